"""Imports optax, an optional dependency, when a function that needs it is called."""

import types


def import_optax(function: str) -> types.ModuleType:
    """Returns the module optax. If it isn't installed, the error names the public function `function`."""
    try:
        import optax
    except ImportError:
        raise ImportError(f"{function}: expected optax to be installed; pip install optax") from None
    return optax

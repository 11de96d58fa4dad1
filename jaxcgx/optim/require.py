"""optax is an optional extra: a function that needs it imports it when it is called."""

import types


def import_optax(function: str) -> types.ModuleType:
    """The module optax, for the public function `function`."""
    try:
        import optax
    except ImportError:
        raise ImportError(f"{function}: expected optax to be installed; pip install optax") from None
    return optax

"""Loading the native module and registering its handlers with XLA."""
import importlib.metadata
import os

import jax

# JAXCGX_REFERENCE=1: plain jnp everywhere, with or without a native module.
REFERENCE = os.environ.get("JAXCGX_REFERENCE", "0") not in ("", "0")

_REMEDY = ("reinstall it with `pip install --force-reinstall --no-deps jaxcgx` (from a checkout: `pip install .`), "
           "or set JAXCGX_REFERENCE=1 to run plain jnp instead of kernels")


def load():
    """The native module, its handlers registered; None with JAXCGX_REFERENCE=1."""
    if REFERENCE:
        return None
    try:
        from jaxcgx.native import _native
    except ImportError as error:
        raise ImportError(f"jaxcgx: its native module can't be loaded ({error}); {_REMEDY}") from error
    built, installed = _native.build_info()["version"], importlib.metadata.version("jaxcgx")
    if built != installed:
        raise ImportError(f"jaxcgx: its native module is of version {built}, the package of version {installed}; {_REMEDY}")
    for platform, handlers in _native.handlers().items():
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return _native

"""Loads the native module, and registers its handlers with XLA."""

import importlib.metadata
import os
import pathlib
import sys
from types import ModuleType

import jax
from jax import export

from jaxcgx import native

# JAXCGX_REFERENCE=1 runs plain jnp everywhere, with or without a native module.
REFERENCE = os.environ.get("JAXCGX_REFERENCE", "0") not in ("", "0")

REMEDY = (
    "reinstall it with `pip install --force-reinstall --no-deps jaxcgx` (from a checkout: `pip install .`), "
    "or set JAXCGX_REFERENCE=1 to run plain jnp instead of kernels"
)
CUDA_REMEDY = (
    "build it where there is a CUDA compiler (nvcc): `pip install . -Ccmake.define.JAXCGX_CUDA=ON` in a checkout, "
    "or set JAXCGX_REFERENCE=1 to run plain jnp there instead of kernels"
)

# jax.export refuses custom calls that aren't JAX's own, except those of the checks that it is told to disable. All
# kernels are here. Exchanges aren't, because a saved program has no connections.
EXPORT_CHECKS = tuple(
    export.DisabledSafetyCheck.custom_call(f"jaxcgx_{kernel}") for kernel in ("clear", "decode", "encode", "reduce")
)

# A checkout in whose folder Python starts hides the installed package, which has the native module. It is found there,
# as in an editable install.
native.__path__.extend(str(pathlib.Path(entry) / "jaxcgx/native") for entry in sys.path)


def find() -> ModuleType:
    """Returns the native module. Raises ImportError if there is no native module of this version."""
    try:
        from jaxcgx.native import _native  # pyright: ignore[reportAttributeAccessIssue]  (CMake builds it)
    except ImportError as error:
        raise ImportError(f"jaxcgx: its native module can't be loaded ({error})") from error
    built, installed = _native.build_info()["version"], importlib.metadata.version("jaxcgx")
    if built != installed:
        raise ImportError(f"jaxcgx: its native module is of version {built}, the package of version {installed}")
    return _native


def _is_command_line() -> bool:
    """Returns whether `python -m jaxcgx` is starting. The import must not fail then, so that its doctor can run."""
    return sys.argv[:1] == ["-m"] and "jaxcgx" in sys.orig_argv


def load() -> ModuleType | None:
    """Returns the native module, with its handlers registered.

    Returns None with JAXCGX_REFERENCE=1, or if the module is missing and `python -m jaxcgx` is starting.
    """
    if REFERENCE:
        return None
    try:
        found = find()
    except ImportError as error:
        if _is_command_line():
            return None
        raise ImportError(f"{error}; {REMEDY}") from error.__cause__
    for platform, handlers in found.handlers().items():
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return found


MODULE = load()


def module() -> ModuleType:
    """Returns the native module. Raises RuntimeError if it is not loaded."""
    if MODULE is None:
        raise RuntimeError("this transport needs the native module, and JAXCGX_REFERENCE=1 leaves it out; unset it")
    return MODULE

"""What a process does once: loads the native module, registers its handlers with XLA, keeps pages, and leaves."""

import atexit
import contextlib
import ctypes
import importlib.metadata
import os
import pathlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
from jax import export

from jaxcgx import _compat, native

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


def load() -> ModuleType | None:
    """Returns the native module, with its handlers registered, or None with JAXCGX_REFERENCE=1."""
    # Also None if the module is missing and this is the command line, so that its doctor can run.
    if REFERENCE:
        return None
    try:
        found = find()
    except ImportError as error:
        if native.COMMAND:
            return None
        raise ImportError(f"{error}; {REMEDY}") from error.__cause__
    for platform, handlers in found.handlers().items():
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return found


MODULE = load()


def has_cuda() -> bool:
    return hasattr(MODULE, "workspace_bytes")


def module() -> ModuleType:
    """Returns the native module. Raises RuntimeError if it is not loaded."""
    if MODULE is None:
        raise RuntimeError("this transport needs the native module, and JAXCGX_REFERENCE=1 leaves it out; unset it")
    return MODULE


def at_exit(leave: Callable[[], object]) -> None:
    """Calls `leave` when this process ends, before JAX's own functions, which were registered earlier."""
    # So the other processes learn at once that this one has left. JAX and MPI may keep a process that ends with an
    # exception alive until the other processes end, too, which would wait for it. Exchanges under way are completed
    # first, unless the process ends with an exception: other ranks may then never take part in them.

    def end() -> None:
        if getattr(sys, "last_value", None) is None:
            with contextlib.suppress(Exception):
                jax.effects_barrier()
        leave()

    atexit.register(end)


# Parameters of glibc's mallopt, from its malloc.h: the free memory at the end of a heap above which it is returned to
# the system, what a new heap gets and an old one keeps beyond its need, the most large blocks with their own mappings,
# and the most heaps of threads.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_HEAP = 64 << 20  # the size of a thread's heap. With this _TOP_PAD, glibc doesn't unmap heaps that are empty.


def _mallopt() -> Any:
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None


def keeps_pages() -> bool:
    return _mallopt() is not None


def keep_pages(*, large: bool = False) -> bool:
    """Keeps the memory of freed arrays for the next step, on CPUs. Returns whether this system can do so.

    Without this call, results and temporaries may be on fresh pages in every step, which the system must clear. With
    the call, the process keeps the memory of freed blocks of less than 64 MiB until it ends. It is for Linux with
    glibc.

    Args:
      large: whether larger blocks are kept, too, such as XLA's temporaries of a large model. All threads then share one
        heap, so call the function before JAX's first computation. Steps of a small model may take longer in one heap.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    if large and _compat.backends_are_initialized():
        warnings.warn(
            "jaxcgx.keep_pages(large=True): expected a call before JAX's first computation, got one after it: threads "
            "that have started have heaps of their own, which keep no block of 64 MiB; move it to the start of the "
            "program",
            stacklevel=2,
        )
    heaps = (_ARENA_MAX, 1) if large else (_TOP_PAD, _HEAP)
    return all(mallopt(*option) for option in ((_TRIM_THRESHOLD, -1), (_MMAP_MAX, 0), heaps))

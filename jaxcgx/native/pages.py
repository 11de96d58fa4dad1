"""keep_pages: the memory of freed arrays is kept for the next step."""

import ctypes
import warnings
from typing import Any

from jaxcgx import _compat

# Parameters of glibc's mallopt, from its malloc.h: freed memory at the end of the heap goes back to the system, large
# memory has a mapping of its own, threads have heaps of their own.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def _mallopt() -> Any:
    """glibc's function, or None."""
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None


def keeps_pages() -> bool:
    """Whether `keep_pages` can do anything here."""
    return _mallopt() is not None


def keep_pages() -> bool:
    """Keeps the memory of freed arrays for the next step, on CPUs. Returns whether this system can.

    A step's results and temporaries are otherwise on fresh pages in every call, which the system has to clear: with
    64 MiB that takes longer than the kernels. Call it at the start of a program, before JAX's first computation. It
    changes malloc in the whole process, which then gives no memory back to the system before it ends. It is for Linux
    with glibc. Elsewhere it does nothing and returns False.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    if _compat.backends_are_initialized():
        warnings.warn(
            "jaxcgx.keep_pages: expected a call before JAX's first computation, got one after it: threads that have "
            "started go on as before; move it to the start of the program",
            stacklevel=2,
        )
    return all(mallopt(*option) for option in ((_TRIM_THRESHOLD, -1), (_MMAP_MAX, 0), (_ARENA_MAX, 1)))

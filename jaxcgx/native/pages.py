"""keep_pages, which keeps the memory of freed arrays for the next step."""

import ctypes
import warnings
from typing import Any

from jaxcgx import _compat

# Parameters of glibc's mallopt, from its malloc.h: the free memory at the end of the heap above which it is returned to
# the system, the most large blocks with their own mappings, and the most heaps of threads.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def _mallopt() -> Any:
    """Returns glibc's mallopt, or None if the C library has none."""
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None


def keeps_pages() -> bool:
    """Returns whether `keep_pages` has an effect on this system."""
    return _mallopt() is not None


def keep_pages() -> bool:
    """Keeps the memory of freed arrays for the next step, on CPUs. Returns whether this system can do so.

    Without this call, the results and temporaries of every step are on fresh pages. The system must clear these pages,
    which takes longer than the kernels for 64 MiB. Call the function at the start of a program, before JAX's first
    computation. It changes malloc in the whole process, which then returns no memory to the system until it ends. It is
    for Linux with glibc. Elsewhere it does nothing and returns False.
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

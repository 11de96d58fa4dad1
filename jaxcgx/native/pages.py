"""keep_pages, which keeps the memory of freed arrays for the next step."""

import ctypes
import warnings
from typing import Any

from jaxcgx import _compat

# Parameters of glibc's mallopt, from its malloc.h: how much freed memory at the end of the heap goes back to the
# system, how many large blocks have their own mappings, how many heaps threads have.
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

    Otherwise a step's results and temporaries are on fresh pages in every call. The system has to clear these pages:
    with 64 MiB that takes longer than the kernels. Call it at the start of a program, before JAX's first computation.
    It changes malloc in the whole process, which then returns no memory to the system until it ends. It is for Linux
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

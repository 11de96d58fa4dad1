"""What a process does before it ends, for the others to learn at once that it takes part no longer.

JAX, and MPI, may keep a process that ends with an exception until the others end, too. These would wait for it.
"""

import atexit
import contextlib
import sys
from collections.abc import Callable

import jax


def at_exit(leave: Callable[[], object]) -> None:
    """Calls `leave` when this process ends, before JAX's own functions, which were registered earlier.

    Exchanges that are under way are completed first, unless the process ends with an exception: then other ranks may
    never come to them.
    """

    def end() -> None:
        if getattr(sys, "last_value", None) is None:
            with contextlib.suppress(Exception):
                jax.effects_barrier()
        leave()

    atexit.register(end)

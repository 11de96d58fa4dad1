"""Functions that a process calls before it ends, so that the other processes learn at once that it has left.

JAX and MPI may keep a process that ends with an exception alive until the other processes end, too. These would wait
for it.
"""

import atexit
import contextlib
import sys
from collections.abc import Callable

import jax


def at_exit(leave: Callable[[], object]) -> None:
    """Calls `leave` when this process ends, before JAX's own functions, which were registered earlier.

    Exchanges under way are completed first, unless the process ends with an exception: other ranks may then never take
    part in them.
    """

    def end() -> None:
        if getattr(sys, "last_value", None) is None:
            with contextlib.suppress(Exception):
                jax.effects_barrier()
        leave()

    atexit.register(end)

"""How a rank leaves: at its end it tells the ranks that still make calls.

Otherwise they would wait for it forever: MPI's waits have no deadline, and MPI_Finalize returns only after all ranks
have called it.

- At a normal end it finishes the exchanges of its programs, leaves the shared memory, and answers the greetings
  (greeting.py) of the other ranks until they end too. A rank that makes a call meanwhile gets an error.
- After an exception it ends all ranks, as `python -m mpi4py` does.
"""

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import Any

import jax
from mpi4py import MPI

from jaxcgx.mpi.greeting import part
from jaxcgx.mpi.waiting import patience
from jaxcgx.transports.mpi import Comm, Shared

_threads: dict[int, "_Parting"] = {}  # by MPI's handle
_shared: dict[int, Shared] = {}  # by segment
_PROCESS = os.getpid()  # a forked child has another
_failed = False  # an exception has ended the program


class _Parting(threading.Thread):
    """Parts from the ranks of a communicator at the end.

    Each communicator needs a thread of its own, because other ranks may greet over one communicator after the other.
    The thread starts early, because no thread may start at the end.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(name="jaxcgx.mpi", daemon=True)
        self.comm, self.now, self.forgotten = comm, threading.Event(), False
        self.start()

    def run(self) -> None:
        self.now.wait()
        if not self.forgotten:
            part(self.comm)


def watch(net: Comm | Shared) -> None:
    """Registers a transport, whose ranks are left at the end. All ranks call it before they use the transport."""
    if isinstance(net, Shared):
        _shared[net.segment] = net
    elif net.size > 1:
        _threads[net.handle] = _Parting(net.comm)


def forget(net: Comm | Shared) -> None:
    """The opposite of `watch`, for a transport that is closed before the end."""
    if isinstance(net, Shared):
        _shared.pop(net.segment, None)
    elif thread := _threads.pop(net.handle, None):
        thread.forgotten = True
        thread.now.set()


def _note(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    global _failed
    _failed = not hasattr(sys, "ps1") and not sys.flags.interactive  # an interactive session goes on
    _previous(kind, error, traceback)


def _say(words: str) -> None:
    print(f"jaxcgx.mpi: rank {MPI.COMM_WORLD.rank} {words}", file=sys.stderr, flush=True)


def _leave() -> None:
    global _failed
    if MPI.Is_finalized() or os.getpid() != _PROCESS:
        return
    if not _failed:
        try:
            jax.effects_barrier()
        except Exception as error:
            _failed = True
            _say(f"has ended, and what it still sent failed: {error}")
    if _failed and MPI.COMM_WORLD.size > 1:
        _say("ends the other ranks, because an error has ended it")
        sys.stdout.flush()
        MPI.COMM_WORLD.Abort(1)
    for shared in _shared.values():
        shared.close()
    for thread in _threads.values():
        thread.now.set()
    for thread in _threads.values():
        thread.join(patience())
        if thread.is_alive():
            _say("has ended, and waits for ranks that have not; MPI ends when all ranks end")
            thread.join()


_previous, sys.excepthook = sys.excepthook, _note
atexit.register(_leave)

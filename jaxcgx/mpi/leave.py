"""The end of a rank. It tells the other ranks that it will make no more calls.

Otherwise the other ranks would wait for it forever: MPI's waits have no deadline, and MPI_Finalize returns only after
all ranks have called it.

- At a normal end, a rank finishes the exchanges of its programs, leaves the shared memory, and answers the greetings
  (agreement.py) of the other ranks until they end too. A rank that makes a call in the meantime gets an error.
- After an exception, a rank ends all ranks, as `python -m mpi4py` does.
"""

import atexit
import os
import sys
import threading
from types import TracebackType
from typing import Any

import jax
from mpi4py import MPI

from jaxcgx.mpi.agreement import part, patience
from jaxcgx.transports.mpi import Net, SharedMemory

_threads: dict[int, "_Parting"] = {}  # by the communicator's MPI handle
_shared: dict[int, SharedMemory] = {}  # by segment
_PROCESS = os.getpid()  # a forked child has a different id
_failed = False  # whether an exception has ended the program


class _Parting(threading.Thread):
    """A thread that calls `part` for a communicator when this rank ends.

    Each communicator has one, because other ranks may greet over theirs in any order. It starts early, because no
    thread can start when the interpreter shuts down.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(name="jaxcgx.mpi", daemon=True)
        self.comm, self.now, self.forgotten = comm, threading.Event(), False
        self.start()

    def run(self) -> None:
        self.now.wait()
        if not self.forgotten:
            part(self.comm)


def watch(net: Net) -> None:
    """Registers a transport, so that this rank leaves it properly at its end. All its ranks do so before use."""
    if isinstance(net, SharedMemory):
        _shared[net.segment] = net
    elif net.size > 1:
        _threads[net.handle] = _Parting(net.comm)


def forget(net: Net) -> None:
    """Unregisters a transport that is closed before the end of the rank."""
    if isinstance(net, SharedMemory):
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

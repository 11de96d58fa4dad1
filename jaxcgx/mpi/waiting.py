"""Waits for other ranks with a time limit: polls an MPI request, and gives it up at the limit."""

import time
import warnings
from typing import Any

from mpi4py import MPI

from jaxcgx.checks import callers_level

# It means mpi4py.MPI.Intracomm. `pyright --verifytypes` doesn't see the types in mpi4py's extension module.
Communicator = Any

_LATE = MPI.Comm.Create_keyval()  # keeps alive a request that was given up: MPI may still write to its buffers


def patience() -> float:
    """Returns `jaxcgx.mpi.WAIT`: the limit of a call with `CHECK`, and the time after which other waits warn."""
    from jaxcgx import mpi  # not at the top, because jaxcgx.mpi imports this module

    return mpi.WAIT


def check_ready(op: str, comm: Communicator) -> None:
    """Checks that MPI has not ended, and that this rank has not given up a wait over this communicator."""
    if MPI.Is_finalized():
        raise RuntimeError(f"{op}: MPI has ended (MPI.Finalize); make every call before that")
    if comm.Get_attr(_LATE) is not None:
        raise RuntimeError(
            f"{op}: an earlier call over this communicator waited in vain, and the ranks are at "
            "different places of the program; start the processes again"
        )


def wait(op: str, comm: Communicator, request: Any) -> None:
    """Waits for all ranks to make a call with `CHECK`. Raises an error after `jaxcgx.mpi.WAIT` seconds."""
    if not _done(request, patience()):
        comm.Set_attr(_LATE, request)
        raise RuntimeError(
            f"{op}: jaxcgx.mpi.CHECK: rank {comm.rank} waited {patience():g} s for the other ranks to make, and to "
            "trace, the same call; all must make the same calls in the same order, with the same shapes"
        )


def meet(op: str, comm: Communicator, request: Any) -> None:
    """Waits for all ranks before their first exchange. Warns after `WAIT` seconds, raises after `MEET` seconds."""
    from jaxcgx import mpi  # not at the top, because jaxcgx.mpi imports this module

    what = f"for all {comm.size} ranks to come to the first use of this communicator or to hierarchy()"
    early = patience()
    if early < mpi.MEET and not _done(request, early):
        warnings.warn(f"{op}: rank {comm.rank} has waited {early:g} s {what}", stacklevel=callers_level())
    if not _done(request, mpi.MEET):
        comm.Set_attr(_LATE, request)
        raise RuntimeError(
            f"{op}: rank {comm.rank} waited {mpi.MEET:g} s {what}; all must use their communicators "
            "for the first time in the same order, also when they only compile"
        )


def _done(request: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > end:
            return False
        time.sleep(1e-4)
    return True

"""check=True: whether all ranks make the same call. They compare over mpi4py before anything is sent."""

import hashlib
import importlib.metadata
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxcgx.checks import spell_array, unexpected

# mpi4py.MPI.Intracomm. `pyright --verifytypes` doesn't see the types of mpi4py's extension module.
Communicator = Any

_SHOWN = 5  # differences that an error names
_LATE = MPI.Comm.Create_keyval()  # the request that a checked call gave up: MPI may still write to its buffers


def agree(op: str, comm: Communicator, x: Any, arguments: Mapping[str, Any]) -> None:
    """Raises an error on every rank if the ranks pass different things. `x` is the tree, whose leaves are compared."""
    mine = {"function": op, "version of jaxcgx": importlib.metadata.version("jaxcgx")}
    mine |= {f"argument '{argument}'": describe(value) for argument, value in arguments.items()}
    leaves = jax.tree_util.tree_flatten_with_path(x)[0]
    mine |= {f"leaf {jax.tree_util.keystr(path) or 'x'}": describe(leaf) for path, leaf in leaves}
    jax.effects_barrier()  # programs that still send may use the same communicator
    digest = np.frombuffer(hashlib.blake2b(repr(mine).encode()).digest(), np.uint8)
    digests = np.zeros((comm.size, digest.size), np.uint8)
    if comm.Get_attr(_LATE) is not None:
        raise RuntimeError(
            f"{op}: argument 'comm': an earlier checked call over this communicator waited in vain, and the ranks are "
            "at different places of the program; start the processes again"
        )
    wait(op, comm, comm.Iallgather(digest, digests))
    wait(op, comm, comm.Ibarrier())  # a digest may be of a call that its rank gave up; then that rank stays away here
    if not (digests == digest).all():
        compare(op, comm.allgather(mine))


def wait(op: str, comm: Communicator, request: Any) -> None:
    """Waits for a request of all ranks; an error after `jaxcgx.mpi.WAIT` seconds."""
    from jaxcgx import mpi  # when it is needed: a program may have set another WAIT

    end = time.monotonic() + mpi.WAIT
    while not request.Test():
        if time.monotonic() > end:
            comm.Set_attr(_LATE, request)
            raise RuntimeError(
                f"{op}: argument 'check': rank {comm.rank} waited {mpi.WAIT:g} s for the other ranks to make, and to "
                "trace, the same call; all must make the same calls in the same order, with the same shapes"
            )
        time.sleep(1e-4)


def compare(op: str, every: Sequence[Mapping[str, str]]) -> None:
    """Raises an error that says where the ranks' descriptions differ, if they do. `every` has one for each rank."""
    said = dict.fromkeys(what for one in every for what in one)
    different = [what for what in said if len({one.get(what) for one in every}) > 1]
    if not different:
        return
    shown = [_difference(what, every) for what in different[:_SHOWN]]
    more = [f"and {len(different) - _SHOWN} more differences"] if len(different) > _SHOWN else []
    raise unexpected(every[0].get("function", op), "the same on every rank", "; ".join(shown + more))


def _difference(what: str, every: Sequence[Mapping[str, str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(every):
        ranks.setdefault(one.get(what, "nothing"), []).append(rank)
    return f"{what}: " + ", ".join(f"{value} on rank {' '.join(map(str, found))}" for value, found in ranks.items())


def describe(value: Any) -> str:
    """What must be the same on every rank, as text: everything except the numbers in arrays and addresses."""
    leaves, tree = jax.tree_util.tree_flatten(value)
    if tree == jax.tree_util.tree_structure(0):
        return _without_addresses(spell_array(value))
    return _without_addresses(repr(jax.tree_util.tree_unflatten(tree, [describe(leaf) for leaf in leaves])))


def _without_addresses(text: str) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", text)

"""Waits for other ranks, and checks that all make the same call, by comparing descriptions of arguments as text.

Ranks don't trace at the same time: one rank may find a call in its cache that another rank traces again, and both are
right. So the ranks greet each other when the program runs: before anything else, in the order of the exchanges, they
compare digests of these descriptions. All digests have the same length. If they differ, all ranks see this. Only then
do the ranks call Python, compare the descriptions, and raise an error.

With `jaxcgx.mpi.CHECK`, the ranks compare them over mpi4py before anything is compiled.
"""

import hashlib
import importlib.metadata
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcgx import _compat, mpi
from jaxcgx.checks import at, callers_level, spell_array, unexpected
from jaxcgx.native.rules import define_impl
from jaxcgx.transports.mpi import EFFECTS, ORDER, Net

# It means mpi4py.MPI.Intracomm. `pyright --verifytypes` doesn't see the types in mpi4py's extension module.
Communicator = Any

_LATE = MPI.Comm.Create_keyval()  # keeps alive a request that was given up: MPI may still write to its buffers
_SHOWN = 5  # the most differences that an error names
_NEAR = 100  # the characters that are shown on each side of a difference
_BYTES = 16
_END: Mapping[str, str] = {"function": ""}  # the description that a rank sends when it makes no more calls
_passed: dict[bytes, Mapping[str, str]] = {}  # the descriptions of all calls of this process, by digest


def describe(op: str, arrays: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the description of a call. It has the types of the leaves of `arrays`, and the values of `settings`."""
    mine = {"function": op, "version of jaxcgx": importlib.metadata.version("jaxcgx")}
    mine |= {f"argument '{argument}'": _spell(value) for argument, value in settings.items()}
    for argument, tree in arrays.items():
        for path, leaf in jax.tree.flatten_with_path(tree)[0]:
            name = jax.tree_util.keystr(path)
            where = f"leaf {name or 'x'}" if argument == "x" else f"argument '{argument}'{at(path)}"
            mine[where] = _type(leaf)
    return mine


def agree(comm: Communicator, mine: Mapping[str, str]) -> None:
    """Raises an error on every rank if the ranks' descriptions differ (`jaxcgx.mpi.CHECK`)."""
    op = mine["function"]
    jax.effects_barrier()  # programs that are still running may use the same communicator
    digest = digest_of(mine)
    digests = np.zeros((comm.size, digest.size), np.uint8)
    wait(op, comm, comm.Iallgather(digest, digests))
    wait(op, comm, comm.Ibarrier())  # a digest may be from a call that its rank gave up; such a rank doesn't come here
    if not (digests == digest).all():
        compare(op, comm.allgather(mine))


def compare(op: str, every: Sequence[Mapping[str, str]]) -> None:
    """Raises an error that names the differences between the ranks' descriptions. Equal descriptions pass."""
    said = dict.fromkeys(what for one in every for what in one)
    different = [what for what in said if len({one.get(what) for one in every}) > 1]
    if not different:
        return
    if "function" in different:  # each function has its own arguments
        different = [what for what in different if what in ("function", "version of jaxcgx")]
    shown = [_difference(what, every) for what in different[:_SHOWN]]
    more = [f"and {len(different) - _SHOWN} more differences"] if len(different) > _SHOWN else []
    raise unexpected(every[0].get("function", op), "the same on every rank", "; ".join(shown + more))


def _difference(what: str, every: Sequence[Mapping[str, str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(every):
        ranks.setdefault(one.get(what, "nothing"), []).append(rank)
    # Of long values, such as plans, only the part is shown in which they differ, and some text before and behind it.
    first = max(_alike(list(ranks)) - _NEAR, 0)
    last = max(_alike([value[:first:-1] for value in ranks]) - _NEAR, 0)
    shown = {
        f"{'...' * (first > 0)}{value[first : len(value) - last]}{'...' * (last > 0)}": found
        for value, found in ranks.items()
    }
    return f"{what}: " + ", ".join(f"{value} on rank {' '.join(map(str, found))}" for value, found in shown.items())


def _alike(values: Sequence[str]) -> int:
    """Returns the number of characters with which all values begin alike."""
    return next((i for i, each in enumerate(zip(*values)) if len(set(each)) > 1), min(map(len, values)))


def _type(leaf: Any) -> str:
    """Returns the leaf's dtype and shape as JAX sees them. So Python numbers may have different values on the ranks."""
    try:
        return spell_array(jax.typeof(leaf))
    except TypeError:
        return _spell(leaf)


def _spell(value: Any) -> str:
    """Returns a setting as text, without the addresses of objects. It may be a tree of settings and arrays."""
    leaves, tree = jax.tree.flatten(value)
    if tree == jax.tree.structure(0):
        return re.sub(" at 0x[0-9a-f]+", "", spell_array(value))
    return repr(jax.tree.unflatten(tree, list(map(_spell, leaves))))


# Waits, which poll an MPI request, and give it up at a limit


def patience() -> float:
    """Returns `jaxcgx.mpi.WAIT`: the limit of a call with `CHECK`, and the time after which other waits warn."""
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


# The greeting


def digest_of(mine: Mapping[str, str]) -> np.ndarray:
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=_BYTES).digest()
    _passed[digest] = mine
    return np.frombuffer(digest, np.uint8)


def greet(mine: Mapping[str, str], net: Net) -> None:
    """Raises an error on every rank, when the program runs, if the ranks' descriptions of the call differ."""
    if net.size > 1:
        greet_p.bind(jnp.asarray(digest_of(mine)), net=net)


def part(comm: Communicator) -> None:
    """Answers the greetings of other ranks until no rank makes further calls. A rank calls it when it ends."""
    mine, every = digest_of(_END), np.empty((comm.size, _BYTES), np.uint8)
    comm.Allgather(mine, every)
    while not (every == mine).all():
        comm.allgather(_END)  # matches the call in _explain on the other ranks
        comm.Allgather(mine, every)


greet_p: Any = _compat.Primitive("jaxcgx_mpi_greet")
greet_p.multiple_results = True
_differ_p: Any = _compat.Primitive("jaxcgx_mpi_differ")
_differ_p.multiple_results = True


def _run(mine: jax.Array, net: Net) -> list[jax.Array]:
    differ = (net.all_gather(mine) != mine).any()
    jax.lax.cond(differ, lambda: _differ_p.bind(mine, net=net), list)
    return []


def _lower_differ(ctx: Any, mine: Any, *, net: Net) -> Sequence[Any]:
    return _compat.lower_call_of_python(ctx, lambda mine: _explain(mine, net), mine, effect=ORDER)


def _explain(mine: Any, net: Net) -> None:
    every = net.comm.allgather(_passed[np.asarray(mine).tobytes()])
    ended = [rank for rank, passed in enumerate(every) if passed == _END]
    if ended:
        found = next(passed["function"] for passed in every if passed != _END)
        raise RuntimeError(
            f"{found}: expected a call of each of {net.size} ranks, got none of rank {' '.join(map(str, ended))}, "
            "which has ended; all ranks must make as many calls: give them as many batches"
        )
    compare(every[0]["function"], every)


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, net: Net) -> tuple[list[jax.Array], list[int]]:
    # The vmap of a lax.cond with a mapped predicate gives all operands a dimension, also constants.
    words = operands[0] if dims[0] is None else jax.lax.index_in_dim(operands[0], 0, dims[0], keepdims=False)
    return greet_p.bind(words, net=net), []


define_impl(greet_p)
_compat.batching.primitive_batchers[greet_p] = _batch
for _primitive, _rule in (greet_p, _compat.mlir.lower_fun(_run, multiple_results=True)), (_differ_p, _lower_differ):
    _primitive.def_effectful_abstract_eval(lambda mine, net: ([], EFFECTS))
    _compat.mlir.register_lowering(_primitive, _rule)

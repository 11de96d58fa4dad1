"""The greeting at the beginning of every call: ranks exchange digests of their arguments before anything else.

Ranks don't trace at the same time: one rank may find a call in its cache that another rank traces again, and both are
right. So the digests are compared when the program runs, in the order of the exchanges. All digests have the same
length. If they differ, all ranks see this. Only then do the ranks call Python, compare their arguments, and raise an
error.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat
from jaxcgx._compat import batching, mlir
from jaxcgx.mpi.agreement import compare
from jaxcgx.mpi.waiting import Communicator
from jaxcgx.native.eager import define_impl
from jaxcgx.native.rules import one_of_same
from jaxcgx.transports.mpi import EFFECTS, ORDER, Net

_BYTES = 16
_END: Mapping[str, str] = {"function": ""}  # the description that a rank sends when it makes no more calls
_passed: dict[bytes, Mapping[str, str]] = {}  # the descriptions of all calls of this process, by digest


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
    lax.cond(differ, lambda: _differ_p.bind(mine, net=net), list)
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
    return greet_p.bind(one_of_same(operands[0], dims[0]), net=net), []


define_impl(greet_p)
batching.primitive_batchers[greet_p] = _batch
for _primitive, _rule in (greet_p, mlir.lower_fun(_run, multiple_results=True)), (_differ_p, _lower_differ):
    _primitive.def_effectful_abstract_eval(lambda mine, net: ([], EFFECTS))
    mlir.register_lowering(_primitive, _rule)

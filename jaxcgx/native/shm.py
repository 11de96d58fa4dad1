"""Exchanges among the processes of a host through shared memory, as a JAX primitive that is linear in one array.

The parts are in the same order as in ops.py. `net` is the transport (transports/shm.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.checks import spell_array, wrong
from jaxcgx.native.rules import add, batch_exchange, define_impl, digest, exchange_aval, refuse

OPERATIONS = ("all_to_all", "all_gather", "shift", "broadcast")  # as xla_ffi/shm/ring.h numbers them


exchange_p: _compat.Primitive = _compat.Primitive("jaxcgx_exchange")


def exchange(operation: str, x: jax.Array, net: Any, argument: int = 0) -> jax.Array:
    """Returns the result of one exchange among the ranks of a transport."""
    # "all_to_all" sends row r of x = [ranks, ...] to rank r, and row r of the result came from rank r. "all_gather"
    # returns every rank's x, as [ranks, ...]. "shift" returns x of the rank that is `argument` before this one.
    # "broadcast" returns x of rank `argument`.
    if operation == "all_to_all" and x.shape[:1] != (net.size,):
        raise wrong(operation, "rows", f"a row for each of {net.size} ranks", spell_array(x))
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return exchange(operation, x.astype(jnp.int8), net, argument=argument).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype.name.endswith("e2m1fn"):
        raise wrong(operation, "x", "elements of whole bytes", spell_array(x), kind=TypeError)
    return exchange_p.bind(x, operation=operation, argument=argument, net=net)


def _lower(ctx: Any, x: Any, *, operation: str, argument: int, net: Any) -> Any:
    return _compat.lower_ordered("jaxcgx_exchange", net.order)(
        ctx,
        x,
        segment=np.int64(net.segment),
        operation=np.int64(OPERATIONS.index(operation)),
        argument=np.int64(argument),
        digest=digest(ctx.avals_in[0].shape, ctx.avals_in[0].dtype, net.label),
    )


# The cotangent of an array that went to one rank comes back the same way. If the array went to every rank, the
# cotangents of all ranks are added.
def _transpose(ct: jax.Array, x: Any, *, operation: str, argument: int, net: Any) -> list[jax.Array]:
    if operation == "all_to_all":
        return [exchange("all_to_all", ct, net)]
    if operation == "all_gather":
        return [add(exchange("all_to_all", ct, net))]
    if operation == "shift":
        return [exchange("shift", ct, net, argument=-argument % net.size)]
    total = add(exchange("all_gather", ct, net))
    return [total if net.rank == argument else jnp.zeros_like(total)]


define_impl(exchange_p)
exchange_p.def_effectful_abstract_eval(exchange_aval)
batching.primitive_batchers[exchange_p] = functools.partial(batch_exchange, exchange_p)
ad.deflinear2(exchange_p, _transpose)
_ELSEWHERE = "memory is shared by processes that compute on CPUs; the computation is placed on another platform"
mlir.register_lowering(exchange_p, refuse(f"jaxcgx_exchange: {_ELSEWHERE}"))
mlir.register_lowering(exchange_p, _lower, platform="cpu")

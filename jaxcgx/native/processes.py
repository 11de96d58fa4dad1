"""Exchanges among processes with one device each, as JAX primitives that are linear in one array.

`net` is the transport, which has the primitive and lowers it (transports/base.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import spell_array, wrong
from jaxcgx.native.rules import add, batch_exchange, define_impl, exchange_aval


def exchange(operation: str, x: jax.Array, net: Any, argument: Any = 0) -> jax.Array:
    """Returns the result of one exchange among the ranks of a transport."""
    # "all_to_all" sends row r of x = [ranks, ...] to rank r, and row r of the result came from rank r. "all_gather"
    # returns every rank's x, as [ranks, ...]. "shift" returns x of the rank that is `argument` before this one, and
    # "permute" that of the rank that sends to this one in the pairs `argument`. "broadcast" returns x of rank
    # `argument`, and "psum" the sum over all ranks. A transport need not have all of them.
    if operation == "all_to_all" and x.shape[:1] != (net.size,):
        raise wrong(operation, "rows", f"a row for each of {net.size} ranks", spell_array(x))
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return exchange(operation, x.astype(jnp.int8), net, argument=argument).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype.name.endswith("e2m1fn"):
        raise wrong(operation, "x", "elements of whole bytes", spell_array(x), kind=TypeError)
    return net.primitive.bind(x, operation=operation, argument=argument, net=net)


# The cotangent of an array that went to one rank comes back the same way. If the array went to every rank, the
# cotangents of all ranks are added. Every rank has its own cotangent of a sum, as in lax if it doesn't track which
# values vary.
def _transpose(ct: jax.Array, x: Any, *, operation: str, argument: Any, net: Any) -> list[jax.Array]:
    if operation == "all_to_all":
        return [net.all_to_all(ct)]
    if operation == "all_gather":
        return [add(net.all_to_all(ct))]
    if operation == "shift":
        return [exchange("shift", ct, net, argument=-argument % net.size)]
    if operation == "permute":
        return [net.plain_ppermute(ct, [(receiver, sender) for sender, receiver in argument])]
    total = net.plain_psum(ct)
    return [total if operation == "psum" or net.rank == argument else jnp.zeros_like(total)]


def define(name: str) -> _compat.Primitive:
    primitive: _compat.Primitive = _compat.Primitive(name)
    define_impl(primitive)
    primitive.def_effectful_abstract_eval(exchange_aval)
    _compat.batching.primitive_batchers[primitive] = functools.partial(batch_exchange, primitive)
    _compat.ad.deflinear2(primitive, _transpose)
    _compat.mlir.register_lowering(primitive, lambda ctx, x, *, net, **how: net.lower(ctx, x, **how))
    return primitive

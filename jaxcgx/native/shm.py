"""Exchanges among the processes of a host, through memory that they share, as a JAX primitive, linear in one array.

In the same order as in ops.py. `net` is the transport: its `segment`, a number that `attach` gave, its `size` and
`rank`, and
its `effects`, one effect, which has the exchanges of all ranks run in the same order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.native import registration

OPERATIONS = ("all_to_all", "all_gather", "shift", "broadcast")  # as xla_ffi/shm/ring.h numbers them


def module():
    """The native module; there is no other way to share memory."""
    if registration.MODULE is None:
        raise RuntimeError("shared memory needs the native module, and JAXCGX_REFERENCE=1 leaves it out; unset it")
    return registration.MODULE


exchange_p = _compat.Primitive("jaxcgx_exchange")


def exchange(operation, x, net, argument=0):
    """all_to_all: [ranks, ...], row r to and from rank r. all_gather: [ranks, ...]. shift: x of the rank `argument`
    before.
    broadcast: x of the rank `argument`."""
    if operation == "all_to_all" and x.shape[:1] != (net.size,):
        raise ValueError(
            f"{operation}: argument 'rows': expected a row for each of {net.size} ranks, got {x.dtype}{list(x.shape)}"
        )
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return exchange(operation, x.astype(jnp.int8), net, argument).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype.name.endswith("e2m1fn"):
        raise TypeError(f"{operation}: argument 'x': expected elements of whole bytes, got {x.dtype}{list(x.shape)}")
    return exchange_p.bind(x, operation=operation, argument=argument, net=net)


def _lower(ctx, x, *, operation, argument, net):
    (effect,) = net.effects
    return _compat.lower_ordered("jaxcgx_exchange", effect)(
        ctx,
        x,
        segment=np.int64(net.segment),
        operation=np.int64(OPERATIONS.index(operation)),
        argument=np.int64(argument),
    )


def _refuse(ctx, x, **params):
    raise NotImplementedError(
        "jaxcgx_exchange: memory is shared by processes that compute on CPUs; the computation is placed on another "
        "platform"
    )


def _abstract(x, *, operation, argument, net):
    shape = (net.size, *x.shape) if operation == "all_gather" else x.shape
    return _compat.result_aval([x], shape, x.dtype), net.effects


# One exchange of longer rows.
def _batch(operands, dims, *, operation, **params):
    before, after = int(operation == "all_to_all"), int(operation in ("all_to_all", "all_gather"))
    return exchange_p.bind(jnp.moveaxis(operands[0], dims[0], before), operation=operation, **params), after


def add(rows):
    """The sum of the rows in their order, of short floats in float32."""
    short = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize < 4
    return functools.reduce(jnp.add, rows.astype(jnp.float32) if short else rows).astype(rows.dtype)


# What goes from rank to rank has its cotangent come back the same way. Of what went to every rank, the cotangents add
# up.
def _transpose(ct, x, *, operation, argument, net):
    if operation == "all_to_all":
        return [exchange("all_to_all", ct, net)]
    if operation == "all_gather":
        return [add(exchange("all_to_all", ct, net))]
    if operation == "shift":
        return [exchange("shift", ct, net, -argument % net.size)]
    total = add(exchange("all_gather", ct, net))
    return [total if net.rank == argument else jnp.zeros_like(total)]


exchange_p.def_impl(jax.jit(exchange_p.bind, static_argnames=("operation", "argument", "net")))
exchange_p.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[exchange_p] = _batch
ad.deflinear2(exchange_p, _transpose)
mlir.register_lowering(exchange_p, _refuse)
mlir.register_lowering(exchange_p, _lower, platform="cpu")

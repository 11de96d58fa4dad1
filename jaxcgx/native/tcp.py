"""Exchanges among processes over TCP, as a JAX primitive.

The parts are in the same order as in ops.py. `net` is the transport (transports/tcp.py). The primitive has no
derivatives, because each collective defines its own derivatives. The operand `who` says who takes part: this rank, and
every rank's place in the mesh.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat
from jaxcgx._compat import batching, mlir
from jaxcgx.checks import unexpected
from jaxcgx.native.connections import connect
from jaxcgx.native.rules import batch_exchange, digest, exchange_aval, refuse

OPERATIONS = ("all_to_all", "all_gather", "permute")  # as xla_ffi/tcp/collectives.h numbers them

tcp_exchange_p: Any = _compat.Primitive("jaxcgx_tcp_exchange")


def exchange(operation: str, x: jax.Array, net: Any, targets: tuple[int, ...] = ()) -> jax.Array:
    """Returns the result of one exchange of an array.

    Args:
      operation: "all_to_all" sends row r of x = [ranks, ...] to rank r, and row r of the result came from rank r.
        "all_gather" returns every rank's x, as [ranks, ...]. "permute" returns x of the rank whose target this rank is.
      x: the array.
      net: the transport.
      targets: for "permute", the target of each rank, -1 for none.
    """
    return tcp_exchange_p.bind(
        *_compat.match_varying(x, who_takes_part(net)), operation=operation, targets=targets, net=net
    )


def who_takes_part(net: Any) -> jax.Array:
    """Returns this rank, then the place of every rank of `net` among all devices of the mesh, as int32."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes, manual = dict(mesh.shape), mesh.manual_axes
    if whole := [name for name, size in sizes.items() if size > 1 and name not in manual]:
        raise unexpected(
            "Tcp",
            "a jax.shard_map over all axes of the mesh",
            f"one that leaves {', '.join(map(repr, whole))} to the compiler",
            "leave out its argument 'axis_names'",
        )
    strides = {name: math.prod(list(sizes.values())[i + 1 :]) for i, name in enumerate(sizes)}
    first = sum(lax.axis_index(name) * strides[name] for name in manual if name not in net.names)
    along = np.indices([sizes[name] for name in net.names]).reshape(len(net.names), -1)
    places = np.array([strides[name] for name in net.names]) @ along
    return jnp.concatenate([net.rank[None], first + jnp.asarray(places)]).astype(jnp.int32)


def with_processes(ctx: Any, who: Any, aval: Any, net: Any) -> Any:
    """Returns `who`, of type `aval`, with process numbers in place of places in the mesh. It is for lowering rules.

    If this process isn't connected yet, it is connected now. That may take as long as the transport's timeout.
    """
    devices = _compat.devices_of(ctx)
    if devices is None:
        raise unexpected(
            "Tcp",
            "to be told which devices the mesh has",
            "an abstract mesh",
            "pass jax.shard_map the mesh itself, or set it with jax.set_mesh",
        )
    processes = [device.process_index for device in devices]
    if len(set(processes)) < len(processes):
        raise unexpected("Tcp", "a mesh of one device of each process", f"devices of the processes {processes}")
    connect(net.timeout, net.links)
    by_process = lambda who: jnp.concatenate([who[:1], jnp.asarray(processes, jnp.int32)[who[1:]]])
    return mlir.lower_fun(by_process, multiple_results=False)(ctx.replace(avals_in=[aval], avals_out=[aval]), who)[0]


def _lower(ctx: Any, x: Any, who: Any, *, operation: str, targets: tuple[int, ...], net: Any) -> Sequence[Any]:
    return _compat.lower_ordered("jaxcgx_tcp_exchange", net.order)(
        ctx,
        x,
        with_processes(ctx, who, ctx.avals_in[1], net=net),
        operation=np.int64(OPERATIONS.index(operation)),
        targets=np.array(targets, np.int64),
        timeout_ms=np.int64(net.timeout * 1000),
        digest=digest(targets, ctx.avals_in[0].shape, ctx.avals_in[0].dtype, net.label),
    )


def lower_on_cpus(primitive: _compat.Primitive, rule: Any) -> None:
    """Registers a lowering rule for CPUs, and an error for other platforms."""
    where = "Tcp is for processes that compute on CPUs; the computation is placed on another platform"
    mlir.register_lowering(primitive, refuse(f"jaxcgx_tcp: {where}; give the axis's name alone"))
    mlir.register_lowering(primitive, rule, platform="cpu")


tcp_exchange_p.def_effectful_abstract_eval(exchange_aval)
batching.primitive_batchers[tcp_exchange_p] = functools.partial(batch_exchange, tcp_exchange_p)
lower_on_cpus(tcp_exchange_p, _lower)

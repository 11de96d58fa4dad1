"""Exchanges among processes over TCP, as a JAX primitive.

The parts are in the same order as in ops.py. `net` is the transport (transports/tcp.py). The primitive has no
derivatives, because each collective defines its own derivatives.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

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
    return tcp_exchange_p.bind(vary(x, net), operation=operation, targets=targets, net=net)


def vary(x: Any, net: Any) -> jax.Array:
    """Returns an operand, marked as varying over the axes of its exchange."""
    return _compat.vary(x, _compat.tracked_axes(net.names))


def who_takes_part(ctx: Any, net: Any) -> dict[str, Any]:
    """Returns the attributes that say which devices exchange. It is for lowering rules.

    They are the same on all devices: groups of places in the mesh, and for each place the process, the device's number
    in it, and XLA's ordinal for it.
    If this process isn't connected yet, it is connected now. That may take as long as the transport's timeout.
    """
    mesh = _compat.mesh_of(ctx)
    if mesh is None:
        raise unexpected(
            "Tcp",
            "to be told which devices the mesh has",
            "an abstract mesh",
            "pass jax.shard_map the mesh itself, or set it with jax.set_mesh",
        )
    devices = list(mesh.devices.flat)
    numbers = _numbers(devices[0].platform)
    connect(1 + max(numbers.values()), net.timeout, net.links)
    along = [mesh.axis_names.index(name) for name in net.names]
    places = np.arange(mesh.size, dtype=np.int64).reshape(mesh.devices.shape)
    return dict(
        ranks=np.int64(net.size),
        groups=np.moveaxis(places, along, range(-len(along), 0)).reshape(-1),
        processes=np.array([device.process_index for device in devices], np.int64),
        devices=np.array([numbers[device] for device in devices], np.int64),
        ordinals=np.array([device.id for device in devices], np.int64),
        timeout_ms=np.int64(net.timeout * 1000),
    )


def _numbers(platform: str) -> dict[jax.Device, int]:
    """Returns the number of each device in its process."""
    found = collections.Counter[int]()
    numbers: dict[jax.Device, int] = {}
    for device in jax.devices(platform):
        numbers[device] = found[device.process_index]
        found[device.process_index] += 1
    return numbers


def _lower(ctx: Any, x: Any, *, operation: str, targets: tuple[int, ...], net: Any) -> Sequence[Any]:
    return _compat.lower_ordered("jaxcgx_tcp_exchange", net.order)(
        ctx,
        x,
        **who_takes_part(ctx, net),
        operation=np.int64(OPERATIONS.index(operation)),
        targets=np.array(targets, np.int64),
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

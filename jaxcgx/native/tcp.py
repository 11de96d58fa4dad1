"""Exchanges among processes, over TCP, as a JAX primitive of one array.

In the same order as in ops.py. `net` is the transport (transports/tcp.py). What a collective's derivatives are is its own
business, and the primitive has none. The second operand says who takes part: a rank, and every rank's place in the mesh.
"""
import functools
import math
import secrets
import socket

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat
from jaxcgx._compat import batching, mlir
from jaxcgx.native.shm import module

CONNECT = 1800.0  # seconds that processes wait for each other to come to the first exchange
OPERATIONS = ("all_to_all", "all_gather", "permute")  # as xla_ffi/handlers/tcp.cc numbers them

tcp_exchange_p = _compat.Primitive("jaxcgx_tcp_exchange")


def exchange(operation, x, net, targets=()):
    """all_to_all: [ranks, ...], row r to and from rank r. all_gather: [ranks, ...]. permute: x of the rank whose target this is;
    targets: of each rank, -1 for none."""
    x, *places = _compat.match_varying(x, net.rank, *_places(net))
    who = jnp.stack(places).astype(jnp.int32)
    return tcp_exchange_p.bind(x, who, operation=operation, targets=targets, net=net)


def _places(net):
    """Of every rank along the names the place among all devices of the mesh."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if whole := [name for name, size in sizes.items() if size > 1 and name not in manual]:
        raise ValueError(f"Tcp: expected a jax.shard_map over all axes of the mesh, got one that leaves {', '.join(map(repr, whole))} to the compiler; "
                         "leave out its argument 'axis_names'")
    strides = {name: math.prod(list(sizes.values())[i + 1 :]) for i, name in enumerate(sizes)}
    first = sum(lax.axis_index(name) * strides[name] for name in manual if name not in net.names)
    along = np.indices([sizes[name] for name in net.names]).reshape(len(net.names), -1)
    return [first + int(place) for place in np.array([strides[name] for name in net.names]) @ along]


def _lower(ctx, x, who, *, operation, targets, net):
    devices = _compat.devices_of(ctx)
    if devices is None:
        raise ValueError("Tcp: expected to be told which devices the mesh has, got an abstract mesh; pass jax.shard_map the mesh itself, or set it "
                         "with jax.set_mesh")
    processes = [device.process_index for device in devices]
    if len(set(processes)) < len(processes):
        raise ValueError(f"Tcp: expected a mesh of one device of each process, got devices of the processes {processes}")
    connect()

    def by_process(who):
        return jnp.concatenate([who[:1], jnp.asarray(processes, jnp.int32)[who[1:]]])

    aval = ctx.avals_in[1]
    (who,) = mlir.lower_fun(by_process, multiple_results=False)(ctx.replace(avals_in=[aval], avals_out=[aval]), who)
    return _compat.lower_ordered("jaxcgx_tcp_exchange", net.order)(
        ctx, x, who, operation=np.int64(OPERATIONS.index(operation)), targets=np.array(targets, np.int64),
        timeout_ms=np.int64(net.timeout * 1000))


def _refuse(ctx, *operands, **params):
    raise NotImplementedError("jaxcgx_tcp_exchange: Tcp is for processes that compute on CPUs; the computation is placed on another platform; give "
                              "the axis's name alone")


def _abstract(x, who, *, operation, targets, net):
    shape = (net.size, *x.shape) if operation == "all_gather" else x.shape
    return _compat.result_aval([x], shape, x.dtype), net.effects


# One exchange of longer rows.
def _batch(operands, dims, *, operation, **params):
    (x, who), (dim, _) = operands, dims
    before, after = int(operation == "all_to_all"), int(operation in ("all_to_all", "all_gather"))
    return tcp_exchange_p.bind(jnp.moveaxis(x, dim, before), who, operation=operation, **params), after


tcp_exchange_p.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[tcp_exchange_p] = _batch
mlir.register_lowering(tcp_exchange_p, _refuse)
mlir.register_lowering(tcp_exchange_p, _lower, platform="cpu")


# The connections of this process, made once


@functools.cache
def connect():
    """Connects the processes of jax.distributed. Each tells the others through its store where it waits for them; a secret of
    theirs keeps others out."""
    store, process, processes, coordinator = _compat.rendezvous()
    if store is None:
        raise RuntimeError("Tcp: expected processes that know each other, got one alone; call jax.distributed.initialize first")
    # The host of process 0, which has the coordinator, is where everybody reaches that.
    host = _host(coordinator) if process else ""
    store.key_value_set(f"jaxcgx/tcp/{process}", f"{module().tcp_listen()} {host}")
    if process == 0:
        store.key_value_set("jaxcgx/tcp/token", secrets.token_hex(16))

    def get(key, whose):
        try:
            return store.blocking_key_value_get(f"jaxcgx/tcp/{key}", int(CONNECT * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(f"Tcp: process {whose} has not come within {CONNECT:g} s: {error}") from None

    token, addresses = get("token", 0), []
    for other in range(processes):
        port, host = get(other, other).split(" ")
        addresses.append((host or coordinator.rpartition(":")[0].strip("[]"), int(port)))
    module().tcp_connect(process, addresses, bytes.fromhex(token), CONNECT)


def _host(coordinator):
    """The address of this host in the network where the coordinator is."""
    host, _, port = coordinator.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect(address)
        return probe.getsockname()[0]

"""Exchanges among processes, over TCP, as JAX primitives: of an array, and the sum of a message in pieces.

In the same order as in ops.py. `net` is the transport (transports/tcp.py). What a collective's derivatives are is its
own
business, and these have none. The operand `who` says who takes part: a rank, and every rank's place in the mesh.
"""

import functools
import math
import secrets
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat
from jaxcgx._compat import batching, mlir
from jaxcgx.native.layout import Layout
from jaxcgx.native.ops import in_front
from jaxcgx.native.registration import module

CONNECT = 1800.0  # seconds that processes wait for each other to come to the first exchange
OPERATIONS = ("all_to_all", "all_gather", "permute")  # as xla_ffi/handlers/tcp.cc numbers them

tcp_exchange_p = _compat.Primitive("jaxcgx_tcp_exchange")


def exchange(operation, x, net, targets=()):
    """all_to_all: [ranks, ...], row r to and from rank r. all_gather: [ranks, ...]. permute: x of the rank whose target
    this is;
    targets: of each rank, -1 for none."""
    return tcp_exchange_p.bind(*_compat.match_varying(x, _who(net)), operation=operation, targets=targets, net=net)


def _who(net):
    """The rank, and of every rank along the names the place among all devices of the mesh."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if whole := [name for name, size in sizes.items() if size > 1 and name not in manual]:
        raise ValueError(
            "Tcp: expected a jax.shard_map over all axes of the mesh, got one that leaves "
            f"{', '.join(map(repr, whole))} to the compiler; leave out its argument 'axis_names'"
        )
    strides = {name: math.prod(list(sizes.values())[i + 1 :]) for i, name in enumerate(sizes)}
    first = sum(lax.axis_index(name) * strides[name] for name in manual if name not in net.names)
    along = np.indices([sizes[name] for name in net.names]).reshape(len(net.names), -1)
    places = np.array([strides[name] for name in net.names]) @ along
    return jnp.concatenate([net.rank[None], first + jnp.asarray(places)]).astype(jnp.int32)


def _with_processes(ctx, who, at):
    """`who`, operand number `at`, with processes in place of places; and connects this one, if it isn't yet."""
    devices = _compat.devices_of(ctx)
    if devices is None:
        raise ValueError(
            "Tcp: expected to be told which devices the mesh has, got an abstract mesh; pass jax.shard_map the mesh "
            "itself, "
            "or set it with jax.set_mesh"
        )
    processes = [device.process_index for device in devices]
    if len(set(processes)) < len(processes):
        raise ValueError(
            f"Tcp: expected a mesh of one device of each process, got devices of the processes {processes}"
        )
    connect()

    def by_process(who):
        return jnp.concatenate([who[:1], jnp.asarray(processes, jnp.int32)[who[1:]]])

    aval = ctx.avals_in[at]
    return mlir.lower_fun(by_process, multiple_results=False)(ctx.replace(avals_in=[aval], avals_out=[aval]), who)[0]


def _lower(ctx, x, who, *, operation, targets, net):
    who = _with_processes(ctx, who, 1)
    return _compat.lower_ordered("jaxcgx_tcp_exchange", net.order)(
        ctx,
        x,
        who,
        operation=np.int64(OPERATIONS.index(operation)),
        targets=np.array(targets, np.int64),
        timeout_ms=np.int64(net.timeout * 1000),
    )


def _refuse(ctx, *operands, **params):
    raise NotImplementedError(
        "jaxcgx_tcp: Tcp is for processes that compute on CPUs; the computation is placed on another platform; give "
        "the axis's name alone"
    )


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


# The sum of a message, sent in pieces that are encoded, added up and decoded while others are on their way

tcp_allreduce_p = _compat.Primitive("jaxcgx_tcp_allreduce")
PIECE, MOST_PIECES = (
    2**19,
    16,
)  # bytes that a piece has at least, and how many there are at most (benchmarks/notes/collectives.md)


def allreduce(schedule, net, codec, leaves, residuals, ids, keys, own, divisor):
    """collectives/schedules.py's "one_shot" or "two_shot" with its bits: the sums, in float32 of the first, and new
    residuals or
    None. keys: of the first encoding and of the sum's; codec: one that has kernels."""
    two_shot = schedule == "two_shot"
    parts = net.size if two_shot else 1
    pieces = max(1, min(MOST_PIECES, Layout.of(codec, leaves, parts, ids).chunk_bytes // PIECE))
    if codec.whole:  # a leaf's part is one bucket
        pieces = 1
    operands = [*leaves, *(residuals or []), _who(net), *(keys[: 1 + two_shot] if codec.stochastic else [])]
    feedback, raw = residuals is not None, two_shot and own == "raw"
    found = tcp_allreduce_p.bind(
        *_compat.match_varying(*operands),
        layout=Layout.of(codec, leaves, parts * pieces, ids),
        batch=(),
        two_shot=two_shot,
        own=raw and not feedback and not codec.raw,  # whose bytes are the part as it is
        feedback=feedback,
        sum_feedback=raw and feedback,
        divisor=float(divisor),
        net=net,
    )
    n = len(leaves)
    return found[:n], found[n:] if feedback else None


def _allreduce_lower(ctx, *operands, layout, batch, net, divisor, **params):
    n, feedback = len(layout.shapes), params["feedback"]
    at = 2 * n if feedback else n
    operands = [*operands[:at], _with_processes(ctx, operands[at], at), *operands[at + 1 :]]
    # As xla_ffi/handlers/tcp_allreduce.cc counts them.
    payloads = 3 * layout.chunks if params["two_shot"] else net.size * layout.chunks
    workspace = _compat.result_aval(
        ctx.avals_in, (math.prod(batch) * payloads * layout.chunk_bytes,), np.dtype("uint8")
    )
    call = _compat.lower_ordered(
        "jaxcgx_tcp_allreduce", net.order, operand_output_aliases={n + i: n + i for i in range(n if feedback else 0)}
    )
    hidden = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    results = call(
        hidden,
        *operands,
        **layout.attributes,
        **params,
        batch=np.int64(math.prod(batch)),
        ranks=np.int64(net.size),
        divisor=np.float32(divisor),
        timeout_ms=np.int64(net.timeout * 1000),
    )
    ctx.set_tokens_out(hidden.tokens_out)
    return results[:-1]


def _allreduce_abstract(*avals, layout, batch, two_shot, feedback, net, **params):
    def result(shape, dtype):
        return _compat.result_aval(avals, (*batch, *shape), dtype, len(batch))

    sums = [result(s, d if two_shot else jnp.float32) for s, d in zip(layout.shapes, layout.dtypes)]
    return sums + [result(s, jnp.float32) for s in layout.shapes if feedback], net.effects


# One call for all messages, as of the operations.
def _allreduce_batch(operands, dims, *, layout, batch, feedback, **params):
    moved = in_front(operands, dims)
    at = len(layout.shapes) * (2 if feedback else 1)
    moved[at] = operands[at]  # who takes part
    results = tcp_allreduce_p.bind(*moved, layout=layout, batch=(len(moved[0]), *batch), feedback=feedback, **params)
    return results, [0] * len(results)


tcp_allreduce_p.multiple_results = True
tcp_allreduce_p.def_effectful_abstract_eval(_allreduce_abstract)
batching.primitive_batchers[tcp_allreduce_p] = _allreduce_batch
mlir.register_lowering(tcp_allreduce_p, _refuse)
mlir.register_lowering(tcp_allreduce_p, _allreduce_lower, platform="cpu")


# The connections of this process, made once


def connect():
    """Connects the processes of jax.distributed, unless they are already."""
    if _compat.rendezvous()[0] is None:
        raise RuntimeError(
            "Tcp: expected processes that know each other, got one alone; call jax.distributed.initialize first"
        )
    with _ONE:
        if why := _failure():
            raise RuntimeError(f"Tcp: {why}; start the processes again")


_ONE = threading.Lock()


@functools.cache
def _failure():
    """Why they are not connected. There is no second try: others may have given up."""
    try:
        _connect(*_compat.rendezvous())
    except RuntimeError as error:
        return str(error)


def _connect(store, process, processes, coordinator):
    """Each tells the others through the store where it waits for them; a secret of theirs keeps others out."""
    # The host of process 0, which has the coordinator, is where everybody reaches that.
    host = _host(coordinator) if process else ""
    store.key_value_set(f"jaxcgx/tcp/{process}", f"{module().tcp_listen()} {host}")
    if process == 0:
        store.key_value_set("jaxcgx/tcp/token", secrets.token_hex(16))

    def get(key, whose):
        try:
            return store.blocking_key_value_get(f"jaxcgx/tcp/{key}", int(CONNECT * 1000))
        except jax.errors.JaxRuntimeError as error:
            late = "DEADLINE_EXCEEDED" in str(error)
            raise RuntimeError(f"process {whose} has not come within {CONNECT:g} s" if late else str(error)) from None

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

"""Exchanges and sums among processes over TCP, as JAX primitives.

A sum is two primitives: one begins it, the other ends it. Pieces are encoded, added up and decoded while other pieces
are on their way. Between the two primitives, a sum uses only its own memory, so a later program may end it. An exchange
of bytes is one primitive or, in the same way, two.

The parts are in the same order as in ops.py. `net` is the transport (transports/tcp.py). The primitives have no
derivatives, because each collective defines its own derivatives.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx._compat import batching, mlir
from jaxcgx.checks import unexpected
from jaxcgx.native import registration
from jaxcgx.native.connections import connect
from jaxcgx.native.layout import DTYPES, Layout
from jaxcgx.native.rng import kernel_key
from jaxcgx.native.rules import batch_exchange, batch_rule, digest, exchange_aval, places, refuse, refuse_gpus
from jaxcgx.typing import STATIC

OPERATIONS = ("all_to_all", "all_gather", "permute")  # as xla_ffi/tcp/collectives.h numbers them

tcp_exchange_p: Any = _compat.Primitive("jaxcgx_tcp_exchange")


def exchange(operation: str, x: jax.Array, net: Any, targets: tuple[int, ...] = ()) -> jax.Array:
    """Returns the result of one exchange: "all_to_all" and "all_gather" as in processes.py, or "permute".

    "permute" returns x of the rank whose target this rank is. `targets` has the target of each rank, -1 for none.
    """
    return tcp_exchange_p.bind(_compat.vary_over(x, net.names), operation=operation, targets=targets, net=net)


def who_takes_part(ctx: Any, net: Any) -> dict[str, Any]:
    """Returns the attributes that say which devices exchange. It is for lowering rules."""
    # They are the same on all devices: groups of places in the mesh, and for each place the process and the device's
    # number in it. If this process isn't connected yet, it is connected now. That may take as long as the transport's
    # timeout.
    mesh = _compat.mesh_of(ctx)
    if mesh is None:
        remedy = "pass jax.shard_map the mesh itself, or set it with jax.set_mesh"
        raise unexpected("Tcp", "to be told which devices the mesh has", "an abstract mesh", remedy)
    devices, found, numbers = list(mesh.devices.flat), collections.Counter[int](), dict[int, int]()
    everywhere = jax.devices(devices[0].platform)
    for device in everywhere:
        numbers[device.id] = found[device.process_index]
        found[device.process_index] += 1
    connect(1 + max(numbers.values()), net.timeout, net.links)
    here = [device for device in everywhere if device.process_index == jax.process_index()]
    registration.module().tcp_name_devices([d.id if d.platform == "cpu" else d.local_hardware_id for d in here])
    return dict(
        ranks=np.int64(net.size),
        groups=_groups(ctx, net.names),
        processes=np.array([device.process_index for device in devices], np.int64),
        devices=np.array([numbers[device.id] for device in devices], np.int64),
        timeout_ms=np.int64(net.timeout * 1000),
    )


def _groups(ctx: Any, names: tuple[Any, ...]) -> np.ndarray:
    """Returns the places in the mesh, group after group along these axes."""
    mesh = _compat.mesh_of(ctx)
    assert mesh is not None
    along = [mesh.axis_names.index(name) for name in names]
    places = np.arange(mesh.size, dtype=np.int64).reshape(mesh.devices.shape)
    return np.moveaxis(places, along, range(-len(along), 0)).reshape(-1)


def _lower(ctx: Any, x: Any, *, operation: str, targets: tuple[int, ...] | None = None, net: Any) -> Sequence[Any]:
    """The rule of a whole exchange, with `targets`, or of its first half."""
    whole, aval = targets is not None, ctx.avals_in[0]
    return _compat.lower_ordered("jaxcgx_tcp_exchange" if whole else "jaxcgx_tcp_exchange_begin", net.order)(
        ctx,
        x,
        **who_takes_part(ctx, net),
        operation=np.int64(OPERATIONS.index(operation)),
        targets=np.array(targets or (), np.int64),
        overtakes=not whole and net.slice_elements is not None,
        digest=digest(*[targets] * whole, aval.shape, aval.dtype, net.label),
    )


def lower(primitive: _compat.Primitive, rule: Any) -> None:
    """Registers a lowering rule for CPUs and, if this build has a CUDA half, for GPUs. Other platforms are errors."""
    where = "Tcp is for processes that compute on CPUs or NVIDIA's GPUs; the computation is placed on another platform"
    mlir.register_lowering(primitive, refuse(f"jaxcgx_tcp: {where}; give the axis's name alone"))
    mlir.register_lowering(primitive, rule, platform="cpu")
    mlir.register_lowering(primitive, rule if registration.has_cuda() else refuse_gpus("tcp"), platform="cuda")


tcp_exchange_p.def_effectful_abstract_eval(exchange_aval)
batching.primitive_batchers[tcp_exchange_p] = functools.partial(batch_exchange, tcp_exchange_p)
lower(tcp_exchange_p, _lower)


# Exchanges in two primitives. A ticket is two words, zeros if nothing has begun.

tcp_exchange_begin_p: Any = _compat.Primitive("jaxcgx_tcp_exchange_begin")
tcp_exchange_end_p: Any = _compat.Primitive("jaxcgx_tcp_exchange_end")


def begin_exchange(operation: str, x: jax.Array, net: Any) -> jax.Array:
    return tcp_exchange_begin_p.bind(_compat.vary_over(x, net.names), operation=operation, net=net)


def end_exchange(ticket: jax.Array, shape: tuple[int, ...], net: Any, later: bool) -> jax.Array:
    """Returns the result of an exchange: uint8 of this shape, [ranks, ...]. `later`: as in `end`."""
    return tcp_exchange_end_p.bind(ticket, shape=shape, net=net, later=later)


def _lower_exchange_end(ctx: Any, ticket: Any, *, shape: tuple[int, ...], net: Any, later: bool) -> Sequence[Any]:
    return _call_of_end(ctx, "jaxcgx_tcp_exchange_end", net, later)(ctx, ticket, ordered=later)


def _call_of_end(ctx: Any, target: str, net: Any, later: bool, in_place: dict[int, int] | None = None) -> Any:
    """Returns the lowering rule of the call that ends something. `in_place`: as jax.ffi's operand_output_aliases."""
    if later:
        return _compat.lower_ordered(target, net.order, operand_output_aliases=in_place)
    ctx.set_tokens_out(ctx.tokens_in)  # if there are any, the next exchange need not wait
    return jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=in_place)


def _abstract_exchange_begin(x: Any, *, operation: str, net: Any) -> tuple[Any, frozenset[Any]]:
    return _compat.result_aval([x], (2,), jnp.dtype(jnp.uint32)), net.effects


def _abstract_exchange_end(ticket: Any, *, shape: tuple[int, ...], net: Any, later: bool) -> tuple[Any, frozenset[Any]]:
    effects = net.effects if later else net.effects - {net.order}
    return _compat.result_aval([ticket], shape, jnp.dtype(jnp.uint8)), effects


# A batch is one exchange of longer rows. Its ticket is repeated for each row.
def _batch_exchange_begin(
    operands: Sequence[Any], dims: Sequence[Any], *, operation: str, net: Any
) -> tuple[jax.Array, int]:
    (x,), (dim,) = operands, dims
    ticket = begin_exchange(operation, jnp.moveaxis(x, dim, operation == "all_to_all"), net)
    return jnp.broadcast_to(ticket, (x.shape[dim], *ticket.shape)), 0


def _batch_exchange_end(
    operands: Sequence[Any], dims: Sequence[Any], *, shape: tuple[int, ...], **params: Any
) -> tuple[jax.Array, int]:
    (tickets,), (dim,) = operands, dims
    shape = (shape[0], tickets.shape[dim], *shape[1:])
    if tickets.shape[dim] == 0:
        return _compat.vary_over(jnp.zeros(shape, jnp.uint8), params["net"].names), 1
    return tcp_exchange_end_p.bind(jnp.moveaxis(tickets, dim, 0)[0], shape=shape, **params), 1


tcp_exchange_begin_p.def_effectful_abstract_eval(_abstract_exchange_begin)
tcp_exchange_end_p.def_effectful_abstract_eval(_abstract_exchange_end)
batching.primitive_batchers[tcp_exchange_begin_p] = _batch_exchange_begin
batching.primitive_batchers[tcp_exchange_end_p] = _batch_exchange_end
lower(tcp_exchange_begin_p, _lower)
lower(tcp_exchange_end_p, _lower_exchange_end)


# Sums

# The fewest bytes of a piece, and the most pieces of a chunk (benchmarks/notes/collectives.md).
PIECE, MOST_PIECES = 2**17, 16
# The same for overlays, where a level of a tree waits for the level below, and for deadlines, which give up pieces.
SMALL_PIECE, MOST_SMALL_PIECES = 2**14, 64


def pieces_of(size: int, small: bool = False) -> int:
    """Returns the number of pieces of a chunk of `size` bytes. `small`: for overlays and deadlines."""
    piece, most = (SMALL_PIECE, MOST_SMALL_PIECES) if small else (PIECE, MOST_PIECES)
    return max(1, min(most, size // piece))


tcp_begin_p: _compat.Primitive = _compat.Primitive("jaxcgx_tcp_begin")
tcp_end_p: _compat.Primitive = _compat.Primitive("jaxcgx_tcp_end")


class Inside(Protocol):
    """A stage inside the ranks of a sum: ranks that add their leaves first, in float32 and in rank order."""

    # Each gets a share of the sums: equal parts of each flattened leaf, the last one padded with the leaf's last
    # number. Devices of one process do this in memory, with the same bits.
    @property
    def net(self) -> Any: ...
    @property
    def leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]: ...

    def inwards(self, leaves: list[Any]) -> list[Any]:
        """Returns this rank's share of the sum of each leaf, in float32."""
        ...

    def outwards(self, shares: list[Any]) -> list[Any]:
        """Returns the whole leaves of which each rank has its share. Shares are rounded to the leaves' dtypes."""
        ...


# The operands and the results of both primitives, in the order in which the handlers have them.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    leaves: list[Any]
    residuals: list[Any] | None
    keys: list[Any]  # for the encodings of a rank's own leaves, of a root's sum, and of other sums
    inside: Inside | None = dataclasses.field(metadata=STATIC)  # ranks that add their leaves first


class Started(NamedTuple):
    residuals: list[Any] | None
    ticket: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Begun:
    """A sum that has begun: the operands of the second primitive."""

    # The ticket is two words. They are zeros if nothing has begun. The residuals are from the first encoding. If `own`
    # is "raw", an owner's residuals of its part become the loss of encoding the sum when the sum ends.
    ticket: jax.Array
    residuals: list[Any] | None
    layout: Layout = dataclasses.field(metadata=STATIC)
    two_shot: bool = dataclasses.field(metadata=STATIC)  # whether the sum goes along trees
    net: Any = dataclasses.field(metadata=STATIC)
    inside: Inside | None = dataclasses.field(metadata=STATIC)  # as in `Operands`; the results are then whole leaves


class Ended(NamedTuple):
    sums: list[Any]
    residuals: list[Any] | None


class How(NamedTuple):
    """The settings of the first primitive: the schedule, and which encodings have feedback."""

    two_shot: bool  # whether the sum goes along trees; otherwise it is one_shot
    parents: tuple[tuple[int, ...], ...]  # for each tree, the parent of each rank
    own: bool  # whether a rank adds its own part without encoding it
    sum_feedback: bool  # whether a residual of a rank's own part becomes the loss of encoding the sum
    divisor: float


def begin(asked: Any, net: Any) -> Begun:
    """Begins a `PiecewiseSum` (transports/base.py), with the bits of its schedule (exchange/schedules.py)."""
    layout, parents, feedback = asked.layout, asked.parents, asked.residuals is not None
    # A codec with `whole` makes one bucket of a leaf's part, which can't be cut.
    if layout.codec.whole:
        pieces = 1
    elif net.slice_elements is None:
        pieces = pieces_of(layout.chunk_bytes, small=layout.shares is not None or net.deadline is not None)
    else:
        pieces = -(-sum(layout.sizes) // (layout.chunks * net.slice_elements))
    layout = dataclasses.replace(layout, chunks=layout.chunks * pieces)
    keys = [asked.first_key, asked.sum_key, asked.hop_key][: 3 if parents else 1] if layout.codec.stochastic else []
    operands = Operands(asked.leaves, asked.residuals, list(map(kernel_key, keys)), asked.inside)
    flat, tree = jax.tree_util.tree_flatten(operands)
    raw = bool(parents) and asked.own == "raw"
    how = How(
        two_shot=bool(parents),
        parents=parents,
        own=raw and not feedback and not layout.codec.raw,  # a raw codec's payload is the unencoded part already
        sum_feedback=raw and feedback,
        divisor=float(asked.divisor),
    )
    flat = _compat.match_varying(_compat.vary_over(flat[0], net.names), *flat[1:])
    found = tcp_begin_p.bind(*flat, tree=tree, layout=layout, batch=(), how=how, net=net)
    started = jax.tree_util.tree_structure(Started(asked.residuals, ticket=0)).unflatten(found)
    return Begun(started.ticket, started.residuals, layout, two_shot=how.two_shot, net=net, inside=asked.inside)


def end(begun: Begun, later: bool) -> Ended:
    """Ends a sum. Returns (sums, new residuals). With "one_shot", sums are float32, else they have the leaves' dtypes.

    With a stage inside, the sums have the shapes and dtypes of the whole leaves.

    With `later`, the program may be later than the program that began the sum. Then no later exchange begins before
    this sum has ended. Otherwise this process could wait for a rank that waits for the end of this sum.
    """
    flat, tree = jax.tree_util.tree_flatten(begun)
    return _ended(begun).unflatten(tcp_end_p.bind(*_compat.match_varying(*flat), tree=tree, batch=(), later=later))


def _ended(begun: Begun) -> Any:
    return jax.tree_util.tree_structure(Ended([0] * len(begun.layout.shapes), begun.residuals))


def _in_place(at: Any, results: Started | Ended) -> dict[int, int]:
    """Returns {place among the operands: place among the results} of the residuals, which are updated in place."""
    return dict(zip(at.residuals or (), places(jax.tree_util.tree_structure(results)).residuals or ()))


def _in_memory(ctx: Any, inside: Inside | None) -> bool:
    """Returns whether the ranks inside are CPU devices of one process, everywhere in the mesh."""
    mesh = _compat.mesh_of(ctx)
    if inside is None or mesh is None or mesh.devices.flat[0].platform != "cpu":
        return False
    processes = np.array([device.process_index for device in mesh.devices.flat])
    processes = processes[_groups(ctx, inside.net.names)].reshape(-1, inside.net.size)
    return bool((processes == processes[:, :1]).all())


def _mapped(function: Any, batch: tuple[int, ...]) -> Any:
    return functools.reduce(lambda mapped, _: jax.vmap(mapped), batch, function)


def _whole_leaves(inside: Inside | None) -> dict[str, Any]:
    """Returns the attributes that describe the leaves that devices add first. Without such devices, they are empty."""
    leaves = [] if inside is None else inside.leaves
    return dict(
        whole_sizes=np.array([math.prod(x.shape) for x in leaves], np.int64),
        whole_dtypes=np.array([DTYPES.index(x.dtype) for x in leaves], np.int64),
    )


# A sum is two calls, so that other operations or later programs run between them.
def _lower_begin(
    ctx: Any, *operands: Any, tree: Any, layout: Layout, batch: tuple[int, ...], how: How, net: Any
) -> Sequence[Any]:
    at = places(tree)
    inside = at.inside
    if inside is not None and not _in_memory(ctx, inside):

        def apart(*operands: Any) -> Any:
            given = tree.unflatten(operands)
            shares = _mapped(inside.inwards, batch)(given.leaves)
            flat, of_shares = jax.tree_util.tree_flatten(dataclasses.replace(given, leaves=shares, inside=None))
            return tcp_begin_p.bind(*flat, tree=of_shares, layout=layout, batch=batch, how=how, net=net)

        return mlir.lower_fun(apart, multiple_results=True)(ctx, *operands)
    messages = math.prod(batch)
    in_place = _in_place(at, Started(at.residuals, ticket=0))
    return _compat.lower_ordered("jaxcgx_tcp_allreduce", net.order, operand_output_aliases=in_place)(
        ctx,
        *operands,
        **layout.attributes,
        **who_takes_part(ctx, net),
        **_whole_leaves(inside),
        inside=np.int64(1 if inside is None else inside.net.size),
        inside_groups=np.array([], np.int64) if inside is None else _groups(ctx, inside.net.names),
        batch=np.int64(messages),
        two_shot=how.two_shot,
        parents=np.array(how.parents, np.int64).reshape(-1),
        own=how.own,
        feedback=at.residuals is not None,
        sum_feedback=how.sum_feedback,
        overtakes=net.slice_elements is not None,
        deadline=np.int64(-1 if net.deadline is None else net.deadline * 1e6),
        divisor=np.float32(how.divisor),
        digest=digest(layout, messages, how),
        bytes=np.int64(messages * _bytes(layout, how.parents, net.size)),  # for `explain`
    )


def _lower_end(ctx: Any, *operands: Any, tree: Any, batch: tuple[int, ...], later: bool) -> Sequence[Any]:
    at = places(tree)
    inside = at.inside
    if inside is not None and not _in_memory(ctx, inside):

        def apart(*operands: Any) -> Any:
            begun = dataclasses.replace(tree.unflatten(operands), inside=None)
            flat, of_shares = jax.tree_util.tree_flatten(begun)
            ended = _ended(begun).unflatten(tcp_end_p.bind(*flat, tree=of_shares, batch=batch, later=later))
            return jax.tree_util.tree_leaves(ended._replace(sums=_mapped(inside.outwards, batch)(ended.sums)))

        return mlir.lower_fun(apart, multiple_results=True)(ctx, *operands)
    in_place = _in_place(at, Ended([0] * len(at.layout.shapes), at.residuals))
    return _call_of_end(ctx, "jaxcgx_tcp_allreduce_end", at.net, later, in_place=in_place)(
        ctx,
        *operands,
        **at.layout.attributes,
        batch=np.int64(math.prod(batch)),
        two_shot=at.two_shot,
        feedback=at.residuals is not None,
        ordered=later,
        **_whole_leaves(inside),
    )


def _bytes(layout: Layout, parents: tuple[tuple[int, ...], ...], ranks: int) -> int:
    """Returns the operand bytes of an XLA collective that sends as much as the busiest rank."""
    if not parents:
        return sum(layout.ends)
    pieces = layout.chunks // len(parents)
    sent = [0] * ranks
    for i, tree in enumerate(parents):
        size = sum(layout.ends[i * pieces : (i + 1) * pieces])
        for rank, parent in enumerate(tree):
            if parent >= 0:
                sent[rank] += size
                sent[parent] += size
    return round(max(sent) * ranks / (2 * (ranks - 1))) if ranks > 1 else 0


def _abstract_begin(
    *avals: Any, tree: Any, layout: Layout, batch: tuple[int, ...], how: How, net: Any
) -> tuple[list[Any], frozenset[Any]]:
    ticket = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return _result_avals(avals, batch, Started(_residuals(layout, tree.unflatten(avals)), ticket)), net.effects


def _abstract_end(*avals: Any, tree: Any, batch: tuple[int, ...], later: bool) -> tuple[list[Any], frozenset[Any]]:
    begun = tree.unflatten(avals)
    layout, net = begun.layout, begun.net
    dtypes = layout.dtypes if begun.two_shot else [jnp.float32] * len(layout.dtypes)
    sums = list(map(jax.ShapeDtypeStruct, layout.shapes, dtypes) if begun.inside is None else begun.inside.leaves)
    results = Ended(sums, _residuals(layout, begun))
    # Ranks inside that are in several processes may exchange in order. See `_lower_end`.
    in_order = later or (begun.inside is not None and net.order in begun.inside.net.effects)
    return _result_avals(avals, batch, results), net.effects if in_order else net.effects - {net.order}


def _residuals(layout: Layout, given: Operands | Begun) -> list[Any] | None:
    return None if given.residuals is None else [jax.ShapeDtypeStruct(s, jnp.float32) for s in layout.shapes]


def _result_avals(avals: Sequence[Any], batch: tuple[int, ...], results: Started | Ended) -> list[Any]:
    return [
        _compat.result_aval(avals, (*batch, *x.shape), x.dtype, rows=len(batch))
        for x in jax.tree_util.tree_leaves(results)
    ]


for _primitive, _abstract, _lowered in (
    (tcp_begin_p, _abstract_begin, _lower_begin),
    (tcp_end_p, _abstract_end, _lower_end),
):
    _primitive.multiple_results = True
    _primitive.def_effectful_abstract_eval(_abstract)
    batching.primitive_batchers[_primitive] = functools.partial(batch_rule, _primitive)
    lower(_primitive, _lowered)

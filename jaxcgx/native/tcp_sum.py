"""The sum of a message over TCP, as two JAX primitives: one begins it, the other ends it.

Pieces are encoded, added up and decoded while other pieces are on their way. Between the two primitives, a sum uses
only its own memory, so a later program may end it.

The parts are in the same order as in ops.py. `net` is the transport (transports/tcp.py).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx._compat import batching, mlir
from jaxcgx.native.layout import Layout
from jaxcgx.native.operands import places
from jaxcgx.native.rng import kernel_key
from jaxcgx.native.rules import in_front, one_of_same
from jaxcgx.native.tcp import refuse, who_takes_part, with_processes
from jaxcgx.native.terms import digest

# The fewest bytes of a piece, and the most pieces of a chunk (benchmarks/notes/collectives.md).
PIECE, MOST_PIECES = 2**17, 16
# The same for overlays: their links are slow, and a level of a tree waits for the level below.
TREE_PIECE, MOST_TREE_PIECES = 2**14, 64


def pieces_of(size: int, trees: bool = False) -> int:
    """Returns the number of pieces of a chunk of `size` bytes. `trees` says whether an overlay moves it."""
    piece, most = (TREE_PIECE, MOST_TREE_PIECES) if trees else (PIECE, MOST_PIECES)
    return max(1, min(most, size // piece))


tcp_begin_p: Any = _compat.Primitive("jaxcgx_tcp_begin")
tcp_end_p: Any = _compat.Primitive("jaxcgx_tcp_end")


# The operands and the results of both primitives, in the order in which the handlers have them.


class Operands(NamedTuple):
    """The operands of the first primitive."""

    leaves: list[Any]
    residuals: list[Any] | None
    who: Any
    first_key: Any = None
    sum_key: Any = None
    hop_key: Any = None


class Started(NamedTuple):
    """The results of the first primitive."""

    residuals: list[Any] | None
    ticket: Any


class Ending(NamedTuple):
    """The operands of the second primitive."""

    ticket: Any
    residuals: list[Any] | None


class Results(NamedTuple):
    """The results of the second primitive."""

    sums: list[Any]
    residuals: list[Any] | None


class How(NamedTuple):
    """The settings of the first primitive: the schedule, and which encodings have feedback."""

    two_shot: bool  # whether the sum goes along trees; otherwise it is one_shot
    parents: tuple[tuple[int, ...], ...]  # for each tree, the parent of each rank
    own: bool  # whether a rank adds its own part without encoding it
    sum_feedback: bool  # whether a residual of a rank's own part becomes the loss of encoding the sum
    divisor: float


class HowToEnd(NamedTuple):
    """The settings of the second primitive."""

    two_shot: bool  # as in `How`
    later: bool  # whether the program may be later than the program that began the sum


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ticket", "residuals"], meta_fields=["layout", "two_shot", "net"]
)
@dataclasses.dataclass(frozen=True)
class Begun:
    """A sum that has begun. A pytree.

    The ticket is two words. They are zeros if nothing has begun. The residuals are from the first encoding. If `own` is
    "raw", an owner's residuals of its part become the loss of encoding the sum when the sum ends.
    """

    ticket: jax.Array
    residuals: list[Any] | None
    layout: Layout
    two_shot: bool  # whether the sum goes along trees
    net: Any


def begin(
    layout: Layout, operands: Operands, *, parents: tuple[tuple[int, ...], ...], own: str, divisor: float, net: Any
) -> Begun:
    """Begins a sum with the bits of "one_shot", "two_shot" or an overlay (exchange/schedules.py).

    Args:
      layout: the layout of the message, with one chunk for each tree, or one chunk for one_shot. Its codec has kernels.
      operands: the operands. This function sets `who`.
      parents: for each tree, the parent of each rank; () for one_shot.
      own: how a rank adds its own part.
      divisor: divides the sum.
      net: the transport.
    """
    # A codec with `whole` makes one bucket of a leaf's part, which can't be cut.
    if layout.codec.whole:
        pieces = 1
    elif net.slice_elements is None:
        pieces = pieces_of(layout.chunk_bytes, trees=layout.shares is not None)
    else:
        pieces = max(1, -(-sum(layout.sizes) // (layout.chunks * net.slice_elements)))
    layout = dataclasses.replace(layout, chunks=layout.chunks * pieces)
    names = ("first_key", "sum_key", "hop_key")[: 3 if parents else 1] if layout.codec.stochastic else ()
    keys = {name: kernel_key(getattr(operands, name)) for name in names}
    operands = Operands(operands.leaves, operands.residuals, who_takes_part(net), **keys)
    flat, tree = jax.tree_util.tree_flatten(operands)
    feedback, raw = operands.residuals is not None, bool(parents) and own == "raw"
    how = How(
        two_shot=bool(parents),
        parents=parents,
        own=raw and not feedback and not layout.codec.raw,  # a raw codec's payload is the unencoded part already
        sum_feedback=raw and feedback,
        divisor=float(divisor),
    )
    found = tcp_begin_p.bind(*_compat.match_varying(*flat), tree=tree, layout=layout, batch=(), how=how, net=net)
    started = _started(operands.residuals).unflatten(found)
    return Begun(started.ticket, started.residuals, layout, two_shot=how.two_shot, net=net)


def end(begun: Begun, later: bool) -> Results:
    """Ends a sum. Returns (sums, new residuals). With "one_shot", sums are float32, else they have the leaves' dtypes.

    Args:
      begun: the sum.
      later: whether the program may be later than the program that began the sum. Then no later exchange begins before
        this sum has ended. Otherwise this process could wait for a rank that waits for the end of this sum.
    """
    flat, tree = jax.tree_util.tree_flatten(Ending(begun.ticket, begun.residuals))
    how = HowToEnd(begun.two_shot, later)
    found = tcp_end_p.bind(
        *_compat.match_varying(*flat), tree=tree, layout=begun.layout, batch=(), how=how, net=begun.net
    )
    return _ended(begun.layout, begun.residuals).unflatten(found)


def _started(residuals: list[Any] | None) -> Any:
    """Returns the structure of `Started`, from the residuals among the operands."""
    return jax.tree_util.tree_structure(Started(residuals, ticket=0))


def _ended(layout: Layout, residuals: list[Any] | None) -> Any:
    """Returns the structure of `Results`, from the residuals among the operands."""
    return jax.tree_util.tree_structure(Results([0] * len(layout.shapes), residuals))


def _in_place(residuals: list[int] | None, results: Any) -> dict[int, int]:
    """Returns {place among the operands: place among the results} of the residuals, which are updated in place."""
    return dict(zip(residuals or (), places(results).residuals or ()))


# A sum is two calls, so that other operations or later programs run between them.
def _lower_begin(
    ctx: Any, *operands: Any, tree: Any, layout: Layout, batch: tuple[int, ...], how: How, net: Any
) -> Sequence[Any]:
    at = places(tree)
    given, messages = list(operands), math.prod(batch)
    given[at.who] = with_processes(ctx, given[at.who], ctx.avals_in[at.who], net=net)
    in_place = _in_place(at.residuals, _started(at.residuals))
    return _compat.lower_ordered("jaxcgx_tcp_allreduce", net.order, operand_output_aliases=in_place)(
        ctx,
        *given,
        **layout.attributes,
        batch=np.int64(messages),
        two_shot=how.two_shot,
        parents=np.array(how.parents, np.int64).reshape(-1),
        own=how.own,
        feedback=at.residuals is not None,
        sum_feedback=how.sum_feedback,
        overtakes=net.slice_elements is not None,
        ranks=np.int64(net.size),
        divisor=np.float32(how.divisor),
        timeout_ms=np.int64(net.timeout * 1000),
        digest=digest(layout, messages, how),
        bytes=np.int64(messages * _bytes(layout, how.parents, net.size)),  # for `explain`
    )


def _lower_end(
    ctx: Any, *operands: Any, tree: Any, layout: Layout, batch: tuple[int, ...], how: HowToEnd, net: Any
) -> Sequence[Any]:
    at = places(tree)
    options: dict[str, Any] = dict(operand_output_aliases=_in_place(at.residuals, _ended(layout, at.residuals)))
    if how.later:
        call = _compat.lower_ordered("jaxcgx_tcp_allreduce_end", net.order, **options)
    else:
        call = jax.ffi.ffi_lowering("jaxcgx_tcp_allreduce_end", has_side_effect=True, **options)
    return call(
        ctx,
        *operands,
        **layout.attributes,
        batch=np.int64(math.prod(batch)),
        two_shot=how.two_shot,
        feedback=at.residuals is not None,
        ordered=how.later,
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
    residuals = _residuals(layout, tree.unflatten(avals))
    return _results(avals, batch, Started(residuals, ticket=jax.ShapeDtypeStruct((2,), jnp.uint32))), net.effects


def _abstract_end(
    *avals: Any, tree: Any, layout: Layout, batch: tuple[int, ...], how: HowToEnd, net: Any
) -> tuple[list[Any], frozenset[Any]]:
    residuals = _residuals(layout, tree.unflatten(avals))
    dtypes = layout.dtypes if how.two_shot else [jnp.float32] * len(layout.dtypes)
    results = Results(list(map(jax.ShapeDtypeStruct, layout.shapes, dtypes)), residuals)
    return _results(avals, batch, results), net.effects if how.later else net.effects - {net.order}


def _residuals(layout: Layout, operands: Operands | Ending) -> list[Any] | None:
    """Returns the types of the new residuals, or None without feedback."""
    return None if operands.residuals is None else [jax.ShapeDtypeStruct(s, jnp.float32) for s in layout.shapes]


def _results(avals: Sequence[Any], batch: tuple[int, ...], results: Started | Results) -> list[Any]:
    return [
        _compat.result_aval(avals, (*batch, *x.shape), x.dtype, rows=len(batch))
        for x in jax.tree_util.tree_leaves(results)
    ]


# vmap makes one call for all messages, as in ops.py.
def _batch_begin(
    operands: Sequence[Any], dims: Sequence[Any], *, tree: Any, batch: tuple[int, ...], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    moved, who = in_front(operands, dims), places(tree).who
    moved[who] = one_of_same(operands[who], dims[who])
    results = tcp_begin_p.bind(*moved, tree=tree, batch=(len(moved[0]), *batch), **params)
    return results, [0] * len(results)


def _batch_end(
    operands: Sequence[Any], dims: Sequence[Any], *, batch: tuple[int, ...], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    moved = in_front(operands, dims)
    results = tcp_end_p.bind(*moved, batch=(len(moved[0]), *batch), **params)
    return results, [0] * len(results)


def _define(primitive: Any, abstract: Any, batched: Any, lower: Any) -> None:
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, refuse)
    mlir.register_lowering(primitive, lower, platform="cpu")


_define(tcp_begin_p, _abstract_begin, batched=_batch_begin, lower=_lower_begin)
_define(tcp_end_p, _abstract_end, batched=_batch_end, lower=_lower_end)

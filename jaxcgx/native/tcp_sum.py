"""The sum of a message over TCP, as a JAX primitive.

Pieces are encoded, added up and decoded while other pieces are on their way.

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
from jaxcgx.native.ops import in_front
from jaxcgx.native.tcp import refuse, who_takes_part, with_processes
from jaxcgx.native.terms import digest

# The least bytes of a piece, and the most pieces (benchmarks/notes/collectives.md).
PIECE, MOST_PIECES = 2**19, 16
# The same by trees of different shares or of several levels: links are slow, and a level waits for the one below.
TREE_PIECE, MOST_TREE_PIECES = 2**14, 64


def pieces_of(size: int, trees: bool = False) -> int:
    """The number of pieces that a chunk of `size` bytes travels in."""
    piece, most = (TREE_PIECE, MOST_TREE_PIECES) if trees else (PIECE, MOST_PIECES)
    return max(1, min(most, size // piece))


tcp_allreduce_p: Any = _compat.Primitive("jaxcgx_tcp_allreduce")


class Operands(NamedTuple):
    """The operands, in the order that the handler takes them."""

    leaves: list[Any]
    residuals: list[Any] | None
    who: Any
    first_key: Any
    sum_key: Any
    hop_key: Any


class How(NamedTuple):
    """What the handler is told: the schedule, and what of it is compensated."""

    two_shot: bool  # along the trees, else one_shot
    parents: tuple[tuple[int, ...], ...]  # of the ranks in each tree
    own: bool  # a rank's own part joins the sum as it is
    sum_feedback: bool  # the residual is what the encoding of the sum loses
    divisor: float


class Results(NamedTuple):
    sums: list[Any]
    residuals: list[Any] | None


def allreduce(
    layout: Layout, operands: Operands, *, parents: tuple[tuple[int, ...], ...], own: str, divisor: float, net: Any
) -> Results:
    """The schedule "one_shot", "two_shot" or an overlay of exchange/schedules.py, with its bits.

    The result is float32 sums with "one_shot", else leaves.

    Args:
      layout: the message, cut into a chunk for each tree, or one for one_shot. Its codec has kernels.
      operands: the operands. `who` is left to this function.
      parents: of the ranks in each tree; () for one_shot.
      own: how a rank adds its own part.
      divisor: what the sum is divided by.
      net: the transport.
    """
    # A whole codec makes one bucket of a leaf's part, which can't be cut.
    uneven = layout.shares is not None
    pieces = 1 if layout.codec.whole else pieces_of(layout.chunk_bytes, uneven)
    layout = dataclasses.replace(layout, chunks=layout.chunks * pieces)
    operands = operands._replace(who=who_takes_part(net))
    if not layout.codec.stochastic:
        operands = operands._replace(first_key=None, sum_key=None, hop_key=None)
    elif not parents:
        operands = operands._replace(sum_key=None, hop_key=None)
    flat, tree = jax.tree_util.tree_flatten(operands)
    feedback, raw = operands.residuals is not None, bool(parents) and own == "raw"
    how = How(
        two_shot=bool(parents),
        parents=parents,
        own=raw and not feedback and not layout.codec.raw,  # the bytes of a raw codec are the part as it is
        sum_feedback=raw and feedback,
        divisor=float(divisor),
    )
    found = tcp_allreduce_p.bind(*_compat.match_varying(*flat), tree=tree, layout=layout, batch=(), how=how, net=net)
    return _results(tree).unflatten(found)


@functools.lru_cache
def _results(tree: Any) -> Any:
    """The structure of the results for operands of a structure."""
    operands = places(tree)
    return jax.tree_util.tree_structure(Results(operands.leaves, operands.residuals))


# Two calls, so that the program goes on between them. The second waits for the sum that the first has begun.
def _lower(
    ctx: Any, *operands: Any, tree: Any, layout: Layout, batch: tuple[int, ...], how: How, net: Any
) -> Sequence[Any]:
    at = places(tree)
    given, messages = list(operands), math.prod(batch)
    given[at.who] = with_processes(ctx, given[at.who], ctx.avals_in[at.who], timeout=net.timeout)
    message = layout.attributes | dict(batch=np.int64(messages))
    fed = list(at.residuals or ())
    residuals = [ctx.avals_in[place] for place in fed]
    ticket = _compat.result_aval(ctx.avals_in, (1,), np.dtype("int64"))
    begun = ctx.replace(avals_out=[*residuals, ticket])
    # Residuals are updated in place.
    aliases = {place: i for i, place in enumerate(fed)}
    *lost, number = _compat.lower_ordered("jaxcgx_tcp_allreduce", net.order, operand_output_aliases=aliases)(
        begun,
        *given,
        **message,
        two_shot=how.two_shot,
        parents=np.array(how.parents, np.int64).reshape(-1),
        own=how.own,
        feedback=at.residuals is not None,
        sum_feedback=how.sum_feedback,
        ranks=np.int64(net.size),
        divisor=np.float32(how.divisor),
        timeout_ms=np.int64(net.timeout * 1000),
        digest=digest(layout, messages, how),
        bytes=np.int64(messages * _bytes(layout, how.parents, net.size)),  # for `explain`
    )
    aliases = {1 + i: len(at.leaves) + i for i in range(len(fed))}
    end = jax.ffi.ffi_lowering("jaxcgx_tcp_allreduce_end", has_side_effect=True, operand_output_aliases=aliases)
    results = end(ctx.replace(avals_in=[ticket, *residuals]), number, *lost, **message)
    ctx.set_tokens_out(begun.tokens_out)
    return results


def _bytes(layout: Layout, parents: tuple[tuple[int, ...], ...], ranks: int) -> int:
    """The bytes of the operand of a collective that sends as many as the rank which sends most."""
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


def _abstract(
    *avals: Any, tree: Any, layout: Layout, batch: tuple[int, ...], how: How, net: Any
) -> tuple[list[Any], frozenset[Any]]:
    def result(shape: tuple[int, ...], dtype: Any) -> Any:
        return _compat.result_aval(avals, (*batch, *shape), dtype, rows=len(batch))

    sums = [result(s, d if how.two_shot else jnp.float32) for s, d in zip(layout.shapes, layout.dtypes)]
    fed = tree.unflatten(avals).residuals is not None
    results = Results(sums, [result(s, jnp.float32) for s in layout.shapes] if fed else None)
    return jax.tree_util.tree_leaves(results), net.effects


# One call for all messages, as with the operations.
def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, tree: Any, batch: tuple[int, ...], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    moved, who = in_front(operands, dims), places(tree).who
    moved[who] = operands[who]
    results = tcp_allreduce_p.bind(*moved, tree=tree, batch=(len(moved[0]), *batch), **params)
    return results, [0] * len(results)


tcp_allreduce_p.multiple_results = True
tcp_allreduce_p.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[tcp_allreduce_p] = _batch
mlir.register_lowering(tcp_allreduce_p, refuse)
mlir.register_lowering(tcp_allreduce_p, _lower, platform="cpu")

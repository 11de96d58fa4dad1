"""What a plan makes of a tree, before any program exists: every leaf's codec, message and bytes."""

import dataclasses
import itertools
import math
import operator

import jax
import jax.numpy as jnp

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.spelling import spell
from jaxcgx.native.layout import Layout
from jaxcgx.plan.leaves import messages, spell_path, why_raw
from jaxcgx.text import Totals, ratio, spell_sizes, table


@dataclasses.dataclass(frozen=True)
class Row:
    """A leaf in an exchange; in a hierarchy it takes part in one over each axis."""

    leaf: str  # its path
    shape: tuple
    dtype: str
    axes: tuple  # that the exchange is over; (): the tree was explained for one number of ranks
    codec: Codec
    message: int | None  # counted from 1; None: the leaf travels alone, as it is
    raw_bytes: int  # of what of the leaf is exchanged, in its own dtype
    bytes: int  # of the same in its message
    why: str | None  # it travels as it is; None: it does not

    @property
    def ratio(self):
        return ratio(self.bytes, self.raw_bytes)


@dataclasses.dataclass(frozen=True)
class Forecast(Totals):
    """What `Plan.explain` found. str() is a table."""

    rows: tuple  # of Row, in the order of the leaves
    totals: dict  # {axes: (bytes, the same uncompressed)}; messages with what fills them up

    def __repr__(self):
        return f"<Forecast of leaves: {len({row.leaf for row in self.rows})}, bytes: {self.bytes:,}, ratio: {self.ratio:.2f}>"

    def __str__(self):
        head = ("leaf", "shape", "dtype", "axes", "codec", "message", "bytes", "uncompressed", "ratio", "raw because")
        rows = [
            (
                r.leaf or "x",
                "x".join(map(str, r.shape)) or "scalar",
                r.dtype,
                _spell_axes(r.axes),
                spell(r.codec),
                str(r.message or ""),
                *spell_sizes(r.bytes, r.raw_bytes),
                r.why or "",
            )
            for r in self.rows
        ]
        totals = self.spell_totals("over", [(_spell_axes(axes), *sizes) for axes, sizes in self.totals.items()])
        return f"{table(head, rows)}\n\n{totals}"


def _spell_axes(axes):
    return ", ".join(map(str, axes)) or "all ranks"


def forecast(plan, tree, axis_size):
    op = "Plan.explain"
    sizes = _sizes(op, axis_size)
    axes, ranks = tuple(name for name in sizes if name is not None), math.prod(sizes.values())
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(tree)[0]) if jax.tree.leaves(tree) else ((), ())
    for path, leaf in zip(paths, leaves):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{op}: argument 'tree', leaf {spell_path(path)!r}: expected an array or a jax.ShapeDtypeStruct, "
                f"got {leaf!r}"
            )
    rows, totals, coded = [[] for _ in leaves], {}, {}
    if isinstance(plan.schedule, dict):
        _check_axes(op, plan.schedule, axes, axis_size)

    def add(over, codec, number, ids, raw, encoded, total, why=None):
        """Rows for leaves in an exchange, with the bytes of each."""
        for i, *both in zip(ids, raw, encoded):
            rows[i].append(
                Row(spell_path(paths[i]), tuple(leaves[i].shape), str(leaves[i].dtype), over, codec, number, *both, why)
            )
        sent, uncompressed = totals.get(over, (0, 0))
        totals[over] = sent + total, uncompressed + sum(raw)

    for i, (codec, why) in enumerate(plan.assign(op, "tree", paths, leaves)):
        codecs = list(codec.values()) if isinstance(codec, dict) else [codec]
        if isinstance(codec, dict):
            _check_axes(op, codec, axes, axis_size)
        if why := why or why_raw(leaves[i], codecs) or ("there is one rank" if ranks == 1 else None):
            size = leaves[i].size * leaves[i].dtype.itemsize
            add(axes, Raw(), None, [i], [size], [size], size, why)
        else:
            coded.setdefault(codec, []).append(i)
    groups = [
        (codec, [ids[k] for k in message])
        for codec, ids in coded.items()
        for message in messages([leaves[i] for i in ids], plan.fusion_mb * 2**20)
    ]
    for number, (codec, ids) in enumerate(groups, 1):
        for over, one, layout, times in _exchanges(codec, sizes, [leaves[i] for i in ids], plan.leader):
            raw = [times * n * leaves[i].dtype.itemsize for n, i in zip(layout.sizes, ids)]
            own = [times * n for n in _own_bytes(layout)]
            filled = not (one.low_rank or (one.raw and _whole(codec, axes, plan.leader)))  # those are plain sums
            add(over, one, number, ids, raw, own, times * layout.chunks * layout.chunk_bytes if filled else sum(own))
    return Forecast(tuple(row for found in rows for row in found), totals)


def _sizes(op, axis_size):
    """{axis name: ranks}; {None: ranks} of a number."""
    sizes = axis_size if isinstance(axis_size, dict) else {None: axis_size}
    try:
        numbers = {name: operator.index(n) for name, n in sizes.items()}
    except TypeError:
        numbers = {}
    if not numbers or min(numbers.values()) < 1:
        raise ValueError(
            f"{op}: argument 'axis_size': expected a number of ranks or {{axis name: ranks}}, outermost first, "
            f"got {axis_size!r}"
        )
    return numbers


def _check_axes(op, given, axes, axis_size):
    """That codecs or schedules by axis are for these axes."""
    if set(given) != set(axes):
        raise ValueError(
            f"{op}: argument 'axis_size': expected {{axis name: ranks}}, outermost first, for the axes of "
            f"{spell(given)}, got {axis_size!r}"
        )


# As collectives/hierarchy.py does it. By shards an inner exchange has a row for each of its ranks, and the leaf shrinks to a share
# on the way out; by a leader every exchange is of whole leaves, and what the leaders send each other they hand on. Sums are in
# float32 from the first exchange on. Factors are of whole leaves, too (collectives/low_rank.py).
def _exchanges(codec, sizes, leaves, leader):
    """(axes, codec, layout, its number) of every exchange of a message."""
    names = tuple(name for name in sizes if name is not None)
    if not isinstance(codec, dict):
        yield names, codec, Layout.of(codec, leaves, math.prod(sizes.values())), 1
        return
    whole, inner = _whole(codec, names, leader), names[1:]
    for k, name in enumerate(names):
        if sizes[name] == 1:
            continue
        dtypes = [jnp.float32 if whole or name != names[-1] else x.dtype for x in leaves]
        if whole:
            shapes = [x.shape for x in leaves]
        else:
            kept = math.prod(sizes[a] for a in inner[: max(k - 1, 0)])  # shares that are together still
            shapes = [(kept * -(-x.size // math.prod(sizes[a] for a in inner)),) for x in leaves]
        once = whole or k == 0
        layout = Layout(codec[name], shapes, dtypes, sizes[name] if once else 1)
        yield (name,), codec[name], layout, 1 if once else sizes[name]
        if leader and k == 0 and not (codec[name].raw or codec[name].low_rank) and math.prod(sizes[a] for a in inner) > 1:
            yield inner, codec[name], layout, 1


def _whole(codec, names, leader):
    """Whether inner exchanges are of whole leaves."""
    return len(names) > 1 and isinstance(codec, dict) and (leader or codec[names[0]].low_rank)


def _own_bytes(layout):
    """The bytes of each leaf of a message, without what fills it up."""
    codec, found = layout.codec, [0] * len(layout.shapes)
    if codec.low_rank:
        return list(map(codec.wire_bytes, layout.shapes, layout.dtypes))
    for piece in itertools.chain(*layout.pieces):
        meta = 4 * codec.meta if piece.bucket else 0
        coded = sum(n * (meta + codec.code_bytes(size, layout.dtypes[piece.leaf])) for _, n, size in piece.buckets())
        found[piece.leaf] += coded + piece.raw * layout.dtypes[piece.leaf].itemsize
    return found

"""Plan.explain: finds the codec, the message and the bytes of every leaf. It needs no program."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import is_integer, unexpected, wrong
from jaxcgx.codecs import Codec, Raw, Skip
from jaxcgx.codecs.base import spell
from jaxcgx.native.layout import Layout
from jaxcgx.plan.assignment import Assignment
from jaxcgx.plan.leaves import ByAxis, Codecs, Route, by_axis, messages, spell_path, values
from jaxcgx.plan.overlay import Overlay
from jaxcgx.text import Totals, ratio, spell_sizes, table
from jaxcgx.typing import PyTree

_OP = "Plan.explain"


@dataclasses.dataclass(frozen=True)
class Row:
    """A leaf in an exchange. In a hierarchy, a leaf has an exchange over each axis, and a row for each exchange.

    Attributes:
      leaf: the path of the leaf.
      shape: the shape of the leaf.
      dtype: the name of its dtype.
      axes: the axes of the exchange; (): `axis_size` was one number.
      codec: the codec.
      message: the number of the message, from 1; None: the leaf travels raw and alone, or not at all.
      raw_bytes: the bytes of the leaf's elements in the exchange, in the leaf's dtype.
      bytes: the bytes of the same elements in the message.
      why: the reason why the leaf travels raw; None: it doesn't.
    """

    leaf: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Any, ...]
    codec: Codec
    message: int | None
    raw_bytes: int
    bytes: int
    why: str | None

    @property
    def ratio(self) -> float:
        """The uncompressed bytes per byte in the message."""
        return ratio(self.bytes, self.raw_bytes)


@dataclasses.dataclass(frozen=True)
class Forecast(Totals):
    """The result of `Plan.explain`. str() is a table.

    Attributes:
      rows: a `Row` for each leaf and exchange.
      totals: {axes: (bytes in messages, bytes of the same elements uncompressed)}.
    """

    rows: tuple[Row, ...]
    totals: dict[Any, tuple[int, int]]

    def __repr__(self) -> str:
        leaves = len({row.leaf for row in self.rows})
        return f"<Forecast of leaves: {leaves}, bytes: {self.bytes:,}, ratio: {self.ratio:.2f}>"

    def __str__(self) -> str:
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


def _spell_axes(axes: tuple[Any, ...]) -> str:
    return ", ".join(map(str, axes)) or "all ranks"


def forecast(
    plan: Assignment, tree: PyTree, axis_size: int | dict[Any, int], *, limit: float, schedule: Any, leader: bool
) -> Forecast:
    sizes = _as_sizes(axis_size)
    axes = tuple(name for name in sizes if name is not None)
    if isinstance(schedule, dict):
        _check_axes(schedule, axes, axis_size)
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    for path, leaf in found:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            place = f"{_OP}: argument 'tree', leaf {spell_path(path)!r}"
            raise unexpected(place, "an array or a jax.ShapeDtypeStruct", repr(leaf), kind=TypeError)
    routes = plan.routes(_OP, "tree", tree)
    nothing: dict[str, Any] = dict(codec=Raw(), message=None, raw_bytes=0, bytes=0, why=None)
    unsent = [Row(spell_path(r.path), r.shape, dtype=str(r.dtype), axes=axes, **nothing) for r in routes]
    rows: list[list[Row]] = [[] for _ in routes]
    sent, raw = collections.Counter[Any](), collections.Counter[Any]()  # the bytes by axes

    alone = "there is one rank" if math.prod(sizes.values()) == 1 else None
    coded: dict[Codecs, list[int]] = {}
    asked = values(schedule)[0]
    along_outermost = isinstance(asked, Overlay) and asked.is_of_outermost(list(sizes.values()))
    for i, route in enumerate(routes):
        codec = route.codec
        if isinstance(codec, dict):
            _check_axes(codec, axes, axis_size)
        elif along_outermost:
            codec = ByAxis(by_axis(axes, codec, Raw()))
        if route.skipped:
            rows[i] = [dataclasses.replace(unsent[i], codec=Skip())]
        elif why := route.why_raw or alone:
            apart = isinstance(codec, dict) and all(each.raw for each in codec.values()) and alone is None
            for over, n in _shares(sizes, route.size) if apart else [(axes, route.size)]:
                size = n * route.dtype.itemsize
                rows[i].append(dataclasses.replace(unsent[i], axes=over, raw_bytes=size, bytes=size, why=why))
                sent[over] += size
                raw[over] += size
        else:
            coded.setdefault(codec, []).append(i)
    groups = [
        (codec, [ids[k] for k in message])
        for codec, ids in coded.items()
        for message in messages([routes[i] for i in ids], limit)
    ]
    for number, (codec, ids) in enumerate(groups, 1):
        for exchange in _exchanges(codec, sizes, leaves=[routes[i] for i in ids], leader=leader):
            over, own = exchange.axes, exchange.bytes
            for i, n, size in zip(ids, exchange.layout.sizes, own):
                whole = exchange.times * n * routes[i].dtype.itemsize
                fields = dict(axes=over, codec=exchange.layout.codec, message=number, raw_bytes=whole, bytes=size)
                rows[i].append(dataclasses.replace(unsent[i], **fields))
                raw[over] += whole
            sent[over] += exchange.message_bytes if exchange.padded else sum(own)
    return Forecast(tuple(itertools.chain(*rows)), {axes: (sent[axes], raw[axes]) for axes in sent})


def _as_sizes(axis_size: int | dict[Any, int]) -> dict[Any, int]:
    """Returns {axis name: ranks}, or {None: ranks} if `axis_size` is a number."""
    sizes: dict[Any, Any] = dict(axis_size) if isinstance(axis_size, dict) else {None: axis_size}
    integers = all(map(is_integer, sizes.values()))
    if not integers or not sizes or min(sizes.values()) < 1:
        expected = "a number of ranks or {axis name: ranks}, outermost first"
        raise wrong(_OP, "axis_size", expected, repr(axis_size), kind=ValueError if integers else TypeError)
    return {name: int(n) for name, n in sizes.items()}


def _check_axes(given: dict[Any, Any], axes: tuple[Any, ...], axis_size: Any) -> None:
    """Checks that a dict of codecs or schedules by axis has exactly these axes."""
    if set(given) != set(axes):
        expected = f"{{axis name: ranks}}, outermost first, for the axes of {spell(given)}"
        raise wrong(_OP, "axis_size", expected, repr(axis_size))


def _shares(sizes: dict[Any, int], n: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yields (axes, number of elements) for each exchange of a leaf of n elements that has Raw() for each axis."""
    outer, *inner = sizes
    share = -(-n // math.prod(sizes[name] for name in inner))
    for k, name in enumerate((outer, *inner)):
        if sizes[name] > 1:
            yield (name,), share * math.prod(sizes[a] for a in inner[:k])


@dataclasses.dataclass(frozen=True)
class _Exchange:
    axes: tuple[Any, ...]
    layout: Layout
    times: int = 1  # the number of messages with this layout: by shards, one for each rank of an inner exchange
    padded: bool = True  # whether padding is sent, too; plain sums and factors have none

    @property
    def bytes(self) -> list[int]:
        """The bytes of each leaf in the message, without padding."""
        codec, dtypes = self.layout.codec, self.layout.dtypes
        if codec.low_rank:
            return [self.times * codec.wire_bytes(*found) for found in zip(self.layout.shapes, dtypes)]
        found = [0] * len(dtypes)
        for piece in itertools.chain(*self.layout.pieces):
            meta = 4 * codec.meta if piece.bucket else 0
            coded = sum(n * (meta + codec.code_bytes(size, dtypes[piece.leaf])) for _, n, size in piece.buckets())
            found[piece.leaf] += self.times * (coded + piece.raw * dtypes[piece.leaf].itemsize)
        return found

    @property
    def message_bytes(self) -> int:
        return self.times * self.layout.chunks * self.layout.chunk_bytes


# This mirrors exchange/hierarchy.py. By shards, sums are in float32 after the innermost exchange. An inner exchange has
# a message for each of its ranks, and a leaf shrinks to a share on its way to the outermost exchange. By leaders, every
# exchange has whole leaves in float32, and the inner ranks get the bytes that their leader received. Factors are those
# of whole leaves, too (exchange/low_rank.py).
def _exchanges(codec: Codecs, sizes: dict[Any, int], leaves: Sequence[Route], leader: bool) -> Iterator[_Exchange]:
    names = tuple(name for name in sizes if name is not None)
    if not isinstance(codec, dict):
        layout = Layout.of(codec, leaves, math.prod(sizes.values()))
        yield _Exchange(names, layout, padded=not codec.low_rank)
        return
    inner = names[1:]
    whole = bool(inner) and (leader or codec[names[0]].low_rank)  # whether inner exchanges have whole leaves
    for k, name in enumerate(names):
        if sizes[name] == 1:
            continue
        dtypes = [jnp.float32 if whole or name != names[-1] else x.dtype for x in leaves]
        if whole:
            shapes = [x.shape for x in leaves]
        else:
            together = math.prod(sizes[a] for a in inner[: max(k - 1, 0)])  # shares that are still joined
            shapes = [(together * -(-x.size // math.prod(sizes[a] for a in inner)),) for x in leaves]
        times = 1 if whole or k == 0 else sizes[name]
        layout = Layout(codec[name], tuple(shapes), dtypes=tuple(dtypes), chunks=sizes[name] // times)
        plain = codec[name].low_rank or (codec[name].raw and whole)
        yield _Exchange((name,), layout, times, padded=not plain)
        if leader and k == 0 and codec[name].makes_codes and math.prod(sizes[a] for a in inner) > 1:
            yield _Exchange(inner, layout)

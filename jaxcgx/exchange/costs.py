"""Estimates of the time of an exchange, for `schedule="auto"` and the planner (report/advise.py).

W ranks sum a message of `raw` bytes in float32 and `wire` compressed bytes. Sums of a sparse codec may need more bytes
(`back`), because they hold every element that was sent. The time to decode a sparse message depends on its bytes, not
on its elements, most of which are 0. "auto" never chooses a ring, because it rounds at every step and allows no
feedback. Nor does it choose "gather", which pays only on networks about as fast as the kernels. A plan with
`prefer="bytes"` compares only bytes.

The constants come from a `Network` (transports/network.py): the network of the plan or, by default, 1 Gbit/s Ethernet
between machines with a few cores. docs/planner.md has the formulas, and compares them with measurements.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.powersgd import PowerSGD
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange.message import Stage
from jaxcgx.native.layout import DTYPES, Layout
from jaxcgx.native.tcp import pieces_of
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Shaped
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.network import Network

SCHEDULES = "two_shot", "one_shot", "ring", "gather"
ENOUGH = 1.1  # two_shot rounds twice, so it must be faster than one_shot by this factor


class Load(NamedTuple):
    ranks: int
    raw: float  # bytes of the message in float32
    wire: float  # compressed bytes of the message
    back: float | None = None  # compressed bytes of the sum; None: the same as `wire`
    sparse: bool = False  # whether the time to decode depends on the compressed bytes, not on the float32 bytes
    whole: bool = False  # whether a leaf in a chunk is one bucket, which can't be cut into pieces

    @classmethod
    def of(cls, codec: Codec, leaves: Sequence[Shaped], raw: float, ranks: int, mover: str | None) -> "Load":
        """Makes the load of leaves of `raw` bytes in float32 that a codec compresses."""
        sent, back = (wire(each, leaves, mover) for each in (codec, codec.of_sum(ranks)))
        return cls(ranks, raw, sent, back, sparse=codec.sparse, whole=codec.whole)

    @classmethod
    def of_factors(cls, codec: Codec, leaves: Sequence[Shaped], ranks: int) -> "Load":
        """Makes the load of each of the two sums of raw factors of leaves that a low-rank codec compresses."""
        half = wire(codec, leaves) / 2
        return cls(ranks, half, half)

    @property
    def both(self) -> float:
        return self.wire + (self.wire if self.back is None else self.back)


class Time(NamedTuple):
    """The predicted seconds of an exchange."""

    kernels: float
    wire: float
    pieces: int | None = None  # the pieces whose kernels and wire overlap; None: kernels and wire take turns

    @property
    def total(self) -> float:
        if self.pieces is None:
            return self.kernels + self.wire
        return max(self.kernels, self.wire) + min(self.kernels, self.wire) / self.pieces


def schedules(codec: Codec, mover: str | None) -> tuple[str, ...]:
    """Returns the schedules of a codec. Factors of low rank are summed by "psum", except over Tcp."""
    if codec.low_rank:
        return ("two_shot", "one_shot") if mover == "tcp" else ("psum",)
    return SCHEDULES[:3] if codec.sparse else SCHEDULES


def wire(codec: Codec, leaves: Sequence[Shaped], mover: str | None = None) -> int:
    """Returns the compressed bytes of leaves. A leaf is any object with a shape and a dtype."""
    bytes_of = codec.likely_bytes if mover == "tcp" else codec.wire_bytes
    return sum(bytes_of(x.shape, x.dtype) for x in leaves)


def seconds(schedule: str, load: Load, network: Network) -> Time:
    """Returns the time of a sum to all ranks by one of `SCHEDULES`, or by "psum" for raw numbers."""
    ranks, raw, others = load.ranks, load.raw, load.ranks - 1
    if ranks == 1:
        return Time(0, 0)
    ways, more = network.ways, ranks > 2
    encoded = raw / network.encode
    if schedule == "psum":
        return Time(0, plain_seconds(ranks, load.wire, network))
    if schedule == "one_shot":
        kernels = encoded + (load.wire if load.sparse else raw) * ranks / network.reduce
        wire = network.wire(others * load.wire, 1 if ways.pieces else others, ways.gather[more])
        chunk = load.wire
    else:
        added = (load.wire if load.sparse else raw) / network.reduce
        kernels = added + encoded / ranks + (load.both if load.sparse else raw) / network.decode
        kernels += 0 if schedule == "gather" else encoded
        chunk = (raw if schedule == "gather" else load.wire) / ranks
        back = others * (load.both - load.wire) / ranks
        if ways.pieces and schedule == "two_shot":
            wire = network.wire(others * chunk + back, 2)
        else:
            if schedule == "ring":
                first = others * network.wire(chunk, 1, ways.shift[more], ways.step_of_shift[more])
            else:
                first = network.wire(others * chunk, others, ways.exchange[more])
            wire = first + network.wire(back, others, ways.gather[more])
    pieces = None
    if ways.pieces and schedule not in ("ring", "gather") and not load.sparse:
        pieces = 1 if load.whole else pieces_of(int(chunk))
    return Time(kernels * network.sharing, wire, pieces)


def plain_seconds(ranks: int, size: float, network: Network) -> float:
    """Returns the seconds of lax.psum of `size` bytes. Over Tcp, it still goes through Gloo."""
    if ranks == 1:
        return 0.0
    if network.mover == "tcp":
        network = dataclasses.replace(network, mover="gloo")
    steps = 2 * (ranks - 1)
    return network.wire(steps * size / ranks, steps, latency=network.ways.step_of_psum)


def choose(load: Load, network: Network, prefer: str = "time") -> str:
    """Returns "one_shot" or "two_shot": the one that takes less time or, with `prefer` "bytes", sends fewer bytes.

    one_shot rounds less often. So two_shot is chosen only if it is faster by a tenth, or sends fewer bytes.
    """
    if prefer == "bytes":
        return "one_shot" if load.wire <= load.both / load.ranks else "two_shot"
    one, two = (seconds(schedule, load, network).total for schedule in ("one_shot", "two_shot"))
    return faster(one, two)


def faster(one: float, two: float) -> str:
    return "one_shot" if one <= ENOUGH * two else "two_shot"


def scheduled(stages: tuple[Stage, ...], leaves: Sequence[Shaped], plan: Plan) -> tuple[Stage, ...]:
    """Returns the stages, outermost first, with a schedule in place of "auto", the same for all messages."""
    outer, inner = stages[0], stages[1:]
    net, codec = outer.net, outer.codec
    if outer.schedule == "tree":
        outer = outer._replace(schedule=Overlay.tree(net.size))
    elif codec.low_rank and (
        outer.schedule in ("ring", "gather") or not (net.begin_sum or isinstance(outer.schedule, Overlay))
    ):
        outer = outer._replace(schedule="psum")
    elif outer.schedule == "auto":
        share = 1 if plan.leader else math.prod(stage.net.size for stage in inner)  # every inner rank takes a share
        if max(x.size for x in leaves) // share > codec.most:
            schedule = "two_shot"  # one_shot doesn't cut leaves, and this one is too long for the codec
        else:
            known = plan.network or Network()
            known = dataclasses.replace(known, mover=known.mover or net.mover)
            parts = [jax.ShapeDtypeStruct((x.size // share,), x.dtype) for x in leaves]
            raw = sum(4 * x.size for x in leaves) // share
            if codec.low_rank:
                load = Load.of_factors(codec, leaves, net.size)
            else:
                load = Load.of(codec, parts, raw, ranks=net.size, mover=known.mover)
            schedule = choose(load, known, prefer=plan.prefer)
        outer = outer._replace(schedule=schedule)
    return (outer, *(s._replace(schedule="two_shot") if s.schedule == "auto" else s for s in inner))


def sent(schedule: str | Overlay, codec: Codec, leaves: Sequence[Shaped], ranks: int, mover: str | None = None) -> int:
    """Returns the exact number of bytes that a rank sends to sum a message. If ranks differ, it is the largest.

    The schedule is "one_shot", "two_shot", "ring" or "gather"; over Tcp (`mover` "tcp") also "tree" or an `Overlay`;
    "psum" for Raw(). lax.psum sums factors of low-rank codecs and the leaves of Raw(), except over Tcp with a schedule
    other than "ring" and "gather", if codecs know their dtype, and along overlays.
    """
    others = ranks - 1
    if schedule == "tree":
        schedule = Overlay.tree(ranks)
    own = isinstance(schedule, Overlay) or (mover == "tcp" and schedule not in ("ring", "gather", "psum"))
    if own and codec.low_rank:
        low = cast(PowerSGD, codec)
        q = [low.factor_shape(x.shape) for x in leaves]
        p = [(rank, low.matrix(x.shape)[0]) for (rank, _), x in zip(q, leaves)]
        factors = [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes] for shapes in (p, q)]
        return sum(sent(schedule, Raw(), each, ranks=ranks, mover=mover) for each in factors)
    by_psum = lambda x: codec.low_rank or (codec.raw and not (own and x.dtype in DTYPES))
    bytes_of = lambda x: x.size * x.dtype.itemsize if codec.raw else codec.wire_bytes(x.shape, x.dtype)
    plain = round(2 * others / ranks * sum(map(bytes_of, filter(by_psum, leaves))))
    leaves = [x for x in leaves if not by_psum(x)]
    if not leaves:
        return plain
    if schedule == "gather":
        shares = [jax.ShapeDtypeStruct((-(-x.size // ranks),), jnp.float32) for x in leaves]
        return plain + others * (4 * sum(x.size for x in shares) + Layout.of(codec, shares).chunk_bytes)
    if isinstance(schedule, Overlay):
        layout = dataclasses.replace(Layout.of(codec, leaves, chunks=len(schedule.trees)), shares=schedule.shares)
        return plain + max(schedule.sent(layout.ends, layout.of_sum(ranks).ends))
    layout = Layout.of(codec, leaves, chunks=1 if schedule == "one_shot" else ranks)
    if own and schedule == "two_shot":  # shorter chunks are not padded
        total = sum(layout.ends)
        return plain + max(total - mine + others * back for mine, back in zip(layout.ends, layout.of_sum(ranks).ends))
    back = 0 if schedule == "one_shot" else layout.of_sum(ranks).chunk_bytes
    return plain + others * (layout.chunk_bytes + back)

"""Ranks along the axes of a mesh, in several processes: jaxcgx's own connections move the bytes.

XLA's collectives between CPUs send before they receive, so they are half-duplex. These connections are full-duplex
(xla_ffi/tcp/net.h). Sums of arrays that are in no message still go through lax.

Exchanges run in the order of the program, which must be the same on every rank. They block no thread while they wait.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.native import tcp
from jaxcgx.native.meeting import Links
from jaxcgx.transports.axes import Tcp
from jaxcgx.transports.base import Pairs, PiecewiseSum
from jaxcgx.transports.xla import Axes, AxesLeaders, split

ORDER: Any = _compat.OrderedOnEachDevice()


def transport_over_tcp(op: str, names: tuple[Any, ...], marks: tuple[Tcp, ...]) -> "TcpAxes":
    links = list(dict.fromkeys(axis.links for axis in marks))
    if len(links) > 1:
        got = " and ".join(map(str, links))
        raise wrong(op, "axis_name", "the same connections and pace in every Tcp", got, "a process connects once")
    mesh = jax.sharding.get_abstract_mesh()
    if others := [axis.name for axis in marks if axis.name not in mesh.manual_axes]:
        expected, got = "Tcp of axes of a mesh, inside jax.shard_map", f"{', '.join(map(repr, others))} of vmap"
        raise wrong(op, "axis_name", expected, got, "give the name alone")
    if whole := [name for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes]:
        got = f"one that leaves {', '.join(map(repr, whole))} to the compiler"
        raise wrong(op, "axis_name", "a jax.shard_map over all axes", got, "leave out its argument 'axis_names'")
    return TcpAxes(names, frozenset(axis.name for axis in marks), min(axis.timeout for axis in marks), links[0])


@dataclasses.dataclass(frozen=True)
class TcpAxes(Axes):
    """Named axes. The axes in `over` are marked as Tcp."""

    # Exchanges over all axes together use the connections. Exchanges over a single axis use them if it is in `over`.
    over: frozenset[Any]
    timeout: float
    links: Links
    label: int = 0
    slice_elements: int | None = None  # elements of a slice; None: sums travel in pieces of a default size, in order
    deadline: float | None = None  # that of `until`

    order: ClassVar[Any] = ORDER
    effects: ClassVar[frozenset[Any]] = _compat.effects_in_order(ORDER)

    @property
    def mover(self) -> str:
        return "tcp"

    def _part(self, name: Any) -> Axes:
        return TcpAxes((name,), self.over, self.timeout, self.links) if name in self.over else Axes((name,))

    def sliced(self, elements: int) -> "TcpAxes":
        return dataclasses.replace(self, slice_elements=elements)

    def until(self, deadline: float) -> "TcpAxes":
        return dataclasses.replace(self, deadline=deadline)

    def labelled(self, label: int) -> "TcpAxes":
        return dataclasses.replace(self, label=label)

    @property
    def parts(self) -> Mapping[Any, Axes]:
        return {name: self._part(name) for name in self.names}

    def leaders(self) -> AxesLeaders:
        outer, inner = split(self.names)
        return AxesLeaders(self if outer in self.over else Axes(self.names), self._part(outer), Axes(inner))

    def all_to_all(self, rows: jax.Array) -> jax.Array:
        return tcp.exchange("all_to_all", rows, self)

    def all_gather(self, row: jax.Array) -> jax.Array:
        return tcp.exchange("all_gather", row, self)

    def permute(self, row: jax.Array, pairs: Pairs) -> jax.Array:
        target = dict(pairs)
        return tcp.exchange("permute", row, self, targets=tuple(target.get(rank, -1) for rank in range(self.size)))

    def begin_exchange(self, operation: str, x: jax.Array) -> jax.Array:
        return tcp.begin_exchange(operation, x, self)

    def end_exchange(self, begun: jax.Array, shape: tuple[int, ...], later: bool = False) -> jax.Array:
        return tcp.end_exchange(begun, shape, self, later)

    def begin_sum(self, asked: PiecewiseSum) -> tcp.Begun:
        return tcp.begin(asked, self)

    def end_sum(self, begun: tcp.Begun, later: bool = False) -> tcp.Ended:
        return tcp.end(begun, later)

"""Ranks along the axes of a mesh between processes, each of one device: connections of their own move the bytes.

XLA's collectives between CPUs send before they receive, so that a link is used in one direction at a time; these use
both.
xla_ffi/tcp/net.h says how. What travels as it is still goes through lax.

Exchanges run in the order of the program, on every rank the same, without holding a thread while they wait.
"""

import dataclasses

import jax

from jaxcgx import _compat
from jaxcgx.native import tcp
from jaxcgx.transports.xla import Axes, Leaders

ORDER = _compat.OrderedOnEachDevice()


def check(op, axes, names):
    """The transport over some names, of which `axes` are Tcp."""
    mesh = jax.sharding.get_abstract_mesh()
    if others := [axis.name for axis in axes if axis.name not in mesh.manual_axes]:
        raise ValueError(
            f"{op}: argument 'axis_name': expected Tcp of axes of a mesh, inside jax.shard_map, got "
            f"{', '.join(map(repr, others))} of vmap; give the name alone"
        )
    if mesh.size > jax.process_count():
        raise ValueError(
            f"{op}: argument 'axis_name': expected Tcp on a mesh of one device of each process, got {mesh.size} devices "
            "of "
            f"{jax.process_count()} process{'es' * (jax.process_count() > 1)}; start a process for each device "
            "(jax.distributed.initialize, jax_num_cpu_devices=1), or give the name alone"
        )
    return TcpAxes(names, frozenset(axis.name for axis in axes), min(axis.timeout for axis in axes))


@dataclasses.dataclass(frozen=True)
class TcpAxes(Axes):
    """As Axes. Together all of them go over connections; of its parts, each by itself, those in `over`."""

    over: frozenset
    timeout: float

    order = ORDER
    effects = frozenset({ORDER, _compat.CalledByPython()})

    @property
    def parts(self):
        return {
            name: TcpAxes((name,), self.over, self.timeout) if name in self.over else Axes((name,))
            for name in self.names
        }

    def leaders(self):
        outer, *inner = self.names
        return Leaders(self if outer in self.over else Axes(self.names), self.parts[outer], Axes(tuple(inner)))

    def all_to_all(self, rows):
        return tcp.exchange("all_to_all", rows, self)

    def all_gather(self, row):
        return tcp.exchange("all_gather", row, self)

    def allreduce(self, schedule, *message):
        return tcp.allreduce(schedule, self, *message)

    def permute(self, row, pairs):
        target = dict(pairs)
        return tcp.exchange("permute", row, self, tuple(target.get(rank, -1) for rank in range(self.size)))

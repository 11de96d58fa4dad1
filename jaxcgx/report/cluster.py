"""Cluster: the ranks and links that `advise` predicts for."""

import dataclasses

import jax

from jaxcgx.checks import check_choice, check_integer, set_field, wrong
from jaxcgx.report.link import Measured, slowest
from jaxcgx.text import parse_rate, parse_time
from jaxcgx.transports.network import PAYLOAD, WAYS, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks that train together, and the links between them. `advise` predicts for it.

    Args:
      world: the number of ranks.
      link: the bit rate of a host's link, such as "10gbit". If `up` is given, `link` is only the rate down. None: the
        slowest link of this host that `python -m jaxcgx link` has measured.
      up: the bit rate up, if it differs from the rate down.
      nodes: the number of hosts. None: every rank has its own host.
      inner_link: the bit rate of each rank's link to the other ranks of its host.
      latency: the latency of a step between hosts, such as "50us". None: the transport's latency in network.py, and the
        delay of a measured link.
      over: "gloo", "tcp" or "duplex" (NCCL, MPI). None: "gloo" and "tcp" on CPUs, otherwise "duplex".

    Attributes:
      measured: the measured link, if `link` is None.
    """

    world: int
    link: str | None = None
    up: str | None = None
    nodes: int | None = None
    inner_link: str = "100gbit"
    latency: str | None = None
    over: str | None = None
    measured: Measured | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        set_field(self, "world", check_integer, 2)
        if self.nodes is not None:
            set_field(self, "nodes", check_integer, 1, self.world)
            if self.world % self.nodes or self.nodes == 1:
                raise wrong("Cluster", "nodes", f"a divisor of world={self.world}, at least 2", self.nodes)
        if self.over is not None:
            set_field(self, "over", check_choice, WAYS)
        object.__setattr__(self, "measured", slowest() if self.link is None else None)
        if self.link is None and (self.up is not None or self.measured is None):
            expected = 'a rate as "10gbit", or a measured link' if self.up is None else "the rate down beside up"
            remedy = "to measure it, run `python -m jaxcgx link` on another host, and `python -m jaxcgx link HOST` here"
            raise wrong("Cluster", "link", expected, None, remedy)
        for name in ("link", "inner_link", "up"):
            if name == "inner_link" or getattr(self, name) is not None:
                self._payload(name)
        self._seconds()

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.world if self.nodes is None else self.nodes

    @property
    def each(self) -> int:
        """The number of ranks of a host."""
        return self.world // self.hosts

    @property
    def movers(self) -> list[str]:
        """Who may move the bytes between hosts."""
        if self.over is not None:
            return [self.over]
        return ["gloo", "tcp"] if jax.default_backend() == "cpu" else ["duplex"]

    def between(self, mover: str) -> Network:
        """Returns the network of a rank and its peers on other hosts, by `mover`. Ranks of a host share its link."""
        latency = self._seconds()
        if self.measured is None:
            down = self._payload("link")
            up = down if self.up is None else self._payload("up")
        else:
            up, down = self.measured.up, self.measured.down
            if latency is None:
                latency = WAYS[mover].latency + self.measured.delay
        sharing = self.each if jax.default_backend() == "cpu" else 1
        return Network(up=up / self.each, down=down / self.each, latency=latency, mover=mover, sharing=sharing)

    def inside(self) -> Network:
        """Returns the network of a rank and the other ranks of its host."""
        return Network(up=self._payload("inner_link"), mover="duplex")

    def _payload(self, name: str) -> float:
        """Returns the bytes of payload per second of a link, whose rate is the field `name`."""
        return PAYLOAD * parse_rate(f"Cluster: argument {name!r}", getattr(self, name), most=10**14)

    def _seconds(self) -> float | None:
        return None if self.latency is None else parse_time("Cluster: argument 'latency'", self.latency)

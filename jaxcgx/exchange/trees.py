"""Sums along the trees of an overlay, level by level, as permutations over any transport.

A rank adds its own part to the received parts, and encodes the sum for its parent. With feedback, the rank that encodes
keeps the loss, as the owners of two_shot do, so nothing is lost.

The result has the same bits as in xla_ffi/tcp/allreduce.h. There, a piece goes on before the rest of its level is
ready.
"""

import jax
import jax.numpy as jnp

from jaxcgx.exchange.message import HOP, SUM, Message, Sent, Stage, Sum, Summed, first, fold
from jaxcgx.exchange.scopes import ExchangeScope, scope
from jaxcgx.native import ops
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport

Link = tuple[int, int, int]  # from, to, tree


class Level:
    """The links of one level of all trees, in rounds. In a round, a rank sends and receives at most once."""

    def __init__(self, links: list[Link]) -> None:
        self.rounds: list[list[Link]] = []
        for link in links:
            for one in self.rounds:
                if all(link[0] != other[0] and link[1] != other[1] for other in one):
                    one.append(link)
                    break
            else:
                self.rounds.append([link])

    def move(self, net: Transport, rows: jax.Array) -> jax.Array:
        """Returns the rows that this rank receives, [rounds, bytes]. Each rank sends from `rows`, [trees, bytes]."""
        came: list[jax.Array] = []
        for one in self.rounds:
            trees = {source: tree for source, _, tree in one}
            tree = jnp.asarray([trees.get(rank, 0) for rank in range(net.size)])[net.rank]
            came.append(net.permute(jnp.take(rows, tree, 0), [(source, target) for source, target, _ in one]))
        return jnp.stack(came)

    def of(self, link: Link) -> int:
        return next(i for i, one in enumerate(self.rounds) if link in one)


class _Climb:
    def __init__(self, stage: Stage, overlay: Overlay, message: Message, how: Sum) -> None:
        self.net, self.overlay, self.message, self.how = stage.net, overlay, message, how
        self.layout = message.layout(stage.codec, len(overlay.trees), overlay.shares)
        self.sum_layout = self.layout.of_sum(overlay.ranks)
        self.rows, self.lost = message.encode(self.layout, first(message.key, stage.codec, self.net))
        self.sent = self.rows  # the payload that this rank sends for its leaves
        self.sums = jnp.zeros((len(overlay.trees), self.sum_layout.chunk_bytes), jnp.uint8)  # sums at the roots

    def level(self, depth: int, level: Level) -> None:
        """Moves the children's rows to the parents at a depth, and sums them there."""
        came = level.move(self.net, self.rows)
        for t, tree in enumerate(self.overlay.trees):
            parents = [r for r in range(self.net.size) if tree.depths[r] == depth and tree.children(r)]
            for count in sorted({len(tree.children(r)) for r in parents}):
                alike = [r for r in parents if len(tree.children(r)) == count]
                self._sum(t, depth, ranks=alike, rows=jnp.concatenate([came, self.rows[t][None]]), level=level)

    def _sum(self, t: int, depth: int, ranks: list[int], rows: jax.Array, level: Level) -> None:
        """Sums tree t at ranks with as many children. `rows` has the row of each round, then this rank's own."""
        net, key, children = self.net, self.message.key, self.overlay.trees[t].children
        which = [[0] * (1 + len(children(ranks[0])))] * net.size  # which rows each rank adds, in rank order
        place = [0] * net.size  # the place of its own row among them
        for rank in ranks:
            each = sorted([rank, *children(rank)])
            which[rank] = [len(level.rounds) if r == rank else level.of((r, rank, t)) for r in each]
            place[rank] = each.index(rank)
        payloads = rows[jnp.asarray(which)[net.rank]]
        mine = jnp.asarray([rank in ranks for rank in range(net.size)])[net.rank]
        how = self.how._replace(divisor=1.0) if depth else self.how
        key = fold(key, HOP, net.rank) if depth else fold(key, SUM)
        at = jnp.asarray(place)[net.rank]
        row, lost = self.message.add(self.layout, payloads, self.lost, how, chunk=t, place=at, key=key)
        if self.lost is not None and lost is not None:
            self.lost = [jnp.where(mine, new, old) for new, old in zip(lost, self.lost)]
        if depth:
            self.rows = self.rows.at[t].set(jnp.where(mine, row, self.rows[t]))
        else:
            self.sums = self.sums.at[t].set(jnp.where(mine, row, self.sums[t]))
        if self.how.own == "raw":
            self.sent = self.sent.at[t].set(jnp.where(mine, row, self.sent[t]))


def allreduce(stage: Stage, overlay: Overlay, message: Message, how: Sum) -> Summed:
    """Returns the divided sum of the leaves over all ranks. Every rank gets it."""
    net, trees = stage.net, list(enumerate(overlay.trees))
    at_depth = lambda d: [(c, p, t) for t, tree in trees for c, p in tree.links if tree.depths[p] == d]
    links = list(map(at_depth, range(overlay.depth)))  # by the depth of the parents
    up, down = list(map(Level, links)), [Level([(p, c, t) for c, p, t in each]) for each in links]
    climb = _Climb(stage, overlay, message, how)
    size = sum(x.size * x.dtype.itemsize for x in message.leaves)
    sent = len(up) and sum(len(each.rounds) for each in up) * (climb.layout.chunk_bytes + climb.sum_layout.chunk_bytes)
    with scope(ExchangeScope("overlay", stage.codec, 2 * (net.size - 1) / net.size * size / max(sent, 1))):
        for depth, level in reversed(list(enumerate(up))):
            climb.level(depth, level)
        sums = climb.sums
        for level in down:
            came = level.move(net, sums)
            for i, one in enumerate(level.rounds):
                for _, target, t in one:
                    sums = sums.at[t].set(jnp.where(net.rank == target, came[i], sums[t]))
        return Summed(ops.decode(climb.sum_layout, sums), climb.lost, Sent(climb.layout, climb.sent))

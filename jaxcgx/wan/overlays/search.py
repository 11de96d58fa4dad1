"""Finds the best overlay for links of given rates: several trees, the ring whose slowest link is fastest, or owners.

A rank's line carries the traffic of all of its links. Only the rates of links can be measured. A line is at least as
fast as its fastest link, and the model takes it to be exactly as fast.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcgx.plan.overlay import Overlay, Tree

Rates = np.ndarray[Any, Any]  # [ranks, ranks], bytes per second from a rank (row) to another rank

ROUNDS = 40  # rounds of the packing of trees, per rank
LEAST = 0.02  # trees with a smaller share are dropped, and so are owners with this part of an equal share
DETOUR = 1.05  # links of other ranks must be cheaper by this factor to be preferred to links of the center
EXACT = 12  # the most ranks for which the best ring is found; for more, a ring that no swap improves


def both(rates: Rates) -> Rates:
    """Returns the rate of each link in both directions at the same time: the rate of its slower direction."""
    return np.minimum(rates, rates.T)


def lines(rates: Rates) -> Rates:
    """Returns the rate of each rank's line in both directions at the same time."""
    off = np.where(np.eye(len(rates), dtype=bool), 0, rates)
    return np.minimum(off.max(0), off.max(1))


def seconds(overlay: Overlay, rates: Rates) -> float:
    """Returns the seconds per byte of a message, in a model in which only links and lines limit the rate."""
    links, line = both(rates), lines(rates)
    through = [0.0] * overlay.ranks  # the load of each line, in each direction
    longest = 0.0
    for (i, j), load in overlay.loads().items():
        longest = max(longest, load / links[i, j])
        through[i] += load
        through[j] += load
    return max(longest, *(load / float(rate) for load, rate in zip(through, line)))


def trees(rates: Rates) -> Overlay:
    """Returns trees that together keep the load of the busiest link or line low."""
    # Every round adds the cheapest tree. The price of a link grows with the load from earlier rounds (Garg and
    # Konemann's packing). If all links have the same rate, the cheapest trees are stars around each rank in turn, as in
    # two_shot.
    n = len(rates)
    links, line = both(rates), lines(rates)
    load_of_link, load_of_line = np.zeros((n, n)), np.zeros(n)
    found: dict[tuple[tuple[int, int], ...], int] = {}
    unit = 1 / line.max()  # the unit of loads
    for k in range(ROUNDS * n):
        worst = max(load_of_link.max(), load_of_line.max())
        steep = 8 * math.log(2 * n) / max(worst, unit)
        price_of_line = np.exp(steep * (load_of_line - worst)) / line
        price = np.exp(steep * (load_of_link - worst)) / links + price_of_line[:, None] + price_of_line[None]
        tree = _cheapest_tree(price, center=k % n)
        found[tree] = found.get(tree, 0) + 1
        for i, j in tree:
            load_of_link[i, j] += 1 / links[i, j]
            load_of_link[j, i] = load_of_link[i, j]
            load_of_line[[i, j]] += 1 / line[[i, j]]
    least = min(LEAST, 0.5 / n) * ROUNDS * n  # the equal shares of many trees are below LEAST
    kept = {tree: count for tree, count in found.items() if count >= least}
    kept = kept or {tree: found[tree] for tree in sorted(found, key=lambda tree: -found[tree])[:n]}
    roots = [0] * n  # the number of trees with each root, which is kept even among roots of the same depth
    made: list[Tree] = []
    for tree, count in kept.items():
        rooted = [Tree.of(tree, count, root) for root in range(n)]
        made.append(min(rooted, key=lambda one: (one.depth, roots[one.root])))
        roots[made[-1].root] += 1
    return Overlay(tuple(made))


def _cheapest_tree(price: Rates, center: int) -> tuple[tuple[int, int], ...]:
    """Returns the links of the cheapest tree over all ranks. It prefers links of the rank `center`."""
    n = len(price)
    near, links = [center], []
    ways = price * np.where(np.arange(n) == center, 1, DETOUR)[:, None]
    while len(near) < n:
        left = np.full((n, n), np.inf)
        left[near] = ways[near]
        left[:, near] = np.inf
        i, j = divmod(int(left.argmin()), n)
        near.append(j)
        links.append((min(i, j), max(i, j)))
    return tuple(sorted(links))


def ring(rates: Rates) -> Overlay:
    """Returns the ring whose slowest link is fastest, because a ring takes as long as its slowest link."""
    return Overlay.ring(best_order(both(rates)))


def best_order(links: Rates) -> list[int]:
    """Returns the order of the ring whose slowest link is fastest. It is exact for at most `EXACT` ranks."""
    n = len(links)
    if n < 4:
        return list(range(n))
    if n > EXACT:
        return _by_swaps(links)
    speeds = sorted({float(links[i, j]) for i, j in itertools.combinations(range(n), 2)})
    first = bisect.bisect_left(speeds, True, key=lambda speed: _circle(links >= speed) is None)  # without such a ring
    return _circle(links >= speeds[first - 1]) or []


def _circle(allowed: Rates) -> list[int] | None:
    """Returns a circle through all ranks along allowed links, or None, by a dynamic program over sets of ranks."""
    n = len(allowed)
    before: dict[tuple[int, int], int] = {(1, 0): -1}  # (set of ranks on a path, last rank): the rank before the last
    for ranks in range(1, 1 << n, 2):
        for last in range(n):
            if (ranks, last) in before:
                for more in range(n):
                    if not ranks >> more & 1 and allowed[last, more]:
                        before.setdefault((ranks | 1 << more, more), last)
    everybody = (1 << n) - 1
    for last in range(1, n):
        if (everybody, last) in before and allowed[last, 0]:
            order, ranks = [], everybody
            while last >= 0:
                order.append(last)
                ranks, last = ranks & ~(1 << last), before[ranks, last]
            return order
    return None


def _by_swaps(links: Rates) -> list[int]:
    """Returns a ring that no reversal of a section improves. Its slowest link counts first, then the next one."""
    order = list(range(len(links)))

    def slowest(order: Sequence[int]) -> list[float]:
        return sorted(float(links[i, j]) for i, j in zip(order, [*order[1:], order[0]]))

    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(1, len(order) + 1), 2):
            other = order[:i] + order[i:j][::-1] + order[j:]
            if slowest(other) > slowest(order):
                order, improved = other, True
    return order


def owners(rates: Rates) -> Overlay:
    """Returns owners with parts such that the lines of all owners are busy for the same time."""
    # In each direction, a rank's line carries the message once, and the rank's own part n - 2 times more. If w is the
    # part of a rank, (1 + (n - 2) w) / rate is therefore the same for all ranks that own a part.
    line = lines(rates)
    n = len(line)
    if n == 2:
        return Overlay.owners(2)
    low, high = 1 / line.max(), (n - 1) / line.min()
    weights = np.ones(n)
    for _ in range(60):
        time = (low + high) / 2
        weights = np.maximum(time * line - 1, 0) / (n - 2)
        low, high = (low, time) if weights.sum() > 1 else (time, high)
    weights = np.where(weights < LEAST / n, 0, weights)
    return Overlay.owners(n, [round(float(w), 6) for w in weights / weights.sum()])


SHAPES = {"trees": trees, "ring": ring, "owners": owners}

"""The best overlay for links of given rates: several trees, the ring whose slowest link is fastest, or owners.

A link between two ranks goes through both ranks' lines. Nobody sees a line, only links: a line is at least as fast as
its fastest link, and is taken to be no faster.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcgx.exchange.overlay import Overlay, Tree

Rates = np.ndarray[Any, Any]  # [ranks, ranks], bytes a second that a rank (row) sends to another

ROUNDS = 40  # of the packing of trees, for each rank
LEAST = 0.02  # share of the message of a tree that is kept
DETOUR = 1.05  # a way around a link must be that much cheaper than the link
EXACT = 12  # ranks up to which the best ring is found; beyond, one that no swap improves


def both(rates: Rates) -> Rates:
    """What a link passes in each direction at the same time: the slower one."""
    return np.minimum(rates, rates.T)


def lines(rates: Rates) -> Rates:
    """What each rank's line passes in each direction."""
    off = np.where(np.eye(len(rates), dtype=bool), 0, rates)
    return np.minimum(off.max(0), off.max(1))


def seconds(overlay: Overlay, rates: Rates) -> float:
    """How long a message of one byte takes, if nothing but links and lines holds it up."""
    links, line = both(rates), lines(rates)
    through = [0.0] * overlay.ranks  # of each line, in each direction
    longest = 0.0
    for (i, j), load in overlay.loads().items():
        longest = max(longest, load / links[i, j])
        through[i] += load
        through[j] += load
    return max(longest, *(load / float(rate) for load, rate in zip(through, line)))


def trees(rates: Rates) -> Overlay:
    """Trees that together load no link and no line more than they must.

    Every round adds the tree that is cheapest where prices grow with what is loaded already (Garg and Konemann's
    packing). Where links are alike, the cheapest trees are stars around one rank after the other: that is two_shot.
    """
    n = len(rates)
    links, line = both(rates), lines(rates)
    load_of_link, load_of_line = np.zeros((n, n)), np.zeros(n)
    found: dict[tuple[tuple[int, int], ...], int] = {}
    unit = 1 / line.max()  # of a load
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
    most = {tree: count for tree, count in found.items() if count >= LEAST * ROUNDS * n}
    kept = most or {max(found, key=lambda tree: found[tree]): 1}
    roots = [0] * n  # as many trees for each where there is a choice
    made: list[Tree] = []
    for tree, count in kept.items():
        made.append(min(_rooted(tree, count), key=lambda one: (one.depth, roots[one.root])))
        roots[made[-1].root] += 1
    return Overlay(tuple(made))


def _rooted(links: tuple[tuple[int, int], ...], share: int) -> list[Tree]:
    return [Tree.of(links, share, root) for root in range(len(links) + 1)]


def _cheapest_tree(price: Rates, center: int) -> tuple[tuple[int, int], ...]:
    """The links of the cheapest tree over all ranks, from a center whose own links are preferred."""
    n = len(price)
    near, links = [center], []
    while len(near) < n:
        ways = [(price[i, j] * (1 if i == center else DETOUR), i, j) for i in near for j in range(n) if j not in near]
        _, i, j = min(ways)
        near.append(j)
        links.append((min(i, j), max(i, j)))
    return tuple(sorted(links))


def ring(rates: Rates) -> Overlay:
    """The ring whose slowest link is fastest. A ring takes as long as its slowest link."""
    return Overlay.ring(best_order(both(rates)))


def best_order(links: Rates) -> list[int]:
    """The order of a ring whose slowest link is fastest: exact up to `EXACT` ranks."""
    n = len(links)
    if n < 4:
        return list(range(n))
    speeds = sorted({float(links[i, j]) for i, j in itertools.combinations(range(n), 2)})
    if n > EXACT:
        return _by_swaps(links)
    low, best = 0, list(range(n))
    high = len(speeds) - 1
    while low <= high:
        middle = (low + high) // 2
        found = _circle(links >= speeds[middle])
        if found:
            best, low = found, middle + 1
        else:
            high = middle - 1
    return best


def _circle(allowed: Rates) -> list[int] | None:
    """A circle through all ranks along allowed links, or None. It extends paths from rank 0 by sets of ranks."""
    n = len(allowed)
    before: dict[tuple[int, int], int] = {(1, 0): -1}  # (ranks on the path, the last one): the one before
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
    """A ring that no reversal of a stretch improves, by its slowest links."""
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
    """Owners whose parts are such that all lines are busy for the same time.

    A rank's line carries the message once, and its own part n - 2 times more, in each direction. So with w the part of
    a rank, (1 + (n - 2) w) / rate is the same for all ranks that own one.
    """
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

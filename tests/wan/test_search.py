"""Tests the best overlay for links of given rates, against every tree and every ring."""

import itertools

import numpy as np
import pytest

from jaxcgx.plan.overlay import Overlay, Tree
from jaxcgx.wan.overlays import search


def slow_link(n, i, j, rate=0.1):
    rates = np.ones((n, n))
    rates[i, j] = rates[j, i] = rate
    return rates


def slow_line(n, i, rate=0.1):
    rates = np.ones((n, n))
    rates[i] = rates[:, i] = rate
    return rates


def drawn(n, seed):
    return np.random.default_rng(seed).uniform(0.1, 1, (n, n))


def fixed_ring(n):
    return Overlay.ring(range(n))


@pytest.mark.parametrize("shape", search.SHAPES)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_alike_links_take_the_least_time(n, shape):
    """Every line carries 2 (n - 1) / n messages."""
    assert search.seconds(search.SHAPES[shape](np.ones((n, n))), np.ones((n, n))) == pytest.approx(
        2 * (n - 1) / n, 0.02
    )


def test_trees_of_alike_links_are_those_of_two_shot():
    found = search.trees(np.full((4, 4), 3.0))
    assert found.depth == 1 and sorted(tree.root for tree in found.trees) == [0, 1, 2, 3]


def test_trees_of_many_alike_links(monkeypatch):
    monkeypatch.setattr(search, "ROUNDS", 1)
    rates = np.ones((51, 51))
    assert search.seconds(search.trees(rates), rates) == pytest.approx(2 * 50 / 51)


def test_a_slow_link_is_gone_around():
    rates = slow_link(4, 1, 2)
    for shape in (search.trees, search.ring):
        assert search.seconds(shape(rates), rates) < search.seconds(fixed_ring(4), rates) / 4


def test_a_slow_line_carries_the_message_once():
    rates = slow_line(4, 2)
    for shape in (search.trees, search.owners):
        assert search.seconds(shape(rates), rates) == pytest.approx(10, 0.01)
    assert search.seconds(fixed_ring(4), rates) == pytest.approx(15)
    assert 2 not in [tree.root for tree in search.owners(rates).trees]


@pytest.mark.parametrize("seed", range(6))
def test_trees_are_near_the_best_packing(seed):
    """The best packing uses all 16 trees of 4 ranks in any proportion."""
    optimize = pytest.importorskip("scipy.optimize")
    rates = drawn(4, seed)
    links, line = search.both(rates), search.lines(rates)
    pairs = list(itertools.combinations(range(4), 2))
    every = [t for t in itertools.combinations(pairs, 3) if is_tree(t)]
    assert len(every) == 16
    loads = np.array(
        [[(p in t) / links[p] for p in pairs] + [sum(i in p for p in t) / line[i] for i in range(4)] for t in every]
    ).T
    # The least time for which the shares add up to one message and no load exceeds it.
    found = optimize.linprog(
        [*[0] * 16, 1], A_ub=np.c_[loads, -np.ones(10)], b_ub=np.zeros(10), A_eq=[[*[1] * 16, 0]], b_eq=[1]
    )
    assert found.x[-1] * 0.999 <= search.seconds(search.trees(rates), rates) <= found.x[-1] * 1.08


def is_tree(links):
    reached = {0}
    for _ in links:
        reached |= {rank for link in links if reached & set(link) for rank in link}
    return len(reached) == 4


@pytest.mark.parametrize("n, seed", [(4, 0), (5, 1), (6, 2), (7, 3)])
def test_the_slowest_link_of_the_ring_is_the_fastest_that_it_can_be(n, seed):
    links = search.both(drawn(n, seed))

    def slowest(order):
        return min(links[i, j] for i, j in zip(order, [*order[1:], order[0]]))

    best = max(slowest((0, *order)) for order in itertools.permutations(range(1, n)))
    order = search.best_order(links)
    assert sorted(order) == list(range(n)) and slowest(order) == best


def test_a_ring_of_many_ranks(monkeypatch):
    """The ring is improved by swaps. It avoids the slow link."""
    monkeypatch.setattr(search, "EXACT", 3)
    links = slow_link(9, 3, 4)
    order = search.best_order(links)
    assert min(links[i, j] for i, j in zip(order, [*order[1:], order[0]])) == 1


def test_owners_keep_all_lines_busy_as_long():
    rates = np.minimum.outer(*[np.array([1.0, 0.8, 0.6, 0.5])] * 2)
    found = search.owners(rates)
    # (1 + 2 w) / rate is the same for all owners
    shares = np.array(found.shares) / sum(found.shares)
    times = (1 + 2 * shares) / search.lines(rates)[[tree.root for tree in found.trees]]
    np.testing.assert_allclose(times, times[0], rtol=0.01)


def test_seconds_counts_links_and_lines():
    star = Overlay((Tree((-1, 0, 0)),))
    rates = np.array([[1, 4, 2], [4, 1, 1], [2, 1, 1.0]])
    # Line 0 has rate 4 and carries two messages; link 0-2 has rate 2 and carries one.
    assert search.seconds(star, rates) == pytest.approx(0.5)

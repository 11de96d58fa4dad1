"""Tests estimates of links: they decay, are corrected for shared lines, and are forgotten when a link changes.

Also tests when links are explored.
"""

import numpy as np
import pytest

from jaxcgx.wan.overlays.topology import ENOUGH, LinkRates

SIZE = 2**20


def measured(links, *pairs, rate=1e6):
    sent, busy = np.zeros((2, *links.rates.shape))
    for i, j in pairs:
        sent[i, j], busy[i, j] = SIZE, SIZE / rate
    links.note(sent, busy)


def test_estimates_decay():
    links = LinkRates(2, decay=0.25)
    measured(links, (0, 1), rate=1e6)
    measured(links, (0, 1), rate=1.5e6)
    assert links.rates[0, 1] == pytest.approx(0.25 * 1e6 + 0.75 * 1.5e6)
    assert np.isnan(links.rates[1, 0]) and links.estimates[1, 0] == links.rates[0, 1]


def test_transfers_that_share_a_line_are_counted_together():
    """Rank 0 sends three transfers at once, and rank 3 receives three at once. Each has a third of the line's rate."""
    links = LinkRates(4, 0.5)
    measured(links, (0, 1), (0, 2), (0, 3), rate=1e6)
    np.testing.assert_allclose(links.rates[0, 1:], 3e6)
    measured(links, (0, 3), (1, 3), (2, 3), rate=1e6)
    np.testing.assert_allclose(links.rates[:3, 3], 3e6)


def test_a_slow_link_does_not_make_its_ranks_fast():
    links = LinkRates(3, 0.5)
    sent, busy = np.zeros((2, 3, 3))
    sent[0, 1] = sent[0, 2] = SIZE
    busy[0, 1], busy[0, 2] = 1.0, 0.1
    links.note(sent, busy)
    assert links.rates[0, 1] == SIZE


def test_little_traffic_says_nothing():
    links = LinkRates(2, 0.5)
    links.note(np.full((2, 2), ENOUGH - 1.0), np.ones((2, 2)))
    assert np.isnan(links.rates).all() and not links.known[0, 1]


def test_a_changed_link_makes_the_others_unknown():
    links = LinkRates(3, 0.5)
    everything = [(i, j) for i in range(3) for j in range(3) if i != j]
    measured(links, *everything)
    assert links.greedy(0.9) == 0.9
    before = links.rates[1, 2]
    measured(links, (0, 1), rate=1e5)
    assert links.rates[0, 1] == pytest.approx(1e5)  # at once, because the old estimate no longer holds
    assert links.greedy(0.9) == 1 / 6 and links.rates[1, 2] == before


def test_the_greedy_rate_is_exact():
    """An integer division would give 0 or 1."""
    links = LinkRates(4, 0.5)
    assert links.greedy(0.9) == 0.0
    measured(links, (0, 1), (1, 0), (2, 3))
    assert links.greedy(0.9) == 3 / 12 and links.greedy(0.2) == 0.2
    measured(links, *[(i, j) for i in range(4) for j in range(4) if i != j])
    assert links.greedy(0.9) == 0.9 and links.greedy(1.0) == 1.0 and links.greedy(0.0) == 0.0


def test_pairs_to_probe():
    """Each rank is in one pair, and unknown links come first. After three probes all links of four ranks are known."""
    random = np.random.default_rng(0)
    for _ in range(20):
        links = LinkRates(4, 0.5)
        for _ in range(3):
            pairs = links.pairs(random)
            assert sorted(rank for pair in pairs for rank in pair) == [0, 1, 2, 3]
            measured(links, *pairs, *[pair[::-1] for pair in pairs])
        assert links.known.all()
    firsts = {tuple(sorted(links.pairs(random))) for _ in range(50)}
    assert len(firsts) == 3  # known links are chosen at random


def test_a_pair_with_one_unknown_direction_is_probed_first():
    links = LinkRates(4, 0.5)
    measured(links, *[(i, j) for i in range(4) for j in range(4) if i != j and (i, j) not in ((1, 0), (3, 2))])
    for seed in range(10):
        assert sorted(links.pairs(np.random.default_rng(seed))) == [(0, 1), (2, 3)]

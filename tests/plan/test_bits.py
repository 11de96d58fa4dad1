"""Tests the choice of bits with plain numbers: it keeps its budget, and is optimal and the same everywhere."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

import jaxcgx as cgx
from jaxcgx.plan import bits

BITS = tuple(cgx.MaxMin(width) for width in range(2, 9))


def total(rows, choice):
    return sum(row[c] for row, c in zip(rows, choice))


def exact(rows, choice):
    return total([list(map(Fraction, row)) for row in rows], choice)


def drawn(seed):
    """Returns arguments of lgreco with so few choices that a test can try all."""
    rng = random.Random(seed)
    leaves, candidates = rng.randint(1, 5), rng.randint(1, 4)
    wire = [[rng.randint(0, 60) for _ in range(candidates)] for _ in range(leaves)]
    errors = [
        [float(np.float32(rng.random() * 10.0 ** rng.randint(-6, 3))) for _ in range(candidates)] for _ in range(leaves)
    ]
    reference, alpha = rng.randrange(candidates), rng.choice([0.25, 0.5, 1.0, 1.5])
    return wire, errors, reference, alpha


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("budget", ["error", "bytes"])
def test_lgreco_is_as_good_as_trying_everything(budget, seed):
    """Of what the budget limits, no choice has more, and of the rest no choice has less."""
    wire, errors, reference, alpha = drawn(seed if budget == "error" else 1000 + seed)
    leaves, candidates = len(wire), len(wire[0])
    limited, rest = (errors, wire) if budget == "error" else (wire, errors)
    most = Fraction(alpha) * exact(limited, [reference] * leaves)
    possible = [c for c in itertools.product(range(candidates), repeat=leaves) if exact(limited, c) <= most]
    found = bits.lgreco(wire, errors, reference, alpha, budget=budget)
    if not possible:
        assert found is None
        return
    least = min(exact(rest, c) for c in possible)
    assert tuple(found) in possible and exact(rest, found) == least
    assert exact(limited, found) == min(exact(limited, c) for c in possible if exact(rest, c) == least)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_lgreco_with_many_leaves(alpha):
    """There are more bytes than steps. The budget is kept, and the bytes are near a lower bound (Lagrange's)."""
    rng = random.Random(7)
    sizes = [rng.randint(1000, 3_000_000) for _ in range(300)]
    wire = [[codec.wire_bytes((n,), "float32") for codec in BITS] for n in sizes]
    errors = [[n * 10.0 ** rng.uniform(-6, 0) * 4.0**-bits for bits in range(2, 9)] for n in sizes]
    reference = [2] * len(sizes)
    budget = Fraction(alpha) * exact(errors, reference)
    found = bits.lgreco(wire, errors, 2, alpha)
    assert exact(errors, found) <= budget
    bound = max(
        sum(min(w + 2.0**k * e for w, e in zip(*rows)) for rows in zip(wire, errors)) - 2.0**k * float(budget)
        for k in np.arange(-10, 30, 0.25)
    )
    step = sum(max(row) - min(row) for row in wire) / bits.STEPS
    assert bound - 1 <= total(wire, found) <= bound + 2 * len(sizes) * step
    if alpha == 1:
        assert total(wire, found) < total(wire, reference)
    # With a margin for the steps, the least error for these bytes is not larger.
    most = total(wire, found) + len(sizes) * step
    turned = bits.lgreco(wire, errors, 2, most / total(wire, reference), budget="bytes")
    assert total(wire, turned) <= most
    assert float(exact(errors, turned)) <= (1 + 1e-9) * float(exact(errors, found))


def test_lgreco_at_the_edges():
    assert bits.lgreco([], [], 0, 1.0) == []
    assert bits.lgreco([[10, 20]], [[0.0, 0.0]], 1, 1.0) == [0]
    assert bits.lgreco([[10, 20]], [[1.0, 0.5]], 1, 1.0) == [1]
    assert bits.lgreco([[10, 20]], [[1.0, 0.5]], 1, 1e300) == [0]
    assert bits.lgreco([[10, 20]], [[1e-45, 1e-46]], 0, 0.5) == [1]
    assert bits.lgreco([[10, 20]], [[3e38, 2e38]], 1, 0.9) is None
    # Errors that are tiny compared with the largest one count, too, because they are rounded up.
    tiny = [[10, 20, 30], [10, 20, 30]], [[1.0, 0.0, 0.0], [1e-30, 1e-30, 0.0]], 1
    assert bits.lgreco(*tiny, 1.0) == [1, 0] and bits.lgreco(*tiny, 0.5) == [1, 2]


def test_kmeans():
    rng = random.Random(3)
    centers = [(0, 5), (5, 0), (-5, -5)]
    points = [tuple(x + rng.uniform(-1, 1) for x in centers[i % 3]) for i in range(60)]
    found = bits.kmeans(points, 3)
    assert found == [(2, 1, 0)[i % 3] for i in range(60)]
    shuffled = list(range(60))
    rng.shuffle(shuffled)
    assert bits.kmeans([points[i] for i in shuffled], 3) == [found[i] for i in shuffled]
    assert bits.kmeans([(1.0, 1.0)] * 4, 3) == [0] * 4
    assert bits.kmeans([(0.0, 0.0), (0.0, 1.0), (0.0, 0.0)], 3) == [0, 1, 0]


def test_kmeans_of_points_that_are_equal():
    """As many clusters as different points, up to three. The highest norm has the last number."""
    assert bits.kmeans([(4, 3), (2, 1), (2, 0), (4, 3)], 3) == [2, 1, 0, 2]
    for seed in range(200):
        rng = random.Random(seed)
        points = [(rng.randint(0, 3), rng.randint(0, 3)) for _ in range(rng.randint(1, 9))]
        assert set(bits.kmeans(points, 3)) == set(range(min(3, len(set(points)))))

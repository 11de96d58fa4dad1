"""Chooses codecs for leaves, on plain numbers: L-GreCo's choice, and the k-means that CGX's authors compare it with.

If ranks chose differently, they would misread one another's bytes. So every result depends only on the arguments, which
are the same on every rank. No result depends on a clock, a random number, the order of a set, or a sum that a library
may reorder. Comparisons are between integers, or between float64 numbers from the same operations in the same order.
"""

import fractions
import math
from collections.abc import Sequence

import numpy as np

STEPS = 50_000  # the most steps into which `lgreco` cuts the range of bytes
BUDGETS = "error", "bytes"  # the quantities that a choice may limit
_FINEST = 60  # the bits of the largest possible sum of errors, as an integer

Point = tuple[float, ...]


def lgreco(
    wire: Sequence[Sequence[int]],
    errors: Sequence[Sequence[float]],
    reference: int,
    alpha: float,
    budget: str = "error",
) -> list[int] | None:
    """Returns the number of the candidate to take for each leaf, or None if every choice exceeds the budget.

    With the budget "error", all leaves together send the fewest bytes. The sum of their errors is at most `alpha` times
    the sum of errors with `reference` for all leaves. With the budget "bytes", the sum of errors is the smallest. All
    leaves together send at most `alpha` times the bytes with `reference` for all leaves.

    `wire` has the bytes, [leaves][candidates], and `errors` finite numbers of at least 0. `reference` is the number of
    a candidate, and `alpha` a finite factor.

    This is L-GreCo's dynamic program with the roles of bytes and errors exchanged: least[b] is the smallest sum of
    errors of the leaves so far, if they take b steps of bytes. Errors are integers, rounded up to units of at most
    2^-59 of the largest possible sum. Bytes are counted from the smallest choice on, in whole steps, rounded up. A step
    is the greatest common divisor of the candidates' differences. If the largest choice is more than STEPS such steps
    away, a step is a multiple of the divisor. Then the result is optimal only up to one step of bytes per leaf.
    """
    if not wire:
        return []
    exact = _as_integers(errors)
    steps, step = _in_steps(wire)
    never = 2**62
    least, taken = np.zeros(1, np.int64), list[np.ndarray]()
    for row, costs in zip(exact, steps):
        longer = np.full(len(least) + max(costs), never, np.int64)
        choice = np.zeros(len(longer), np.uint8)
        for c, cost in enumerate(costs):
            window = slice(cost, cost + len(least))
            better = least + row[c] < longer[window]
            longer[window][better] = (least + row[c])[better]
            choice[window][better] = c
        least = longer
        taken.append(choice)
    if budget == "bytes":
        most = (_times(alpha, sum(row[reference] for row in wire)) - sum(map(min, wire))) // step
        if most < 0:
            return None
        b = int(least[: most + 1].argmin())
    else:
        most = _times(alpha, sum(row[reference] for row in exact.tolist()))
        within = np.flatnonzero(least <= min(most, never - 1))
        if not len(within):
            return None
        b = int(within[0])
    found = list[int]()
    for choice, costs in zip(reversed(taken), reversed(steps)):
        found.append(int(choice[b]))
        b -= costs[found[-1]]
    return found[::-1]


def _as_integers(errors: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns the errors as int64 in a common unit, rounded up."""
    largest = math.fsum(max(row) for row in errors)
    unit = fractions.Fraction(2) ** (math.frexp(largest)[1] - _FINEST)
    return np.array([[math.ceil(fractions.Fraction(error) / unit) for error in row] for row in errors], np.int64)


def _times(alpha: float, total: int) -> int:
    return math.floor(fractions.Fraction(alpha) * total)


def _in_steps(wire: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Returns (bytes above each leaf's smallest candidate, in whole steps, rounded up; the bytes of a step)."""
    extra = [[n - min(row) for n in row] for row in wire]
    step = math.gcd(*(n for row in extra for n in row)) or 1
    step *= max(1, -(-sum(map(max, extra)) // (step * STEPS)))
    return [[-(-n // step) for n in row] for row in extra], step


def kmeans(points: Sequence[Point], clusters: int) -> list[int]:
    """Returns the number of each point's cluster, from 0 on, in the order of the centers' last coordinates.

    These are Lloyd's iterations on standardised coordinates. The first centers are not random: the different points are
    sorted by their last coordinate, and points at evenly spaced places of that order are taken. Among equally near
    centers, a point takes the first. A cluster that loses all its points gets no number. There are never more clusters
    than different points.
    """
    points = list(zip(*map(_standardised, zip(*points))))
    different = sorted(set(points), key=lambda point: point[::-1])
    clusters = min(clusters, len(different))
    centers = [different[(2 * k + 1) * len(different) // (2 * clusters)] for k in range(clusters)]
    found = list[int]()
    for _ in range(100):
        nearest = [min(range(clusters), key=lambda k: _distance(point, centers[k])) for point in points]
        if nearest == found:
            break
        found = nearest
        for k in range(clusters):
            members = [point for point, n in zip(points, found) if n == k]
            if members:
                centers[k] = tuple(math.fsum(column) / len(members) for column in zip(*members))
    place = {k: rank for rank, k in enumerate(sorted(set(found), key=lambda k: (centers[k][-1], k)))}
    return [place[k] for k in found]


def _distance(point: Sequence[float], center: Sequence[float]) -> float:
    """Returns the squared distance, by products: IEEE 754 defines every bit of products, but not of powers."""
    return math.fsum((a - b) * (a - b) for a, b in zip(point, center))


def _standardised(column: Sequence[float]) -> list[float]:
    mean = math.fsum(column) / len(column)
    deviation = math.sqrt(_distance(column, [mean] * len(column)) / len(column))
    return [(x - mean) / deviation if deviation else 0.0 for x in column]

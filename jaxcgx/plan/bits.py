"""How many bits for which leaf, on plain numbers: L-GreCo's choice and the k-means that CGX's authors compare it with.

Ranks that choose differently decode garbage. So every result depends on the arguments alone, which are the same on
every rank: there is no clock, no random number, no order of a set, and no sum that a library may reorder. Comparisons
are between integers, or between float64 numbers that come from the same operations in the same order.
"""

import fractions
import math
from collections.abc import Sequence

import numpy as np

STEPS = 50_000  # that `lgreco` cuts the budget of bytes into
BUDGETS = "error", "bytes"  # what a choice keeps to
_FINEST = 60  # bits of the largest possible sum of errors

Point = tuple[float, ...]


def lgreco(
    wire: Sequence[Sequence[int]],
    errors: Sequence[Sequence[float]],
    reference: int,
    alpha: float,
    budget: str = "error",
) -> list[int] | None:
    """The candidate to take for each leaf; None if every choice exceeds the budget.

    All leaves together send the fewest bytes whose error is at most `alpha` times that of taking `reference` for all.
    If the budget is of bytes, they err the least with at most `alpha` times its bytes.

    Args:
      wire: [leaves][candidates], bytes.
      errors: [leaves][candidates], finite and at least 0.
      reference: a candidate's number.
      alpha: a finite factor.
      budget: one of `BUDGETS`.

    This is L-GreCo's dynamic program with bytes and errors exchanged: least[b] is the least error of the leaves so far
    at b bytes. Errors are integers, in units of 2^-60 of the largest sum or finer, and rounded up, so that rounding
    never exceeds the budget. Bytes above the smallest choice count in whole steps, of 1/STEPS of the distance to the
    largest choice. The result is optimal if all differences are multiples of a step; else it may be what is optimal
    for a step of bytes more or less a leaf.
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
    """The errors as int64, rounded up."""
    largest = math.fsum(max(row) for row in errors)
    unit = fractions.Fraction(2) ** (math.frexp(largest)[1] - _FINEST)
    return np.array([[math.ceil(fractions.Fraction(error) / unit) for error in row] for row in errors], np.int64)


def _times(alpha: float, total: int) -> int:
    return math.floor(fractions.Fraction(alpha) * total)


def _in_steps(wire: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """The bytes above each leaf's smallest candidate, in whole steps, rounded up; and the bytes of a step."""
    extra = [[n - min(row) for n in row] for row in wire]
    step = math.gcd(*(n for row in extra for n in row)) or 1
    step *= max(1, -(-sum(map(max, extra)) // (step * STEPS)))
    return [[-(-n // step) for n in row] for row in extra], step


def kmeans(points: Sequence[Point], clusters: int) -> list[int]:
    """The number of each point's cluster, from 0. Clusters are in the order of their centers' last coordinate.

    These are Lloyd's iterations on standardised coordinates. There is no random start: they start from points at evenly
    spaced places in the order of the last coordinate, where equal points count once. Of equally near centers the first
    counts. A cluster that loses all its points has no number; there are never more clusters than different points.

    Args:
      points: [points][coordinates].
      clusters: how many there are at most.
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
    """The squared distance.

    It takes sums, products and roots only. IEEE 754 fixes these in every library, but not powers.
    """
    return math.fsum((a - b) * (a - b) for a, b in zip(point, center))


def _standardised(column: Sequence[float]) -> list[float]:
    mean = math.fsum(column) / len(column)
    deviation = math.sqrt(_distance(column, [mean] * len(column)) / len(column))
    return [(x - mean) / deviation if deviation else 0.0 for x in column]

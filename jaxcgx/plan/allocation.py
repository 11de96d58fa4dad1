"""How many bits for which leaf: the two ways in which CGX's authors choose, on plain numbers.

Every rank must choose alike, or ranks would decode what others encoded otherwise. So nothing here depends on anything
but its
arguments, which are the same on every rank: no clock, no random numbers, no order of a set, and no sum that a library
may
reorder. What is compared are integers, or float64 after the same operations in the same order.
"""

import fractions
import math

import numpy as np

STEPS = 50_000  # of the budget of bytes that `lgreco` tells apart
_FINEST = 60  # bits of the largest possible sum of errors


def lgreco(wire, errors, reference, alpha):
    """For each leaf the candidate to take, so that all together send the fewest bytes with an error of at most `alpha`
    times that
    of taking the candidate `reference` for all. None: no choice errs so little.

    wire, errors: [leaves][candidates], bytes and finite errors of at least 0. reference: a candidate's number.

    L-GreCo's dynamic program, over bytes instead of errors: least[b] is the least error of the leaves so far at b
    bytes. Errors
    are integers, in units of 2^-60 of the largest sum or finer, and rounded up: no discretisation can exceed the
    budget. Bytes
    beyond the smallest choice count in whole steps, of 1/STEPS of what the largest choice has more: the bytes of the
    result are
    the least but for at most one step a leaf, and exactly the least where all differences are multiples of a step.
    """
    if not wire:
        return []
    largest = math.fsum(max(row) for row in errors)
    unit = fractions.Fraction(2) ** (math.frexp(largest)[1] - _FINEST)
    exact = np.array([[math.ceil(fractions.Fraction(e) / unit) for e in row] for row in errors], np.int64)
    never = 2**62
    budget = min(math.floor(fractions.Fraction(alpha) * sum(int(row[reference]) for row in exact)), never - 1)
    extra = [[n - min(row) for n in row] for row in wire]
    step = math.gcd(*(n for row in extra for n in row)) or 1
    step *= max(1, -(-sum(map(max, extra)) // (step * STEPS)))
    steps = [[-(-n // step) for n in row] for row in extra]
    least, taken = np.zeros(1, np.int64), []
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
    within = np.flatnonzero(least <= budget)
    if not len(within):
        return None
    b, found = int(within[0]), []
    for choice, costs in zip(reversed(taken), reversed(steps)):
        found.append(int(choice[b]))
        b -= costs[found[-1]]
    return found[::-1]


def kmeans(points, clusters):
    """For each point the number of its cluster, from 0, with the clusters in the order of their centres' last
    coordinate.

    points: [points][coordinates]. Lloyd's iterations on standardised coordinates, from points at evenly spaced places
    in the
    order of their last coordinate, equal ones counted once: no random start. Of equally near centres the first counts.
    A cluster
    that loses all its points has no number: there are fewer then, and never more than different points.
    """
    columns = [_standardised(column) for column in zip(*points)]
    points = list(zip(*columns))
    different = sorted(set(points), key=lambda point: point[::-1])
    clusters = min(clusters, len(different))
    centres = [different[(2 * k + 1) * len(different) // (2 * clusters)] for k in range(clusters)]
    found = None
    for _ in range(100):
        nearest = [min(range(clusters), key=lambda k: _distance(point, centres[k])) for point in points]
        if nearest == found:
            break
        found = nearest
        for k in range(clusters):
            members = [point for point, n in zip(points, found) if n == k]
            if members:
                centres[k] = tuple(math.fsum(column) / len(members) for column in zip(*members))
    place = {k: rank for rank, k in enumerate(sorted(set(found), key=lambda k: (centres[k][-1], k)))}
    return [place[k] for k in found]


def _distance(point, centre):
    """Squared. Of what a library computes, IEEE 754 fixes sums, products and roots, but not powers."""
    return math.fsum((a - b) * (a - b) for a, b in zip(point, centre))


def _standardised(column):
    mean = math.fsum(column) / len(column)
    deviation = math.sqrt(_distance(column, [mean] * len(column)) / len(column))
    return [(x - mean) / deviation if deviation else 0.0 for x in column]

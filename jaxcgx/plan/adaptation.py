"""Codecs for leaves, by what is known of their gradients: Plan.adapt's methods. What may be computed here allocation.py
says."""

import dataclasses
import math
import numbers

import numpy as np

from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.spelling import spell
from jaxcgx.plan import allocation

_BUCKETS = {2: 128, 3: 256, 4: None}  # CGX's, of the clusters' bits; None: the reference's


def _lgreco(op, statistics, ids, reference, alpha):
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 < alpha < math.inf:
        raise ValueError(f"{op}: argument 'alpha': expected a positive number, got {alpha!r}")
    codecs = statistics.codecs
    if reference not in codecs:
        raise ValueError(
            f"{op}: argument 'reference': expected one of the statistics' codecs, {', '.join(map(spell, codecs))}, got "
            f"{spell(reference)}; pass gradient_statistics codecs that it is among"
        )
    errors = _finite(op, statistics, ids, statistics.errors)
    wire = [[codec.wire_bytes(statistics.shapes[i], statistics.dtypes[i]) for codec in codecs] for i in ids]
    chosen = allocation.lgreco(wire, errors, codecs.index(reference), alpha)
    if chosen is None:
        raise ValueError(
            f"{op}: argument 'alpha': expected a factor that some choice of {', '.join(map(spell, codecs))} can keep "
            "to, "
            f"got {alpha}; pass a larger one, or gradient_statistics codecs with more bits"
        )
    return [codecs[c] for c in chosen]


def _kmeans(op, statistics, ids, reference, alpha):
    if alpha != 1.0:
        raise ValueError(
            f"{op}: argument 'alpha': expected 1.0 with method=\"kmeans\", which has no budget, got {alpha!r}"
        )
    if not isinstance(reference, MaxMin):
        raise ValueError(
            f"{op}: argument 'reference': expected a MaxMin with method=\"kmeans\", got {spell(reference)}"
        )
    tops = _finite(op, statistics, ids, statistics.tops)
    points = [(_log2(math.prod(statistics.shapes[i])), _log2(top)) for i, top in zip(ids, tops)]
    places = allocation.kmeans(points, len(_BUCKETS))
    bits = [max(_BUCKETS) - max(places) + place for place in places]
    return [dataclasses.replace(reference, bits=b, bucket_size=_BUCKETS[b] or reference.bucket_size) for b in bits]


def _finite(op, statistics, ids, values):
    """The rows `ids` as Python floats."""
    values = np.asarray(values, np.float64)
    for i in ids:
        if not np.isfinite(values[i]).all():
            raise ValueError(
                f"{op}: argument 'statistics', leaf {statistics.paths[i]!r}: expected finite numbers, got "
                f"{values[i].tolist()}; leave out the steps whose gradients overflowed"
            )
    return values[ids].tolist()


def _log2(x):
    """log2, but linear between powers of two, where math.log2 need not be the same on every machine; of 0 that of
    2^-150."""
    fraction, exponent = math.frexp(max(x, 2.0**-150))
    return exponent + 2 * fraction - 2


METHODS = {
    "lgreco": _lgreco,
    "kmeans": _kmeans,
}  # (op, statistics, which of its leaves, reference, alpha): a codec for each leaf

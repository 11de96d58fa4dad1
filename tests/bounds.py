"""The bound of a sum's error that docs/error-bounds.md derives from the codec, which is a MaxMin, and the schedule.

`x` is float64[ranks, elements] everywhere. Bounds are per bucket.
"""

import numpy as np

from jaxcgx.native.layout import Layout


def spans(x, codec):
    """Returns each bucket's range: [..., elements] to [..., buckets]."""
    whole = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % codec.bucket_size)], mode="edge")
    return np.ptp(whole.reshape(*x.shape[:-1], -1, codec.bucket_size), -1)


def loss(span, error, codec):
    """Returns the error that quantization adds to numbers of range `span` that already have the error `error`."""
    part = 1 if codec.stochastic else 0.5  # of a unit
    return part * (span + 2 * error) / (2**codec.bits - 1) * (1 + 2**-15)


def two_shot(x, owner, codec):
    mine = np.arange(len(x))[:, None] == owner
    received = np.where(mine, 0, loss(spans(x, codec), 0, codec)).sum(0)
    return received + loss(spans(x.sum(0), codec), received, codec)


def one_shot(x, owner, codec):
    return loss(spans(x, codec), 0, codec).sum(0)


def ring(x, owner, codec):
    ranks, who = len(x), np.repeat(owner, codec.bucket_size)[: x.shape[-1]]
    error = total = 0
    for hop in range(1, ranks + 1):
        total = total + np.take_along_axis(x, (who + hop)[None] % ranks, 0)[0]
        error = error + loss(spans(total, codec), error, codec)
    return error


SCHEDULES = dict(two_shot=two_shot, one_shot=one_shot, ring=ring)


def owners(leaves, ranks, codec):
    """Returns the rank that sums each bucket, for every leaf."""
    size = codec.bucket_size
    found = [np.zeros(-(-x.size // size), int) for x in leaves]
    for c, pieces in enumerate(Layout.of(codec, leaves, ranks).pieces):
        for p in pieces:
            found[p.leaf][p.start // size : -(-(p.start + p.coded) // size)] = c
    return found


def check(got, x, bound, codec):
    """Checks that a sum of x has no larger error than the bound plus float32's rounding, and returns the errors."""
    assert x.size
    rounding = 2**-22 * np.abs(x).sum(0)
    error = np.abs(np.asarray(got, np.float64) - x.sum(0))
    assert (error <= np.repeat(bound, codec.bucket_size)[: x.shape[-1]] + rounding).all()
    return error

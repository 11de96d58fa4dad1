"""Tests sums over the shards of leaves. Every process makes the same program, whatever the order of its sets."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import CODEC

from jaxcgx.optim.clipping import Clipping
from jaxcgx.optim.leaves import flatten
from jaxcgx.optim.nonfinite import count_nonfinite
from jaxcgx.optim.telemetry import measure
from jaxcgx.transports.xla import Axes

AXES = ("data", "e", "d", "c", "b")  # ranks, and shards in an order that is not alphabetical


def clip(x):
    limits = Clipping(clip_value=None, clip_norm=1.0, clip_global_norm=None)
    return limits.clip(x, ("data",), 2)


def nonfinite(x):
    return count_nonfinite([x])


def telemetry(x):
    return measure(Axes(("data",)), flatten(x), [[CODEC]], [x[None]], [x], [x[None]]).vnmse


@pytest.mark.parametrize(
    ("function", "spec", "summed"),
    [
        (clip, P(AXES), ["'b', 'c', 'd', 'e'"]),
        (nonfinite, P(), ["'b', 'c', 'd', 'data', 'e'"]),
        (telemetry, P(), ["'b', 'c', 'd', 'e'", "'data',"]),
    ],
    ids=["clip", "nonfinite", "telemetry"],
)
def test_axes_of_sums(function, spec, summed):
    mesh = jax.make_mesh((2, 2, 2, 1, 1), AXES, axis_types=(AxisType.Auto,) * 5)
    program = jax.make_jaxpr(jax.shard_map(function, mesh=mesh, in_specs=P(AXES), out_specs=spec))(jnp.ones(8))
    assert re.findall(r"psum\w*\[\s*axes=\(([^)]*)\)", str(program)) == summed

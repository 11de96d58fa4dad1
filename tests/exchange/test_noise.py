"""Tests stochastic rounding: unbiased sums, and independent noise for ranks, elements, exchanges and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, planned
from ranks import mesh, on_ranks

import jaxcgx as cgx

CODEC = cgx.MaxMin(2, 128, rounding="stochastic")


def lost(rows):
    """Returns the errors of each rank's numbers, [ranks, numbers]. The exchange is a gather, so nothing is summed."""
    f = lambda x: cgx.compressed_all_gather(x, "a", CODEC, key=jax.random.key(0))
    return np.asarray(on_ranks(f, mesh(4))(rows)[0] - rows)


def test_ranks_draw_independent_noise():
    """For the same numbers, each rank has different errors."""
    found = np.corrcoef(lost(jnp.tile(normal(20_000), (4, 1))))
    assert np.abs(found - np.eye(4)).max() < 0.03


@pytest.mark.parametrize("schedule", ["two_shot", "one_shot", "ring"])
def test_sums_are_unbiased(schedule):
    x, steps = normal((3, 500)), 400

    def body(x):
        draw = lambda key: cgx.compressed_psum(x, "a", planned(CODEC, schedule=schedule), key=key)
        return jax.lax.map(draw, jax.random.split(jax.random.key(1), steps))

    draws = np.asarray(on_ranks(body, mesh(3))(x)[0], np.float64)
    off = (draws.mean(0) - np.asarray(x, np.float64).sum(0)) / (draws.std(0) / steps**0.5 + 1e-6)
    assert np.abs(off).max() < 5 and 0.8 < off.std() < 1.2
    steps_apart = np.corrcoef((draws - draws.mean(0))[:20])
    assert np.abs(steps_apart - np.eye(20)).max() < 0.25


def test_shards_of_a_hierarchy_draw_independent_noise():
    """Inner ranks with the same numbers have the same shares, but different errors in the exchange of each share."""
    x = jnp.broadcast_to(jnp.tile(normal(5000), 2), (2, 2, 10_000)) / 4
    f = lambda x: cgx.compressed_psum(
        x, ("a", "b"), planned({"a": CODEC, "b": cgx.Raw()}, schedule="one_shot"), key=jax.random.key(0)
    )
    first, second = np.asarray(on_ranks(f, mesh(2, 2))(x)[0, 0] - 4 * x[0, 0]).reshape(2, 5000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_rows_for_different_ranks_draw_independent_noise():
    x = jnp.tile(normal(5000), (4, 4, 1))
    f = lambda x: cgx.compressed_all_to_all(x, "a", 0, 0, CODEC, key=jax.random.key(0))
    rows = np.asarray(on_ranks(f, mesh(4))(x) - x).reshape(16, 5000)
    assert np.abs(np.corrcoef(rows) - np.eye(16)).max() < 0.08


def test_keys_of_steps_and_typed_or_raw_keys():
    x = normal((2, 300))
    run = jax.jit(lambda x, key: jax.vmap(lambda x: cgx.compressed_psum(x, "a", CODEC, key=key), axis_name="a")(x))
    one, again, other = (run(x, k) for k in (jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(1)))
    assert (one == again).all() and (one != other).any()


def test_a_key_may_differ_along_other_axes():
    """Then the results differ, too."""

    def body(x):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("b"))
        return cgx.compressed_psum(x, "a", CODEC, key=key)

    got = on_ranks(body, mesh(2, 4))(jnp.broadcast_to(normal((2, 1, 300)), (2, 4, 300)))
    assert (got[0] == got[1]).all() and (got[0, 0] != got[0, 1]).any()

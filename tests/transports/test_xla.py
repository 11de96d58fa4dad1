"""Tests where rows arrive: on meshes, and over axes of vmap, of which lax supports only one at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import mesh, on_ranks

from jaxcgx.transports.xla import Axes

SIZES = (2, 3)
X = jnp.arange(6 * 6 * 4, dtype=jnp.uint8).reshape(*SIZES, 6, 4)  # each rank has a row of four bytes for each rank


def on(where, f):
    if where == "mesh":
        return on_ranks(f, mesh(*SIZES))(X)
    return jax.vmap(jax.vmap(f, axis_name="b"), axis_name="a")(X)


@pytest.mark.short
@pytest.mark.parametrize("where", ["mesh", "vmap"])
def test_axes(where):
    def f(x):
        axes = Axes(("a", "b"))
        return axes.rank, axes.all_to_all(x), axes.all_gather(x[0]), axes.shift(x[0])

    rank, exchanged, gathered, shifted = (np.asarray(y).reshape(6, *y.shape[2:]) for y in on(where, f))
    flat = np.asarray(X).reshape(6, 6, 4)
    np.testing.assert_array_equal(rank, range(6))
    np.testing.assert_array_equal(exchanged, flat.swapaxes(0, 1))
    np.testing.assert_array_equal(gathered, np.broadcast_to(flat[:, 0], (6, 6, 4)))
    np.testing.assert_array_equal(shifted, np.roll(flat[:, 0], 1, 0))


@pytest.mark.parametrize("where", ["mesh", "vmap"])
def test_leaders(where):
    def f(x):
        leaders = Axes(("a", "b")).leaders()
        return leaders.rank, leaders.all_to_all(x[:2]), leaders.all_gather(x[0]), leaders.shift(x[0])

    rank, exchanged, gathered, shifted = on(where, f)
    np.testing.assert_array_equal(rank, [[0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(exchanged[:, 0], X[:, 0, :2].swapaxes(0, 1))
    np.testing.assert_array_equal(gathered, np.broadcast_to(X[:, 0, 0], (2, 3, 2, 4)))  # all ranks get the leaders' row
    np.testing.assert_array_equal(shifted[:, 0], np.roll(X[:, 0, 0], 1, 0))

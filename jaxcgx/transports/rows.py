"""Between a caller's dimensions and the rows that ranks exchange: [ranks, ...], row r for or from rank r."""

import math

import jax.numpy as jnp


def split(x, dimension, size, tiled):
    """x cut along `dimension` into a row for each rank; `tiled`: the dimension stays, shorter."""
    if tiled:
        x = x.reshape(*x.shape[:dimension], size, x.shape[dimension] // size, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x, dimension, 0)


def join(rows, dimension, tiled):
    """The rows along `dimension`: a new one, or, `tiled`, one behind another in an existing one."""
    x = jnp.moveaxis(rows, 0, dimension)
    return (
        x.reshape(
            *x.shape[:dimension],
            -1 if x.size else math.prod(x.shape[dimension : dimension + 2]),
            *x.shape[dimension + 2 :],
        )
        if tiled
        else x
    )


def by_axis(rows, stages):
    """[ranks, ...] as [ranks of the first stage, ranks of the second, ..., ...]."""
    return rows.reshape(*(net.size for net, _ in stages), *rows.shape[1:])

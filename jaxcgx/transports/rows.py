"""Between a caller's dimensions and the rows that ranks exchange: [ranks, ...], row r for or from rank r."""
import math

import jax.numpy as jnp

from jaxcgx.native.shm import add


def split(x, dimension, size, tiled):
    """x cut along `dimension` into a row for each rank; `tiled`: the dimension stays, shorter."""
    if tiled:
        x = x.reshape(*x.shape[:dimension], size, x.shape[dimension] // size, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x, dimension, 0)


def join(rows, dimension, tiled):
    """The rows along `dimension`: a new one, or, `tiled`, one behind another in an existing one."""
    x = jnp.moveaxis(rows, 0, dimension)
    return x.reshape(*x.shape[:dimension], -1 if x.size else math.prod(x.shape[dimension : dimension + 2]), *x.shape[dimension + 2 :]) if tiled else x


def by_axis(rows, stages):
    """[ranks, ...] as [ranks of the first stage, ranks of the second, ..., ...]."""
    return rows.reshape(*(net.size for net, _ in stages), *rows.shape[1:])


def countable(x):
    """What is added up of x: of a bool how often it is true, as lax counts."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


class Transport:
    """What transports over processes, which have no named axis, make of their own `size`, `all_to_all`, `all_gather` and
    `plain_psum`."""

    names = ()
    allreduce = None

    @property
    def parts(self):
        return {}

    def plain_pmean(self, x):
        return self.plain_psum(x) / self.size

    def plain_psum_scatter(self, x, scatter_dimension, tiled):
        return add(self.all_to_all(split(countable(x), scatter_dimension, self.size, tiled)))

    def plain_all_gather(self, x, axis, tiled, to):
        return join(self.all_gather(x), axis, tiled)

    def plain_all_to_all(self, x, split_axis, concat_axis, tiled):
        return join(self.all_to_all(split(x, split_axis, self.size, tiled)), concat_axis, tiled)

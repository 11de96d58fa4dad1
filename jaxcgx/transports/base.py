"""What transports over processes have in common."""

import jax.numpy as jnp

from jaxcgx.native.rows import add
from jaxcgx.transports.rows import join, split


def countable(x):
    """What is added up of x: of a bool how often it is true, as lax counts."""
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


class Transport:
    """What transports over processes, which have no named axis, make of their own `size`, `all_to_all`, `all_gather`
    and
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

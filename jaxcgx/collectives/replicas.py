"""check_replicas: do all ranks have the same bits, and if not, which rank and which leaf?"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat
from jaxcgx.exchange import scopes
from jaxcgx.transports.resolve import check_axes


@functools.partial(jax.tree_util.register_dataclass, data_fields=["differs"], meta_fields=["paths", "axis_name"])
@dataclasses.dataclass(frozen=True)
class Replicas:
    """What check_replicas found. A pytree: a jitted step can return it."""

    differs: jax.Array  # bool[leaves, ranks]
    paths: tuple
    axis_name: object

    @property
    def agree(self):
        """bool[]: every rank has the same bits. An array like any other inside jit."""
        return ~self.differs.any()

    def __str__(self):
        if self.agree:
            return f"All ranks of {self.axis_name!r} agree on all {len(self.paths)} leaves."
        return "\n".join(
            f"Leaf {path or 'x'} of rank {', '.join(map(str, np.flatnonzero(row)))} of {self.axis_name!r} differs from "
            "the other ranks'."
            for path, row in zip(self.paths, np.asarray(self.differs))
            if row.any()
        )

    def check(self):
        """Raises an error that names the ranks and leaves, if any differ. For concrete results, outside jit."""
        if not self.agree:
            raise ValueError(f"check_replicas: {self}")


def _words(x):
    """The bits of an array as uint32[n]."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or (jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8):
        x = x.astype(jnp.int32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(-1)


def _checksum(x):
    """uint32[2] of the bits and their places. Any change of a single element changes the first: odd factors are
    invertible modulo 2^32. The second mixes the bits before, so that changes of several don't cancel in both."""
    words = _words(x)
    place = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    mixed = (words ^ (words >> 15)) * jnp.uint32(0x2C1B3C6D) + place
    mixed = (mixed ^ (mixed >> 12)) * jnp.uint32(0x297A2D39)
    return jnp.stack([(words * place).sum(dtype=jnp.uint32), (mixed ^ (mixed >> 15)).sum(dtype=jnp.uint32)])


def check_replicas(tree, axis_name):
    """Whether every rank of an axis has the same bits in every leaf, for 8 bytes a leaf on the wire.

    tree: a pytree of arrays of any dtype that ought to be the same on every rank: parameters, an optimizer's state.
    The result is a pytree, `Replicas`: `.agree` for use in the same program; `.differs`, bool[leaves, ranks]; and, once
    it is concrete, `str(result)` and `result.check()`, which name the ranks and the leaves that differ from what most
    ranks have (of two that differ, the second).
    """
    net = check_axes("check_replicas", axis_name)
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = tuple(jax.tree_util.keystr(path) for path, _ in found)
    sums = [_checksum(jnp.asarray(leaf)) for _, leaf in found]
    if not sums:
        return Replicas(jnp.zeros((0, net.size), bool), (), axis_name)
    every = _compat.vary(jnp.stack(_compat.match_varying(*sums)), _compat.tracked_axes(net.names))
    with scopes.scope(scopes.Message("check_replicas", net.names, paths)):
        for name in reversed(net.names):
            every = _compat.all_gather(every, (name,), axis=0, tiled=False, to="invarying")
    every = every.reshape(-1, len(sums), 2)
    same = (every[:, None] == every[None]).all(-1)  # [rank, rank, leaf]
    most = same.sum(1).argmax(0)  # of each leaf, a rank that has what most have
    return Replicas(~jnp.take_along_axis(same, most[None, None], 0)[0].T, paths, axis_name)

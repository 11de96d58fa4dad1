"""check_replicas: checks that all ranks have the same bits, and names the ranks and leaves that differ."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx.exchange import scopes
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.typing import STATIC, AxisName, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replicas:
    """The result of check_replicas. It is a pytree, so a jitted step can return it.

    Attributes:
      differs: bool[leaves, ranks], True if a rank's leaf differs from the leaf that most ranks have. In a tie, such as
        between two ranks, the leaf of the lowest rank counts as the right one.
      paths: the path of each leaf.
      axis_name: the axis or axes of the ranks.
    """

    differs: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata=STATIC)
    axis_name: AxisName = dataclasses.field(metadata=STATIC)

    @property
    def agree(self) -> jax.Array:
        """bool[], True if every rank has the same bits. Inside jit it is a traced array."""
        return ~self.differs.any()

    def __str__(self) -> str:
        if self.agree:
            return f"All ranks of {self.axis_name!r} agree on all {len(self.paths)} leaves."
        return "\n".join(
            f"Leaf {path or 'x'} of rank {', '.join(map(str, np.flatnonzero(row)))} of {self.axis_name!r} differs from "
            "the other ranks'."
            for path, row in zip(self.paths, np.asarray(self.differs))
            if row.any()
        )

    def check(self) -> None:
        """Raises an error that names the ranks and leaves that differ, if any. Call it outside jit."""
        if not self.agree:
            raise ValueError(f"check_replicas: {self}")


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32[n]."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or (jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8):
        x = x.astype(jnp.int32)
    elif jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:
        x = x.astype(jnp.float32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(-1)


def checksum(x: jax.Array) -> jax.Array:
    """Returns uint32[2]: two checksums of the bits of an array and their places.

    The first checksum changes if any single element changes, because odd factors are invertible modulo 2^32. The second
    one mixes the bits before it adds them, so that several changes don't cancel in both checksums.
    """
    words = _words(x)
    place = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    mixed = (words ^ (words >> 15)) * jnp.uint32(0x2C1B3C6D) + place
    mixed = (mixed ^ (mixed >> 12)) * jnp.uint32(0x297A2D39)
    return jnp.stack([(words * place).sum(dtype=jnp.uint32), (mixed ^ (mixed >> 15)).sum(dtype=jnp.uint32)])


def check_replicas(tree: PyTree, axis_name: AxisName) -> Replicas:
    """Compares the bits of every leaf on all ranks of an axis. Each rank sends checksums of 8 bytes per leaf.

    Args:
      tree: a pytree of arrays of any dtype that must be the same on every rank, such as parameters or an optimizer's
        state.
      axis_name: a mesh axis, or a tuple of axes.

    Returns:
      A `Replicas`. Its `agree` can be used in the same program. If the result is concrete, `str(result)` and
      `result.check()` name the ranks and the leaves that differ.
    """
    net = transport_over_axes("check_replicas", axis_name)
    found = jax.tree.flatten_with_path(tree)[0]
    paths = tuple(jax.tree_util.keystr(path) for path, _ in found)
    sums = [checksum(jnp.asarray(leaf)) for _, leaf in found]
    if not sums:
        return Replicas(jnp.zeros((0, net.size), bool), (), axis_name)
    every = _compat.vary_over(jnp.stack(_compat.match_varying(*sums)), net.names)
    with scopes.scope(scopes.MessageScope("check_replicas", net.names, paths)):
        for name in reversed(net.names):
            every = _compat.all_gather(every, (name,), axis=0, tiled=False, to="invarying")
    every = every.reshape(-1, len(sums), 2)
    same = (every[:, None] == every[None]).all(-1)  # [rank, rank, leaf]
    most = same.sum(1).argmax(0)  # for each leaf, a rank that has the bits that most ranks have
    return Replicas(~jnp.take_along_axis(same, most[None, None], 0)[0].T, paths, axis_name)

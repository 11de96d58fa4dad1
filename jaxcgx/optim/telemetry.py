"""Measures the errors of compression in a step, as arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.codecs.base import Codec
from jaxcgx.collectives.old_psum import plain_reduce
from jaxcgx.optim.leaves import Leaves
from jaxcgx.transports.base import Transport

TINY = 2.0**-126  # the smallest normal float32


class Telemetry(NamedTuple):
    """The errors of compression in a step, per leaf and over all ranks, as trees like the gradients, of float32[].

    `lost` is the error that feedback keeps. With own="raw" it includes both roundings of an exchange, with
    own="encoded" only the first. In a hierarchy, it includes only the exchange over the outermost axis. `meant` is the
    sum of gradients and residuals, which a step should send.

    Attributes:
      vnmse: `|lost|^2 / |meant|^2`.
      saturation: the fraction of elements that are not 0 and whose error is not finite, or at least as large as the
        element. Codecs take their scale from a bucket's range and don't clip. So these are small elements in a bucket
        with a large one.
      bytes: the bytes of the encoded leaf; in a hierarchy, for the outermost axis.
      uncompressed: the bytes of the leaf, uncompressed.
    """

    vnmse: Any
    saturation: Any
    bytes: Any
    uncompressed: Any


class Sums(NamedTuple):
    """Sums over the elements of a leaf and over all ranks."""

    lost: jax.Array  # of squares
    meant: jax.Array  # of squares
    gone: jax.Array  # the number of elements that were lost altogether
    size: jax.Array  # the number of elements


def _sums(leaf: jax.Array, residual: jax.Array, mean: jax.Array, lost: jax.Array) -> Sums:
    meant = leaf.astype(jnp.float32) + residual[0]
    lost = jnp.where(jnp.isfinite(mean), lost[0], jnp.nan)  # elsewhere the residual stayed unchanged: it is no error
    gone = (meant != 0) & ~(jnp.abs(lost) < jnp.abs(meant))
    return Sums(
        lost=(lost**2).sum(), meant=(meant**2).sum(), gone=gone.sum(dtype=jnp.float32), size=jnp.float32(leaf.size)
    )


def measure(
    net: Transport,
    leaves: Leaves,
    codecs: list[list[Codec] | None],
    residuals: list[Any],
    mean: list[Any],
    lost: list[Any],
) -> Telemetry:
    """Returns the telemetry of one exchange.

    Args:
      net: the transport over the ranks.
      leaves: the gradients that were sent.
      codecs: for each leaf, the codecs that encode it, outermost axis first. An empty list: the leaf travels raw. None:
        the leaf is skipped.
      residuals: the residuals before the exchange, [1, *shape].
      mean: the mean of each leaf.
      lost: the residuals after the exchange.
    """
    encoded = [i for i, given in enumerate(codecs) if given]
    sums = {}
    if encoded:
        each = (jnp.stack(_sums(leaves.values[i], residuals[i], mean=mean[i], lost=lost[i])) for i in encoded)
        rows = jnp.stack(_compat.match_varying(*each))
        # The axes of the mesh over which leaves are sharded, in the same order in every process.
        shards = tuple(sorted(_compat.varying_axes(rows) - set(net.names), key=str))
        rows = lax.psum(rows, shards) if shards else rows
        rows = plain_reduce("compressed_psum", rows, net, mean=False)
        sums = {i: Sums(*row) for i, row in zip(encoded, rows)}
    nothing = jnp.zeros((), jnp.float32)
    share = lambda part, whole: part / jnp.maximum(whole, TINY)
    each = [sums.get(i) for i in range(len(leaves.values))]
    vnmse = [nothing if found is None else share(found.lost, found.meant) for found in each]
    saturation = [nothing if found is None else share(found.gone, found.size) for found in each]
    uncompressed = [0 if given is None else x.size * x.dtype.itemsize for x, given in zip(leaves.values, codecs)]
    sent = [
        given[0].wire_bytes(x.shape, x.dtype) if given else size
        for x, given, size in zip(leaves.values, codecs, uncompressed)
    ]
    scalars = lambda numbers: leaves.tree([jnp.float32(number) for number in numbers])
    return Telemetry(
        vnmse=leaves.tree(vnmse),
        saturation=leaves.tree(saturation),
        bytes=scalars(sent),
        uncompressed=scalars(uncompressed),
    )

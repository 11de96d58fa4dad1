"""What a step lost, as arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat
from jaxcgx.codecs.base import Codec
from jaxcgx.optim.leaves import Leaves

TINY = 2.0**-126


class Telemetry(NamedTuple):
    """What a step lost, per leaf and over all ranks: trees like the gradients, of float32[].

    Lost is what feedback keeps: with own="raw" both roundings of an exchange, with own="encoded" the first one alone,
    in a hierarchy those over the outermost axis. Meant are the gradients with the residuals.
    """

    vnmse: Any  # |lost|^2 / |meant|^2
    # The share of elements that are not 0 and whose error is at least as large as they are, or not finite. Codecs take
    # their scale from the range and clip nothing: these are the small elements beside a large one.
    saturation: Any
    bytes: Any  # of the encoded leaf, in a hierarchy for the outermost axis
    uncompressed: Any  # bytes of the leaf


class Sums(NamedTuple):
    """What is added up over a leaf and over all ranks."""

    lost: jax.Array  # squares
    meant: jax.Array  # squares
    gone: jax.Array  # elements that were lost altogether
    size: jax.Array  # elements


def _sums(leaf: jax.Array, residual: jax.Array, mean: jax.Array, lost: jax.Array) -> Sums:
    meant = leaf.astype(jnp.float32) + residual[0]
    lost = jnp.where(jnp.isfinite(mean), lost[0], jnp.nan)  # elsewhere the residual says nothing: it stayed as it was
    gone = (meant != 0) & ~(jnp.abs(lost) < jnp.abs(meant))
    return Sums(
        lost=(lost**2).sum(), meant=(meant**2).sum(), gone=gone.sum(dtype=jnp.float32), size=jnp.float32(leaf.size)
    )


def measure(
    names: tuple[Any, ...],
    leaves: Leaves,
    codecs: list[list[Codec] | None],
    residuals: list[Any],
    mean: list[Any],
    lost: list[Any],
) -> Telemetry:
    """The telemetry of one exchange.

    Args:
      names: the axes of the ranks.
      leaves: the gradients that were sent.
      codecs: for each leaf the codecs that encode it, outermost axis first; none: raw; None: it is skipped.
      residuals: those before the exchange, [1, *shape].
      mean: what came back.
      lost: the residuals after the exchange.
    """
    encoded = [i for i, given in enumerate(codecs) if given]
    sums = {}
    if encoded:
        each = (jnp.stack(_sums(leaves.values[i], residuals[i], mean=mean[i], lost=lost[i])) for i in encoded)
        rows = jnp.stack(_compat.match_varying(*each))
        # Over the ranks and the axes of the mesh that leaves are sharded over, in the same order in every process.
        shards = sorted(_compat.varying_axes(rows) - set(names), key=str)
        rows = lax.psum(rows, (*names, *shards))
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

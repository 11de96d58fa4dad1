"""What a step lost, as arrays."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxcgx import _compat

TINY = 2.0**-126


class Telemetry(NamedTuple):
    """Of each leaf, over all ranks; trees like the gradients, of float32[].

    vnmse: the squared error of what was sent over the squares of what was meant, gradients and residuals: |lost|^2 /
    |meant|^2.
    Lost is what feedback keeps: with own="raw" both roundings of an exchange together, with own="encoded" the first
    alone, and of a
    hierarchy those over the outermost axis alone. saturation: the share of elements that were lost altogether, off by
    as much as
    they are or more, or not finite, and not 0 themselves. (Codecs take their scale from the range and clip nothing: it
    is the
    small elements beside a large one that they have no step for.) bytes: of the leaf as it is encoded, for the
    outermost axis of a
    hierarchy. uncompressed: of the leaf.
    """

    vnmse: Any
    saturation: Any
    bytes: Any
    uncompressed: Any


def measure(net, tree, leaves, codecs, residuals, mean, lost):
    """Telemetry of leaves with their residuals, [1, ...], before and after. codecs: of each leaf, outermost first;
    none: raw."""

    def one(leaf, residual, mean, lost):
        meant = leaf.astype(jnp.float32) + residual[0]
        lost = jnp.where(jnp.isfinite(mean), lost[0], jnp.nan)  # there the residual says nothing: it stayed as it was
        gone = (meant != 0) & ~(jnp.abs(lost) < jnp.abs(meant))
        return jnp.stack([(lost**2).sum(), (meant**2).sum(), gone.sum(dtype=jnp.float32), jnp.float32(leaf.size)])

    coded = [i for i, codec in enumerate(codecs) if codec]
    found = {}
    if coded:
        rows = jnp.stack(_compat.match_varying(*(one(leaves[i], residuals[i], mean[i], lost[i]) for i in coded)))
        found = dict(
            zip(coded, lax.psum(rows, tuple({*net.names, *_compat.varying_axes(rows)})))
        )  # and over the axes of shards
    nothing = jnp.zeros((), jnp.float32)
    share = lambda i, part, whole: found[i][part] / jnp.maximum(found[i][whole], TINY) if i in found else nothing
    vnmse, saturation = ([share(i, *parts) for i in range(len(leaves))] for parts in ((0, 1), (2, 3)))
    uncompressed = [x.size * x.dtype.itemsize for x in leaves]
    sent = [
        codec[0].wire_bytes(x.shape, x.dtype) if codec else size for x, codec, size in zip(leaves, codecs, uncompressed)
    ]
    scalars = lambda values: tree.unflatten([jnp.float32(value) for value in values])
    return Telemetry(tree.unflatten(vnmse), tree.unflatten(saturation), scalars(sent), scalars(uncompressed))

"""What a step lost, as arrays."""
from typing import Any, NamedTuple

import jax.numpy as jnp


class Telemetry(NamedTuple):
    """Of each leaf, over all ranks; trees like the gradients, of float32[].

    vnmse: the squared error of what was sent over the squares of what was meant, gradients and residuals: |lost|^2 / |meant|^2,
    both roundings of an exchange together. saturation: the share of elements that were lost altogether, off by as much as
    they are or more, or not finite, and not 0 themselves. (Codecs take their scale from the range and clip nothing: it is the small elements beside a large
    one that they have no step for.) bytes: of the leaf as it is encoded, for the outermost axis of a hierarchy. uncompressed: of the leaf.
    """

    vnmse: Any
    saturation: Any
    bytes: Any
    uncompressed: Any


def measure(net, tree, leaves, codecs, residuals, mean, lost):
    """Telemetry of leaves with their residuals before and after. codecs: of each leaf, outermost first; none if it is raw."""
    def one(leaf, residual, mean, lost):
        meant = leaf.astype(jnp.float32) + residual
        lost = jnp.where(jnp.isfinite(mean), lost, jnp.nan)  # there the residual says nothing: it stayed as it was
        gone = (meant != 0) & ~(jnp.abs(lost) < jnp.abs(meant))
        return jnp.stack([(lost**2).sum(), (meant**2).sum(), gone.sum(dtype=jnp.float32)])

    coded = [i for i, codec in enumerate(codecs) if codec]
    sums = net.plain_psum(jnp.stack([one(leaves[i], residuals[i], mean[i], lost[i]) for i in coded])) if coded else []
    found = dict(zip(coded, sums))
    nothing = jnp.zeros((), jnp.float32)
    vnmse = [found[i][0] / jnp.where(found[i][1] == 0, 1, found[i][1]) if i in found else nothing for i in range(len(leaves))]
    saturation = [found[i][2] / (x.size * net.size) if i in found else nothing for i, x in enumerate(leaves)]
    uncompressed = [x.size * x.dtype.itemsize for x in leaves]
    sent = [codec[0].wire_bytes(x.shape, x.dtype) if codec else size for x, codec, size in zip(leaves, codecs, uncompressed)]
    scalars = lambda values: tree.unflatten([jnp.float32(value) for value in values])
    return Telemetry(tree.unflatten(vnmse), tree.unflatten(saturation), scalars(sent), scalars(uncompressed))

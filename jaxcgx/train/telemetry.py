"""Measures the errors of compression in a step, as arrays."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.exchange.reduce import plain_reduce
from jaxcgx.exchange.routes import Travel
from jaxcgx.train.exchange import At
from jaxcgx.typing import PyTree

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

    vnmse: PyTree
    saturation: PyTree
    bytes: PyTree
    uncompressed: PyTree


def measure(travel: Travel, at: At, grads: PyTree, before: PyTree, mean: PyTree, lost: PyTree) -> Telemetry:
    """Returns the telemetry of one exchange.

    `before` and `lost` are the residuals before and after it. `mean` has the mean of each leaf, or a rank's slice of
    it.
    """
    routes, net = travel.routes, travel.net
    leaves, scalars = routes.each(grads), [jnp.zeros((), jnp.float32)] * len(routes.leaves)
    vnmse, saturation = list(scalars), list(scalars)
    if encoded := [i for i, route in enumerate(routes.leaves) if route.encoded]:
        given, means, after = routes.each(before), routes.each(mean), routes.each(lost)
        # A rank has only its slice of the mean of a scattered leaf. Its own gradient takes the place of the mean.
        seen = [x if travel.way.cuts(i) else m for i, (x, m) in enumerate(zip(leaves, means))]
        each = [_sums(leaves[i], given[i], seen[i], after[i]) if i in encoded else None for i in range(len(leaves))]
        nothing = jnp.zeros(4, jnp.float32)
        rows = at.of_shards([nothing if x is None else x for x in each])
        total = jnp.stack(_compat.match_varying(*(rows[i] for i in encoded)))
        for i, row in zip(encoded, plain_reduce(routes.op, total, net, mean=False)):
            vnmse[i] = row[0] / jnp.maximum(row[1], TINY)
            saturation[i] = row[2] / jnp.maximum(row[3], TINY)
    whole = [0 if route.skipped else route.nbytes for route in routes.leaves]
    outermost = lambda codec: codec[next(iter(net.parts))] if isinstance(codec, Mapping) else codec
    wire = lambda route: outermost(route.codec).wire_bytes(route.shape, route.dtype)
    sent = [wire(route) if route.encoded else size for route, size in zip(routes.leaves, whole)]
    numbers = lambda counts: routes.tree.unflatten([jnp.float32(n) for n in counts])
    return Telemetry(routes.tree.unflatten(vnmse), routes.tree.unflatten(saturation), numbers(sent), numbers(whole))


def _sums(leaf: jax.Array, residual: jax.Array, mean: jax.Array, lost: jax.Array) -> jax.Array:
    """Returns a rank's sums: the squares of what is lost and meant, the elements that are lost altogether, and all."""
    meant = leaf.astype(jnp.float32) + residual
    lost = jnp.where(jnp.isfinite(mean), lost, jnp.nan)  # elsewhere the residual stayed unchanged: it is no error
    gone = (meant != 0) & ~(jnp.abs(lost) < jnp.abs(meant))
    sums = (lost**2).sum(), (meant**2).sum(), gone.sum(dtype=jnp.float32), jnp.float32(leaf.size)
    return jnp.stack(_compat.match_varying(*sums))

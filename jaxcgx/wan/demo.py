"""demo: decoupled momentum (DeMo). Ranks exchange the largest coefficients of their momenta's cosine transforms."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx.checks import check_integer, check_number, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.coding import decode, encode
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.topk import TopK
from jaxcgx.exchange.sums import same
from jaxcgx.native import ops
from jaxcgx.native.layout import layout_of
from jaxcgx.optim.leaves import check_arrays, check_real, flatten
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.settings import check_ranks
from jaxcgx.typing import AxisName

if TYPE_CHECKING:
    import optax

OP = "demo"


class DemoState(NamedTuple):
    """The state of `demo`.

    Attributes:
      momentum: like the gradients, `float32[ranks, *shape]`: the part that hasn't been sent yet.
    """

    momentum: Any

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields with arrays per rank, and whether `reshard_state` keeps their sum or their mean over the ranks."""
        return {"momentum": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that have the structure of the parameters and are the same on every rank."""
        return ()

    @property
    def telemetry(self) -> None:
        """None, because DeMo reports no telemetry."""

    @property
    def factors(self) -> None:
        """None, because DeMo has no PowerSGD factors."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a leaf, which is cut as a matrix, and the cosine transforms of the blocks."""

    shape: tuple[int, ...]
    side: int  # the longest side of a block

    @property
    def matrix(self) -> tuple[int, int]:
        return (math.prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)

    @property
    def block(self) -> tuple[int, ...]:
        """The sides of a block: for each side of the matrix, its largest divisor up to `side`."""
        return tuple(max(d for d in range(1, self.side + 1) if n % d == 0) for n in self.matrix)

    def coefficients(self, x: jax.Array) -> jax.Array:
        """Returns the coefficients of each block, [blocks, elements]."""
        (m, n), (a, b) = self.matrix, self.block
        parts = x.reshape(m // a, a, n // b, b)
        found = jnp.einsum("aibj,ki,lj->abkl", parts, *map(_cosines, (a, b)), precision="highest")
        return found.reshape(-1, a * b)

    def restore(self, coefficients: jax.Array) -> jax.Array:
        """Returns the leaf that has these coefficients."""
        (m, n), (a, b) = self.matrix, self.block
        parts = coefficients.reshape(m // a, n // b, a, b)
        return jnp.einsum("abkl,ki,lj->aibj", parts, *map(_cosines, (a, b)), precision="highest").reshape(self.shape)


@functools.cache
def _cosines(n: int) -> np.ndarray:
    """Returns the matrix of the orthonormal cosine transform (DCT-II) of n numbers, with a row per coefficient."""
    k, i = np.ogrid[:n, :n]
    rows = np.sqrt(2 / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
    return np.where(k == 0, np.sqrt(1 / n), rows).astype(np.float32)


def demo(
    axis_name: AxisName,
    *,
    decay: float = 0.999,
    side: int = 64,
    k: int = 32,
    values: Codec = Raw(),
    axis_size: int | None = None,
) -> "optax.GradientTransformation":
    """Makes an optax.GradientTransformation that sends only the largest parts of every rank's momentum (DeMo).

        train = cgx.make_train_step(loss_fn, optax.sign_sgd(1e-3), mesh, compress=cgx.wan.demo)

    Every rank has its own momentum, m = decay * m + gradient. It sends the largest coefficients of the cosine transform
    of each block of m, and subtracts them from m. All ranks add up the coefficients that they receive. Each sum is
    divided by the number of ranks that sent this coefficient. DeMo's step is the sign of the result. `optax.sign_sgd`
    after this transformation takes the sign.

    The published rule is m = decay * m + learning rate * gradient. With a constant rate, the steps are the same. With a
    schedule of rates, they differ.

    Args:
      axis_name: the axis of the ranks, or a tuple of axes; or an MPI communicator.
      decay: the decay of the momentum, from 0 to 1.
      side: the longest side of a block. A leaf is cut as a matrix whose rows have the length of its last dimension.
        The sides of blocks divide the sides of the matrix evenly.
      k: the number of coefficients of a block that a rank sends.
      values: the codec of the coefficients that are sent. It must round to nearest. Sign() sends one bit each.
      axis_size: as in `compress_gradients`.
    """
    optax, ranks = import_optax(OP), check_ranks(OP, axis_name)
    check_number(OP, "decay", decay, lambda x: 0 <= x <= 1, "a number from 0 to 1")
    check_integer(OP, "side", side, 1)
    check_integer(OP, "k", k, 1)
    codec = lambda n: TopK(min(1.0, (k - 0.5) / n), values=values)
    if codec(k).stochastic:
        raise wrong(OP, "values", "a codec that rounds to nearest", repr(values), 'leave out rounding="stochastic"')

    def init(params: Any) -> DemoState:
        params, rows = check_arrays(OP, "params", params), ranks.rows(axis_size)
        zeros = lambda x: _compat.vary(jnp.zeros((rows.size, *x.shape), jnp.float32), rows.varying)
        check_real(OP, "params", params)
        return DemoState(jax.tree_util.tree_map(zeros, params))

    def update(updates: Any, state: DemoState, params: Any = None) -> tuple[Any, DemoState]:
        net, leaves = ranks.net(), flatten(check_arrays(OP, "updates", updates))
        blocks = [Blocks(x.shape, side) for x in leaves.values]
        kept: list[Any] = []
        payloads: list[jax.Array] = []
        for x, old, cut in zip(leaves.values, leaves.match(state.momentum), blocks):
            moved = decay * old[0] + x.astype(jnp.float32)
            found = cut.coefficients(moved)
            payloads.append(jax.vmap(lambda c: encode(c, codec(c.size)))(found))
            left = moved - cut.restore(_decoded(payloads[-1], codec, cut))
            kept.append(jnp.where(jnp.isfinite(left), left, old[0])[None])
        means: list[jax.Array] = []
        for x, rows, cut in zip(leaves.values, _gathered(net, payloads), blocks):
            each = jax.vmap(lambda row, cut=cut: _decoded(row, codec, cut))(rows)
            senders = jax.vmap(lambda row, cut=cut: _sent(row, codec, cut))(rows).sum(0)
            mean = cut.restore(each.sum(0) / jnp.maximum(senders, 1))
            means.append(same(mean.astype(x.dtype), net.names))
        return leaves.tree(means), DemoState(leaves.tree(kept))

    return optax.GradientTransformation(init, update)


def _decoded(payload: jax.Array, codec: Any, cut: Blocks) -> jax.Array:
    """Returns the coefficients of a leaf's blocks that a rank sent. All other coefficients are 0."""
    n = math.prod(cut.block)
    return jax.vmap(lambda row: decode(row, codec(n), (n,), jnp.float32))(payload)


def _sent(payload: jax.Array, codec: Any, cut: Blocks) -> jax.Array:
    """Returns 1 for the coefficients of a leaf's blocks that a rank sent, also for those that are 0. Otherwise 0."""
    n = math.prod(cut.block)
    layout, ones = layout_of(codec(n), (n,), jnp.float32), jnp.ones(n, jnp.float32)
    return jax.vmap(lambda row: 1 - ops.clear(layout, row[None], [ones])[0])(payload)


def _gathered(net: Any, payloads: Sequence[jax.Array]) -> list[jax.Array]:
    """Gathers every rank's payloads in one exchange. Returns an array [ranks, *shape] for each payload."""
    rows = net.all_gather(jnp.concatenate([payload.reshape(-1) for payload in payloads]))
    ends = np.cumsum([payload.size for payload in payloads])[:-1]
    parts = jnp.split(rows, ends, axis=1)
    return [part.reshape(len(rows), *payload.shape) for part, payload in zip(parts, payloads)]

"""Demo: exchanges only the largest parts of every rank's momentum (DeMo, decoupled momentum)."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxcgx.checks import check_integer, check_number, check_real, set_field, wrong
from jaxcgx.codecs import Codec, Raw, TopK, decode, encode
from jaxcgx.codecs.topk import check_values
from jaxcgx.exchange.message import Carry
from jaxcgx.exchange.primitives import same
from jaxcgx.native import ops
from jaxcgx.native.layout import layout_of
from jaxcgx.train.exchange import At
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.base import Transport
from jaxcgx.typing import Params, PyTree

OP = "Demo"


@dataclasses.dataclass(frozen=True)
class CosineBlocks:
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
        (m, n), (a, b) = self.matrix, self.block
        parts = x.reshape(m // a, a, n // b, b)
        found = jnp.einsum("aibj,ki,lj->abkl", parts, *map(_cosines, (a, b)), precision="highest")
        return found.reshape(-1, a * b)

    def restore(self, coefficients: jax.Array) -> jax.Array:
        (m, n), (a, b) = self.matrix, self.block
        parts = coefficients.reshape(m // a, n // b, a, b)
        return jnp.einsum("abkl,ki,lj->aibj", parts, *map(_cosines, (a, b)), precision="highest").reshape(self.shape)


@functools.cache
def _cosines(n: int) -> np.ndarray:
    """Returns the matrix of the orthonormal cosine transform (DCT-II) of n numbers, with a row per coefficient."""
    k, i = np.ogrid[:n, :n]
    rows = np.sqrt(2 / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
    return np.where(k == 0, np.sqrt(1 / n), rows).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Demo:
    """An exchange that sends only the largest parts of every rank's momentum (DeMo).

        train = cgx.make_train_step(loss_fn, optax.sign_sgd(1e-3), mesh, cgx.wan.Demo())

    Every rank has its own momentum, m = decay * m + gradient. It sends the largest coefficients of the cosine transform
    of each block of m, and subtracts them from m. All ranks add up the coefficients that they receive. Each sum is
    divided by the number of ranks that sent this coefficient. DeMo's step is the sign of the result. `optax.sign_sgd`
    takes the sign.

    The published rule is m = decay * m + learning rate * gradient. With a constant rate, the steps are the same. With a
    schedule of rates, they differ.

    Args:
      decay: the decay of the momentum, from 0 to 1.
      side: the longest side of a block. A leaf is cut as a matrix whose rows have the length of its last dimension.
        The sides of blocks divide the sides of the matrix evenly.
      k: the number of coefficients of a block that a rank sends.
      values: the codec of the coefficients that are sent. It must round to nearest. Sign() sends one bit each.
    """

    decay: float = 0.999
    _: dataclasses.KW_ONLY
    side: int = 64
    k: int = 32
    values: Codec = Raw()
    plan: ClassVar[None] = None
    early: ClassVar[bool] = False
    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_field(self, "decay", check_number, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        set_field(self, "side", check_integer, 1)
        set_field(self, "k", check_integer, 1)
        set_field(self, "values", check_values)
        if self._codec(self.k).stochastic:
            expected, remedy = "a codec that rounds to nearest", 'leave out rounding="stochastic"'
            raise wrong(OP, "values", expected, repr(self.values), remedy)

    def _codec(self, n: int) -> TopK:
        return TopK(min(1.0, (self.k - 0.5) / n), values=self.values)

    def init(self, params: Params) -> ExchangeState:
        check_real(OP, "params", params)
        # The part of the momentum that hasn't been sent yet, in float32.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        return ExchangeState(Carry(momentum=zeros), None)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[PyTree, ExchangeState]:
        return grads, state

    def end(self, ticket: PyTree, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        leaves, tree = jax.tree.flatten(ticket)
        blocks = [CosineBlocks(x.shape, self.side) for x in leaves]
        kept, payloads, means = list[jax.Array](), list[jax.Array](), list[jax.Array]()
        for x, old, cut in zip(leaves, tree.flatten_up_to(state.own.momentum), blocks):
            moved = self.decay * old + x.astype(jnp.float32)
            found, codec = cut.coefficients(moved), self._codec(math.prod(cut.block))
            payloads.append(jax.vmap(lambda c, codec=codec: encode(c, codec))(found))
            left = moved - cut.restore(_decoded(payloads[-1], codec, cut))
            kept.append(jnp.where(jnp.isfinite(left), left, old))
        for x, rows, cut in zip(leaves, _gathered(at.net, payloads), blocks):
            codec = self._codec(math.prod(cut.block))
            each = jax.vmap(lambda row, cut=cut, codec=codec: _decoded(row, codec, cut))(rows)
            senders = jax.vmap(lambda row, cut=cut, codec=codec: _sent(row, codec, cut))(rows).sum(0)
            mean = cut.restore(each.sum(0) / jnp.maximum(senders, 1))
            means.append(same(mean.astype(x.dtype), at.net.names))
        return tree.unflatten(means), ExchangeState(Carry(momentum=tree.unflatten(kept)), None)


def _decoded(payload: jax.Array, codec: TopK, cut: CosineBlocks) -> jax.Array:
    """Returns the coefficients of a leaf's blocks that a rank sent. All other coefficients are 0."""
    n = math.prod(cut.block)
    return jax.vmap(lambda row: decode(row, codec, (n,), jnp.float32))(payload)


def _sent(payload: jax.Array, codec: TopK, cut: CosineBlocks) -> jax.Array:
    """Returns 1 for the coefficients of a leaf's blocks that a rank sent, also for those that are 0. Otherwise 0."""
    n = math.prod(cut.block)
    layout, ones = layout_of(codec, (n,), jnp.float32), jnp.ones(n, jnp.float32)
    return jax.vmap(lambda row: 1 - ops.clear(layout, row[None], [ones])[0])(payload)


def _gathered(net: Transport, payloads: list[jax.Array]) -> list[jax.Array]:
    """Gathers every rank's payloads in one exchange. Returns an array [ranks, *shape] for each payload."""
    row, unravel = ravel_pytree(payloads)
    return jax.vmap(unravel)(net.all_gather(row))

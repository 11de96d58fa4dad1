"""The values that travel through an exchange: a message with its keys and its state, its stages, and its sum."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.codecs.base import Codec
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout
from jaxcgx.native.rules import digest
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport
from jaxcgx.typing import STATIC, ArrayLike, PyTree

# The state that a sum keeps from call to call, as fields of `Carry` and `Message`. Each rank has its own residuals and
# momentum. Factors are the same on every rank: like sums, they don't vary over the axes of the exchange. A permutation
# keeps what was sent and received (ENDS).
STATE, SHARED, ENDS = ("residuals", "momentum", "factors"), ("factors",), ("sent", "received")
# Numbers that are folded into keys: for the first encoding, the encoding of a sum, the hops of a ring or a tree, and
# the backward pass, whose number no stage of a hierarchy has.
FIRST, SUM, HOP, BACK = 0, 1, 3, 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What a collective keeps from call to call: trees like its argument, with None for leaves that keep nothing.

    None in place of a tree: no leaf keeps anything of its kind.

    Attributes:
      residuals: float32, this rank's own compression errors, which the next sum adds to its input.
      momentum: this rank's own momentum, like the leaves.
      factors: the factors of low-rank codecs, the same on every rank.
      sent: float32, what `compressed_ppermute` last sent from this rank, as the receiver has it.
      received: float32, what it last brought to this rank.
    """

    residuals: PyTree = None
    momentum: PyTree = None
    factors: PyTree = None
    sent: PyTree = None
    received: PyTree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Message:
    """Leaves that travel together, with their key and their state. A pytree.

    `ids` are the numbers of the leaves in the caller's tree. The noise of a leaf depends on its id, so its bits don't
    depend on the grouping of leaves into messages. `key` is two words, or None if the codec draws no noise. Each kind
    of state is a list with one array per leaf, or None.
    """

    ids: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    leaves: list[Any]
    key: jax.Array | None = None
    back: jax.Array | None = None  # the key of the transpose; None: it is made from `key`
    residuals: list[Any] | None = None  # float32, in the shapes of the leaves
    momentum: list[Any] | None = None  # like the leaves
    factors: list[Any] | None = None  # float32[rank, n]
    sent: list[Any] | None = None  # float32, in the shapes of the leaves
    received: list[Any] | None = None  # the same

    def replace(self, **changes: Any) -> "Message":
        return dataclasses.replace(self, **changes)

    def layout(self, codec: Codec, chunks: int = 1, shares: tuple[int, ...] | None = None) -> Layout:
        return dataclasses.replace(Layout.of(codec, self.leaves, chunks=chunks, ids=self.ids), shares=shares)

    def carried(self) -> "Message":
        """Returns the message with its residuals added to its leaves. Its residuals are the losses of this addition."""
        if self.residuals is None:
            return self
        leaves, lost = carry_over(self.leaves, self.residuals)
        return self.replace(leaves=leaves, residuals=lost)

    def encode(self, layout: Layout, key: jax.Array | None) -> tuple[jax.Array, list[Any] | None]:
        """Returns (the encoded leaves with their residuals added, the new residuals or None)."""
        if self.residuals is None:
            return ops.encode(layout, self.leaves, key), None
        return ops.encode_fed(layout, self.leaves, residuals=self.residuals, key=key)

    def add(
        self,
        layout: Layout,
        payloads: jax.Array,
        lost: list[Any] | None,
        how: "Sum",
        *,
        chunk: ArrayLike,
        place: ArrayLike,
        key: Any,
    ) -> tuple[jax.Array, list[Any] | None]:
        """Adds the payloads of a chunk, of which this rank sent number `place`. Returns (the encoded sum, the losses).

        With feedback and `own` "raw", the loss of the first encoding of a rank's own part is added back to the sum.
        Only the loss of encoding that sum remains.
        """
        if lost is not None and how.own == "raw":
            return ops.reduce_fed(layout, payloads, lost, chunk=chunk, divisor=how.divisor, key=key)
        own = ops.Own(self.leaves, place) if how.replaces_own(layout.codec) else None
        return ops.reduce_encoded(layout, payloads, chunk=chunk, own=own, divisor=how.divisor, key=key), lost


class Stage(NamedTuple):
    net: Transport
    codec: Codec
    schedule: str | Overlay
    backward: Codec  # the codec of the transpose

    def compared(self, message: "Message", how: object) -> "Stage":
        """Returns the stage with a transport that compares the kind of message, and `how` it is sent, on all ranks."""
        leaves = [(x.shape, x.dtype) for x in message.leaves]
        what = digest(self.schedule, self.codec, message.ids, leaves, how)
        return self._replace(net=self.net.labelled(int(what)))

    def transposed(self) -> "Stage":
        return Stage(self.net, self.backward, schedule="one_shot", backward=self.codec)


class Sum(NamedTuple):
    """The settings of a sum.

    `own` says how a rank adds its own part to the sum that it owns: "raw" or "encoded". The sum is divided by `divisor`
    in float32 before its last encoding. With `leader`, one rank per node takes part in the outermost exchange.
    """

    own: str = "raw"
    divisor: float = 1.0
    leader: bool = False

    def replaces_own(self, codec: Codec) -> bool:
        """Returns whether a rank's own part replaces its payload. With a raw codec, the payload equals the part."""
        return self.own == "raw" and not codec.raw


class Sent(NamedTuple):
    layout: Layout
    payload: jax.Array

    def clear(self, arrays: list[Any]) -> list[Any]:
        """Returns arrays, which have the shapes of the leaves, with 0 where an element was sent."""
        return ops.clear(dataclasses.replace(self.layout, dtypes=tuple(x.dtype for x in arrays)), self.payload, arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BegunMessage:
    """A message on its way over its outermost stage, in one round or two. None in place of what isn't needed."""

    outer: Any  # what the transport has begun: the exchange of this round
    # Whether a second round follows. It needs the results of this one.
    more: bool = dataclasses.field(default=False, metadata=STATIC)
    residuals: list[Any] | None = None  # of the first encoding. A message without inner stages has them itself
    before: list[Any] | None = None  # in a hierarchy with feedback: the residuals before
    payload: jax.Array | None = None  # what this rank has sent for the leaves, by a sparse codec
    leaves: list[Any] | None = None  # the leaves that the second round needs
    # Of low-rank codecs, in the second round: for each stack of leaves, the basis and this rank's Q.
    factors: list[tuple[jax.Array, jax.Array]] | None = None

    def replace(self, **changes: Any) -> "BegunMessage":
        return dataclasses.replace(self, **changes)


class Summed(NamedTuple):
    leaves: list[Any]
    residuals: list[Any] | None = None  # a list like the leaves; None without feedback
    sent: Any = None  # a `Sent`; None if no momentum needs it


def carry_over(leaves: list[Any], residuals: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns (leaves plus residuals in the leaves' dtypes; what rounding loses, or the residual where not finite)."""
    whole = [x.astype(jnp.float32) + r for x, r in zip(leaves, residuals)]
    carried = [w.astype(x.dtype) for w, x in zip(whole, leaves)]
    lost = [w - c.astype(jnp.float32) for w, c in zip(whole, carried)]
    return carried, [jnp.where(jnp.isfinite(x), x, r) for x, r in zip(lost, residuals)]


def fold(key: jax.Array | None, *numbers: int | jax.Array) -> jax.Array | None:
    """Returns the key folded with the numbers, as two words. No key gives None. An offset is kept as the third word."""
    if key is None:
        return None
    folded = jax.random.wrap_key_data(key[:2], impl="threefry2x32")
    for n in numbers:
        folded = jax.random.fold_in(folded, n)
    words = jax.random.key_data(folded)
    return words if key.shape == (2,) else jnp.concatenate([words, key[2:]])


def back_key(key: jax.Array | None, dimensions: int = 0) -> jax.Array | None:
    """Returns the key of the backward pass. vmap has added `dimensions` in front of the key."""
    make: Any = lambda words: fold(words, BACK)
    for _ in range(dimensions if key is not None else 0):
        make = jax.vmap(make)
    return make(key)


def first(key: jax.Array | None, codec: Codec, net: Transport) -> jax.Array | None:
    """Returns the key of a rank's first encoding. No two encodings of an element share their noise, with one exception.

    For correlated rounding (Suresh et al., 2022), rank r of N ranks rounds with the noise u_r = (pi_r + u) / N, where u
    is uniform in [0, 1) and pi is a random permutation of 0, ..., N - 1. So u_r is uniform as well, and each rank's
    rounding is unbiased. But the ranks' noise is evenly spread in [0, 1), so that their errors cancel.

    Here u_r = (U + s_r / N) mod 1. U is drawn from the key for each element, and is the same on all ranks. s is a
    random permutation of the ranks, one per message. Each element has the distribution above: the integer part of N U
    rotates s, and the fraction of N U is u. Errors of different elements are uncorrelated, because they are unbiased
    for each s. Kernels only add the offset s_r / N, which is the third word of the key.
    """
    if key is None or not codec.correlated:
        return fold(key, FIRST, net.rank)
    order: Any = fold(key, FIRST, 0)
    words: Any = fold(key, FIRST, 1)
    offsets = np.uint32(2**16 * np.arange(net.size) // net.size)
    shares = jax.random.permutation(jax.random.wrap_key_data(order, impl="threefry2x32"), offsets)
    return jnp.append(words, shares[net.rank])


def fold_stage(key: jax.Array | None, number: int, others: Sequence[Stage]) -> jax.Array | None:
    """Returns the key of stage `number`. Ranks with different places along the stages `others` draw different noise."""
    rank = 0
    for stage in others if key is not None else ():
        rank = rank * stage.net.size + stage.net.rank
    return fold(key, number, rank)

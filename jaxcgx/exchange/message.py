"""The values that travel through an exchange: a message, its stages, and how its sum is formed."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.codecs.base import Codec
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout
from jaxcgx.native.rules import digest
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport

# The state that a sum keeps from call to call, as fields of the message. Each rank has its own residuals and momentum.
# Factors are the same on every rank: like sums, they don't vary over the axes of the exchange.
OWN, SHARED = ("residuals", "momentum"), ("factors",)
STATE = OWN + SHARED


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves", "key", "back", *STATE], meta_fields=["ids"])
@dataclasses.dataclass(frozen=True)
class Message:
    """Leaves that travel together, with their key and their state. A pytree.

    `ids` are the numbers of the leaves in the caller's tree. The noise of a leaf depends on its id, so its bits don't
    depend on the grouping of leaves into messages. `key` is two words, or None if the codec draws no noise. Each kind
    of state is a list with one array per leaf, or None.
    """

    ids: tuple[int, ...]
    leaves: list[Any]
    key: jax.Array | None = None
    back: jax.Array | None = None  # the key of the transpose; None: it is made from `key`
    residuals: list[Any] | None = None  # float32, in the shapes of the leaves
    momentum: list[Any] | None = None  # like the leaves
    factors: list[Any] | None = None  # float32[rank, n]

    def replace(self, **changes: Any) -> "Message":
        return dataclasses.replace(self, **changes)

    def layout(self, codec: Codec, chunks: int = 1, shares: tuple[int, ...] | None = None) -> Layout:
        return dataclasses.replace(Layout.of(codec, self.leaves, chunks=chunks, ids=self.ids), shares=shares)


class Stage(NamedTuple):
    """One exchange of a message."""

    net: Transport
    codec: Codec
    schedule: str | Overlay
    backward: Codec  # the codec of the transpose

    def compared(self, message: "Message", how: Any) -> "Stage":
        """Returns the stage with a transport that compares the kind of message, and `how` it is sent, on all ranks."""
        leaves = [(x.shape, x.dtype) for x in message.leaves]
        what = digest(self.schedule, self.codec, message.ids, leaves, how)
        return self._replace(net=self.net.labelled(int(what)))

    def transposed(self) -> "Stage":
        """Returns the stage of the transpose."""
        return Stage(self.net, self.backward, schedule="one_shot", backward=self.codec)


class Sum(NamedTuple):
    """The settings of a sum.

    `own` says how a rank adds its own part to the sum that it owns: "raw" or "encoded". The sum is divided by `divisor`
    in float32 before its last encoding. With `leader`, one rank per node takes part in the outermost exchange.
    """

    own: str = "raw"
    divisor: float = 1.0
    leader: bool = False

    def with_codec(self, codec: Codec) -> "Sum":
        """Returns the settings of a codec's sums. If sums have room for all elements, own parts are encoded, too."""
        return self._replace(own="encoded") if codec.sums_grow else self

    def replaces_own(self, codec: Codec) -> bool:
        """Returns whether a rank's own part replaces its payload. With a raw codec, the payload equals the part."""
        return self.own == "raw" and not codec.raw


class Sent(NamedTuple):
    """The payload that this rank sent for its leaves."""

    layout: Layout
    payload: jax.Array

    def clear(self, arrays: list[Any]) -> list[Any]:
        """Returns arrays, which have the shapes of the leaves, with 0 where an element was sent."""
        return ops.clear(dataclasses.replace(self.layout, dtypes=tuple(x.dtype for x in arrays)), self.payload, arrays)


class Summed(NamedTuple):
    """A sum over one transport."""

    leaves: list[Any]
    residuals: Any = None  # a list like the leaves; None without feedback
    sent: Any = None  # a `Sent`; None if no momentum needs it


def carry(leaves: list[Any], residuals: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns (the leaves plus their residuals, in the leaves' dtypes; the losses of rounding to these dtypes).

    Where a loss is not finite, the residual stays unchanged, as in the kernels.
    """
    whole = [x.astype(jnp.float32) + r for x, r in zip(leaves, residuals)]
    carried = [w.astype(x.dtype) for w, x in zip(whole, leaves)]
    lost = [w - c.astype(jnp.float32) for w, c in zip(whole, carried)]
    return carried, [jnp.where(jnp.isfinite(x), x, r) for x, r in zip(lost, residuals)]

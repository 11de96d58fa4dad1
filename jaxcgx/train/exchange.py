"""What an exchange is: init, begin, end. And the place of a step in which it runs."""

import dataclasses
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxcgx.codecs.base import Codec
from jaxcgx.plan import Plan
from jaxcgx.transports.base import Transport
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import Params, PyTree


@dataclasses.dataclass(frozen=True)
class At:
    """What an exchange may ask of its step."""

    net: Transport
    params: Params = None
    loss: jax.Array | None = None
    dims: tuple[int | None, ...] = ()  # for each leaf, the dimension of which a rank wants only its slice of the mean


class Exchange(Protocol):
    """How every rank's gradients become their mean. A frozen dataclass: static under jit.

    `begin` and `end` run on one rank, without the axis of the rows. `early`: `begin` needs nothing of this step, so the
    step calls it before the loss, with None in place of the gradients; `end` then gets this step's gradients.
    """

    plan: Plan
    early: ClassVar[bool]

    def init(self, params: Params) -> ExchangeState: ...

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[PyTree, ExchangeState]: ...

    def end(self, ticket: PyTree, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]: ...


def as_exchange(given: "Exchange | Codec | Plan | dict") -> Exchange:
    """A codec or a plan is an exchange with feedback."""
    from jaxcgx.train.feedback import Feedback

    return Feedback(given) if isinstance(given, Codec | Plan | dict) else given


def zeros(shapes: PyTree) -> PyTree:
    return jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def seed_words(seed: int) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))

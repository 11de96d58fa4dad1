"""The outer optimizer, which moves the outer parameters by the mean of the centers' outer gradients."""

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_number, check_positive, wrong
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import as_phases
from jaxcgx.train.feedback import TINY, warn_of_loss
from jaxcgx.train.state import ExchangeState
from jaxcgx.train.transformation import UnknownRanksError
from jaxcgx.train.update import check_optimizer, import_optax
from jaxcgx.typing import Params, PyTree
from jaxcgx.wan.diloco.fragments import wide

if TYPE_CHECKING:
    import optax


def as_optimizer(op: str, outer: "str | optax.GradientTransformation") -> "optax.GradientTransformation":
    """Returns the outer optimizer that a user gave as an optax.GradientTransformation or by its name."""
    optax = import_optax(op)
    if outer == "sgd":
        return optax.sgd(1.0)
    if outer == "nesterov":
        return optax.sgd(0.7, momentum=0.9, nesterov=True)
    check_optimizer(op, "outer", outer, "'nesterov', 'sgd' or an optax.GradientTransformation")
    return outer  # pyright: ignore[reportReturnType]  (no str has these functions)


def as_outer_plan(op: str, plan: Any, keep: bool) -> Plan:
    """Returns the plan of outer gradients, which is one for the whole training. `keep`: with feedback."""
    phase, *others = as_phases(op, plan)
    if others:
        raise wrong(op, "plan", "one plan for the whole training", "a schedule of plans", "pass one of them")
    if not keep:
        warn_of_loss(op, "keep", phase.plan.codecs, "write keep=True")
    return phase.plan


def init_outer(op: str, outer: "optax.GradientTransformation", params: Params) -> PyTree:
    """Returns the initial state of the outer optimizer. Checks that it can be the same in every center."""
    is_exchange = lambda x: isinstance(x, ExchangeState)
    try:
        state = outer.init(params)
        rows = any(map(is_exchange, jax.tree.leaves(state, is_leaf=is_exchange)))
    except UnknownRanksError:  # in Decoupled, where no axis of ranks is in sight
        state, rows = None, True
    if rows:
        remedy = f"pass the plain one, such as optax.sgd(0.7, momentum=0.9, nesterov=True), and a plan to {op}"
        expected = "an optimizer whose state all centers share"
        raise wrong(op, "outer", expected, "one with arrays per rank", remedy) from None
    return state


def outer_step(
    outer: "optax.GradientTransformation", params: Params, state: PyTree, mean: PyTree
) -> tuple[Params, PyTree, PyTree]:
    """Returns (the outer parameters, the optimizer's state, its update) after a step with a mean of outer gradients."""
    from optax import apply_updates  # an optional dependency

    mean = jax.tree.map(lambda d, x: d.astype(x.dtype), mean, params)
    step, state = outer.update(mean, state, params)
    return apply_updates(params, step), state, step


def matched_nesterov(rate: float = 1.0, momentum: float = 0.9, rho: float = 0.0) -> "optax.GradientTransformation":
    """Makes an optimizer, SGD with Nesterov's momentum, that moves as far as plain SGD with the rate `rate`.

    At the same learning rate, SGD with momentum moves 1 + momentum / (1 - momentum * rho) times as far as plain SGD. To
    compare different momenta, use the same `rate`.

    Args:
      rate: the rate of SGD without momentum.
      momentum: Nesterov's momentum, from 0 to below 1.
      rho: the correlation of outer gradients from round to round, above -1 and below 1. The metric `rho` measures it.
    """
    op = "matched_nesterov"
    check_positive(op, "rate", rate)
    check_number(op, "momentum", momentum, lambda x: 0 <= x < 1, "a number from 0 to below 1")
    check_number(op, "rho", rho, lambda x: -1 < x < 1, "a number above -1 and below 1")
    return import_optax(op).sgd(rate / (1 + momentum / (1 - momentum * rho)), momentum=momentum, nesterov=True)


class OuterTelemetry(NamedTuple):
    """The metrics of the last outer step of a fragment. D is the mean of outer gradients, E the D of the round before.

    Attributes:
      gain: `-<step, D> / |D|^2`: the length of the step in the direction of -D, in units of the norm of D. With
        Nesterov's momentum, it is the learning rate times A_t.
      rho: `<D, E> / (|D| |E|)`: the correlation of D and E.
    """

    gain: jax.Array
    rho: jax.Array

    @classmethod
    def of(cls, mean: PyTree, step: PyTree, before: PyTree) -> Self:
        """Returns the metrics of the optimizer's update `step` with this mean of outer gradients. `before` is E."""
        square = _dot(mean, mean)
        norms = jnp.sqrt(square) * jnp.sqrt(_dot(before, before))
        gain = -_dot(step, mean) / jnp.maximum(square, TINY)
        return cls(gain, rho=_dot(mean, before) / jnp.maximum(norms, TINY))


def _dot(x: PyTree, y: PyTree) -> jax.Array:
    products = jax.tree.map(lambda a, b: (wide(a) * wide(b)).sum(), x, y)
    return jax.tree.reduce(jnp.add, products, jnp.zeros((), jnp.float32))

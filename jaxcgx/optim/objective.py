"""The caller's loss function in the one form that a training step differentiates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxcgx.checks import spell_array, wrong
from jaxcgx.optim.accumulation import OP, Given
from jaxcgx.optim.model_state import check_renewed


def make_objective(
    loss_fn: Callable[..., Any], *, has_state: bool, has_aux: bool, weighted: bool
) -> Callable[..., Any]:
    """A function (params, Given), of all parameters, that returns (loss, (weight, model state, aux)).

    Args:
      loss_fn: a function (params, batch) of all parameters, as `make_train_step` explains it.
      has_state: whether it takes a model state behind the parameters, and returns a new one.
      has_aux: whether it returns auxiliary outputs.
      weighted: whether it returns (sum, weight) in place of a loss. The loss is then the sum.
    """

    def objective(params: Any, given: Given) -> tuple[Any, tuple[Any, Any, Any]]:
        # A copy of the tree: variables of NNX can be changed only where JAX traces what made them.
        states = (jax.tree_util.tree_map(lambda x: x, given.model_state),) if has_state else ()
        keys = () if given.key is None else (given.key,)
        found = loss_fn(params, *states, given.batch, *keys)
        weight = model_state = aux = None
        try:
            if has_state and has_aux:
                loss, (model_state, aux) = found
            elif has_state:
                loss, model_state = found
            elif has_aux:
                loss, aux = found
            else:
                loss = found
            if weighted:
                loss, weight = loss
        except (TypeError, ValueError):
            rest = ", (model state, aux)" if has_state and has_aux else ", model state" if has_state else ", aux"
            value = ("(sum, weight)" if weighted else "loss") + rest * (has_state or has_aux)
            raise wrong(OP, "loss_fn", f"a function that returns ({value})", f"one that returns {found}") from None
        loss = _scalar(loss, "sum" if weighted else "loss")
        if weighted:
            loss, weight = loss.astype(float), _constant(_scalar(weight, "weight").astype(float))
        return loss, (weight, check_renewed(given.model_state, model_state), aux)

    return objective


def _scalar(x: Any, what: str) -> jax.Array:
    """A loss, a sum or a weight, checked. JAX doesn't differentiate others."""
    expected, got, remedy = f"a function whose {what} is a number", None, ""
    if not (hasattr(x, "shape") or isinstance(x, int | float)):
        got, remedy = f"a {type(x).__name__}", "pass has_aux=True for (loss, aux), weighted=True for (sum, weight)"
    elif jnp.shape(x):
        got, remedy = spell_array(x), "return a mean, as in losses.mean()"
    elif what != "weight" and not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        expected, got = f"a function whose {what} is of floating point", spell_array(x)
    if got is not None:
        raise wrong(OP, "loss_fn", expected, got, remedy, kind=TypeError)
    return jnp.asarray(x)


@jax.custom_jvp
def _constant(weight: Any) -> Any:
    """A weight. It is known only behind the last micro-batch, so gradients can't have a part of its own."""
    return weight


def _constant_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        expected, got = "a weight that doesn't depend on the parameters", "one that does"
        raise wrong(OP, "loss_fn", expected, got, "return (sum, jax.lax.stop_gradient(weight))")
    return primals[0], tangents[0]


_constant.defjvp(_constant_jvp, symbolic_zeros=True)

"""Brings the caller's loss function, in all of its forms, into the one form that a training step differentiates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxcgx.checks import spell_array, wrong
from jaxcgx.optim.accumulation import OP, Given, wide
from jaxcgx.optim.model_state import check_renewed


def make_objective(
    loss_fn: Callable[..., Any], *, has_state: bool, has_aux: bool, weighted: bool
) -> Callable[..., Any]:
    """Returns a function (params, Given) -> (loss, (weight, model state, aux)), where `params` are all parameters.

    Args:
      loss_fn: the caller's function (params, batch) of all parameters. `make_train_step` explains its forms.
      has_state: whether `loss_fn` takes a model state after the parameters, and returns a new one.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      weighted: whether `loss_fn` returns (sum, weight) in place of a loss. The result then has the sum as its loss.
    """

    def objective(params: Any, given: Given) -> tuple[Any, tuple[Any, Any, Any]]:
        # The loss function gets a copy, because NNX variables can be changed only in the trace that made them.
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
            loss = loss.astype(wide(loss.dtype))
            weight = _constant(_scalar(weight, "weight").astype(loss.dtype))
        return loss, (weight, check_renewed(given.model_state, model_state), aux)

    return objective


def _scalar(x: Any, what: str) -> jax.Array:
    """Returns a loss, a sum or a weight as an array, after a check that it is a scalar that JAX can use."""
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
    """Returns the weight, which must not depend on the parameters: its derivative is an error.

    The sum of all weights is known only after the last micro-batch, so gradients can't include its derivative.
    """
    return weight


def _constant_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        expected, got = "a weight that doesn't depend on the parameters", "one that does"
        raise wrong(OP, "loss_fn", expected, got, "return (sum, jax.lax.stop_gradient(weight))")
    return primals[0], tangents[0]


_constant.defjvp(_constant_jvp, symbolic_zeros=True)

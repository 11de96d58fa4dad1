"""The caller's loss function in the one form that a training step differentiates."""

from collections.abc import Callable
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.optim.accumulation import OP, Given
from jaxcgx.optim.model_state import check_renewed


def make_objective(
    loss_fn: Callable[..., Any], names: tuple[Any, ...], *, has_state: bool, has_aux: bool
) -> Callable[..., Any]:
    """A function (params, Given), of all parameters, that returns (loss, (model state, aux)).

    Args:
      loss_fn: a function (params, batch) of all parameters, as `make_train_step` explains it.
      names: the axes of the ranks.
      has_state: whether it takes a model state behind the parameters, and returns a new one.
      has_aux: whether it returns auxiliary outputs.
    """

    def objective(params: Any, given: Given) -> tuple[Any, tuple[Any, Any]]:
        # A copy of the tree: variables of NNX can be changed only where JAX traces what made them.
        states = (jax.tree_util.tree_map(lambda x: x, given.model_state),) if has_state else ()
        keys = () if given.key is None else (given.key,)
        found = loss_fn(params, *states, given.batch, *keys)
        model_state = aux = None
        try:
            if has_state and has_aux:
                loss, (model_state, aux) = found
            elif has_state:
                loss, model_state = found
            elif has_aux:
                loss, aux = found
            else:
                loss = found
        except (TypeError, ValueError):
            rest = "(model state, aux)" if has_state and has_aux else "model state" if has_state else "aux"
            raise wrong(OP, "loss_fn", f"a function that returns (loss, {rest})", f"one that returns {found}") from None
        return loss, (check_renewed(given.model_state, model_state, _compat.tracked_axes(names)), aux)

    return objective

"""The optimizer's update, of the parameters that are trained."""

import jax
import optax

from jaxcgx.optim.frozen import join, part
from jaxcgx.train.division import Division
from jaxcgx.typing import Params, PyTree, Specs


def update(
    optimizer: optax.GradientTransformationExtraArgs, means: PyTree, opt_state: PyTree, params: Params, skipped: PyTree,
    loss: jax.Array, division: Division, specs: Specs = None
) -> tuple[Params, PyTree]:
    """Returns (parameters, optimizer state)."""
    means, (trained, frozen) = part(means, skipped)[0], part(params, skipped)
    run = lambda means, state, trained: optimizer.update(means, state, trained, value=loss)
    updates, opt_state = division.updates(run, specs)(means, opt_state, trained)
    return join(optax.apply_updates(trained, updates), frozen), opt_state

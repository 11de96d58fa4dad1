"""LoCo's variants of error feedback, which change the residuals after a step."""

from typing import Any

import jax
import jax.numpy as jnp


def damp(beta: float | jax.Array, old: list[Any], lost: list[Any]) -> list[Any]:
    """Returns moving averages of the errors of steps, as new residuals. Leaves without a residual have None."""
    return [None if r is None else (1 - beta) * r + beta * new for r, new in zip(old, lost)]


def forget(every: int | jax.Array, count: Any, residuals: list[Any]) -> list[Any]:
    """Returns the residuals, or zeros if the number of steps, `count`, is a multiple of `every`.

    `count` may be None if no leaf has a residual.
    """
    return [None if r is None else jnp.where(count % every == 0, 0, r) for r in residuals]

"""What residuals keep of a step's loss (LoCo's variants of error feedback)."""

from typing import Any

import jax
import jax.numpy as jnp


def damp(beta: float | jax.Array, old: list[Any], lost: list[Any]) -> list[Any]:
    """A moving average of what steps lost; None for a leaf without residual."""
    return [None if r is None else (1 - beta) * r + beta * new for r, new in zip(old, lost)]


def forget(every: int | jax.Array, count: Any, residuals: list[Any]) -> list[Any]:
    """The residuals, or zeros after every `every` of `count` steps. Without residuals there may be no count."""
    return [None if r is None else jnp.where(count % every == 0, 0, r) for r in residuals]

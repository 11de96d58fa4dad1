"""Rows that ranks have exchanged: [ranks, ...]."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def add(rows: jax.Array) -> jax.Array:
    """Returns the sum of the rows, added in their order. Floats shorter than 32 bits are added in float32."""
    short = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize < 4
    return functools.reduce(jnp.add, rows.astype(jnp.float32) if short else rows).astype(rows.dtype)


def exchanged_shape(operation: str, x: Any, ranks: int) -> tuple[int, ...]:
    """Returns the shape of the result of an engine's exchange of x."""
    return (ranks, *x.shape) if operation == "all_gather" else x.shape


def mapped_axes(operation: str) -> tuple[int, int]:
    """Returns vmap's axis in the operand and in the result of an engine's exchange: behind the axis of the ranks."""
    return int(operation == "all_to_all"), int(operation in ("all_to_all", "all_gather"))

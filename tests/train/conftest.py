"""Fixtures of the tests of train."""

import jax
import pytest


@pytest.fixture
def promotion():
    """optax and flax rely on type promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield

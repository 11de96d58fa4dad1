"""Tests that chunks are balanced. tests/cpp/test_layout.cc has the other rules, and kernels have the same layouts."""

import jax.numpy as jnp
import pytest

import jaxcgx as cgx
from jaxcgx.native.layout import Layout


@pytest.mark.parametrize("chunks", (2, 3, 7, 8))
def test_chunks_are_balanced_by_bytes(chunks):
    sizes = (1_000_000, *(10,) * 100, 50_000)
    for codec in (cgx.MaxMin(4), cgx.ByteGrad(), cgx.Raw(), cgx.Cast()):
        layout = Layout(codec, tuple((n,) for n in sizes), (jnp.float32,) * len(sizes), chunks)
        whole = Layout(codec, layout.shapes, layout.dtypes, 1).chunk_bytes
        # The limit is an even share, one more unit, and padding to 16 bytes for each of the small leaves.
        assert layout.chunk_bytes <= whole / chunks + 4 * 520 + 16 * (len(sizes) + 2)

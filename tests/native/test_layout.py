"""Tests layouts: every element is in one piece, nothing overlaps, and chunks are balanced."""

import itertools

import hypothesis
import jax.numpy as jnp
import pytest
from helpers import CODECS
from hypothesis import strategies as st

import jaxcgx as cgx
from jaxcgx.native.layout import UNIT, Layout

layouts = st.builds(
    lambda codec, sizes, chunks, dtype: Layout(codec, tuple((n,) for n in sizes), (dtype,) * len(sizes), chunks),
    st.sampled_from(CODECS),
    st.lists(st.integers(0, 5000) | st.integers(0, 2**33), min_size=1, max_size=5),
    st.integers(1, 9) | st.integers(1, 1000),
    st.sampled_from(("float32", "float16")),
)


@hypothesis.given(layouts)
def test_every_element_is_in_one_piece_and_nothing_overlaps(layout):
    codec, next_element = layout.codec, [0] * len(layout.sizes)
    for pieces in layout.pieces:
        ends = []
        for p in pieces:
            assert p.start == next_element[p.leaf] and p.start % (codec.bucket_size or UNIT) == 0
            next_element[p.leaf] += p.coded + p.raw
            codes = sum(n * codec.code_bytes(size, layout.dtypes[p.leaf]) for _, n, size in p.buckets())
            ends.append((p.meta, p.meta + sum(n for _, n, _ in p.buckets() if codec.meta) * 4 * codec.meta))
            ends.append((p.codes, p.codes + codes))
            ends.append((p.tail, p.tail + p.raw * layout.dtypes[p.leaf].itemsize))
            assert p.codes % 16 == 0 and p.tail % 16 == 0
        ends = sorted(e for e in ends if e[0] < e[1])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        assert not ends or ends[-1][1] <= layout.chunk_bytes
    assert tuple(next_element) == layout.sizes
    assert layout.chunk_bytes % 16 == 0


@pytest.mark.parametrize("chunks", (2, 3, 7, 8))
def test_chunks_are_balanced_by_bytes(chunks):
    sizes = (1_000_000, *(10,) * 100, 50_000)
    for codec in (cgx.MaxMin(4), cgx.ByteGrad(), cgx.Raw(), cgx.Cast()):
        layout = Layout(codec, tuple((n,) for n in sizes), (jnp.float32,) * len(sizes), chunks)
        whole = Layout(codec, layout.shapes, layout.dtypes, 1).chunk_bytes
        # The limit is an even share, one more unit, and padding to 16 bytes for each of the small leaves.
        assert layout.chunk_bytes <= whole / chunks + 4 * 520 + 16 * (len(sizes) + 2)


def test_a_leaf_smaller_than_the_chunks():
    layout = Layout(cgx.MaxMin(4, 2), ((17,),), (jnp.float32,), 8)
    assert sum(p.coded for pieces in layout.pieces for p in pieces) == 17
    assert max(sum(p.coded for p in pieces) for pieces in layout.pieces) <= 4

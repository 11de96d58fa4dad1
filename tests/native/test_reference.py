"""Tests that kernel and reference agree byte for byte, for every kernel that this processor runs.

The operations are encode, decode, reduce and feedback.
"""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    CODECS,
    FULL,
    SPARSE,
    assert_same_bytes,
    assert_same_values,
    assert_trees,
    each_codec,
    native_key,
    normal,
    one_nan,
    reference_decode,
    reference_encode,
    reference_reduce,
)
from hypothesis import strategies as st
from strategies import LAYOUTS, layouts, spaces, values

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout
from jaxcgx.native.reference import Reduce

# One layout for each kind of codec, and for each rounding of MaxMin and Micro.
KINDS = {
    (type(one.codec), isinstance(one.codec, cgx.MaxMin | cgx.Micro) and one.codec.stochastic): one
    for one in LAYOUTS
    if one.codec.rotate == isinstance(one.codec, cgx.Eden)
}


def with_all_kinds(layouts):
    """Returns the layouts and, in the full form of the tests, those of KINDS."""
    return list(dict.fromkeys([*layouts, *KINDS.values()])) if FULL else layouts


def with_few_chunks(layouts):
    """Returns the layouts, by default with two chunks and with one in turn, because each chunk is compiled."""
    return [
        Layout(one.codec, one.shapes, one.dtypes, one.chunks if FULL else 2 - i % 2, one.ids)
        for i, one in enumerate(layouts)
    ]


def each_layout(layouts):
    return pytest.mark.parametrize("layout", layouts, ids=lambda layout: f"{layout.codec}-{layout.chunks}")


def of_ranks(ranks, layout, seed, exponent, special):
    """Returns the leaves of each rank. Only rank 1 has special values."""
    return [values(layout, seed + r, exponent, special if r == 1 else "none") for r in range(ranks)]


def residuals_of(layout, seed, exponent):
    return [x.astype(jnp.float32) for x in values(layout, seed ^ 1, exponent, "none")]


def check_encode(layout, leaves, residuals):
    """Checks that both encode the same with feedback, and returns the payload."""
    key = native_key(layout.codec)
    payload, new = ops.encode_fed(layout, leaves, residuals, key)
    expected, expected_new = reference_encode(layout, True)(leaves, residuals, key)
    assert_same_bytes(payload, expected)
    assert_trees(assert_same_values, new, expected_new)
    return payload


def check_decode(layout, payload):
    assert_trees(assert_same_values, ops.decode(layout, payload), reference_decode(layout)(payload))


def check_reduce(layout, payloads, residuals, chunk, divisor):
    key = native_key(layout.of_sum(len(payloads)).codec)
    got, new = ops.reduce_fed(layout, payloads, residuals, chunk=chunk, divisor=divisor, key=key)
    operands = Reduce(payloads, jnp.array([chunk, 0], jnp.int32), residuals=residuals, key=key)
    expected, expected_new = reference_reduce(layout, divisor, True)(operands)
    assert_same_bytes(one_nan(layout, got, chunk), one_nan(layout, expected, chunk))
    assert_trees(assert_same_values, new, expected_new)


# Compiling the reference for a layout takes most of the time, so by default a fifth of the layouts is tested.
# test_golden.py has every codec.
@each_layout(LAYOUTS if FULL else LAYOUTS[::5])
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 4)
@hypothesis.given(**spaces)
def test_encode_and_decode(layout, seed, exponent, special):
    leaves, key = values(layout, seed, exponent, special), native_key(layout.codec)
    payload = ops.encode(layout, leaves, key)
    assert_same_bytes(payload, reference_encode(layout)(leaves, key))
    check_decode(layout, payload)


@each_layout(with_few_chunks(with_all_kinds(LAYOUTS[:: 5 if FULL else 7])))
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 6)
@hypothesis.given(**spaces, lost=st.integers(-150, 20))
def test_encode_with_feedback(layout, seed, exponent, special, lost):
    check_encode(layout, values(layout, seed, exponent, special), residuals_of(layout, seed, lost))


@pytest.mark.parametrize(
    ("layout", "with_own"),
    list(zip(with_few_chunks(with_all_kinds(LAYOUTS[1::10][:4])), (True, False) * len(LAYOUTS))),
    ids=lambda v: str(getattr(v, "codec", v)),
)
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 10)
@hypothesis.given(**spaces, rank=st.integers(0, 2))
def test_reduce_encoded(layout, with_own, seed, exponent, special, rank):
    key, ranks = native_key(layout.codec), of_ranks(3, layout, seed, exponent, special)
    payloads = jnp.stack([ops.encode(layout, leaves, key) for leaves in ranks])
    run, own = reference_reduce(layout, 3.0, True), ranks[rank] if with_own else None
    for chunk in range(layout.chunks):
        got = ops.reduce_encoded(
            layout, payloads[:, chunk], chunk=chunk, own=own and ops.Own(own, rank), divisor=3, key=key
        )
        operands = Reduce(payloads[:, chunk], jnp.array([chunk, rank], jnp.int32), own=own, key=key)
        assert_same_bytes(got, run(operands)[0])


@each_layout(with_few_chunks(KINDS.values()))
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 10)
@hypothesis.given(**spaces, lost=st.integers(-150, 20) | st.integers(-12, 3))
def test_reduce_with_feedback(layout, seed, exponent, special, lost):
    key, ranks = native_key(layout.codec), of_ranks(3, layout, seed, exponent, special)
    payloads, residuals = jnp.stack([ops.encode(layout, x, key) for x in ranks]), residuals_of(layout, seed, lost)
    for chunk in range(layout.chunks):
        check_reduce(layout, payloads[:, chunk], residuals, chunk, divisor=1.0 if layout.chunks == 2 else 3.0)


# By default only a few codecs are tested. test_golden.py has sums of every kind of codec.
@pytest.mark.parametrize(
    ("codec", "with_own"), list(zip(CODECS if FULL else CODECS[::6], (False, True) * len(CODECS))), ids=str
)
def test_reduce_to_leaves(codec, with_own):
    layout = Layout(codec, ((40, 5), (9,)), (jnp.dtype("float32"), jnp.dtype("float16")))
    ranks = [values(layout, seed, 0, "none") for seed in range(5)]
    key = native_key(codec)
    payloads = jnp.stack([ops.encode(layout, leaves, key)[0] for leaves in ranks])
    own = ranks[2] if with_own else None
    got = ops.reduce(layout, payloads, own=own and ops.Own(own, 2), divisor=5)
    operands = Reduce(payloads, jnp.array([0, 2], jnp.int32), own=own)
    assert_trees(assert_same_values, got, reference_reduce(layout, 5.0, False)(operands))


# Only two codecs, because a selection compiles slowly. They cover each estimate, values with and without buckets, noise
# and a raw tail, and sums of both kinds.
@pytest.mark.parametrize(("codec", "chunks"), [(SPARSE[1], 2), (SPARSE[2], 1 + FULL)], ids=["sampled", "fitted"])
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 10)
@hypothesis.given(**spaces)
def test_sparse_codecs(codec, chunks, seed, exponent, special):
    layout, last = Layout(codec, ((30, 31), (700,)), ("float32", "bfloat16"), chunks=chunks), chunks - 1
    ranks, residuals = of_ranks(2, layout, seed, exponent, special), residuals_of(layout, seed, exponent)
    payload = check_encode(layout, ranks[1], residuals)
    check_decode(layout, payload)
    payloads = jnp.stack([ops.encode(layout, ranks[0], native_key(codec)), payload])
    check_reduce(layout, payloads[:, last], residuals, chunk=last, divisor=3.0)


@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 10)
@hypothesis.given(layout=layouts(), key=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), **spaces)
def test_any_layout(layout, key, seed, exponent, special):
    leaves = values(layout, seed, exponent, special)
    key = jnp.array(key, jnp.uint32) if layout.codec.stochastic else None
    payload = ops.encode(layout, leaves, key)
    assert payload.shape == (layout.chunks, layout.chunk_bytes)
    assert_same_bytes(payload, reference_encode.__wrapped__(layout)(leaves, key))
    # with any codes after an encoder's metadata, the kernel and the reference decode the same
    codes = np.random.RandomState(seed).randint(0, 256, payload.shape).astype(np.uint8)
    for c, pieces in enumerate(layout.pieces):
        end_of_metadata = min((p.codes for p in pieces), default=0)
        codes[c, :end_of_metadata] = np.asarray(payload)[c, :end_of_metadata]
    assert_trees(assert_same_values, ops.decode(layout, codes), reference_decode.__wrapped__(layout)(codes))


@pytest.mark.parametrize("codec", **each_codec([c for c in CODECS if not c.meta and c != cgx.Lossless()]))
def test_any_bytes_decode(codec):
    """test_lossless.py and test_topk.py have the other codecs without metadata."""
    layout = Layout(codec, ((700,), (33,)), ("float32", "bfloat16"))
    check_decode(layout, np.random.RandomState(0).randint(0, 256, (1, layout.chunk_bytes)).astype(np.uint8))


@pytest.mark.parametrize(
    "codec",
    [
        cgx.MaxMin(4, 100_000, "stochastic"),
        cgx.Sign(100_000),
        cgx.ByteGrad(),
        cgx.AbsMax(8, 70_000),
        cgx.Micro(),
        cgx.Micro("nvfp4", "stochastic"),
    ],
    ids=repr,
)
def test_buckets_larger_than_a_task(codec):
    leaves = [normal(250_000)]
    layout = Layout.of(codec, leaves, chunks=2)
    check_decode(layout, check_encode(layout, leaves, [normal(250_000, seed=1)]))

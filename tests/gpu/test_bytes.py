"""Tests that the GPU gives the bytes of the CPU for encode, decode, reduce and feedback.

The messages are those with which the kernels are compared with the reference.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_golden
from golden import patches
from helpers import (
    CODECS,
    KEY,
    assert_same_bytes,
    assert_same_values,
    assert_trees,
    each_codec,
    native_key,
    normal,
    one_nan,
)
from hypothesis import strategies as st
from strategies import LAYOUTS, layouts, spaces, values

import jaxcgx as cgx
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import Layout
from jaxcgx.native.reference import Encode

pytestmark = pytest.mark.gpu
EXAMPLES = hypothesis.settings().max_examples


def both(f, *args):
    """Returns the results of f on the CPU and on the GPU."""
    return [jax.tree.map(np.asarray, f(*jax.device_put(args, jax.devices(platform)[0]))) for platform in ("cpu", "gpu")]


def on_cpu(make):
    """Makes the numbers on the CPU, because these tests don't depend on what a GPU does with denormals."""

    @functools.wraps(make)
    def made(*args, **kwargs):
        with jax.default_device(jax.devices("cpu")[0]):
            return make(*args, **kwargs)

    return made


values, normal = on_cpu(values), on_cpu(normal)


def check_encode(layout, leaves, key, residuals=None):
    """Returns the payload. CPU and GPU must agree on the payload of the leaves, and on the leaves of the payload."""
    operands = Encode(leaves, residuals, key)
    (payload, new), (got, got_new) = both(functools.partial(test_golden.encode_by_kernels, layout), operands)
    # Residuals make sums; without them, raw numbers are copied.
    sent = functools.partial(one_nan, layout) if residuals is not None else np.asarray
    assert_same_bytes(sent(got), sent(payload))
    for a, b in zip(got_new, new, strict=True):
        assert_same_values(a, b)
    check_decode(layout, payload)
    return payload


def check_decode(layout, payload):
    assert_trees(assert_same_values, *both(functools.partial(ops.decode, layout), payload)[::-1])


def check_reduce(layout, payloads, own, rank, key, divisor=3.0):
    residuals = [normal(s, 7, scale=0.1) for s in layout.shapes]
    for chunk in range(layout.chunks):
        where = dict(chunk=chunk, divisor=divisor)
        run = lambda p, own, key: ops.reduce_encoded(layout, p, own=own and ops.Own(own, rank), key=key, **where)
        assert_same_bytes(*(one_nan(layout, p, chunk) for p in both(run, payloads[:, chunk], own, key)[::-1]))
        run = lambda p, residuals, key: ops.reduce_fed(layout, p, residuals, key=key, **where)
        (expected, new), (got, got_new) = both(run, payloads[:, chunk], residuals, key)
        assert_same_bytes(one_nan(layout, got, chunk), one_nan(layout, expected, chunk))
        assert_trees(assert_same_values, got_new, new)
        if layout.chunks == 1:
            run = lambda p, own: ops.reduce(layout, p, own=own and ops.Own(own, rank), divisor=divisor)
            assert_trees(assert_same_values, *both(run, payloads[:, chunk], own)[::-1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.codec}-{layout.chunks}")
@hypothesis.given(**spaces, lost=st.integers(-150, 20))
def test_encode_and_decode(layout, seed, exponent, special, lost):
    leaves = values(layout, seed, exponent, special)
    check_encode(layout, leaves, native_key(layout.codec))
    residuals = [x.astype(jnp.float32) for x in values(layout, seed ^ 1, lost, "none")]
    check_encode(layout, leaves, native_key(layout.codec), residuals)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.codec}-{layout.chunks}")
@pytest.mark.parametrize("with_own", (False, True))
@hypothesis.settings(max_examples=EXAMPLES // 4)
@hypothesis.given(**spaces, rank=st.integers(0, 2))
def test_reduce(layout, with_own, seed, exponent, special, rank):
    key = native_key(layout.codec)
    ranks = [values(layout, seed + r, exponent, special if r == 1 else "none") for r in range(3)]
    payloads = np.stack([check_encode(layout, leaves, key) for leaves in ranks])
    check_reduce(layout, payloads, ranks[rank] if with_own else None, rank, key)


@hypothesis.settings(max_examples=5 * EXAMPLES)
@hypothesis.given(layout=layouts(), key=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), **spaces)
def test_any_layout(layout, key, seed, exponent, special):
    leaves = values(layout, seed, exponent, special)
    payload = check_encode(layout, leaves, np.array(key, np.uint32) if layout.codec.stochastic else None)
    # Any bytes are tested, also as metadata. The wire format doesn't define how inexact products are rounded. AVX2's
    # kernels round them like the GPU.
    best = registration.MODULE.build_info()["kernels"]
    try:
        registration.MODULE.select_kernels("avx2")
    except ValueError:  # this processor has no AVX2
        return
    try:
        check_decode(layout, np.random.RandomState(seed).randint(0, 256, payload.shape).astype(np.uint8))
    finally:
        registration.MODULE.select_kernels(best)


SIZES = 1, 7, 31, 32, 33, 64, 100, 128, 256, 512, 1000, 1024, 2048, 2049, 4096, 5000, 8192, 8193, 20_000, 100_000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "make",
    [
        *(functools.partial(cgx.MaxMin, bits) for bits in range(1, 9)),
        *(functools.partial(cgx.AbsMax, bits) for bits in (2, 3, 4, 8)),
        lambda size: cgx.MaxMin(4, size, "stochastic"),
        lambda size: cgx.MaxMin(8, size, skip_incomplete=True),
        functools.partial(cgx.Float8, "e4m3"),
        functools.partial(cgx.Float8, "e5m2"),
        cgx.Sign,
    ],
    ids=lambda make: repr(make(1)),
)
def test_buckets_of_every_size(make, size):
    codec = make(size) if not isinstance(make, functools.partial) else make(bucket_size=size)
    leaves = [normal(123_457), normal(50_001, 1, jnp.bfloat16), normal(3, 2), normal(20_000, 3, jnp.float16)]
    layout, key = Layout.of(codec, leaves, chunks=3), native_key(codec)
    residuals = [normal(x.shape, 5, scale=0.1) for x in leaves]
    payload = check_encode(layout, leaves, key, residuals)
    check_reduce(layout, np.stack([payload] * 9), leaves, 4, key)


@pytest.mark.parametrize("size", (1, 700, 40_000, 3_000_000))
@pytest.mark.parametrize(
    "codec",
    [
        *(cgx.TopK(ratio, select=select) for ratio in (0.001, 0.01, 0.3) for select in ("exact", "sampled", "fitted")),
        cgx.TopK(0),
        cgx.TopK(1),
        cgx.TopK(0.05, cgx.MaxMin(4, 64, "stochastic"), "sampled", "top"),
        cgx.TopK(0.1, cgx.ByteGrad()),
        cgx.TopK(0.02, cgx.Cast(), pull="top"),
    ],
    ids=repr,
)
def test_the_largest_elements(codec, size):
    leaves = [normal(size), normal(size // 2 + 1, 1, jnp.bfloat16).at[::3].set(0.5), normal(100, 2, jnp.float16)]
    layout, key = Layout.of(codec, leaves, chunks=2), native_key(codec)
    payload = check_encode(layout, leaves, key, [normal(x.shape, 5, scale=0.1) for x in leaves])
    if size % 2:
        run = lambda p, own, key: ops.reduce_encoded(layout, p, chunk=1, own=ops.Own(own, 2), divisor=3, key=key)
        arrays = leaves
    else:
        run = lambda p, residuals, key: ops.reduce_fed(layout, p, residuals, chunk=1, divisor=3, key=key)
        arrays = [normal(x.shape, 7, scale=0.1) for x in leaves]
    results = both(run, np.stack([payload[1]] * 4), arrays, key)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert_same_bytes(b, a)
    for cleared in (payload, np.random.RandomState(0).randint(0, 256, payload.shape).astype(np.uint8)):  # any bytes
        for a, b in zip(*both(functools.partial(ops.clear, layout), cleared, leaves), strict=True):
            assert_same_bytes(b, a)


@pytest.mark.parametrize("codec", **each_codec(CODECS[::3]))
def test_a_thousand_leaves(codec):
    rng, dtypes = np.random.RandomState(0), [jnp.dtype(d) for d in ("float32", "bfloat16", "float16")]
    leaves = [rng.standard_normal(1 + 37 * i % 3000).astype(dtypes[i % 3]) for i in range(1000)]
    layout, key = Layout.of(codec, leaves, chunks=2), native_key(codec)
    payload = check_encode(layout, leaves, key, [np.zeros(x.shape, np.float32) for x in leaves])
    check_reduce(layout, np.stack([payload, payload]), None, 0, key)


@pytest.mark.parametrize("codec", **each_codec(CODECS[::3]))
def test_batches(codec):
    x = normal((2, 3, 700))
    keys = np.arange(12, dtype=np.uint32).reshape(2, 3, 2)
    layout = Layout(codec, ((700,),), (jnp.float32,), 2)

    def run(x, keys):
        payload = jax.vmap(jax.vmap(lambda x, k: ops.encode(layout, [x], k if codec.stochastic else None)))(x, keys)
        return payload, jax.vmap(jax.vmap(lambda p: ops.decode(layout, p)[0]))(payload)

    (expected, decoded), (got, got_decoded) = both(run, x, keys)
    assert_same_bytes(got, expected)
    assert_same_values(got_decoded, decoded)


def test_a_leaf_of_more_than_2_to_31_elements():
    gpu = jax.devices("gpu")[0]
    n, codec = 2**31 + 70_000, cgx.MaxMin(4)
    if gpu.memory_stats()["bytes_limit"] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    layout = Layout(codec, ((n,),), (jnp.bfloat16,))
    end = Layout(codec, ((70_000,),), (jnp.bfloat16,))
    tail = normal(70_000, dtype=jnp.bfloat16)
    # Zeros, except for the last elements. Slices are made by lax in a program, because indices that jnp, and since
    # 0.11.2 lax.slice, pass to a program have 32 bits.
    encode = lambda tail: ops.encode(layout, [jnp.concatenate([jnp.zeros(2**31, jnp.bfloat16), tail])])
    (leaf,) = ops.decode(layout, jax.jit(encode)(jax.device_put(tail, gpu)))
    expected = ops.decode(end, ops.encode(end, [jax.device_put(tail, jax.devices("cpu")[0])]))[0]
    part = lambda first, last: jax.jit(lambda leaf: jax.lax.slice(leaf, (first,), (last,)))(leaf)
    assert_same_bytes(part(2**31, n), expected)
    assert not part(0, 2**31).any()


def test_a_chunk_that_does_not_exist_does_no_harm():
    layout = Layout.of(cgx.MaxMin(4, 64), [normal(1000)], chunks=2)
    payloads = np.zeros((3, layout.chunk_bytes), np.uint8)
    for chunk, rank in ((2, 0), (-1, 0), (2**31 - 1, 0), (0, 3), (0, -1), (0, -(2**31))):
        own = ops.Own([normal(1000)], jnp.int32(rank))
        out = ops.reduce_encoded(layout, payloads, chunk=jnp.int32(chunk), own=own)
        assert jax.block_until_ready(out).shape == (layout.chunk_bytes,)
        assert np.isnan(ops.decode(layout, jnp.stack([out] * 2))[0][: layout.pieces[0][0].coded]).all()
    check_encode(layout, [normal(1000)], None)


@pytest.mark.parametrize("to", ("float16", "bfloat16"))
@pytest.mark.parametrize("leaf", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_every_half_decodes(to, leaf):
    halves = np.arange(2**16, dtype=np.uint16).view(np.uint8)[None]
    check_decode(Layout(cgx.Cast(to), ((2**16,),), (leaf,)), halves)


@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
@pytest.mark.parametrize("to", ("float16", "bfloat16"))
def test_floats_of_every_exponent_become_halves(to, rounding):
    """Ties after even and odd numbers, their neighbours at each bit that may be the last, random bits."""
    ties = 1 << np.arange(23)
    low = np.unique(
        [(before + ties + near) & 0x7FFFFF for before in (0 * ties, 2 * ties, 2**23 - 2 * ties) for near in (-1, 0, 1)]
    )
    bits = (np.arange(512, dtype=np.uint32)[:, None] << 23 | low.astype(np.uint32)).ravel()
    bits = np.concatenate([bits, np.random.RandomState(0).randint(0, 2**32, 2**20 + 77, np.uint32)])
    codec = cgx.Cast(to, rounding)
    check_encode(Layout(codec, (bits.shape,), (jnp.float32,)), [bits.view(np.float32)], native_key(codec))


@test_golden.each(test_golden.ENCODE)
def test_golden_encode(case):
    test_golden.check_encode(case, test_golden.encode_by_kernels)
    layout = test_golden.layout_of(case)
    check_decode(layout, np.asarray(test_golden.stacked(case, "payload")))


@test_golden.each(test_golden.REDUCE)
def test_golden_reduce(case):
    test_golden.test_kernels_reduce(case)


@pytest.mark.parametrize("width", (1, 2, 4, 8))
@pytest.mark.parametrize("kind", ("ones", "small", "any", "mixed"))
def test_patches(width, kind):
    rng = np.random.default_rng(width)
    for size in (1, 300, 2**15, 5 * 2**15 + 13):
        for share in (0, 0.003, 0.07, 0.4, 1):
            old = rng.integers(0, 256, size * width, np.uint8).view(f"u{width}")
            new = patches.change(rng, old, share, kind)
            patch = cgx.patch.encode(old, new)
            with jax.enable_x64(True):
                before, after = jax.device_put((old, new), jax.devices("gpu")[0])
            assert cgx.patch.encode(before, after) == patch
            place = before.unsafe_buffer_pointer()
            for donate in False, True:
                got = cgx.patch.apply(before, patch, donate=donate)
                np.testing.assert_array_equal(got, new)
            assert got.unsafe_buffer_pointer() == place and before.is_deleted()


def test_noise_is_that_of_the_cpu():
    layout = Layout.of(cgx.MaxMin(2, 128, "stochastic"), [normal(100_000)], ids=[2**31 - 1])
    check_encode(layout, [normal(100_000)], KEY)

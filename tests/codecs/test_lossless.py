"""Tests that Lossless keeps every bit, in the number of bytes that docs/wire-format.md specifies."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KEY, assert_same_bytes, assert_trees, normal, reference_decode, reference_encode
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange import primitives
from jaxcgx.exchange.message import Message, Stage, Sum
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout
from jaxcgx.transports.xla import Axes

DTYPES = "bfloat16", "float16", "float32"
CODEC = cgx.Lossless()


def used(x):
    """Returns the sent bytes of a payload per byte of the array. Tcp doesn't send the zeros at the payload's end."""
    return len(np.trim_zeros(np.asarray(cgx.encode(x, CODEC)), "b")) / x.nbytes


@pytest.mark.parametrize("dtype, share", [*zip(DTYPES, (0.68, 0.87, 0.84))])
def test_normal_numbers_take_fewer_bytes(dtype, share):
    for scale in (1e-3, 1.4e-3):
        x = normal(2**17, dtype=dtype, scale=scale)
        assert used(x) < share
        assert abs(CODEC.likely_bytes(x.shape, dtype) / x.nbytes / used(x) - 1) < 0.02


def test_other_distributions_take_fewer_bytes():
    rng = np.random.default_rng(0)
    for x, share in (
        (rng.laplace(size=2**16), 0.70),
        (rng.standard_t(3, 2**16), 0.70),
        (rng.standard_normal(2**16) * (rng.random(2**16) < 0.5), 0.79),  # including zeros
        (np.zeros(2**16), 0.001),
    ):
        assert used(jnp.asarray(x, jnp.bfloat16)) < share


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_words_take_no_more_than_the_bound(dtype):
    """Exponents that are all different need as many bytes as the array, and the heads of its blocks."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2**16, 2**17, dtype=np.uint16).view(jnp.dtype(dtype)))
    assert 0.99 < used(x) <= CODEC.wire_bytes(x.shape, dtype) / x.nbytes <= 1 + 2 / 1024
    assert_same_bytes(cgx.decode(cgx.encode(x, CODEC), CODEC, x.shape, dtype), x)


def test_wire_bytes():
    """Bytes are the heads of blocks, their planes, and the overflow, each padded to 16 bytes."""
    assert CODEC.wire_bytes((512,), "bfloat16") == 16 + (128 + 512) + 384
    assert CODEC.wire_bytes((512,), "float16") == 16 + (128 + 512 + 192) + 192
    assert CODEC.wire_bytes((512,), "float32") == 16 + (128 + 3 * 512) + 384
    assert CODEC.wire_bytes((4100,), "bfloat16") == 32 + 8 * 640 + 16 + 8 * 384 + 16
    assert CODEC.wire_bytes((0,), "float32") == 0


def test_kernels_and_reference_have_the_same_bytes():
    """The blocks include short ones, and ones whose digits just fit or just don't fit."""
    rng = np.random.default_rng(0)
    spread = lambda n, most: np.exp2(rng.uniform(0, most, n))
    leaves = [
        jnp.asarray(np.concatenate([spread(512, most) for most in range(4, 40, 2)]), jnp.float32),
        jnp.asarray(spread(700, 12), jnp.float16),
        jnp.asarray(spread(17, 100), jnp.bfloat16),
    ]
    layout = Layout.of(CODEC, leaves)
    payload = ops.encode(layout, leaves)
    assert_same_bytes(payload, reference_encode(layout)(leaves, None))
    for got in ops.decode(layout, payload), reference_decode(layout)(payload):
        assert_trees(assert_same_bytes, leaves, got)


def test_any_bytes_decode_to_the_same_bits():
    layout = Layout.of(CODEC, [jnp.zeros(700, dtype) for dtype in DTYPES])
    for seed in range(4):
        raw = np.random.default_rng(seed).integers(0, 256, (1, layout.chunk_bytes), dtype=np.uint8)
        if seed % 2:  # digits that never end
            raw[:, layout.overflows[0] :] = 255
        assert_trees(assert_same_bytes, ops.decode(layout, jnp.asarray(raw)), reference_decode(layout)(raw))


@pytest.mark.parametrize("schedule", ["two_shot", "one_shot", "ring"])
def test_sums_are_those_of_raw(schedule):
    """Sums have the same bits, also if partial sums are rounded to the leaf's dtype."""
    shapes = {"float32": (4, 1030), "bfloat16": (4, 33, 17), "float16": (4, 600)}
    leaves = [normal(shape, i, dtype, scale=3.0) for i, (dtype, shape) in enumerate(shapes.items())]
    net = Axes(("a",))

    def f(*leaves):
        def total(codec, own):
            stage = Stage(net, codec, schedule, backward=codec)
            message = Message(tuple(range(len(leaves))), list(leaves))
            return primitives.psum(message, net=net, stages=(stage,), how=Sum(own, 3.0)).leaves

        # for Raw, own="raw" and own="encoded" are the same
        return [total(CODEC, own) for own in ("raw", "encoded")], total(cgx.Raw(), "encoded")

    ours, expected = on_ranks(f, mesh(4), check_vma=False)(*leaves)
    for got in ours:
        assert_trees(assert_same_bytes, got, expected)


def test_sums_keep_denormals_that_raw_sums_may_lose():
    """XLA may flush them to zero. The kernels keep them."""
    x = jnp.full((4, 1000), 1e-40)
    got, raw = on_ranks(lambda x: [cgx.compressed_psum(x, "a", codec) for codec in (CODEC, cgx.Raw())], mesh(4))(x)
    assert_same_bytes(got, np.full((4, 1000), 4 * np.float32(1e-40)))
    assert {*np.unique(np.asarray(raw))} <= {np.float32(0), 4 * np.float32(1e-40)}


def test_feedback_gives_back_the_rounding_alone():
    x, lost = normal(1000, dtype=jnp.bfloat16), normal(1000, 1, scale=0.1)
    layout = Layout.of(CODEC, [x])
    payload, (new,) = ops.encode_fed(layout, [x], [lost], KEY)
    exact = x.astype(jnp.float32) + lost
    assert_same_bytes(ops.decode(layout, payload)[0], exact.astype(jnp.bfloat16))
    assert_same_bytes(new, exact - exact.astype(jnp.bfloat16).astype(jnp.float32))

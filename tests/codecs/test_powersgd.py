"""Tests PowerSGD as a codec: the matrix of a leaf, its bytes, the roundtrip of one rank, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from errors import table
from helpers import assert_same_bytes, normal

import jaxcgx as cgx

CODEC = cgx.PowerSGD(2)


def low_rank(m, n, rank, seed=0):
    return normal((m, rank), seed) @ normal((rank, n), seed + 1)


def test_a_leaf_is_the_matrix_with_the_smallest_factors():
    assert cgx.PowerSGD().matrix((30, 50)) == (30, 50)
    assert cgx.PowerSGD().matrix((3, 3, 64, 128)) == (576, 128)  # a convolution in Flax
    assert cgx.PowerSGD().matrix((128, 64, 3, 3)) == (128, 576)  # a convolution in PyTorch
    assert cgx.PowerSGD().matrix((512, 8, 64)) == (512, 512)  # attention, in and out
    assert cgx.PowerSGD().matrix((8, 64, 512)) == (512, 512)
    assert CODEC.factor_shape((3, 3, 64, 128)) == (2, 128)


def test_bytes_and_what_travels_raw():
    assert CODEC.wire_bytes((30, 50), "float32") == 4 * 2 * (30 + 50)
    assert CODEC.wire_bytes((30, 50), "bfloat16") == 4 * 2 * (30 + 50)  # factors are float32
    assert cgx.PowerSGD(1).wire_bytes((2048, 2048), "float32") == 2**14
    assert CODEC.why_raw((8, 8), jnp.dtype("float32")) is CODEC.why_raw((5, 4), jnp.dtype("float32")) is None
    for shape, dtype, words in (
        ((), "float16", "it has no dimension, and PowerSGD is for matrices"),
        ((100,), "float32", "it has one dimension, and PowerSGD is for matrices"),
        ((1, 100), "float32", "it has 400 bytes, and its factors of rank 2 would have 808"),
        ((4, 4), "float32", "it has 64 bytes, and its factors of rank 2 would have 64"),
        ((8, 8), "bfloat16", "it has 128 bytes, and its factors of rank 2 would have 128"),
    ):
        assert CODEC.wire_bytes(shape, dtype) == np.prod(shape, dtype=int) * jnp.dtype(dtype).itemsize
        assert CODEC.why_raw(shape, jnp.dtype(dtype)) == words


def test_roundtrip():
    """Exact for matrices of low rank; otherwise smaller than the matrix. An overflow makes the whole leaf NaN."""
    x = {
        "matrix": low_rank(40, 50, 2),
        "kernel": low_rank(45, 30, 1).reshape(3, 3, 5, 30),
        "constant": jnp.full((40, 50), 7.5),
        "zero": jnp.zeros((40, 50)),
        "tiny": low_rank(40, 50, 2) * 1e-30,
        "huge": low_rank(40, 50, 2) * 1e30,
    }
    others = {
        "full": normal((40, 50)),
        "overflown": normal((40, 50)).at[3, 4].set(jnp.inf),
        "half": normal((40, 50), 1, "bfloat16"),
        "bias": normal(100),
        "many": low_rank(40, 50, 9),
    }
    sent = lambda x: jax.tree.map(lambda leaf: cgx.roundtrip(leaf, CODEC), x)
    y, many, derivative = jax.jit(
        lambda x: (
            sent(x),
            cgx.roundtrip(x["many"], cgx.PowerSGD(9)),
            jax.grad(lambda x: (3 * cgx.roundtrip(x, CODEC)).sum())(x["full"]),
        )
    )(x | others)
    for name in x:
        np.testing.assert_allclose(y[name], x[name], rtol=0, atol=3e-6 * np.abs(x[name]).max(), err_msg=name)
    np.testing.assert_allclose(many, others["many"], rtol=0, atol=1e-4)
    assert not np.asarray(y["zero"]).any() and np.isnan(y["overflown"]).all() and y["half"].dtype == jnp.bfloat16
    assert_same_bytes(y["bias"], others["bias"])
    best, lost = np.linalg.svd(others["full"], compute_uv=False), np.linalg.norm(others["full"] - y["full"])
    assert np.sqrt((best[2:] ** 2).sum()) <= lost * 1.0001 < np.linalg.norm(others["full"])
    assert np.linalg.matrix_rank(y["full"], 1e-3) == 2
    np.testing.assert_array_equal(derivative, jnp.full((40, 50), 3.0))


def test_bases_are_orthonormal():
    """Columns are almost equal, equal or zero, and have the smallest and the largest magnitudes."""
    p = np.array(normal((4, 5, 200)))
    p[0, 1] = p[0, 0] * (1 + 1e-6 * p[0, 2])
    p[1, 1:3] = p[1, 0]
    p[2, 2:] = 0
    p[3] *= np.float32([1e-37, 1e37, 1e-44, 1, 1e-20])[:, None]
    basis = np.asarray(jax.jit(cgx.PowerSGD().orthonormal)(p), np.float64)
    gram = basis @ basis.swapaxes(1, 2)
    there = np.stack([np.diag(g) > 0.5 for g in gram])
    np.testing.assert_allclose(gram, there[:, :, None] * np.eye(5), atol=1e-5)
    np.testing.assert_array_equal(there.sum(1)[2:], [2, 4])
    assert there[0].all()


def test_bits_by_what_gradients_lose():
    """Ranks of PowerSGD are candidates like widths of bits."""
    grads = {"low": low_rank(60, 80, 1), "full": normal((60, 80), 5)}
    found = jax.jit(functools.partial(cgx.gradient_statistics, codecs=(cgx.PowerSGD(1), cgx.MaxMin(4))))(grads)
    plan = cgx.Plan(cgx.MaxMin(4)).adapt(found)
    chosen = {row.leaf: row.codec for row in plan.explain(grads, 2).rows}
    assert chosen == {"low": cgx.PowerSGD(1), "full": cgx.MaxMin(4)}


BYTES = jnp.zeros(9, jnp.uint8)


def adapt(candidate):
    return cgx.Plan(CODEC).adapt(cgx.gradient_statistics({"w": normal((60, 80))}, codecs=(candidate,)))


BAD_INPUT = {
    "PowerSGD": [
        (lambda: cgx.PowerSGD(0), ValueError, "rank", "0"),
        (lambda: cgx.PowerSGD(1.5), TypeError, "rank", "1.5"),
    ],
    "encode": [(lambda: cgx.encode(normal((9, 9)), CODEC), ValueError, "codec", "PowerSGD(rank=2)")],
    "decode": [(lambda: cgx.decode(BYTES, CODEC, (9, 9), "float32"), ValueError, "codec", "PowerSGD(rank=2)")],
    "PowerSGD.wire_bytes": [(lambda: CODEC.wire_bytes((9, 9), "int32"), TypeError, "dtype", "int32")],
    "Plan.adapt": [(lambda: adapt(cgx.MaxMin(4)), ValueError, "reference", "PowerSGD(rank=2)")],
}
test_bad_input = table(BAD_INPUT)

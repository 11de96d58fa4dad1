"""Tests what TopK sends, against NumPy, and the conversion of lists of indices to bytes and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says, table
from helpers import KEY, assert_same_bytes, assert_same_values, assert_trees, native_key, normal, reference_decode
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.codecs.topk import Sampled
from jaxcgx.native import ops, packing, reference
from jaxcgx.native.layout import Layout
from jaxcgx.native.reference import Clear

TopK = cgx.TopK
MOST = 2**31 - 1


def largest(x, k):
    """Returns the indices of the k largest magnitudes by sorting. Of equal magnitudes, the first ones are taken."""
    return np.sort(np.argsort(-(np.asarray(x).view(np.int32) & 0x7FFFFFFF).astype(np.int64), kind="stable")[:k])


def top(x, k):
    """Returns x with zeros in place of all elements but the largest."""
    found, at = np.zeros_like(x), largest(x, k)
    found[at] = np.asarray(x)[at]
    return found


def with_not_finite(x, r):
    x[r.randint(0, len(x), 1 + len(x) // 30)] = np.nan
    x[r.randint(0, len(x), 1 + len(x) // 300)] = -np.inf
    return x


KINDS = {  # of normal numbers and a source of random ones
    "normal": lambda x, r: x,
    "ties": lambda x, r: np.sign(x) * np.round(np.abs(x) * 3),
    "equal": lambda x, r: np.full_like(x, -1.5),
    "zeros": lambda x, r: np.where(r.rand(len(x)) < 0.5, np.float32(-0.0), np.float32(0)),
    "few": lambda x, r: np.where(r.rand(len(x)) > 0.001, np.float32(-0.0), x),
    "denormal": lambda x, r: x * np.float32(2.0**-140),
    "huge block": lambda x, r: np.r_[
        x[: len(x) // 3], x[len(x) // 3 : len(x) // 2] * np.float32(1e30), x[len(x) // 2 :]
    ],
    "rising": lambda x, r: np.sort(x**2),
    "falling": lambda x, r: np.sort(x**2)[::-1],
    "not finite": with_not_finite,
    "periodic": lambda x, r: np.where(np.arange(len(x)) % 16, x, np.float32(100)),  # a sample sees only these elements
}


def numbers(n, kind):
    r = np.random.RandomState(n)
    return np.ascontiguousarray(KINDS[kind](r.standard_normal(n).astype(np.float32), r))


@pytest.mark.parametrize(
    ("n", "ratio"), [(1, 0.4), (5000, 0.0), (5000, 0.01), (5000, 1.0), (300_001, 0.001), (300_001, 0.4)]
)
def test_exact_takes_the_largest_and_of_equal_ones_the_first(n, ratio):
    codec = TopK(ratio)
    layout = Layout(codec, ((n,),), ("float32",))
    k = codec.capacity(n)
    assert k == -(-ratio * n // 1)

    @jax.jit
    def run(x, leaf, residual, array):
        payload, (new,) = ops.encode_fed(layout, [leaf], [residual])
        plain = ops.encode(layout, [x])
        return ops.decode(layout, plain)[0], ops.decode(layout, payload)[0], new, ops.clear(layout, plain, [array])[0]

    for kind in KINDS:
        x = numbers(n, kind)
        residual = np.where(np.isfinite(x), x, 0) / 2
        leaf = x - residual
        total = leaf + residual
        array = normal(n, seed=1)
        out, with_feedback, new, cleared = run(x, leaf, residual, array)
        given = top(total, k)
        assert_same_bytes(out, top(x, k))
        assert_same_values(with_feedback, given)
        # Elements that are not sent remain in the residual. Elements that are not finite leave the residual unchanged.
        finite = np.isfinite(total)
        assert_same_bytes(new, np.where(finite, np.where(finite, total, 0) - np.where(finite, given, 0), residual))
        np.testing.assert_array_equal(cleared, np.where(np.isin(np.arange(n), largest(x, k)), 0, array))


@pytest.mark.parametrize(("n", "count"), [(5000, 100), (300_001, 290_000)])
def test_of_several_nans_the_first_are_taken(n, count):
    """NaNs with larger bits don't come first, neither among few candidates nor among many."""
    x = numbers(n, "normal")
    x[100 : 100 + count] = (np.arange(count, dtype=np.uint32) + 0x7FC00000).view(np.float32)
    codec = TopK(count / 2 / n)
    (sent,) = np.nonzero(cgx.roundtrip(x, codec))
    assert sent.tolist() == list(range(100, 100 + codec.capacity(n)))


@pytest.mark.parametrize("n", [4097, 4128, 7456, 22_817, 53_153, 262_143, 262_145])
def test_exact_of_much(n):
    """The threshold that a small sample suggests may be smaller than all elements."""
    x = numbers(n, "normal")
    for ratio in (0.3, 0.6, 0.6742, 0.75, 0.8, 0.9, 0.95, 0.999):
        assert_same_bytes(cgx.roundtrip(x, TopK(ratio)), top(x, TopK(ratio).capacity(n)))


@pytest.mark.parametrize(
    ("select", "n", "ratio"),
    [
        ("sampled", 3, 0.5),
        ("sampled", 40, 1 / 40),
        (Sampled(share=1.0), 1000, 0.1),
        ("sampled", 300, 0.01),
        ("sampled", 5000, 0.1),
        ("sampled", 300_001, 0.001),
        ("fitted", 5000, 0.01),
        ("fitted", 300_001, 0.02),
        (Sampled(0.5, "exponential", 0.9, 3), 20_000, 0.02),
        (Sampled(refinements=0), 20_000, 0.01),
        (Sampled(2**-15, lower=1.0), 20_000, 0.3),
    ],
)
def test_sampled_takes_the_largest_of_what_reaches_a_threshold(select, n, ratio):
    codec = TopK(ratio, select=select)
    layout = Layout(codec, ((n,),), ("float32",))
    k = codec.capacity(n)
    run = jax.jit(lambda x, key: ops.decode(layout, ops.encode(layout, [x], key))[0])
    for kind in KINDS:
        x = numbers(n, kind)
        at = largest(x, k)
        for key in (KEY, KEY + 1):
            out = np.asarray(run(x, key))
            found = np.flatnonzero(out.view(np.int32))
            assert_same_bytes(out[found], x[found])
            assert len(found) > k / 2 or kind != "normal" or select in ("fitted", Sampled(refinements=0))
            # The result has those of the k largest elements that reach a magnitude: all of them, or the first k if
            # there are more.
            magnitudes = x.view(np.int32) & 0x7FFFFFFF
            with_zeros = at[magnitudes[at] >= magnitudes[found].min(initial=MOST)]
            np.testing.assert_array_equal(found, with_zeros[x[with_zeros].view(np.int32) != 0])


def test_the_sample_begins_where_the_key_says():
    n = 100_000
    layout = Layout(TopK(0.01, select=Sampled(0.001)), ((n,),), ("float32",))
    payloads = {bytes(np.asarray(ops.encode(layout, [normal(n)], KEY + jnp.uint32(i)))) for i in range(4)}
    assert len(payloads) > 1
    assert_same_bytes(ops.encode(layout, [normal(n)], KEY), ops.encode(layout, [normal(n)], KEY))


@pytest.mark.parametrize(
    "values",
    [
        cgx.MaxMin(4, 64),
        cgx.Cast("float16"),
        cgx.AbsMax(8, 100),
        cgx.MaxMin(3, 50, "stochastic", skip_incomplete=True),
        cgx.Lossless(),
        cgx.MaxMin(8, 128, rotate=True),
    ],
    ids=repr,
)
def test_what_the_values_lose_stays(values):
    n = 20_000
    codec = TopK(0.02, values=values)
    layout = Layout(codec, ((n,),), ("float32",))
    x, residual = normal(n), normal(n, seed=1, scale=0.1)
    payload, (new,) = ops.encode_fed(layout, [x], [residual], native_key(codec))
    (out,) = ops.decode(layout, payload)
    total = np.asarray(x + residual)
    at = largest(total, 400)
    assert set(np.flatnonzero(out)) <= set(at)
    np.testing.assert_array_equal(new, total - np.asarray(out))
    # Without random numbers, values are encoded as by their codec alone.
    if not values.stochastic:
        np.testing.assert_array_equal(
            np.asarray(out)[at], cgx.decode(cgx.encode(total[at], values), values, (400,), "float32")
        )


def test_values_that_lists_have_no_kernels_for():
    for values in cgx.Lossless(), cgx.MaxMin(8, 128, rotate=True):
        assert TopK(0.1, values).native is None
    assert_same_bytes(cgx.roundtrip(normal(5000), TopK(1.0, cgx.Lossless())), normal(5000))


def test_a_sum_of_lists_loses_nothing():
    n, ranks = 10_000, 4
    codec = TopK(0.01)
    layout = Layout(codec, ((n,),), ("float32",))
    xs = [normal(n, seed=r) for r in range(ranks)]
    payloads = jnp.concatenate([ops.encode(layout, [x]) for x in xs])
    expected = np.float32(sum(top(x, 100) for x in xs))
    assert_same_bytes(ops.reduce(layout, payloads)[0], expected)
    of_sum = layout.of_sum(ranks)
    assert of_sum.codec == TopK(0.01, lists=4) and of_sum.codec.capacity(n) == 400
    most = TopK(0.01, lists=2**40).of_sum(ranks)
    assert most.capacity(n) == n and TopK(0.01, lists=2**20).of_sum(2).lists == 2**21
    assert_same_bytes(ops.decode(of_sum, ops.reduce_encoded(layout, payloads)[None])[0], expected)
    pulled, best = dataclasses.replace(layout, codec=TopK(0.01, pull="top")), top(expected, 100)
    total, (lost,) = ops.reduce_fed(pulled, payloads, [jnp.zeros(n)])
    assert_same_bytes(ops.decode(pulled, total[None])[0], best)
    assert_same_bytes(lost, expected - best)


def test_any_bytes_decode_as_the_reference_does():
    layout = Layout(TopK(0.03), ((3000,), (40,), (0,)), ("float32", "bfloat16", "float32"), chunks=2)
    clear = jax.jit(lambda payload, arrays: reference.clear(layout, Clear(payload, arrays)))
    r = np.random.RandomState(0)
    ones = [jnp.ones(s, d) for s, d in zip(layout.shapes, layout.dtypes)]
    random = lambda most: r.randint(0, most, (2, layout.chunk_bytes))
    for share in (256, 2):  # lists with few ones and with many
        payload = (random(256) * (random(share) < 2)).astype(np.uint8)
        assert_trees(assert_same_values, ops.decode(layout, payload), reference_decode(layout)(payload))
        assert_trees(assert_same_values, ops.clear(layout, payload, ones), clear(payload, ones))


@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 0), (1, 1), (2, 1), (10, 3), (1000, 10), (1000, 3), (1000, 500), (1000, 999), (300_000, 2), (5000, 133)],
)
def test_indices_come_back(n, k):
    r = np.random.RandomState(n + k)
    for count in {k, k // 2}:
        given = (
            np.sort(np.r_[r.choice(n, count, replace=False), np.full(k - count, n)]).astype(np.int32)
            if k < n
            else np.arange(n, dtype=np.int32)
        )
        raw = jax.jit(packing.to_list, static_argnums=1)(given, n)
        assert raw.size == packing.index_bytes(n, k)
        np.testing.assert_array_equal(jax.jit(packing.from_list, static_argnums=(1, 2))(raw, n, k), given)


def test_indices_that_float32_does_not_have():
    """Above 2^24, it has only even ones."""
    x = np.zeros(2**24 + 4, np.float32)
    x[-3:] = 1, 2, 3
    assert_same_bytes(cgx.roundtrip(x, TopK(3 / x.size)), x)


def test_the_largest_piece_has_sizes():
    # tests/cpp/test_layout.cc has the same sizes.
    assert [packing.index_bytes(MOST, k) for k in (0, 2147484, 21474837, MOST)] == [0, 3208644, 22984790, 0]
    assert TopK(0.001).code_bytes(MOST, jnp.dtype("float32")) == -(-3208644 // 16) * 16 + 4 * 2147484
    assert TopK(1.0).code_bytes(MOST, jnp.dtype("float32")) == 4 * MOST + 4
    words = says("TopK", got="2147483648")
    with raises(ValueError, words):
        TopK(0.001).wire_bytes((2**31,), "float32")
    # The limit is for each piece. Two chunks are two pieces.
    assert Layout(TopK(0.001), ((2**31,),), ("float32",), chunks=2).chunk_bytes == TopK(0.001).code_bytes(
        2**30, jnp.dtype("float32")
    )


CORRELATED = cgx.MaxMin(rounding="correlated")
WHAT_IS_REFUSED = {
    "TopK": [
        (lambda: TopK(1.5), ValueError, "ratio", "1.5"),
        (lambda: TopK("1"), TypeError, "ratio", "'1'"),
        (lambda: TopK(values=TopK()), ValueError, "values", "TopK("),
        (lambda: TopK(values=cgx.PowerSGD(2)), ValueError, "values", "PowerSGD(rank=2)"),
        (lambda: TopK(values=CORRELATED), ValueError, "values", "MaxMin(bits=4", 'rounding="stochastic"'),
        (lambda: TopK(values=4), TypeError, "values", "4"),
        (lambda: TopK(select="best"), ValueError, "select", "'best'"),
        (lambda: TopK(select=[]), ValueError, "select", "[]"),
        (lambda: TopK(select=np.array(["exact", "sampled"])), ValueError, "select", "array(["),
        (lambda: TopK(pull="some"), ValueError, "pull", "'some'"),
        (lambda: TopK(lists=0), ValueError, "lists", "0"),
    ],
    "Sampled": [
        (lambda: Sampled(share=0), ValueError, "share", "0"),
        (lambda: Sampled(lower=2), ValueError, "lower", "2"),
        (lambda: Sampled(refinements=101), ValueError, "refinements", "101"),
    ],
}
test_what_is_refused = table(WHAT_IS_REFUSED)


def test_a_leaf_on_several_devices_is_not_cut():
    """Its largest elements are those of the whole leaf, wherever they are."""
    x = np.concatenate([normal(3000), 10 * normal(1000, 1)])
    cut = jax.device_put(x, NamedSharding(mesh(4), P("a")))
    roundtrip = jax.jit(lambda x: cgx.roundtrip(x, cgx.TopK(0.01)))
    np.testing.assert_array_equal(roundtrip(cut), roundtrip(x))

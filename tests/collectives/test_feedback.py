"""Tests that all errors of a compressed sum are returned as residuals, and are added to the next sum."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import refused
from helpers import FULL, Truncate, assert_same_bytes, assert_trees, normal, planned
from jax import lax
from jax.sharding import PartitionSpec as P
from ranks import NAMES, assert_conserved, mesh, on_ranks, total

import jaxcgx as cgx

KEY = jax.random.key(5)
STOCHASTIC = cgx.MaxMin(2, 64, rounding="stochastic")


def tree(*ranks, seed=0):
    leaves = {f"{n}": normal((*ranks, n), n + seed) for n in (1, 7, 513, 3001)}
    return leaves | {"matrix": normal((*ranks, 30, 40), 2 + seed), "scalar": normal(ranks, 1 + seed)}


def psum(x, residuals, axes="a", codec=STOCHASTIC, mean=False, key=KEY, **fields):
    """Returns (sum, residuals)."""
    op = cgx.compressed_pmean if mean else cgx.compressed_psum
    found, carry = op(x, axes, planned(codec, **fields), key=key, carry=cgx.Carry(residuals=residuals))
    return found, carry.residuals


ONE_AXIS = dict.fromkeys([(n,) for n in (range(1, 9) if FULL else (1, 2, 3, 8))], ("two_shot", "one_shot", "gather"))
WAYS = ONE_AXIS | {(2, 4): [{"a": "one_shot", "b": "ring"}], (2, 2, 2): ["auto"]}


@pytest.mark.parametrize("sizes", WAYS, ids=str)
def test_nothing_is_lost(sizes):
    """tests/train/test_product.py compares other forms of two axes with a model."""
    x, before, axes = tree(*sizes), tree(*sizes, seed=100), NAMES[: len(sizes)]
    codecs = dict.fromkeys(axes, cgx.Raw()) | {"a": STOCHASTIC} if len(axes) > 1 else STOCHASTIC
    run = lambda x, e: [psum(x, e, axes, codecs, mean=True, schedule=schedule) for schedule in WAYS[sizes]]
    for results, after in on_ranks(run, mesh(*sizes))(x, before):
        assert_conserved(x, before, results, after, len(axes), weight=math.prod(sizes))
        assert sizes == (1,) or all(np.abs(after[name]).max() > 0.01 for name in ("513", "3001", "matrix"))


@pytest.mark.parametrize("ranks", [3, 8])
def test_gathers_alone(ranks):
    """A model in NumPy. Only sums are encoded, share by share, and a rank's residual is the loss of its own share."""
    codec, x, before = cgx.MaxMin(4, 64), tree(ranks), tree(ranks, seed=100)
    bad = {"bad": normal((ranks, 200)).at[0, 3].set(jnp.nan)}
    x, before = ({**t, "h": normal((ranks, 70), 9, jnp.bfloat16), **bad} for t in (x, before))
    before |= {"h": normal((ranks, 70), 8), "bad": bad["bad"] * 0 + 1}
    run = lambda x, e: psum(x, e, codec=codec, key=None, schedule="gather")
    results, after = on_ranks(run, mesh(ranks))(x, before)
    for name in x:
        meant = np.asarray(x[name].astype(jnp.float32) + before[name]).reshape(ranks, -1)
        size = -(-meant.shape[1] // ranks)
        padded = np.pad(meant, [(0, 0), (0, ranks * size - meant.shape[1])], mode="edge")
        total = functools.reduce(np.add, padded).reshape(ranks, size)
        sent = np.stack([cgx.roundtrip(share, codec) for share in total])
        flat = lambda y, name=name, n=meant.shape[1]: y.reshape(-1)[:n].reshape(x[name].shape[1:])
        np.testing.assert_array_equal(results[name], np.broadcast_to(flat(sent).astype(x[name].dtype), x[name].shape))
        for rank in range(ranks):
            lost = flat(np.where(np.arange(ranks)[:, None] == rank, total - sent, 0))
            expected = np.where(np.isfinite(flat(sent)), lost, before[name][rank])
            np.testing.assert_allclose(after[name][rank], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_16_bit_leaves_the_encoding_is_fed_back(dtype):
    """Residuals are float32. Only the rounding of the result to the leaf's dtype is lost."""
    x, before = normal((4, 3001), 0, dtype), normal((4, 3001), 1)
    results, after = on_ranks(psum, mesh(4))(x, before)
    assert results.dtype == dtype and after.dtype == jnp.float32
    rounding = float(jnp.finfo(dtype).eps) * np.abs(np.asarray(results, np.float32)).max()
    have, got = total(x, 1) + total(before, 1), np.asarray(results[0], np.float64) + total(after, 1)
    np.testing.assert_allclose(got, have, rtol=0, atol=rounding)


def test_a_batch_of_a_codec_without_kernels():
    one = functools.partial(psum, codec=Truncate(), key=None, schedule="two_shot")
    x, before = normal((2, 3, 40), 0), normal((2, 3, 40), 1)
    run, (results, after) = on_ranks(one, mesh(2)), on_ranks(jax.vmap(one), mesh(2))(x, before)
    for i in range(3):
        expected = run(x[:, i], before[:, i])
        assert_same_bytes(results[:, i], expected[0])
        assert_same_bytes(after[:, i], expected[1])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
def test_types(check_vma, sizes):
    """The sum is the same on all ranks and may be returned as such. The residuals differ between ranks and may not."""
    axes = NAMES[: len(sizes)]
    codec = {"a": STOCHASTIC, "b": cgx.Raw()} if len(sizes) == 2 else STOCHASTIC
    f, x = lambda x, e: psum(x, e, axes, codec), jnp.ones((8, 100))
    mapped = functools.partial(jax.shard_map, f, mesh=mesh(*sizes), in_specs=P(axes), check_vma=check_vma)
    run = lambda out: jax.eval_shape(mapped(out_specs=out), x, x)
    run((P(), P(axes)))
    if check_vma:
        with pytest.raises(ValueError, match="out_specs"):
            run((P(), P()))


def test_transforms():
    """Transforms are jit, vmap over the ranks, a batch, scan, and derivatives, for which residuals are constants."""
    x, before = normal((4, 600), 0), normal((4, 600), 1)
    expected = on_ranks(psum, mesh(4))(x, before)
    results, after = jax.vmap(psum, axis_name="a")(x, before)
    assert_same_bytes(results, expected[0])
    assert_same_bytes(after, expected[1])

    batch = on_ranks(jax.vmap(psum), mesh(4))(jnp.stack([x, -x], 1), jnp.stack([before, -before], 1))
    assert_same_bytes(batch[0][:, 0], expected[0])
    assert_same_bytes(batch[1][:, 0], expected[1])

    def twice(x, e):
        y, e = lax.scan(lambda e, _: psum(x, e)[::-1], e, None, length=2)[::-1]
        return y[-1], e

    unrolled = lambda x, e: psum(x, psum(x, e)[1])
    assert_trees(assert_same_bytes, on_ranks(twice, mesh(4))(x, before), on_ranks(unrolled, mesh(4))(x, before))

    weights = jnp.arange(600.0)
    gradient = on_ranks(jax.grad(lambda x, e: (weights * psum(x, e)[0]).sum(), argnums=(0, 1)), mesh(4))(x, before)
    np.testing.assert_array_equal(gradient[0], jnp.broadcast_to(weights, (4, 600)))
    assert not np.asarray(gradient[1]).any()


GRIDS = (1, 2), (1, 8), (1, 64), (1, 512), (2, 64), (2, 512), (2, 8192), (3, 512)  # bits and elements of a bucket
LOSSY = [cgx.MaxMin(*grid, rounding) for grid in GRIDS for rounding in ("nearest", "stochastic")]
LOSSY += [cgx.Sign(), cgx.AbsMax(2), cgx.AbsMax(2, 8192), cgx.Float8(), cgx.Micro()]


@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_who_loses_more_than_it_is_given_is_warned_of(codec):
    x = normal((2**16,), 0)
    lost = x - cgx.roundtrip(x, codec, KEY if codec.stochastic else None)
    assert codec.contracts == bool((lost**2).sum() < (x**2).sum())


def test_warnings():
    codec = cgx.MaxMin(1, 64)
    residuals = lambda x: psum(x, x, codec=codec, key=None)
    differences = lambda x: cgx.compressed_ppermute(x, "a", [], codec, carry=cgx.Carry(sent=x, received=x))[0]
    for f, op, what in (residuals, "psum", "residuals"), (differences, "ppermute", "differences"):
        words = rf"compressed_{op}: argument 'plan': {what} of MaxMin\(bits=1.* grow without bound"
        with pytest.warns(UserWarning, match=words):
            jax.eval_shape(on_ranks(f, mesh(2)), jnp.ones((2, 100)))


def test_no_ring_between_nodes():
    """An axis of one rank decides nothing."""
    plan = cgx.Plan.from_env(NAMES[:2], {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"})
    run = lambda x: psum(x, x, NAMES[:2], codec=plan, key=None)
    f = lambda *sizes: on_ranks(run, mesh(*sizes))(jnp.ones((*sizes, 50)))
    f(1, 4), f(1, 1)
    refused("compressed_psum", lambda: f(2, 2), ValueError, "plan", '"ring"', 'schedule="two_shot"')


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_raw_leaves_of_16_bits_give_back_their_rounding(dtype):
    x = {"short": normal((4, 900), 1, dtype), "long": normal((4, 3000), 2, dtype)}
    before = jax.tree.map(lambda x: normal(x.shape, 3, scale=0.01), x)
    run = lambda x, r: psum(x, r, codec=cgx.Plan(cgx.MaxMin(4)), mean=True, key=None)
    results, after = on_ranks(run, mesh(4))(x, before)
    assert_conserved(x, before, results, after, axes=1, weight=4)


def test_residuals_that_pmap_calls_replicated():
    """They differ between ranks. Who saves one of them loses the others."""
    run = jax.pmap(psum, axis_name="a", out_axes=None, devices=jax.devices()[:4])
    with pytest.warns(UserWarning, match="out_axes"):
        run(normal((4, 3000), 1), jnp.zeros((4, 3000)))

"""Tests compressed_ppermute against lax.ppermute: values, derivatives, transformations, bytes and noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from helpers import normal, sent
from jax import lax
from ranks import EXACT, mesh, on_ranks, whole_numbers

import jaxcgx as cgx

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
PERMS = {"ring": RING, "pipeline": RING[:3], "swap": [(1, 3), (3, 1)], "own": [(2, 2), (0, 1)], "nobody": []}
TREE = {
    "w": whole_numbers((4, 8, 12)),
    "h": whole_numbers((4, 300), 1, jnp.bfloat16),
    "n": jnp.arange(20, dtype=jnp.int32).reshape(4, 5),
    "empty": jnp.zeros((4, 0)),
}


def twins(perm, plan=EXACT, axis="a", **options):
    compressed = lambda x: cgx.compressed_ppermute(x, axis, perm, plan, **options)
    return compressed, lambda x: lax.ppermute(x, axis, perm)


def same(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("perm", PERMS.values(), ids=PERMS)
@pytest.mark.parametrize("plan", [EXACT, cgx.Raw(), cgx.Plan(EXACT, min_size=100)], ids=["exact", "raw", "guarded"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_values_are_those_of_lax(perm, plan, check_vma):
    compressed, plain = (on_ranks(f, mesh(4), check_vma)(TREE) for f in twins(perm, plan))
    same(compressed, plain)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8])
def test_any_number_of_ranks(ranks):
    x = whole_numbers((ranks, 33), ranks)
    perm = [(r, (r + 1) % ranks) for r in range(ranks)]
    same(*(on_ranks(f, mesh(ranks))(x) for f in twins(perm)))


@pytest.mark.parametrize("perm", [RING, RING[:3]])
@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_are_those_of_lax(perm, check_vma):
    x, ct = whole_numbers((4, 40)), whole_numbers((4, 40), 1)

    def all_of(f):
        loss = lambda x, ct: (f(x) * ct).sum()
        return lambda x, ct: (jax.vjp(f, x)[1](ct)[0], jax.jvp(f, (x,), (ct,))[1], jax.grad(loss)(x, ct))

    same(*(on_ranks(all_of(f), mesh(4), check_vma)(x, ct) for f in twins(perm)))


@pytest.mark.parametrize("wrap", ["scan", "remat", "while", "cond"])
def test_control_flow(wrap):
    def around(f):
        if wrap == "remat":
            return lambda x: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x)
        if wrap == "cond":
            return lambda x: lax.cond(lax.axis_size("a") > 1, f, lambda x: 0 * f(x), x)
        if wrap == "while":
            return lambda x: lax.fori_loop(0, 3, lambda _, x: f(x), f(x))
        return lambda x: lax.scan(lambda x, _: (f(x), f(x)), f(x), length=3)

    same(*(on_ranks(around(f), mesh(4))(TREE["w"]) for f in twins(RING)))


@pytest.mark.parametrize("perm", [RING, RING[:3]])
def test_axes_of_vmap(perm):
    """Under vmap JAX permutes only if every rank sends, so `lax` runs on a mesh."""
    x = TREE["w"]
    compressed, plain = twins(perm)
    same(jax.jit(jax.vmap(compressed, axis_name="a"))(x), on_ranks(plain, mesh(4))(x))


def test_vmap_is_one_exchange():
    compressed, plain = twins(RING)
    x = whole_numbers((4, 5, 6, 3))
    run = on_ranks(jax.vmap(jax.vmap(compressed, in_axes=1)), mesh(4))
    np.testing.assert_array_equal(run(x), on_ranks(lambda x: jnp.moveaxis(plain(x), 2, 1), mesh(4))(x))
    assert run.lower(x).compile().as_text().count(" collective-permute(") == 1


def test_ranks_of_several_axes_count_in_the_order_of_the_names():
    x = whole_numbers((2, 3, 7))
    perm = [(r, (r + 1) % 6) for r in range(6)]
    for axes in ("a", "b"), ("b", "a"):
        got = on_ranks(lambda x, axes=axes: cgx.compressed_ppermute(x, axes, perm, EXACT), mesh(2, 3))(x)
        flat = x if axes == ("a", "b") else jnp.swapaxes(x, 0, 1)
        rolled = jnp.roll(flat.reshape(6, 7), 1, 0).reshape(flat.shape)
        np.testing.assert_array_equal(got, rolled if axes == ("a", "b") else jnp.swapaxes(rolled, 0, 1))


@pytest.mark.parametrize("codec", [cgx.MaxMin(4), cgx.AbsMax(8), cgx.Micro("mxfp4"), cgx.TopK(0.1), cgx.Lossless()])
def test_a_receiver_decodes_what_a_sender_encodes(codec):
    x = normal((4, 5000))
    got = on_ranks(twins(RING, codec)[0], mesh(4))(x)
    np.testing.assert_array_equal(got, jnp.roll(jax.vmap(lambda x: cgx.roundtrip(x, codec))(x), 1, 0))


def test_what_is_sent():
    codec, x = cgx.MaxMin(4), normal((4, 5000))
    program = on_ranks(twins(RING, codec)[0], mesh(4)).lower(x).compile().as_text()
    assert sent(program) == {("collective-permute", "u8")}
    (found,) = cgx.explain(on_ranks(twins(RING, codec)[0], mesh(4)), x).collectives
    wire = codec.wire_bytes((5000,), "float32")
    assert (found.operation, found.bytes, found.raw_bytes) == ("collective-permute", wire, 20_000)
    assert found.function == "compressed_ppermute" and found.codec == "MaxMin(bits=4)"


def test_the_transpose_has_its_own_codec_and_noise():
    codec, back, key = cgx.MaxMin(4, rounding="stochastic"), cgx.MaxMin(8), jax.random.key(0)
    x = normal((4, 4096))
    run = functools.partial(twins, RING, codec, key=key)
    forward = on_ranks(run()[0], mesh(4))(x)
    transposed = lambda **options: on_ranks(lambda x: jax.vjp(run(**options)[0], x)[1](x)[0], mesh(4))(x)
    # Back around the ring, the same numbers have other errors.
    lost = (forward - jnp.roll(x, 1, 0)).ravel(), (transposed() - jnp.roll(x, -1, 0)).ravel()
    assert abs(np.corrcoef(*lost)[0, 1]) < 0.1
    expected = jnp.roll(jax.vmap(lambda x: cgx.roundtrip(x, back))(x), -1, 0)
    np.testing.assert_array_equal(transposed(backward_plan=back), expected)


def test_ranks_draw_different_noise():
    x = jnp.broadcast_to(normal(4096), (4, 4096))
    got = on_ranks(twins(RING, cgx.MaxMin(2, rounding="stochastic"), key=jax.random.key(1))[0], mesh(4))(x)
    lost = np.asarray(got - x)
    assert np.abs(np.corrcoef(lost) - np.eye(4)).max() < 0.1


def call(perm=RING, plan=EXACT, axis="a", x=TREE["w"], **options):
    return lambda: on_ranks(lambda x: cgx.compressed_ppermute(x, axis, perm, plan, **options), mesh(4))(x)


ERRORS = {
    "compressed_ppermute": [
        (call([(0, 4)]), ValueError, "perm", "[(0, 4)]", "pairs"),
        (call([(-1, 0)]), ValueError, "perm", "[(-1, 0)]"),
        (call([(0, 1), (0, 2)]), ValueError, "perm", "[(0, 1), (0, 2)]", "sender"),
        (call([(0, 1), (2, 1)]), ValueError, "perm", "[(0, 1), (2, 1)]", "receiver"),
        (call([0, 1]), TypeError, "perm", "[0, 1]"),
        (call([(0.5, 1)]), TypeError, "perm", "[(0.5, 1)]"),
        (call(3), TypeError, "perm", "3"),
        (call(plan={"a": EXACT}), ValueError, "plan", "{'a': Cast("),
        (call(backward_plan={"a": EXACT}), ValueError, "backward_plan", "{'a': Cast("),
        (call(plan=cgx.PowerSGD(2)), ValueError, "plan", "PowerSGD("),
        (call(plan=cgx.Skip()), ValueError, "plan", "Skip()"),
        (call(plan=4), TypeError, "plan", "4"),
        (call(axis="b"), NameError, "axis_name"),
    ]
}
test_errors = table(ERRORS)

"""Tests that derivatives are those of lax's collectives, and are as compressed as the values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import refused
from helpers import normal, planned, sent
from jax import lax
from ranks import CASES, EXACT, assert_same, mesh, on_ranks, ring, twins, whole_numbers

import jaxcgx as cgx

SOME = {op: kwargs[1:2] or kwargs for op, kwargs in CASES.items()}
X, V = whole_numbers((4, 4, 8, 12)), whole_numbers((4, 4, 8, 12), 1)
CHECKS = pytest.mark.parametrize("check_vma", [True, False])


def weighted(tree):
    """Returns a sum with whole weights that depend on the position of each element."""
    return sum((y * (jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 7 - 3)).sum() for y in jax.tree.leaves(tree))


def derivatives(f, all_of_them=True):
    def run(x, v):
        loss, both = lambda x: weighted(f(x)), jnp.stack([x, v])
        y, back = jax.vjp(f, x)
        found = {
            "jvp": jax.jvp(f, (x,), (v,)),
            "grad": jax.grad(loss)(x),
            "vjp": back(jax.tree.map(lambda y: 0 * y + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 5, y)),
        }
        if all_of_them:
            total = lambda c, x: (c + x, None)
            found |= {
                "linearize": jax.linearize(f, x)[1](v),
                "grad of grad": jax.grad(lambda x: (jax.grad(lambda x: loss(x * x))(x) * v).sum())(x),
                "grad of remat": jax.grad(lambda x: weighted(jax.checkpoint(f)(2 * x)))(x),
                "grad of scan": jax.grad(lambda x: loss(lax.scan(total, 0 * x, jnp.stack([x, x]))[0]))(x),
                "scan of grad": lax.scan(lambda c, x: (c, jax.grad(loss)(x)), 0, both)[1],
                "vmap of grad": jax.vmap(jax.grad(loss))(both),
                "grad of vmap": jax.grad(lambda xs: weighted(jax.vmap(f)(xs)))(both),
                "vmap of jvp": jax.vmap(lambda v: jax.jvp(f, (x,), (v,))[1])(both),
            }
        return {jax.tree_util.keystr(path): y for path, y in jax.tree_util.tree_leaves_with_path(found)}

    return run


@functools.lru_cache
def expected(check_vma):
    return on_ranks(derivatives(twins("a", None, SOME)[1]), mesh(4), check_vma)(X, V)


@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=pytest.mark.short), False])
def test_shard_map(check_vma):
    assert_same(on_ranks(derivatives(twins("a", EXACT, SOME)[0]), mesh(4), check_vma)(X, V), expected(check_vma))


def test_pmap():
    run = jax.pmap(derivatives(twins("a", EXACT, SOME)[0], all_of_them=False), axis_name="a", devices=jax.devices()[:4])
    assert_same(run(X, V), expected(check_vma=False))


def test_vmap_with_an_axis_name():
    compressed, plain = twins("a", EXACT, SOME)
    some = derivatives(compressed, all_of_them=False)
    assert_same(jax.jit(jax.vmap(some, axis_name="a"))(X, V), expected(check_vma=False))
    of_all = lambda f: jax.grad(lambda x: weighted(jax.vmap(f, axis_name="a")(x)))
    np.testing.assert_array_equal(jax.jit(of_all(compressed))(X), jax.jit(of_all(plain))(X))


@CHECKS
@pytest.mark.parametrize("codec", [EXACT, {"a": EXACT, "b": cgx.Raw()}], ids=str)
def test_two_axes(codec, check_vma):
    """Each case has its own gradient: invarying gathers, and sums of all schedules, by shards and by leaders."""
    x = whole_numbers((2, 2, 4, 8, 12))
    cases = SOME | {"all_gather": [dict(axis=0), dict(axis=1, tiled=True)]}
    cases["all_gather"] += [dict(axis=2, tiled=True, to="invarying")] * check_vma
    one_each = {f"{op} {kwargs}": {op: [kwargs]} for op in cases for kwargs in cases[op]}

    def gradients(plain):
        each = {case: twins(("a", "b"), codec, one)[plain] for case, one in one_each.items()}
        return lambda x: {case: jax.grad(lambda x, f=f: weighted(f(x)))(x) for case, f in each.items()}

    schedules, leaders = ("two_shot", "one_shot", "ring", "gather"), [False, True][: 1 + isinstance(codec, dict)]
    plans = [planned(codec, schedule=schedule, leader=leader) for schedule in schedules for leader in leaders]
    sums = lambda x: [jax.grad(lambda x: weighted(cgx.compressed_pmean(x, ("a", "b"), plan)))(x) for plan in plans]
    lax_gradients = on_ranks(gradients(plain=True), mesh(2, 2), check_vma)(x)
    assert_same(on_ranks(gradients(plain=False), mesh(2, 2), check_vma)(x), lax_gradients)
    for got in on_ranks(sums, mesh(2, 2), check_vma)(x):
        np.testing.assert_array_equal(got, lax_gradients["pmean {}"])


@pytest.mark.parametrize("ranks", [1, 4])
def test_raw_slices_that_are_joined_along_another_dimension(ranks):
    """The derivative of lax.all_to_all itself fails."""
    x, f = whole_numbers((ranks, ranks, 3, 5)), lambda x: cgx.compressed_all_to_all(x, "a", 0, 1, cgx.Raw())
    np.testing.assert_array_equal(on_ranks(jax.grad(lambda x: (f(x) ** 2).sum()), mesh(ranks))(x), 2 * x)
    np.testing.assert_array_equal(on_ranks(f, mesh(ranks))(x), np.moveaxis(x, (1, 2, 0), (0, 1, 2)))


def test_the_transpose_of_an_invarying_gather_rounds_nothing():
    """Every rank has the whole cotangent, so it takes its part, and nothing is sent."""
    gather = lambda codec: lambda x: weighted(cgx.compressed_all_gather(x, "a", codec, to="invarying"))
    gradient = lambda codec: on_ranks(jax.grad(gather(codec)), mesh(4), True)(X)
    np.testing.assert_array_equal(gradient(cgx.MaxMin(2)), gradient(EXACT))


@CHECKS
def test_some_leaves_of_a_message(check_vma):
    """Leaves that are not differentiated travel as zeros. Integers and empty leaves have their tangents."""

    def body(x, y):
        rest = {"n": x[0, 0].astype(jnp.int32), "empty": x[:0]}
        loss = lambda x: weighted(cgx.compressed_psum({"x": x, "y": y * y, **rest}, "a", EXACT)["x"])
        gathered = lambda x, y: cgx.compressed_all_gather((x, y.astype(jnp.bfloat16), 2 * x), "a", EXACT)
        return jax.grad(loss)(x), jax.grad(lambda x, y: weighted(gathered(x, y)[::2]), (0, 1))(x, y)

    def plain(x, y):
        return (
            jax.grad(lambda x: weighted(lax.psum(x, "a")))(x),
            jax.grad(lambda x, y: weighted(lax.all_gather((x, 2 * x), "a")), (0, 1))(x, y),
        )

    flat = lambda out: dict(enumerate(jax.tree.leaves(out)))
    assert_same(flat(on_ranks(body, mesh(4), check_vma)(X, V)), flat(on_ranks(plain, mesh(4), check_vma)(X, V)))


def test_jacobians():
    x, sums = whole_numbers((2, 3)), [lambda x: cgx.compressed_psum(x, "a", EXACT), lambda x: lax.psum(x, "a")]
    for derivative in (jax.jacfwd, jax.jacrev, lambda f: jax.hessian(lambda x: f(x) ** 2)):
        got, plain = (jax.jit(derivative(jax.vmap(f, axis_name="a")))(x) for f in sums)
        np.testing.assert_array_equal(got, plain)


@CHECKS
@pytest.mark.parametrize("op", ["psum_scatter", "all_gather", "all_to_all"])
def test_a_codec_for_each_direction(op, check_vma):
    """With 2 bits forward and no compression backward, the gradient of a linear loss is lax's for any values."""
    kwargs = dict(split_axis=0, concat_axis=0, tiled=True) if op == "all_to_all" else dict(tiled=True)
    lossy, raw = cgx.MaxMin(2, 64), cgx.Raw()

    def body(x, w):
        gradient = lambda f: jax.value_and_grad(lambda x: (f(x) * w[: f(x).shape[0]]).sum())(x)
        compressed = functools.partial(getattr(cgx, f"compressed_{op}"), axis_name="a", **kwargs)
        forward = lambda x: compressed(x, plan=lossy, backward_plan=raw)
        backward = lambda x: compressed(x, plan=raw, backward_plan=lossy)
        return [gradient(f) for f in (lambda x: getattr(lax, op)(x, "a", **kwargs), forward, backward)]

    found = on_ranks(body, mesh(4), check_vma)(normal((4, 8, 6)), normal((4, 32, 6), 1))
    (value, gradient), (lossy_value, same), (same_value, lossy_gradient) = found
    np.testing.assert_allclose(same, gradient, rtol=1e-6, atol=1e-6)  # except for the order of the summation
    np.testing.assert_allclose(same_value, value, rtol=1e-5)
    assert (np.abs(lossy_value - value) > 1e-3).any() and (np.abs(lossy_gradient - gradient) > 1e-3).any()


@CHECKS
def test_backward_messages_are_compressed(check_vma):
    """tests/exchange/test_noise.py checks that they draw noise of their own."""
    codec, options = cgx.MaxMin(4, 64, rounding="stochastic"), dict(key=jax.random.key(0))

    def body(x):
        f = {
            "psum": lambda x: cgx.compressed_psum(x, "a", planned(codec, schedule="two_shot"), **options),
            "all_to_all": lambda x: cgx.compressed_all_to_all(x, "a", 0, 0, codec, tiled=True, **options),
            "psum_scatter": lambda x: cgx.compressed_psum_scatter(x, "a", codec, tiled=True, **options),
            "all_gather": lambda x: cgx.compressed_all_gather(x, "a", codec, tiled=True, **options),
        }
        return {name: jax.vjp(g, x)[1](g(x)) for name, g in f.items()}

    program = on_ranks(body, mesh(4), check_vma).lower(normal((4, 64, 9))).compile().as_text()
    assert sent(program) == {("all-to-all", "u8"), ("all-gather", "u8")}


def test_a_payload_has_no_derivative():
    """Its gradient would be zero, in silence. What isn't differentiated may be encoded inside of a loss."""
    by_hand = lambda x: cgx.decode(lax.ppermute(cgx.encode(x, EXACT), "a", ring(4)), EXACT, x.shape, x.dtype)
    grad = lambda move: on_ranks(jax.grad(lambda x: (move(x) * x).sum()), mesh(4))(X)
    refused("encode", lambda: grad(by_hand), TypeError, "x", "one that is", "cgx.roundtrip cgx.compressed_ppermute")
    grad(lambda x: by_hand(lax.stop_gradient(x)))

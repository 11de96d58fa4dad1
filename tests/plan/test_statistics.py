"""Tests gradient_statistics: the error of each codec for each leaf, the same on every rank, in jit and outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says, table
from helpers import normal
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx

CODECS = (cgx.MaxMin(2), cgx.MaxMin(8), cgx.Cast("bfloat16"), cgx.Raw())
NOISY = (cgx.MaxMin(2, rounding="stochastic"), cgx.MaxMin(4))
TREE = {
    "e": jnp.zeros((0, 3)),
    "k": {"w": normal((40, 30)), "h": normal(257, 1, dtype=jnp.bfloat16)},
    "n": jnp.ones(3, jnp.int32),
    "s": jnp.float32(3),
}


def squared(x):
    return float(np.square(np.asarray(x, np.float64)).sum())


def test_numbers():
    found = cgx.gradient_statistics(TREE, codecs=CODECS)
    leaves = {"k/h": TREE["k"]["h"], "k/w": TREE["k"]["w"], "s": TREE["s"]}
    assert (found.paths, found.codecs) == (tuple(leaves), CODECS)
    assert [*zip(found.shapes, found.dtypes)] == [(x.shape, x.dtype) for x in leaves.values()]
    error = lambda x, codec: squared(np.float64(cgx.roundtrip(x, codec)) - np.float64(x))
    tops = [squared(np.sort(np.abs(np.float64(x)).reshape(-1))[-100:]) for x in leaves.values()]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    close(found.errors, [[error(x, codec) for codec in CODECS] for x in leaves.values()])
    close(found.norms, list(map(squared, leaves.values())))
    close(found.tops, tops)
    assert (np.asarray(found.errors)[:, 3] == 0).all()


def test_default_candidates():
    assert cgx.gradient_statistics(TREE).codecs == tuple(cgx.MaxMin(bits) for bits in range(2, 9))


@pytest.mark.parametrize("check_vma", [True, False])
def test_ranks_add_up_and_agree(check_vma):
    def f(x):
        tree = {"w": x}
        both = jax.jit(functools.partial(cgx.gradient_statistics, axis_name=("a", "b"), codecs=CODECS))(tree)
        return both, cgx.gradient_statistics(tree, codecs=CODECS)

    both, own = on_ranks(f, mesh(2, 2), check_vma)(normal((2, 2, 40, 30)))
    for name in ("errors", "norms", "tops"):
        every = np.asarray(getattr(both, name)).reshape(4, -1)
        assert (every == every[0]).all(), name
        np.testing.assert_allclose(every[0], np.asarray(getattr(own, name)).reshape(4, -1).sum(0), rtol=1e-5)
    each = [jax.tree.map(lambda x: x[at], both) for at in np.ndindex(2, 2)]
    assert len({cgx.Plan(CODECS[1], min_size=0).adapt(statistics) for statistics in each}) == 1


def test_gradients_that_jax_has_reduced():
    def measure(params, x):
        return cgx.gradient_statistics(jax.grad(lambda params: (params["w"] * x).sum())(params), "a", CODECS)

    run = jax.shard_map(measure, mesh=mesh(2), in_specs=(P(), P("a")), out_specs=P())
    words = says("gradient_statistics", "grads", at="leaf ['w']", remedy="jaxcgx.value_and_grad(loss_fn")
    with raises(ValueError, words):
        run({"w": normal((8, 30))}, normal((16, 30)))


def test_noise():
    """Each leaf has different noise, and each rank."""
    x, key = {"v": normal((64, 64)), "w": normal((64, 64))}, jax.random.key(3)
    errors = lambda key: cgx.gradient_statistics(x, codecs=NOISY, key=key).errors
    found = errors(key)
    assert found[0, 0] != found[1, 0] and found[0, 1] == found[1, 1]
    assert (found == errors(key)).all() and found[0, 0] != errors(jax.random.key(4))[0, 0]
    of_rank = lambda x: cgx.gradient_statistics(x, "a", NOISY, key=key).errors
    one, two = (np.asarray(on_ranks(of_rank, mesh(n))(jnp.stack([x["w"]] * n)))[0, 0] for n in (1, 2))
    assert two[0] != 2 * one[0] and two[1] == 2 * one[1]


def test_steps_add_up():
    a, b = cgx.gradient_statistics({"w": normal((40, 30))}), cgx.gradient_statistics({"w": normal((40, 30), 1)})
    total = jax.jit(lambda a, b: a + b)(a, b)
    for name in "errors", "norms", "tops":
        assert (getattr(total, name) == getattr(a, name) + getattr(b, name)).all()
    assert (total.paths, total.codecs) == (a.paths, a.codecs)
    with raises(ValueError, says("GradientStatistics")):
        a + cgx.gradient_statistics({"v": normal((40, 30))})
    with pytest.raises(TypeError, match="unsupported operand"):
        a + 1


SAME_PATHS = {"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(3)}
BAD_INPUT = {
    "gradient_statistics": [
        (lambda: cgx.gradient_statistics(TREE, codecs=[]), TypeError, "codecs", "[]"),
        (lambda: cgx.gradient_statistics(TREE, codecs=cgx.MaxMin()), TypeError, "codecs", "MaxMin("),
        (lambda: cgx.gradient_statistics(TREE, codecs=[4]), TypeError, "codecs", "4"),
        (lambda: cgx.gradient_statistics(TREE, codecs=NOISY), ValueError, "key", "None"),
        (lambda: cgx.gradient_statistics({"n": jnp.ones(3, jnp.int32)}), ValueError, "grads", "none"),
        (lambda: cgx.gradient_statistics(TREE, "data"), NameError, "axis_name"),
        (lambda: cgx.gradient_statistics(SAME_PATHS), ValueError, "grads", "several", "'a/b'"),
    ]
}
test_bad_input = table(BAD_INPUT)

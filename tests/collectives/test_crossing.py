"""Tests a mean that one program begins and another one ends, over plain axes.

tests/transports/test_tcp.py tests the same over Tcp, where the exchange continues between the programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from helpers import assert_same_trees, normal
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx

X = {"w": normal((4, 30, 40)), "b": normal((4, 7)), "count": jnp.arange(4), "empty": jnp.zeros((4, 0))}
PLAN = cgx.Plan(cgx.MaxMin(4), rules=[("w", cgx.PowerSGD(2))], min_size=1, skip_1d=False)
NOISY = cgx.MaxMin(2, 64, "stochastic")


def mapped(function, vma=True, out=P("a")):
    return jax.jit(jax.shard_map(function, mesh=mesh(4), in_specs=P("a"), out_specs=out, check_vma=vma))


def of_rank(x):
    return jax.tree.map(lambda leaf: leaf[0], x)


def zeros(x):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32) if leaf.dtype == jnp.float32 else None, x)


@pytest.mark.parametrize("vma", [True, False])
def test_the_bits_of_one_program(vma):
    def both(function):
        def call(x):
            x = of_rank(x)
            plain, fed = function(x, "a", PLAN), function(x, "a", NOISY, key=jax.random.key(1), residuals=zeros(x))
            return (plain, fed[0]), jax.tree.map(lambda r: r[None], fed[1])

        return call

    def end(begun):
        (plain, fed), residuals = begun
        mean, residuals = cgx.end_pmean(fed, of_rank(residuals))
        return (cgx.end_pmean(plain), mean), jax.tree.map(lambda r: r[None], residuals)

    out = (P(), P("a"))  # the types say that a mean is the same on all ranks
    expected = mapped(both(cgx.compressed_pmean), vma, out)(X)
    begun = mapped(both(cgx.begin_pmean), vma)(X)
    found = mapped(end, vma, out)(begun)
    assert_same_trees(found, expected)
    tickets, residuals = begun
    means, same = mapped(end, vma, out)((jax.tree.map(jnp.zeros_like, tickets), residuals))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(means))
    assert_same_trees(same, residuals)


def test_factors():
    codec, x = cgx.PowerSGD(2), X["w"]
    factors = cgx.init_factors(x[0], codec)

    def begin(x):
        return cgx.begin_pmean(x[0], "a", codec, factors=factors)

    ticket, found = mapped(begin, out=(P("a"), P()))(x)
    mean, expected = mapped(
        lambda x: cgx.compressed_pmean(x[0], "a", codec, carry=cgx.Carry(factors=factors)), out=P()
    )(x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(mapped(cgx.end_pmean, out=P())(ticket), mean)


def test_under_vmap():
    def means(function):
        return mapped(jax.vmap(function), out=P())(X["w"].reshape(8, 15, 40))

    np.testing.assert_array_equal(
        means(lambda x: cgx.end_pmean(cgx.begin_pmean(x, "a", cgx.MaxMin(4)))),
        means(lambda x: cgx.compressed_pmean(x, "a", cgx.MaxMin(4))),
    )


def test_explain_names_it():
    report = cgx.explain(mapped(lambda x: cgx.begin_pmean(x[0], "a", cgx.MaxMin(4))), X["w"], show=False)
    assert {c.function for c in report.collectives} == {"begin_pmean"}


def test_what_is_no_ticket():
    with raises(TypeError, says("end_pmean", "ticket", expected="what begin_pmean returned", got="3")):
        cgx.end_pmean(3)


def test_residuals_that_do_not_belong_to_the_ticket():
    def pair(x):
        return cgx.end_pmean(cgx.begin_pmean(x[0], "a", cgx.MaxMin(4), residuals=zeros(x[0]))[0])

    def alone(x):
        return cgx.end_pmean(cgx.begin_pmean(x[0], "a", cgx.MaxMin(4)), zeros(x[0]))

    with raises(ValueError, says("end_pmean", "residuals", expected="residuals that begin_pmean returned", got="None")):
        mapped(pair)(X["w"])
    with raises(ValueError, says("end_pmean", "residuals", expected="None, as begin_pmean got none", got="some")):
        mapped(alone)(X["w"])


def test_errors_name_the_function_that_was_called():
    with raises(TypeError, says("begin_pmean", "codec")):
        mapped(lambda x: cgx.begin_pmean(x[0], "a", 4))(X["w"])

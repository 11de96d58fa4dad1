"""Tests sums that one program begins and another one ends, and routes that are made once, over plain axes.

tests/transports/test_tcp.py tests the same over Tcp, where the exchange continues between the programs.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same_trees, normal
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.exchange.reduce import begin, end
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.exchange.routes import Routes
from jaxcgx.transports.xla import Axes

X = {"w": normal((4, 30, 40)), "b": normal((4, 7)), "count": jnp.arange(4), "empty": jnp.zeros((4, 0))}
PLAN = cgx.Plan(cgx.MaxMin(4), rules=[("w", cgx.PowerSGD(2))], min_size=1, skip_1d=False)
NOISY = cgx.Plan.every(cgx.MaxMin(2, 64, "stochastic"))
KEY = jax.random.key(1)


def routes(plan, x):
    return Routes.of("mean", plan, x)


def begun(x, plan, carry=None, key=None):
    words = None if key is None else jax.random.key_data(key)
    return begin(x, carry or cgx.Carry(), routes(plan, x).over(Axes(("a",))), words)


def rows(tree):
    return jax.tree.map(lambda leaf: leaf[None], tree)


def of_rank(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def mapped(function, vma=True, out=P("a")):
    return jax.jit(jax.shard_map(function, mesh=mesh(4), in_specs=P("a"), out_specs=out, check_vma=vma))


@pytest.mark.parametrize("vma", [True, False])
def test_the_bits_of_one_program(vma):
    first = {name: jnp.zeros(leaf.shape) for name, leaf in X.items() if name != "count"} | {"count": None}

    def together(x, residuals):
        x, carry = of_rank(x), cgx.Carry(residuals=of_rank(residuals))
        mean, kept = cgx.compressed_pmean(x, "a", NOISY, key=KEY, carry=carry)
        return (cgx.compressed_pmean(x, "a", PLAN), mean), rows(kept)

    def start(x, residuals):
        x, carry = of_rank(x), cgx.Carry(residuals=of_rank(residuals))
        return rows((begun(x, PLAN), begun(x, NOISY, carry, KEY)))

    def finish(tickets):
        (plain, _), (mean, kept) = (end(*each) for each in of_rank(tickets))
        return (plain, mean), rows(kept)

    out = (P(), P("a"))  # the types say that a mean is the same on all ranks
    run = lambda f, out=P("a"): jax.jit(
        jax.shard_map(f, mesh=mesh(4), in_specs=(P("a"), P("a")), out_specs=out, check_vma=vma)
    )
    assert_same_trees(mapped(finish, vma, out)(run(start)(X, first)), run(together, out)(X, first))


def test_routes_are_made_once():
    """They are static parts of programs and tickets, which compare them by identity."""
    other = cgx.Plan(cgx.MaxMin(4), rules=[("w", cgx.PowerSGD(2))], min_size=1, skip_1d=False)
    assert routes(PLAN, X) is routes(other, jax.tree.map(jnp.copy, X))
    assert routes(PLAN, X) is not routes(PLAN, {**X, "b": X["w"]})


@pytest.mark.parametrize("plan", [PLAN.default, {"a": cgx.MaxMin(4), "b": cgx.Raw()}])
def test_what_begins(plan):
    """Over Tcp, `begin` sends every message: factors and raw leaves, too, and between centers of several ranks."""
    plan, seen = cgx.Plan(plan, rules=[("w", cgx.PowerSGD(2))], min_size=1, skip_1d=False, schedule="two_shot"), []
    x = {"w": jnp.ones((30, 40)), "b": jnp.ones(7), "c": jnp.ones((8, 8))}

    def start(x):
        ticket, carry = begin(
            x, cgx.Carry(), routes(plan, x).over(transport_over_axes("mean", (cgx.Tcp("a"), "b"))), None
        )
        seen.append((len(ticket.begun), sorted(ticket.held)))
        return end(ticket, carry)[0]

    jax.eval_shape(jax.shard_map(start, mesh=mesh(2, 2), in_specs=P(), out_specs=P(), check_vma=False), x)
    assert seen == [(2, [])]

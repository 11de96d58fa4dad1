"""Tests routes, which are made once, and what `begin` sends over Tcp.

tests/transports/test_tcp.py tests sums that one program begins and another one ends.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import normal
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.exchange.reduce import begin, end
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.exchange.routes import Routes


def routes(x, codec=cgx.MaxMin(4), **fields):
    rules = [("w", cgx.PowerSGD(2))]
    return Routes.of("mean", cgx.Plan(codec, rules=rules, min_size=1, skip_1d=False, **fields), x)


def test_routes_are_made_once():
    """They are static parts of programs and tickets, which compare them by identity."""
    x = {"w": normal((30, 40)), "b": normal(7), "count": jnp.arange(4), "empty": jnp.zeros(0)}
    assert routes(x) is routes(jax.tree.map(jnp.copy, x))
    assert routes(x) is not routes({**x, "b": x["w"]})


@pytest.mark.parametrize("codec", [cgx.MaxMin(4), {"a": cgx.MaxMin(4), "b": cgx.Raw()}])
def test_what_begins(codec):
    """Over Tcp, `begin` sends every message: factors and raw leaves, too, and between centers of several ranks."""
    x, seen = {"w": jnp.ones((30, 40)), "b": jnp.ones(7), "c": jnp.ones((8, 8))}, []

    def start(x):
        net = transport_over_axes("mean", (cgx.Tcp("a"), "b"))
        ticket, carry = begin(x, cgx.Carry(), routes(x, codec, schedule="two_shot").over(net), None)
        seen.append((len(ticket.begun), sorted(ticket.held)))
        return end(ticket, carry)[0]

    jax.eval_shape(jax.shard_map(start, mesh=mesh(2, 2), in_specs=P(), out_specs=P(), check_vma=False), x)
    assert seen == [(2, [])]

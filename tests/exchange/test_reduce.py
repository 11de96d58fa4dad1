"""Tests routes, which are made once, and what `begin` sends over Tcp.

tests/transports/test_tcp.py tests sums that one program begins and another one ends.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import normal
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.exchange.reduce import begin, end
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.exchange.routes import Routes, Way


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


@pytest.mark.parametrize("given", [False, True])
def test_a_raw_message_has_residuals_only_if_they_are_given(given):
    """Residuals of an earlier plan, which compressed the leaves, are sent with the leaves. Zeros would cost time."""
    x = [jnp.ones((8, 8))] * 4
    residuals = [x[0] if given else None, None, *x[2:]]
    mine = Routes.of("mean", cgx.Plan(cgx.MaxMin(4), [("[01]", cgx.Raw())], min_size=1), x)

    def start(x):
        net = transport_over_axes("mean", (cgx.Tcp("a"),))
        return end(*begin(x, cgx.Carry(residuals=residuals), mine.over(net), None))[0]

    program = jax.make_jaxpr(jax.shard_map(start, mesh=mesh(2), in_specs=P(), out_specs=P(), check_vma=False))(x)
    begun = re.findall(r"((?:\w+:\S+ )+)= jaxcgx_tcp_begin\[", str(program))
    assert sorted(results.count("f32[8,8]") for results in begun) == [2 * given, 2]


@pytest.mark.parametrize(
    ("mib", "codec", "schedule", "axis", "messages"),
    [
        (8, cgx.MaxMin(4), "auto", cgx.Tcp("a"), 8),
        (32, cgx.MaxMin(4), "auto", cgx.Tcp("a"), 16),
        (32, cgx.Raw(), "auto", cgx.Tcp("a"), 16),
        (128, cgx.MaxMin(4), "auto", cgx.Tcp("a"), 32),
        (32, cgx.MaxMin(4), "ring", cgx.Tcp("a"), 8),
        (32, cgx.TopK(0.1), "auto", cgx.Tcp("a"), 8),
        (32, cgx.PowerSGD(2), "auto", cgx.Tcp("a"), 8),
        (32, cgx.MaxMin(4), "auto", "a", 8),
    ],
)
def test_messages_of_a_backward_pass_have_a_sixteenth_of_the_tree(mib, codec, schedule, axis, messages):
    leaf, seen = jax.ShapeDtypeStruct((2**9, 2**8), jnp.float32), []
    x = {"sent": [leaf] * (2 * mib), "frozen": [leaf] * 256}
    mine = Routes.of("mean", cgx.Plan(codec, [("frozen", cgx.Skip())], schedule=schedule), x)

    def count(_):
        net, order = transport_over_axes("mean", (axis,)), tuple(range(len(mine.leaves)))
        seen.extend(len(mine.over(net, way).envelopes) for way in (Way(), Way(order=order)))

    jax.eval_shape(jax.shard_map(count, mesh=mesh(2), in_specs=P(), out_specs=P(), check_vma=False), 0.0)
    assert seen == [-(-mib // 64), messages]

"""Tests the order in which a backward pass finishes its gradients, and exchanges in this order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_trees
from jax import lax
from ranks import mesh
from steps import run

import jaxcgx as cgx

SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def layer(w, x):
    return jnp.tanh(x @ w)


def chain(call):
    """Returns a loss of three layers whose names don't show their order."""

    def loss(params, x):
        for name in ("b", "c", "a"):
            x = call(params[name], x)
        return jnp.sum(x**2)

    return loss


@pytest.mark.parametrize("call", [layer, jax.jit(layer), jax.checkpoint(layer)], ids=["plain", "jit", "remat"])
def test_the_last_layer_ends_first(call):
    params = dict.fromkeys("abc", SHAPE)
    assert cgx.backward_order(chain(call), params, X) == (0, 2, 1)


def test_what_is_used_twice_ends_with_its_first_use():
    tied = lambda params, x: jnp.sum(layer(params[0].T, layer(params[1], layer(params[0], x))))
    assert cgx.backward_order(tied, [SHAPE, SHAPE], X) == (1, 0)


def test_a_loop_ends_its_gradients_together():
    def loss(params, x):
        x, _ = lax.scan(lambda x, w: (layer(w, x), None), layer(params["a"], x), params["b"])
        return jnp.sum(layer(params["c"], x)), x

    params = {"a": SHAPE, "b": jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), "c": SHAPE}
    assert cgx.backward_order(loss, params, X) == (2, 1, 0)


def make(exchange, overlap, call=layer):
    options = dict(sharding=cgx.Sharding("a"), overlap=overlap)
    return cgx.make_train_step(chain(call), optax.sgd(0.1), mesh(4), exchange, **options)


SMALL = dict(fusion_mb=1e-4, min_size=0, skip_1d=False)


@pytest.mark.parametrize(
    "exchange", [cgx.Plan(cgx.MaxMin(4, 16), **SMALL), cgx.DGC(0.1, **SMALL)], ids=["feedback", "dgc"]
)
def test_overlap_changes_no_bit(exchange):
    params = {name: jax.random.normal(jax.random.key(i), (8, 8)) for i, name in enumerate("abc")}
    batch = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    plain, late = (run(make(exchange, overlap), 3, params, batch)[0] for overlap in (None, "backward"))
    assert_same_trees(plain, late)


def sums(program):
    """Returns the leaves of the messages, in the program's order."""
    found = []
    for eqn in getattr(program, "jaxpr", program).eqns:
        if eqn.primitive.name == "jaxcgx_psum":
            found += re.findall(r"\['(\w)'\]", str(eqn.source_info.name_stack)) or re.findall(
                r"make_train_step\.(\w)\.", str(eqn.source_info.name_stack)
            )
        for value in eqn.params.values():
            found += sums(value) if hasattr(getattr(value, "jaxpr", value), "eqns") else []
    return found


def test_the_order_of_messages():
    """The loss is traced once, also for the order."""
    sent, traces = {}, []

    def call(w, x):
        traces.append(1)
        return layer(w, x)

    for overlap in (None, "backward", cgx.Priority()):
        train = make(cgx.Plan(cgx.MaxMin(4, 16), **SMALL), overlap, call)
        state, batch = train.init({name: jnp.ones((8, 8)) for name in "abc"}), np.ones((8, 8), np.float32)
        if isinstance(overlap, cgx.Priority):  # the first step sends nothing
            state, _ = train.step(state, batch)
        traces.clear()
        sent[overlap] = sums(train.step.trace(state, batch).jaxpr)
        assert len(traces) == 3
    assert list(sent.values()) == [["a", "b", "c"], ["a", "c", "b"], ["b", "c", "a"]]


@pytest.mark.parametrize(
    ("exchange", "sums", "lists"),
    [
        (cgx.Plan(cgx.MaxMin(4), min_size=64), 2, 0),
        (cgx.Plan(cgx.MaxMin(4), [("0", cgx.ByteGrad())], min_size=64), 3, 0),
        (cgx.Plan(cgx.PowerSGD(1), min_size=64), 3, 0),
        (cgx.DGC(ratio=0.1), 1, 1),
    ],
    ids=["MaxMin", "two codecs", "PowerSGD", "DGC"],
)
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_the_messages_of_many_small_leaves(exchange, sums, lists, overlap):
    """Over Tcp, a step of 60 leaves sends one message for each codec, two of PowerSGD, one raw one, and its loss."""
    params = {f"{i % 10}{i:02}": np.ones((8, 8) if i % 3 == 0 else (8,), np.float32) for i in range(60)}

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w) if w.ndim == 2 else x + w
        return jnp.mean(x)

    sharding = cgx.Sharding(cgx.Tcp("a"))
    train = cgx.make_train_step(loss, optax.sgd(0.1), mesh(2), exchange, sharding=sharding, overlap=overlap)
    state, batch = jax.eval_shape(train.init, params), jax.ShapeDtypeStruct((4, 8), np.float32)
    program = str(train.step.trace(state, batch).jaxpr)
    count = lambda name: len(re.findall(rf"\b{name}\[", program))
    assert count("jaxcgx_tcp_begin") == count("jaxcgx_tcp_end") == sums
    assert count("jaxcgx_tcp_exchange_begin") == count("jaxcgx_tcp_exchange_end") == lists
    assert count("jaxcgx_psum") == 1  # the loss
    assert not count("psum") and not count("psum_invariant")

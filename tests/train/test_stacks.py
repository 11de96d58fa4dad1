"""Tests `Stacks`: with ZeRO-1, each matrix of Muon is whole on one rank."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from helpers import normal
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx

Dims = optax.contrib.MuonDimensionNumbers
LAYERS, STEPS = 5, 3


@pytest.fixture(scope="module", autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax's Muon relies on it
        yield


def init_params():
    layers = [dict(up=normal((8, 16), i, scale=0.1), bias=jnp.zeros(16)) for i in range(LAYERS)]
    return dict(embed=normal((8, 16), 20), layers=layers, out=normal((16, 8), 21))


def batch(step):
    return normal((12, 8), 30 + step)


def loss_fn(params, batch):
    x = batch @ params["embed"] @ params["out"]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ params["out"]
    return (x**2).mean()


def train(ranks, plan, gather):
    """Returns the parameters after some steps, the state, and what `explain` says of a step."""
    params, places = init_params(), mesh_of(ranks)
    stacks = cgx.Stacks(params, ranks=ranks, leave="embed|out")
    stacked = stacks.stack(params)
    muon = optax.contrib.muon(
        0.1, muon_weight_dimension_numbers=dict.fromkeys(stacked) | dict.fromkeys(stacks.names, Dims(1, 2))
    )
    specs = cgx.shard_specs(stacked, places) | dict.fromkeys(stacks.names, P("data"))
    sharding = cgx.Sharding(optimizer=specs, gather=gather)
    step = cgx.make_train_step(lambda p, b: loss_fn(stacks.unstack(p), b), muon, places, plan, sharding=sharding)
    state = step.init(stacked)
    for i in range(STEPS):
        state, _ = step.step(state, batch(i))
    return stacks.unstack(state.params), state, cgx.explain(step.step, state, batch(0), show=False)


@pytest.fixture(scope="module")
def plain():
    """The parameters that Muon makes in one process, without stacks."""
    params = init_params()
    dims = jax.tree_util.tree_map_with_path(lambda path, x: Dims() if "up" in str(path) else None, params)
    muon = optax.contrib.muon(0.1, muon_weight_dimension_numbers=dims)
    state = muon.init(params)
    for i in range(STEPS):
        updates, state = muon.update(jax.grad(loss_fn)(params, batch(i)), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("ranks", [1, 3])  # 5 matrices: a row of zeros with 3
def test_muon_of_stacks_is_muon(plain, ranks):
    params, _, _ = train(ranks, cgx.Raw(), cgx.Raw())
    assert jax.tree.structure(params) == jax.tree.structure(plain)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), params, plain)


def test_stacks_go_to_their_homes_and_updates_back(plain):
    params, state, found = train(4, cgx.MaxMin(8), cgx.MaxMin(8))
    large = [(c.operation, c.function) for c in found.collectives if c.bytes > 100]
    assert sorted(large) == [
        ("all-gather", "compressed_all_gather"),
        ("all-gather", "make_train_step"),
        ("all-to-all", "make_train_step"),
    ], found
    momentum = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (8, 8, 16)]
    assert momentum and {x.sharding.spec for x in momentum} == {P("data")}
    away = lambda tree: optax.tree.norm(jax.tree.map(jnp.subtract, tree, plain))
    assert away(params) < 0.2 * away(init_params())


def test_names_of_stacks():
    tree = dict(
        a=jnp.zeros((2, 3)), b=jnp.zeros((2, 3), jnp.bfloat16), c=jnp.ones((2, 3)), d=jnp.zeros((3, 2)), e=jnp.ones(1)
    )
    stacks = cgx.Stacks(tree, ranks=2, leave="^d$")
    stacked = stacks.stack(tree)
    assert {name: (x.shape, x.dtype.name) for name, x in stacked.items()} == {
        "stack 2x3 float32": ((2, 2, 3), "float32"),
        "stack 2x3 bfloat16": ((2, 2, 3), "bfloat16"),
        "d": ((3, 2), "float32"),
        "e": ((1,), "float32"),
    }
    again = stacks.unstack(stacked)
    jax.tree.map(np.testing.assert_array_equal, again, tree)


MATRICES = dict(a=jnp.ones((2, 3)), b=jnp.ones((2, 3)), c=jnp.zeros(3))
TAKEN = {"stack 2x3 float32": jnp.zeros(4)}
STACKS, OF_ONE = cgx.Stacks(MATRICES, ranks=4), cgx.Stacks(MATRICES).stack(MATRICES)

test_errors = table(
    {
        "Stacks": [
            (lambda: cgx.Stacks({"a/b": 1.0, "a": {"b": 2.0}}), ValueError, "params ['a/b']", "'a/b'", "rename"),
            (lambda: cgx.Stacks(TAKEN | MATRICES), ValueError, "params ['stack 2x3 float32']", "'stack 2x3 float32'"),
        ],
        "Stacks.stack": [
            (lambda: STACKS.stack(MATRICES | dict(a=jnp.ones((5, 5)))), ValueError, "params", "{'a': 'float32[5, 5]'"),
            (lambda: STACKS.stack({}), ValueError, "params", "{}"),
        ],
        "Stacks.unstack": [
            (lambda: STACKS.unstack(MATRICES), ValueError, "stacked", "['a', 'b', 'c']"),
            (lambda: STACKS.unstack(OF_ONE), ValueError, "stacked", "{'stack 2x3 float32': 2"),
        ],
    }
)

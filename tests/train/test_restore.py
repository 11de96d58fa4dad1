"""Tests the state per rank: its specs, checkpoints on disk, and other numbers of ranks.

test_machine.py restores a training loop's residuals, momentum and optimizer's state on any number of ranks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, refused, rows, says, table
from helpers import assert_same_trees, mesh_with
from jax.sharding import PartitionSpec as P
from training import CODEC, PARAMS, X, loss_fn, mesh_of, place, save

import jaxcgx as cgx


@functools.cache
def make(ranks):
    exchange = cgx.Momentum(CODEC, 0.5)
    return cgx.make_train_step(loss_fn, optax.adagrad(0.1), mesh_of(ranks), exchange, donate=False)


def go_on(train, state, steps=2):
    for _ in range(steps):
        state, metrics = train.step(state, X)
    return state, metrics.loss


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Returns a checkpoint of four ranks."""
    return save(tmp_path_factory.mktemp("four") / "here", make(4).init(PARAMS))


@pytest.mark.parametrize("form", ["params", "optimizer"])
def test_sharded_parameters_or_state(form, tmp_path):
    """With ZeRO-3 and ZeRO-1, shards and the errors of gathering updates keep their bits, and get the new sharding."""

    def make(ranks):
        specs = {form: cgx.shard_specs(PARAMS, mesh_of(ranks), min_size=100)}
        sharding = cgx.Sharding(gather=CODEC if form == "optimizer" else cgx.Raw(), **specs)
        options = dict(sharding=sharding, donate=False)
        return cgx.make_train_step(loss_fn, optax.sgd(0.1, momentum=0.5), mesh_of(ranks), CODEC, **options)

    saved, _ = go_on(make(4), make(4).init(PARAMS))
    path, train = save(tmp_path / "here", saved), make(2)
    template = train.init(PARAMS)
    found = cgx.restore_state(path, template)
    sharding = lambda x: x.sharding
    assert jax.tree.map(sharding, found) == jax.tree.map(sharding, template)
    assert_same_trees(*(state.replace(exchange=state.exchange.shared) for state in (found, saved)))
    new, old = (state.exchange.own.residuals["w"] for state in (found, saved))
    assert new.shape == (2, 30, 40) and np.abs(np.asarray(old).sum(0)).max() > 1e-3
    np.testing.assert_allclose(np.asarray(new).sum(0), np.asarray(old).sum(0), rtol=1e-5, atol=1e-7)
    assert (found.lost is not None) == (form == "optimizer")
    assert found.opt_state[0].trace["w"].addressable_shards[0].data.shape == (30, 20)
    assert go_on(train, found)[1] < loss_fn(jax.device_get(saved.params), X)


def test_pending_gradients(tmp_path):
    """They keep their mean over the ranks."""
    make = lambda ranks: cgx.make_train_step(
        loss_fn, optax.sgd(0.1), mesh_of(ranks), CODEC, overlap=cgx.Priority(), donate=False
    )
    state, _ = make(4).step(make(4).init(PARAMS), X)
    moved = cgx.reshard_state(state, 2).pending
    found = cgx.restore_state(save(tmp_path / "here", state), make(2).step(make(2).init(PARAMS), X)[0])
    assert cgx.state_specs(state, "data").pending.grads["w"] == P(("data",))
    assert moved.grads["w"].shape == (2, 30, 40)
    assert_same_trees(found.pending.grads, moved.grads)
    mean = np.asarray(state.pending.grads["w"]).mean(0)
    np.testing.assert_allclose(moved.grads["w"].mean(0), mean, rtol=1e-5, atol=1e-7)
    sent = dataclasses.replace(state.pending, ticket=jnp.zeros(4))
    with raises(ValueError, says("reshard_state", "state", got="one whose gradients", remedy="train.finish")):
        cgx.reshard_state(state.replace(pending=sent), 2)


def test_a_manager_and_a_hierarchy(tmp_path):
    """Momentum has sixteen bits, and ranks have two axes."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    exchange = cgx.Momentum(CODEC, 0.5)
    state = cgx.compress_gradients("data", exchange, axis_size=3).init(half)
    state = jax.tree.map(lambda x: jnp.ones_like(x) if x.ndim > 1 else x, state)
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave((half, state)))
    with jax.set_mesh(mesh_with(node=2, local=2)):
        template = cgx.compress_gradients(("node", "local"), exchange).init(half)
    _, found = cgx.restore_state(tmp_path / "5" / "default", (half, template))
    own, like = found.own, template.own
    assert own.residuals["w"].sharding == like.residuals["w"].sharding and own.momentum["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(own.residuals["w"], np.full((4, 30, 40), 0.75, np.float32))
    np.testing.assert_array_equal(own.momentum["b"].astype(jnp.float32), np.ones((4, 40)))


def test_other_leaves_per_rank(tmp_path):
    """Leaves per rank outside of our states."""

    def tree(ranks, fill):
        rows = np.float32(fill(ranks))
        return dict(residuals={"w": rows}, stats=rows, seen=np.full(ranks, ranks), key=jax.random.key(ranks))

    path = save(tmp_path / "here", tree(4, np.arange))
    keep = {"^residuals/": "sum", "^stats$": "mean", "seen": "mean"}
    found = cgx.restore_state(path, tree(2, np.zeros), per_rank=keep)
    np.testing.assert_array_equal(found["residuals"]["w"], [3, 3])
    np.testing.assert_array_equal(found["stats"], [1.5, 1.5])
    np.testing.assert_array_equal(found["seen"], [4, 4])
    assert found["key"] == jax.random.key(4)


def test_a_model_with_state_per_rank(tmp_path):
    """Floating-point numbers keep their mean, counters are those of the first rank, and random keys differ."""

    @functools.cache
    def make(ranks):
        loss = lambda params, state, x: (loss_fn(params, x), {**state, "n": state["n"] + 1, "mean": x.mean()})
        return cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(ranks), CODEC, model_state="per_rank")

    first = {"key": jax.random.key(0), "n": 0, "mean": 0.0}
    state, _ = make(4).step(make(4).init(PARAMS, first), X)
    path = save(tmp_path / "here", state)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    templates = [jax.tree.map(shape, make(ranks).init(PARAMS, first)) for ranks in (6, 4)]
    six, same = (cgx.restore_state(path, template).model_state.rows for template in templates)
    words = lambda rows: {**rows, "key": jax.random.key_data(rows["key"])}
    assert_same_trees(words(same), words(state.model_state.rows))
    assert len(set(map(str, words(six)["key"]))) == 6 and list(six["n"]) == [1] * 6
    np.testing.assert_allclose(six["mean"], np.full(6, X.mean()), rtol=1e-5)


WIDE, restore = dict(PARAMS, b=jnp.zeros(41)), cgx.restore_state
bare = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
other_residuals = lambda path, t: restore(path, t.replace(exchange=make(2).init(WIDE).exchange))
ERRORS = {
    "restore_state": [
        (lambda path, t: restore(path / "none", t), FileNotFoundError, "path", "", "CheckpointManager"),
        (lambda path, t: restore(path.parent, t), FileNotFoundError, "path"),
        (lambda path, t: restore(path, PARAMS), TypeError, "template", "a dict", "train.init"),
        (lambda path, t: restore(path, t.exchange), ValueError, "template", "none"),
        (lambda path, t: restore(path, t.replace(pending=3)), ValueError, "template .pending", "another"),
        (lambda path, t: restore(path, t.replace(params=WIDE)), ValueError, "template .params['b']", "float32[41]"),
        (other_residuals, ValueError, "template .exchange.own.residuals['b']", "float32[2, 41]"),
        (lambda path, t: restore(path, jax.tree.map(bare, t)), ValueError, "template .params['b']", "", "init"),
        (lambda path, t: restore(path, t, per_rank={"nothing": "sum"}), ValueError, "per_rank", "'nothing'"),
        (lambda path, t: restore(path, t, per_rank={"b": "max"}), ValueError, "per_rank", "'max'"),
    ]
}


@pytest.mark.parametrize("row", rows(ERRORS))
def test_errors(four, row):
    refused(*row, run=lambda given: given(four, make(2).init(PARAMS)))


def compressed(ranks):
    return optax.chain(cgx.compress_gradients("data", CODEC, axis_size=ranks), optax.adagrad(0.1))


CLIP = optax.chain(optax.clip(1.0), optax.scale_by_schedule(lambda step: 1.0))
FIRST, IF_FINITE = cgx.compress_gradients("data", CODEC, axis_size=4), optax.apply_if_finite(compressed(4), 5)


@pytest.mark.short
def test_specs_through_any_nesting():
    exchange = cgx.Momentum(cgx.Plan(CODEC, min_size=100), 0.9)
    optimizer = optax.chain(
        CLIP,
        cgx.compress_gradients("data", exchange, axis_size=4),
        optax.MultiSteps(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 3).gradient_transformation(),
    )
    state = optimizer.init(PARAMS)
    specs = cgx.state_specs(jax.eval_shape(optimizer.init, PARAMS), "data")
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    rows = {"w": P(("data",)), "b": None}
    assert specs[1].own.residuals == specs[1].own.momentum == rows
    assert set(jax.tree.leaves((specs[0], specs[1].shared, specs[2]))) == {P()}
    assert cgx.state_specs(state, ["node", "local"])[1].own.momentum["w"] == P(("node", "local"))


specs_of = lambda optimizer: cgx.state_specs((optimizer.init(PARAMS), ()), "data")
ERRORS_OF_STATES = {
    "state_specs": [
        (lambda: specs_of(optax.MultiSteps(compressed(4), 2)), ValueError, "opt_state", "it around", "optax.chain("),
        (lambda: specs_of(IF_FINITE), ValueError, "opt_state", "it around", "optax.chain("),
        # Its state would differ between ranks, and no spec would say so.
        (lambda: specs_of(optax.chain(CLIP, optax.trace(0.9), FIRST)), ValueError, "opt_state", "TraceState before it"),
    ],
    "reshard_state": [(lambda: cgx.reshard_state(FIRST.init(PARAMS), 0), ValueError, "new_size", "0")],
}
test_errors_of_states = table(ERRORS_OF_STATES)


def test_dtypes_for_other_ranks():
    """Residuals are float32, and momentum has the dtype of its parameters, in JAX's arrays and in NumPy's."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state = cgx.compress_gradients("data", cgx.Momentum(CODEC), axis_size=4).init(params)
    for found in state, cgx.reshard_state(state, 3), cgx.reshard_state(jax.tree.map(np.asarray, state), 6):
        assert {x.dtype for x in jax.tree.leaves(found.own.residuals)} == {jnp.dtype("float32")}
        assert {x.dtype for x in jax.tree.leaves(found.own.momentum)} == {jnp.dtype("bfloat16")}


def test_the_same_size_changes_nothing():
    state = compressed(4).init(PARAMS)
    same, leaves = jax.tree.leaves(cgx.reshard_state(state, 4)), jax.tree.leaves(state)
    assert leaves and all(a is b for a, b in zip(same, leaves, strict=True))


def test_a_resharded_state_shares_no_memory():
    """A step that donates the new state leaves the old one alone."""
    of = lambda ranks: cgx.make_train_step(loss_fn, optax.sgd(0.1, momentum=0.9), mesh_of(ranks), CODEC)
    four, two = of(4), of(2)
    state = four.init(PARAMS)
    new = cgx.reshard_state(state, 2)
    new = place(new, cgx.state_specs(new, "data"), 2)
    two.step(new, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(new)) and not any(x.is_deleted() for x in jax.tree.leaves(state))

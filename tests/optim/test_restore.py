"""Tests restore_state with checkpoints on disk that have another number of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_same_trees, assert_trees
from training import CODEC, PARAMS, X, loss_fn, mesh_of

import jaxcgx as cgx

ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")


@functools.cache
def make(ranks):
    return cgx.make_train_step(loss_fn, optax.adagrad(0.1), mesh_of(ranks), plan=CODEC, momentum=0.5, donate=False)


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def go_on(train, params, state, steps=2):
    for _ in range(steps):
        params, state, metrics = train.step(params, state, X)
    return params, state, metrics.loss


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Returns parameters and state of four ranks, and their checkpoint."""
    params, state, _ = go_on(make(4), *make(4).init(PARAMS))
    return params, state, save(tmp_path_factory.mktemp("four") / "here", (params, state))


def assert_kept(found, saved, ranks):
    """Checks that residuals keep their sum over the ranks, momentum its mean, and everything else its bits."""

    def check(of_all, new, old):
        assert new.shape == (ranks, *old.shape[1:]) and new.addressable_shards[0].data.shape[0] == 1
        assert np.abs(of_all(old, 0)).max() > 1e-3
        np.testing.assert_allclose(of_all(np.asarray(new), 0), of_all(np.asarray(old), 0), rtol=1e-5, atol=1e-7)

    assert_trees(functools.partial(check, np.sum), found[0].residuals, saved[0].residuals)
    assert_trees(functools.partial(check, np.mean), found[0].momentum, saved[0].momentum)
    without = lambda state: (state[0]._replace(residuals=None, momentum=None), state[1])
    assert_same_trees(without(found), without(saved))


def test_fewer_ranks(four):
    params, state, path = four
    found, restored = cgx.restore_state(path, make(2).init(PARAMS))
    assert_same_trees(found, params)
    assert_kept(restored, state, 2)
    moved = jax.device_put(cgx.reshard_state(state, 2), jax.tree.map(lambda x: x.sharding, restored))
    assert_same_trees(restored, moved)
    assert go_on(make(2), found, restored)[2] < loss_fn(jax.device_get(params), X)


def test_nothing_is_compressed(tmp_path):
    """A state without arrays per rank is unchanged for any number of ranks."""
    of = lambda ranks: cgx.make_train_step(loss_fn, optax.adam(0.1), mesh_of(ranks), plan=cgx.Raw()).init(PARAMS)
    assert_same_trees(cgx.restore_state(save(tmp_path / "raw", of(4)), of(2)), of(2))


def test_neither_number_divides_the_other(tmp_path):
    params, state, _ = go_on(make(8), *make(8).init(PARAMS))
    for number, ranks in enumerate((6, 8)):
        path = save(tmp_path / str(number), dict(params=params, state=state, step=number))
        template = dict(zip(("params", "state"), make(ranks).init(PARAMS)), step=0)
        found = cgx.restore_state(path, template)
        assert_same_trees(found["params"], params)
        assert_kept(found["state"], state, ranks)
        assert found["step"] == number
        params, state = found["params"], found["state"]
    go_on(make(8), params, state)


def shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def test_as_many_ranks(four):
    """All bits return. The template may have shapes with shardings."""
    params, state, path = four
    restored = cgx.restore_state(path, jax.tree.map(shape, make(4).init(PARAMS)))
    assert_same_trees(restored, (params, state))
    assert_same_trees(go_on(make(4), *restored), go_on(make(4), params, state))


@pytest.mark.parametrize("form", ["param_specs", "optimizer_specs"])
def test_sharded_parameters_or_state(form, tmp_path):
    """With ZeRO-3 and ZeRO-1, shards and the errors of gathering updates keep their bits, and get the new sharding."""

    def make(ranks):
        gather = CODEC if form == "optimizer_specs" else cgx.Raw()
        options = {form: cgx.shard_specs(PARAMS, mesh_of(ranks), min_size=100), "gather": gather}
        optimizer = optax.sgd(0.1, momentum=0.5)
        return cgx.make_train_step(loss_fn, optimizer, mesh_of(ranks), plan=CODEC, donate=False, **options)

    saved = go_on(make(4), *make(4).init(PARAMS))[:2]
    path, train = save(tmp_path / "here", saved), make(2)
    template = train.init(PARAMS)
    found = cgx.restore_state(path, template)
    sharding = lambda x: x.sharding
    assert jax.tree.map(sharding, found) == jax.tree.map(sharding, template)
    (params, (sent, *rest)), (old_params, (old_sent, *old_rest)) = found, saved
    assert_same_trees(
        (params, rest, sent._replace(residuals=None)), (old_params, old_rest, old_sent._replace(residuals=None))
    )
    totals = [np.asarray(each.residuals["w"]).sum(0) for each in (sent, old_sent)]
    assert sent.residuals["w"].shape == (2, 30, 40) and np.abs(totals[1]).max() > 1e-3
    np.testing.assert_allclose(*totals, rtol=1e-5, atol=1e-7)
    momentum = rest[0][0].trace["w"]
    assert len(rest) == 1 + (form == "optimizer_specs") and momentum.addressable_shards[0].data.shape == (30, 20)
    assert go_on(train, *found)[2] < loss_fn(jax.device_get(old_params), X)


def test_a_manager_and_a_hierarchy(four, tmp_path):
    """Momentum has sixteen bits, and ranks have two axes."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state = cgx.compress_gradients("data", CODEC, momentum=0.5, axis_size=3).init(half)
    state = jax.tree.map(lambda x: jnp.ones_like(x) if x.ndim > 1 else x, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave((half, state)))
    mesh = jax.make_mesh(
        (2, 2), ("node", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh):
        template = cgx.compress_gradients(("node", "local"), CODEC, momentum=0.5).init(half)
    _, found = cgx.restore_state(tmp_path / "5" / "default", (half, template))
    assert (
        found.residuals["w"].sharding == template.residuals["w"].sharding and found.momentum["w"].dtype == jnp.bfloat16
    )
    np.testing.assert_array_equal(found.residuals["w"], np.full((4, 30, 40), 0.75, np.float32))
    np.testing.assert_array_equal(found.momentum["b"].astype(jnp.float32), np.ones((4, 40)))


def test_other_leaves_per_rank(tmp_path):
    """Leaves per rank outside of our states are an example: the residuals of value_and_grad."""

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
        return cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(ranks), plan=CODEC, model_state="per_rank")

    first = {"key": jax.random.key(0), "n": 0, "mean": 0.0}
    *trees, _ = make(4).step(*make(4).init(PARAMS, first), X)
    path = save(tmp_path / "here", trees)
    templates = [jax.tree.map(shape, list(make(ranks).init(PARAMS, first))) for ranks in (6, 4)]
    six, same = (cgx.restore_state(path, template)[1].rows for template in templates)
    words = lambda rows: {**rows, "key": jax.random.key_data(rows["key"])}
    assert_same_trees(words(same), words(trees[1].rows))
    assert len(set(map(str, words(six)["key"]))) == 6 and list(six["n"]) == [1] * 6
    np.testing.assert_allclose(six["mean"], np.full(6, X.mean()), rtol=1e-5)


def bare(x):
    """Returns a state without its sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


TEMPLATE, PATH = ("restore_state", "template"), ("restore_state", "path")
WIDE = dict(PARAMS, b=jnp.zeros(41))


@pytest.mark.parametrize(
    ("restore", "error", "words"),
    [
        (
            lambda path, t: cgx.restore_state(path / "none", t),
            FileNotFoundError,
            says(*PATH, expected="folder Orbax", remedy="CheckpointManager"),
        ),
        (lambda path, t: cgx.restore_state(path.parent, t), FileNotFoundError, says(*PATH, expected="folder Orbax")),
        (
            lambda path, t: cgx.restore_state(path, PARAMS),
            TypeError,
            says(*TEMPLATE, expected="tree state", got="a dict", remedy="train.init per_rank 'sum'"),
        ),
        (lambda path, t: cgx.restore_state(path, t[1]), ValueError, says(*TEMPLATE, expected="leaf '0/b'", got="none")),
        (
            lambda path, t: cgx.restore_state(path, (*t, 3)),
            ValueError,
            says(*TEMPLATE, at="leaf [2]", expected="leaves '0/b'", got="another"),
        ),
        (
            lambda path, t: cgx.restore_state(path, ({**t[0], "b": WIDE["b"]}, t[1])),
            ValueError,
            says(*TEMPLATE, at="leaf [0]['b']", expected="[40]", got="float32[41]"),
        ),
        (
            lambda path, t: cgx.restore_state(path, (t[0], make(2).init(WIDE)[1])),
            ValueError,
            says(*TEMPLATE, at="leaf [1][0].residuals['b']", expected="[4, 40]", got="float32[2, 41]"),
        ),
        (
            lambda path, t: cgx.restore_state(path, jax.tree.map(bare, t)),
            ValueError,
            says(*TEMPLATE, at="leaf [0]['b']", expected="jax.ShapeDtypeStruct sharding", remedy="init"),
        ),
        (
            lambda path, t: cgx.restore_state(path, t, per_rank={"nothing": "sum"}),
            ValueError,
            says("restore_state", "per_rank", expected="paths", got="'nothing'"),
        ),
        (
            lambda path, t: cgx.restore_state(path, t, per_rank={"b": "max"}),
            ValueError,
            says("restore_state", "per_rank", expected="'sum' 'mean'", got="'max'"),
        ),
    ],
)
def test_errors(four, restore, error, words):
    with raises(error, words):
        restore(four[2], make(2).init(PARAMS))

"""Tests docs/convert.md: each pair of steps runs. With Raw() both train the same, and with 4 bits almost the same."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pages
import pytest
from helpers import assert_close, assert_same_trees, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import predict
from training import mesh_of

import jaxcgx as cgx

PAGE = (pages.ROOT / "docs/convert.md").read_text()
PAIRS = pages.pairs(PAGE)
RANKS, STEPS = 4, 50
X = normal((64, 8), 1)
Y = jnp.sin(X[:, :3]) + normal((64, 3), 4, scale=0.5)
PARAMS = {"w": normal((8, 64), 2, scale=0.3), "v": normal((64, 3), 3, scale=0.1)}


def on(mesh):
    """Returns the batch on a mesh."""
    return jax.device_put((X, Y), NamedSharding(mesh, P("data")))


def loss_fn(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


def token_losses(params, x, y):
    """Each rank has 1 to 16 tokens that count."""
    return ((predict(params, x) - y) ** 2).mean(-1), jnp.float32(x[:, 0] > 0)


# The arguments of a step of each style, from a sharded batch and an optimizer.
def functional(x, y, optimizer):
    return PARAMS, optimizer.init(PARAMS), x, y


def with_keys(x, y, optimizer):
    """Adds a key for each example."""
    keys = jax.device_put(jax.random.split(jax.random.key(0), len(x)), x.sharding)
    return *functional(x, y, optimizer), keys


def replicated(x, y, optimizer):
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * RANKS), tree)
    rows = (np.asarray(a).reshape(RANKS, -1, a.shape[-1]) for a in (x, y))
    return stack(PARAMS), stack(optimizer.init(PARAMS)), *rows


def equinox(x, y, optimizer):
    eqx = pytest.importorskip("equinox", reason="needs the extra `test`")
    model = eqx.nn.MLP(8, 3, 64, 1, key=jax.random.key(0))
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), x, y


def modules(x, y, optimizer):
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 64, rngs=rngs), nnx.tanh, nnx.Linear(64, 3, rngs=rngs))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param), x, y


def train_state(x, y, optimizer):
    flax = pytest.importorskip("flax.training.train_state", reason="needs the extra `test`")
    return flax.TrainState.create(apply_fn=None, params=PARAMS, tx=optimizer), x, y


STYLES = dict.fromkeys(["jit", "shard_map, gradient inside", "shard_map, gradient outside"], functional)
STYLES |= {"pmap": replicated, "Equinox": equinox, "Flax NNX": modules, "TrainState": train_state}
# {title: number of changed lines}
LOSSES = {"Weighted means": 2, "Losses across examples": 4, "Dropout": 1, "Auxiliary outputs": 1}
LOSSES |= {"Frozen parameters": 2, "Small leaves": 2, "Feedback": 2}
APART = {"FSDP", "mpirun", "Several processes", "Evaluation and checkpoints"}  # these have tests of their own
LIBRARIES = {equinox: ("eqx", "equinox"), modules: ("nnx", "flax.nnx")}
model_loss = lambda model, x, y: ((model(x) - y) ** 2).mean()
OTHER_LOSSES = {equinox: lambda model, x, y: model_loss(jax.vmap(model), x, y), modules: model_loss}


def train(source, style, codec=None, kind=AxisType.Auto):
    """Returns the losses of 50 steps with the means of auxiliary outputs after them, and a step's explanation."""
    mesh = mesh_of(RANKS, kind)
    optimizer = optax.adam(3e-3)
    names = pages.IMPORTS | dict(mesh=mesh, codec=codec, optimizer=optimizer, token_losses=token_losses)
    names |= dict(loss_fn=OTHER_LOSSES.get(style, loss_fn), embed=predict, predict=predict)
    if style in LIBRARIES:
        short, library = LIBRARIES[style]
        names[short] = pytest.importorskip(library, reason="needs the extra `test`")
    exec(compile(source, "docs/convert.md", "exec"), names)
    step, losses = names["step"], []
    x, y = on(mesh)
    context = contextlib.nullcontext() if style is replicated else jax.set_mesh(mesh)
    with context, jax.numpy_dtype_promotion("standard"):  # as programs of users have
        args = style(x, y, names["optimizer"])
        found = codec and cgx.explain(step, *args, show=False)
        for _ in range(STEPS):
            result = step(*args)
            *new, loss = result if isinstance(result, tuple) else (result,)
            args = *new, *args[len(new) :]
            losses.append([float(np.mean(x)) for x in jax.tree.leaves(loss)])
    losses, *aux = np.array(losses).T
    return losses, aux, found


def test_every_pair_is_tested():
    assert set(PAIRS) == {*STYLES, *LOSSES, *APART}


@pytest.mark.parametrize("name", [*STYLES, *LOSSES])
def test_before_and_after(name):
    before, after = PAIRS[name]
    assert len(pages.new_lines(before, after)) == LOSSES.get(name, 1)
    compare(before, after, {**STYLES, "Dropout": with_keys}.get(name, functional))


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="jax.grad of a product fails if the batch is sharded")
@pytest.mark.parametrize("name", ["jit", "Flax NNX", "TrainState"])
def test_on_an_explicit_mesh(name):
    compare(*PAIRS[name], STYLES[name], AxisType.Explicit)


def compare(before, after, style, kind=AxisType.Auto):
    plain, plain_aux, _ = train(before, style, kind=kind)
    raw, raw_aux, uncompressed = train(after, style, cgx.Raw(), kind)
    np.testing.assert_allclose(raw, plain, rtol=1e-4)
    np.testing.assert_allclose(raw_aux, plain_aux, rtol=1e-4, atol=1e-5)
    assert plain[-1] < 0.9 * plain[0]
    losses, _, compressed = train(after, style, cgx.MaxMin(4, 64), kind)
    assert abs(losses[-1] / plain[-1] - 1) < 0.02, (losses[-1], plain[-1])
    assert uncompressed.ratio == 1 and compressed.ratio > 1.9


def test_fsdp():
    """The pair of mpirun is tested in tests/mpi/test_steps.py."""
    mesh = mesh_of(RANKS)
    x, y = on(mesh)
    before, after = PAIRS["FSDP"]

    def losses(source, codec=None):
        names = pages.IMPORTS | dict(mesh=mesh, loss_fn=loss_fn, optimizer=optax.adam(3e-3), codec=codec)
        exec(source, names := names | dict(params=PARAMS, specs={"w": P(None, "data"), "v": P("data")}))
        args, found = [names["params"]] * (not codec) + [names["state"]], []
        params = names["state"].params if codec else names["params"]
        sharded = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)]
        assert sharded == [(16, 3), (8, 16)]  # "v" and "w"
        for _ in range(STEPS):
            *args, loss = names["step"](*args, x, y)
            found.append(float(loss))
        return np.array(found), codec and cgx.explain(names["step"], *args, x, y, show=False).ratio

    with jax.numpy_dtype_promotion("standard"):
        plain, _ = losses(before)
        raw, _ = losses(after, cgx.Raw())
        compressed, ratio = losses(after, cgx.MaxMin(8, 64))
    np.testing.assert_allclose(raw, plain, rtol=1e-4)
    assert abs(compressed[-1] / plain[-1] - 1) < 0.02 and ratio > 1.9


def test_several_processes():
    """In a single process, which has all parts."""
    mesh = jax.make_mesh((RANKS,), ("data",), devices=jax.devices()[:RANKS])
    names = pages.IMPORTS | dict(mesh=mesh, images=np.asarray(X), labels=np.asarray(Y), chosen=np.arange(0, 64, 4))
    found = []
    for source in PAIRS["Several processes"]:
        exec(source, names)
        found.append((names["x"], names["y"]))
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(after, before)
        assert after.sharding == before.sharding


def test_evaluation_and_checkpoints(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
    mesh = mesh_of(RANKS)
    optimizer = optax.chain(cgx.compress_gradients("data", cgx.MaxMin(2, 64), mesh=mesh), optax.sgd(0.1))
    params, (x, y) = jax.device_put(PARAMS, NamedSharding(mesh, P())), on(mesh)
    _, state = optimizer.update(cgx.grad(loss_fn, "data", None)(params, x, y), optimizer.init(params), params)
    names = dict(jax=jax, cgx=cgx, loss_fn=loss_fn, optimizer=optimizer, params=params, state=state, x=x, y=y)
    found = []
    for i, source in enumerate(PAIRS["Evaluation and checkpoints"]):
        with ocp.StandardCheckpointer() as checkpointer:
            exec(source, names | dict(checkpointer=checkpointer, path=tmp_path / str(i)), local := {})
        found.append((local["test_loss"], local["found"]))
    (before, plain), (after, fed) = found
    assert before == after == pytest.approx(float(loss_fn(PARAMS, X, Y)), rel=1e-5)
    assert_same_trees(plain, dict(params=params, state=state))
    assert_same_trees(fed, plain)
    assert jax.tree.map(lambda x: x.sharding, fed["state"][0]) == jax.tree.map(lambda x: x.sharding, state[0])


def last_program(title, **names):
    """Returns the names that the last program of a section makes."""
    section = re.search(rf"^## {title}\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE).group(1)
    exec(re.findall(pages.CODE, section, re.DOTALL | re.MULTILINE)[-1], names := pages.IMPORTS | names)
    return names


def test_feedback():
    """With sync_in_backward, parameters and residuals are those of an optimizer with feedback."""
    optimizer, codec, mesh = optax.adam(3e-3), cgx.MaxMin(2), mesh_of(RANKS)
    x, y = on(mesh)
    names = dict(mesh=mesh, codec=codec, optimizer=optimizer, loss_fn=loss_fn)
    fed = optax.chain(cgx.compress_gradients("data", codec, mesh=mesh), optimizer)
    expected = PARAMS, fed.init(PARAMS)

    @jax.jit
    def step(params, state):
        updates, state = fed.update(cgx.grad(loss_fn, "data", None, mesh=mesh)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):  # as programs of users have
        named = last_program("shard_map, gradient outside", **names)
        found = [PARAMS, jax.tree.map(lambda x: jnp.zeros((RANKS, *x.shape)), PARAMS), optimizer.init(PARAMS)]
        for _ in range(5):
            *found, _ = named["step"](*found, x, y)
            expected = step(*expected)
    assert_close(found[:2], [expected[0], expected[1][0].own.residuals])
    assert all(np.abs(r).max() > 1e-4 for r in jax.tree.leaves(found[1]))


def test_accumulated_gradients():
    """Four micro-batches are one step of the whole batch, with one exchange."""
    mesh, optimizer = mesh_of(RANKS), optax.sgd(0.1)
    split = [jax.device_put(a.reshape(4, -1, a.shape[-1]), NamedSharding(mesh, P(None, "data"))) for a in (X, Y)]
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        names = last_program("Accumulated gradients", mesh=mesh, codec=cgx.Raw(), optimizer=optimizer, loss_fn=loss_fn)
        args = PARAMS, names["optimizer"].init(PARAMS), *split
        params, *_, loss = names["step"](*args)
        found = cgx.explain(names["step"], *args, show=False).collectives
    value, grads = jax.value_and_grad(loss_fn)(PARAMS, X, Y)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    assert_close(params, jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads))
    gradients = sum(g.nbytes for g in grads.values())
    assert gradients <= sum(c.bytes * c.times for c in found) < 2 * gradients


def test_compare_once():
    source, mesh = pages.programs("docs/convert")[-1], mesh_of(RANKS)
    x, y = on(mesh)
    names = dict(cgx=cgx, mesh=mesh, params=PARAMS, x=x, y=y)
    exec(source, {**names, "loss_fn": loss_fn})
    with pytest.raises(ValueError, match="weighted=True"):
        mean = lambda losses, mask: (losses * mask).sum() / mask.sum()
        exec(source, {**names, "loss_fn": lambda params, x, y: mean(*token_losses(params, x, y))})

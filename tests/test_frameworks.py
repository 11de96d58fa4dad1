"""Tests docs/frameworks.md: each pair of programs runs. With Raw() both find the same parameters."""

import contextlib
import dataclasses
import functools
import re
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pages
import pytest
from helpers import assert_close, mesh_with, normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx

pytestmark = pytest.mark.usefixtures("promotion")  # of users
PAGE = (pages.ROOT / "docs/frameworks.md").read_text()
PAIRS = pages.pairs(PAGE)
RANKS, STEPS = 2, 3
X = normal((16, 8), 1)
Y = jnp.sin(X[:, :3])
TOKENS = np.random.default_rng(0).integers(1, 32, (16, 6)) * (np.arange(6) < np.arange(16)[:, None] % 6 + 1)


def needs(library):
    return pytest.importorskip(library, reason="needs the extra `test`")


def on(mesh, *arrays, axis="data"):
    return jax.device_put(arrays, NamedSharding(mesh, P(axis)))


def programs(source, codec, **names):
    """Returns the names that a program of the page makes."""
    names = pages.IMPORTS | dict(codec=codec) | names
    exec(compile(source, "docs/frameworks.md", "exec"), names)
    return names


def steps(step, *state):
    """Returns the losses of some steps, and the last state. step(*state, key) returns the next state and the loss."""
    losses = []
    for i in range(STEPS):
        *state, loss = step(*state, jax.random.key(i))
        losses.append(loss)
    return losses, state


def keras(source, codec, noisy=False):
    library = needs("keras")
    distribution = library.distribution.DataParallel(devices=["cpu:0", "cpu:1"], auto_shard_dataset=False)
    mesh = distribution.device_mesh.backend_mesh
    names = programs(source, codec, keras=library, mesh=mesh, error=library.losses.MeanSquaredError())
    layers = library.layers
    with distribution.scope():
        library.utils.set_random_seed(0)
        hidden = [layers.BatchNormalization(), layers.Dropout(0.2)] if noisy else []
        model = names["Model"]([library.Input((8,)), layers.Dense(16, "tanh"), *hidden, layers.Dense(3)])
        model.compile(optimizer=library.optimizers.Adam(1e-2))
        data = np.asarray(X), np.asarray(Y)
        found = model.fit(*data, batch_size=8, epochs=STEPS, shuffle=False, verbose=0).history["loss"]
    assert found[-1] < found[0]
    return found, [v.value for v in model.trainable_variables]


def maxtext(source, codec):
    nn, flax = needs("flax.linen"), needs("flax.training.train_state")
    mesh = mesh_with(data=2, fsdp=2)
    rules = ("batch", ("data", "fsdp")), ("embed", "fsdp"), ("vocab", None)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            partitioned = lambda *axes: nn.with_logical_partitioning(nn.initializers.normal(0.3), axes)
            x = nn.Embed(32, 8, embedding_init=partitioned("vocab", "embed"))(tokens)
            x = nn.with_logical_constraint(x, ("batch", None, None))
            return nn.Dense(32, kernel_init=partitioned("embed", "vocab"))(x)

    model = Model()

    def token_losses(model, params, tokens):
        logits = model.apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, 1, 1)), tokens > 0

    def init(key):
        params = model.init(key, TOKENS[:1])["params"]
        return flax.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))

    key = jax.random.key(0)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(jax.eval_shape(init, key)), mesh, rules)
    state = nn.unbox(jax.jit(init, out_shardings=shardings)(key))
    step = programs(source, codec, model=model, token_losses=token_losses, shardings=shardings)["train_step"]
    (tokens,) = on(mesh, TOKENS, axis=("data", "fsdp"))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        losses, (state,) = steps(lambda state, key: step(state, tokens), state)
    return losses, state.params


def diloco(source, codec):
    """Rounds of two local steps of each replica, which has its own data, and an exchange."""
    mesh = mesh_with(diloco=2, fsdp=2)
    specs, outer = {"w": P(None, "fsdp"), "b": P()}, optax.sgd(0.7, momentum=0.9, nesterov=True)
    rows = jax.tree.map(lambda spec: P("diloco", *spec), specs)
    drjax = types.SimpleNamespace(reduce_mean=lambda tree: jax.tree.map(lambda x: x.mean(0), tree))
    names = dict(mesh=mesh, specs=specs, rows=rows, drjax=drjax, outer_optimizer=outer)
    synchronize = programs(source, codec, **names)["synchronize"]
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    params = jax.device_put({"w": normal((8, 4), 2), "b": jnp.zeros(3)}, shardings)
    loss_fn = lambda p, x, y: ((x @ p["w"][:, :3] + p["b"] - y) ** 2).mean()

    @jax.jit
    def train(params, moments, x, y):
        local = lambda p: jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.vmap(jax.grad(loss_fn))(p, x, y))
        inner = jax.tree.map(lambda p, spec: jnp.broadcast_to(p, (2, *p.shape)), params, rows)
        return *synchronize(params, local(local(inner)), moments), loss_fn(params, x[0], y[0])

    data = on(mesh, X.reshape(2, 8, 8), Y.reshape(2, 8, 3), axis="diloco")
    return steps(lambda params, moments, key: train(params, moments, *data), params, outer.init(params))


def big_vision(source, codec):
    nn, mesh = needs("flax.linen"), mesh_of(RANKS)
    model, tx = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(3)]), optax.adam(0.01)
    step = programs(source, codec, model=model, tx=tx, mesh=mesh)["update_fn"]
    params = model.init(jax.random.key(0), X)["params"]
    images, labels = on(mesh, X, jnp.float32(Y > 0))
    learn = lambda state, key: step(state, key, {"image": images, "labels": labels})
    losses, (state,) = steps(learn, {"params": params, "opt": tx.init(params)})
    return losses, state["params"]


def flax_lm1b(source, codec):
    nn, flax, mesh = needs("flax.linen"), needs("flax.training.train_state"), mesh_of(RANKS)
    model = nn.Sequential([nn.Embed(32, 8), nn.Dense(32)])

    def compute_weighted_cross_entropy(logits, targets, weights):
        return (optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights).sum(), weights.sum()

    params = model.init(jax.random.key(0), TOKENS)["params"]
    state = flax.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, P()), state)
    state, (inputs,) = jax.device_put(state, shardings), on(mesh, TOKENS)
    names = dict(compute_weighted_cross_entropy=compute_weighted_cross_entropy, state_mesh_shardings=shardings)
    step = jax.jit(programs(source, codec, model=model, mesh=mesh, **names)["train_step"])
    found = []
    for _ in range(STEPS):
        state, *outputs = step(state, {"inputs": inputs})
        found.append(outputs)
    return found, state.params


def haiku(source, codec):
    hk = needs("haiku")

    def forward(x):
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), is_training=True))
        return hk.Linear(3)(x)

    model, optimizer = hk.transform_with_state(forward), optax.adam(0.01)

    def loss_fn(params, state, batch):
        predicted, state = model.apply(params, state, None, batch[0])
        loss = ((predicted - batch[1]) ** 2).mean()
        return loss, (loss, state)

    step = programs(source, codec, loss_fn=loss_fn, optimizer=optimizer)["train_step"]
    params, state = model.init(jax.random.key(0), X)
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * RANKS), tree)
    batch = [np.asarray(a).reshape(RANKS, -1, a.shape[-1]) for a in (X, Y)]
    losses, (state,) = steps(lambda state, key: step(state, batch), stack((params, state, optimizer.init(params))))
    return losses, state[:2]


def brax(source, codec):
    gradient = programs(source, codec)["loss_and_pgrad"](lambda w, x: (jnp.tanh(x @ w) ** 2).mean(), "i")
    w = jnp.stack([normal((8, 64), 2)] * RANKS)
    return jax.pmap(gradient, axis_name="i")(w, np.asarray(X).reshape(RANKS, -1, 8))


def numpyro(source, codec):
    library, mesh = needs("numpyro"), mesh_of(RANKS)
    names = dict(numpyro=library, optimizer=optax.adam(0.05), mesh=mesh)

    def model(x):
        mean = library.sample("mean", library.distributions.Normal(jnp.zeros(8), 1).to_event(1))
        with library.plate("data", 100, subsample_size=len(x)):
            library.sample("x", library.distributions.Normal(mean, 0.5).to_event(1), obs=x)

    def guide(x):
        """A point, so that no key changes the loss."""
        library.sample("mean", library.distributions.Delta(library.param("at", jnp.zeros(8))).to_event(1))

    step = programs(source, codec, model=model, guide=guide, **names)["step"]
    params, (x,) = {"at": jnp.zeros(8)}, on(mesh, X)
    learn = lambda params, state, key: step(params, state, x, key)
    losses, (params, _) = steps(learn, params, names["optimizer"].init(params))
    return losses, params


def diffrax(source, codec):
    library, eqx, mesh = needs("diffrax"), needs("equinox"), mesh_of(RANKS)

    def solve(model, ts, y0):
        term, saved = library.ODETerm(lambda t, y, args: model(y)), library.SaveAt(ts=ts)
        return library.diffeqsolve(term, library.Euler(), ts[0], ts[-1], 0.25, y0, saveat=saved, max_steps=8).ys

    def loss_fn(model, ti, yi):
        return jnp.mean((yi - jax.vmap(solve, in_axes=(None, None, 0))(model, ti, yi[:, 0])) ** 2)

    model = eqx.nn.MLP(3, 3, 16, 1, key=jax.random.key(0))
    optim, losses = optax.adam(0.01), []
    step = programs(source, codec, eqx=eqx, loss_fn=loss_fn, optim=optim, mesh=mesh)["make_step"]
    state, (yi,) = optim.init(eqx.filter(model, eqx.is_inexact_array)), on(mesh, jnp.stack([Y, 0.9 * Y, 0.8 * Y], 1))
    for _ in range(STEPS):
        loss, model, state = step(jnp.linspace(0, 1, 3), yi, model, state)
        losses.append(loss)
    return losses, eqx.filter(model, eqx.is_inexact_array)


class Axis(typing.NamedTuple):
    name: str
    size: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["axes"])
@dataclasses.dataclass
class Named:
    """As a NamedArray of haliax: an array with axes of fixed sizes."""

    array: jax.Array
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, array, names):
        return cls(array, tuple(map(Axis, names, array.shape)))


def levanter(source, codec):
    eqx, mesh = needs("equinox"), mesh_of(RANKS)
    util = types.SimpleNamespace(tree_map=functools.partial(jax.tree.map, is_leaf=lambda x: isinstance(x, Named)))
    hax = dict(NamedArray=Named, named=Named.of, tree_util=util, axis_mapping=contextlib.nullcontext)
    names = programs(source, codec, eqx=eqx, hax=types.SimpleNamespace(**hax), mesh=mesh, Trainer=object)
    trainer = names["MyTrainer"]()
    trainer.compute_axis_mapping = {}

    def loss_fn(model, x, y, key):
        assert all(each.array.shape == tuple(axis.size for axis in each.axes) for each in (x, y)) and key.shape == (2,)
        hidden = jax.lax.with_sharding_constraint(jax.vmap(model)(x.array), NamedSharding(mesh, P("data")))
        return ((hidden - y.array) ** 2).mean()

    model = eqx.nn.MLP(8, 3, 16, 1, key=jax.random.key(0))
    x, y = (Named.of(each, ("batch", "feature")) for each in on(mesh, X, Y))
    return eqx.filter_jit(trainer._compute_gradients_microbatched)(loss_fn, model, x, y, key=jax.random.PRNGKey(0))


PROGRAMS = {"Keras": keras, "MaxText": maxtext, "MaxText's DiLoCo": diloco, "big_vision": big_vision}
PROGRAMS |= {"Flax lm1b": flax_lm1b, "Haiku": haiku, "Brax": brax}
PROGRAMS |= {"NumPyro": numpyro, "Diffrax": diffrax, "Levanter": levanter}


def test_every_program_is_tested():
    assert set(PAIRS) == set(PROGRAMS) == set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", PROGRAMS)
def test_before_and_after(name, monkeypatch):
    if name == "MaxText" and jax.__version_info__ < (0, 10):
        pytest.skip("jax 0.9 can't lower axis_index in a shard_map within a shard_map")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    before, after = PAIRS[name]
    assert len(pages.new_lines(before, after)) <= 3
    plain, raw = jax.tree.leaves(PROGRAMS[name](before, None)), jax.tree.leaves(PROGRAMS[name](after, cgx.Raw()))
    assert len(plain) == len(raw) > 1
    assert_close(raw, plain)


def test_keras_with_noise_and_statistics(monkeypatch):
    """The program of the page trains a model with Dropout and batch norm, with 4 bits."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras(PAIRS["Keras"][1], cgx.MaxMin(4), noisy=True)

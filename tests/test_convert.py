"""docs/convert.md: each pair of steps runs, and with Raw() both train the same."""

import contextlib
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

PAGE = (pathlib.Path(__file__).parent.parent / "docs/convert.md").read_text()
PAIR = r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```\n```python\n(.*?)^```$"
PAIRS = {name: (before, after) for name, before, after in re.findall(PAIR, PAGE, re.DOTALL | re.MULTILINE)}
RANKS, STEPS = 4, 20
X = normal((64, 8), 1)
Y = jnp.sin(X[:, :3])
PARAMS = {"w": normal((8, 32), 2, scale=0.3), "v": normal((32, 3), 3, scale=0.2)}


def loss_fn(params, x, y):
    return ((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean()


def functional(step, x, y, optimizer):
    state = PARAMS, optimizer.init(PARAMS)
    for _ in range(STEPS):
        *state, loss = step(*state, x, y)
        yield loss


def replicated(step, x, y, optimizer):
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * RANKS), tree)
    state = stack(PARAMS), stack(optimizer.init(PARAMS))
    x, y = (a.reshape(RANKS, -1, a.shape[-1]) for a in (np.asarray(x), np.asarray(y)))
    for _ in range(STEPS):
        *state, loss = step(*state, x, y)
        yield loss[0]


def equinox(step, x, y, optimizer):
    eqx = pytest.importorskip("equinox", reason="needs the extra `test`")
    model = eqx.nn.MLP(8, 3, 32, 1, key=jax.random.key(0))
    state = model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(STEPS):
        *state, loss = step(*state, x, y)
        yield loss


def modules(step, x, y, optimizer):
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 32, rngs=rngs), nnx.tanh, nnx.Linear(32, 3, rngs=rngs))
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    for _ in range(STEPS):
        yield step(model, optimizer, x, y)


def train_state(step, x, y, optimizer):
    flax = pytest.importorskip("flax.training.train_state", reason="needs the extra `test`")
    state = flax.TrainState.create(apply_fn=None, params=PARAMS, tx=optimizer)
    for _ in range(STEPS):
        state, loss = step(state, x, y)
        yield loss


STYLES = {
    "jit": functional,
    "pmap": replicated,
    "shard_map, gradient inside": functional,
    "shard_map, gradient outside": functional,
    "Equinox": equinox,
    "Flax NNX": modules,
    "TrainState": train_state,
}


LIBRARIES = {equinox: ("eqx", "equinox"), modules: ("nnx", "flax.nnx")}
LOSSES = {
    equinox: lambda model, x, y: ((jax.vmap(model)(x) - y) ** 2).mean(),
    modules: lambda model, x, y: ((model(x) - y) ** 2).mean(),
}


def losses(source, style, codec, kind=AxisType.Auto):
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(kind,), devices=jax.devices()[:RANKS])
    optimizer = optax.adam(1e-2)
    names = dict(jax=jax, cgx=cgx, optax=optax, functools=functools, P=P, mesh=mesh, codec=codec, optimizer=optimizer)
    names["loss_fn"] = LOSSES.get(style, loss_fn)
    if style in LIBRARIES:
        short, library = LIBRARIES[style]
        names[short] = pytest.importorskip(library, reason="needs the extra `test`")
    exec(compile(source, "docs/convert.md", "exec"), names)
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P("data")))
    context = contextlib.nullcontext() if style is replicated else jax.set_mesh(mesh)
    with context, jax.numpy_dtype_promotion("standard"):  # programs of users have that
        return np.array([float(loss) for loss in style(names["step"], x, y, optimizer)])


def test_every_section_is_tested():
    assert set(PAIRS) == set(STYLES)


@pytest.mark.parametrize("name", STYLES)
def test_before_and_after(name):
    before, after = PAIRS[name]
    changed = set(after.splitlines()) - set(before.splitlines())
    assert 1 <= len(changed) <= 3
    plain = losses(before, STYLES[name], None)
    np.testing.assert_allclose(losses(after, STYLES[name], cgx.Raw()), plain, rtol=1e-4)
    assert plain[-1] < 0.8 * plain[0]
    assert abs(losses(after, STYLES[name], cgx.MaxMin(4, 64))[-1] - plain[-1]) < 0.05 * plain[0]


def test_jit_on_an_explicit_mesh():
    before, after = PAIRS["jit"]
    plain = losses(before, functional, None, AxisType.Explicit)
    np.testing.assert_allclose(losses(after, functional, cgx.Raw(), AxisType.Explicit), plain, rtol=1e-4)

"""docs/convert.md: each pair of steps runs. With Raw() both train the same, and with 4 bits nearly."""

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
CODE = r"^```python\n((?:(?!^```).)*)^```$"
PAIR = rf"^## ([^\n]+)\n(?:(?!^## ).)*?{CODE}\n{CODE}"
PAIRS = {name: (before, after) for name, before, after in re.findall(PAIR, PAGE, re.DOTALL | re.MULTILINE)}
RANKS, STEPS = 4, 50
X = normal((64, 8), 1)
Y = jnp.sin(X[:, :3]) + normal((64, 3), 4, scale=0.5)
PARAMS = {"w": normal((8, 64), 2, scale=0.3), "v": normal((64, 3), 3, scale=0.1)}


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def loss_fn(params, x, y):
    return ((predict(params, x) - y) ** 2).mean()


def token_losses(params, x, y):
    """Ranks have 1 to 16 tokens that count."""
    return ((predict(params, x) - y) ** 2).mean(-1), jnp.float32(x[:, 0] > 0)


# The arguments of a step of each style, from batch and optimizer.
def functional(x, y, optimizer):
    return PARAMS, optimizer.init(PARAMS), x, y


def replicated(x, y, optimizer):
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * RANKS), tree)
    return (
        stack(PARAMS),
        stack(optimizer.init(PARAMS)),
        *(np.asarray(a).reshape(RANKS, -1, a.shape[-1]) for a in (x, y)),
    )


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


STYLES = {
    "jit": functional,
    "pmap": replicated,
    "shard_map, gradient inside": functional,
    "shard_map, gradient outside": functional,
    "Equinox": equinox,
    "Flax NNX": modules,
    "TrainState": train_state,
}
LOSSES = {"Weighted means": 2, "Losses across examples": 4, "Frozen parameters": 2}  # and how many lines change
LIBRARIES = {equinox: ("eqx", "equinox"), modules: ("nnx", "flax.nnx")}
OTHER_LOSSES = {
    equinox: lambda model, x, y: ((jax.vmap(model)(x) - y) ** 2).mean(),
    modules: lambda model, x, y: ((model(x) - y) ** 2).mean(),
}


def train(source, style, codec=None, kind=AxisType.Auto):
    """(the losses of 50 steps, what explain says of a step)."""
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(kind,), devices=jax.devices()[:RANKS])
    optimizer = optax.adam(3e-3)
    names = dict(jax=jax, jnp=jnp, cgx=cgx, optax=optax, functools=functools, P=P, mesh=mesh, codec=codec)
    names |= dict(
        optimizer=optimizer, loss_fn=OTHER_LOSSES.get(style, loss_fn), token_losses=token_losses, embed=predict
    )
    if style in LIBRARIES:
        short, library = LIBRARIES[style]
        names[short] = pytest.importorskip(library, reason="needs the extra `test`")
    exec(compile(source, "docs/convert.md", "exec"), names)
    step, losses = names["step"], []
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P("data")))
    context = contextlib.nullcontext() if style is replicated else jax.set_mesh(mesh)
    with context, jax.numpy_dtype_promotion("standard"):  # programs of users have that
        args = style(x, y, optimizer)
        found = codec and cgx.explain(step, *args, show=False)
        for _ in range(STEPS):
            result = step(*args)
            *new, loss = result if isinstance(result, tuple) else (result,)
            args = *new, *args[len(new) :]
            losses.append(float(np.mean(loss)))
    return np.array(losses), found


def test_every_pair_is_tested():
    assert set(PAIRS) == {*STYLES, *LOSSES}


@pytest.mark.parametrize("name", [*STYLES, *LOSSES])
def test_before_and_after(name):
    before, after = PAIRS[name]
    assert len({line for line in after.splitlines() if line} - set(before.splitlines())) == LOSSES.get(name, 1)
    style = STYLES.get(name, functional)
    plain, _ = train(before, style)
    raw, uncompressed = train(after, style, cgx.Raw())
    np.testing.assert_allclose(raw, plain, rtol=1e-4)
    assert plain[-1] < 0.9 * plain[0]
    losses, compressed = train(after, style, cgx.MaxMin(4, 64))
    assert abs(losses[-1] / plain[-1] - 1) < 0.02, (losses[-1], plain[-1])
    assert uncompressed.ratio == 1 and compressed.ratio > 2


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="jax.grad of a product with a sharded batch is an error of JAX's own there"
)
def test_jit_on_an_explicit_mesh():
    before, after = PAIRS["jit"]
    plain, _ = train(before, functional, kind=AxisType.Explicit)
    raw, _ = train(after, functional, cgx.Raw(), AxisType.Explicit)
    np.testing.assert_allclose(raw, plain, rtol=1e-4)
    losses, compressed = train(after, functional, cgx.MaxMin(4, 64), AxisType.Explicit)
    assert abs(losses[-1] / plain[-1] - 1) < 0.02 and compressed.ratio > 2


def test_compare_once():
    (source,) = re.findall(r"^## Compare once\n.*?^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P("data")))
    names = dict(jax=jax, np=np, cgx=cgx, params=PARAMS, x=x, y=y)
    with jax.set_mesh(mesh):
        exec(source, {**names, "loss_fn": loss_fn})
        with pytest.raises(AssertionError):  # a mean that is weighted
            mean = lambda losses, mask: (losses * mask).sum() / mask.sum()
            exec(source, {**names, "loss_fn": lambda params, x, y: mean(*token_losses(params, x, y))})

"""diloco: against a transcription in NumPy, in all its parts; and what it must never do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_trees, normal
from jax.sharding import AxisType

import jaxcgx as cgx

# Numbers of few bits: sums and products of them are exact, in whatever order a compiler takes them.
PARAMS = {"w": jnp.round(4 * normal((6, 4), 1)) / 4, "b": jnp.round(4 * normal((4,), 2)) / 4, "s": jnp.float32(0.5)}
X = np.round(4 * np.asarray(normal((12, 8, 6), 3))) / 4  # batches of 8 examples
INNER = optax.sgd(0.25)


def loss_fn(params, x):
    """A loss whose gradients are exact."""
    return ((x @ params["w"] + params["b"]) * params["s"]).sum() / 4


def quadratic(params, x):
    target = x.mean(0)
    return ((params["w"] - target[:, None]) ** 2).sum() / 2 + (params["b"] ** 2).sum() + params["s"] ** 2


@functools.lru_cache
def mesh_of(centres=2, local=1, types=AxisType.Auto):
    shape, names = ((centres, local), ("dc", "local")) if local > 1 else ((centres,), ("dc",))
    devices = jax.devices()[: centres * local]
    return jax.make_mesh(shape, names, axis_types=(types,) * len(names), devices=devices)


def trainer(diloco, mesh=None, loss=quadratic, **options):
    mesh = mesh or mesh_of()
    return cgx.make_train_step(loss, diloco.inner, mesh, data_axis=mesh.axis_names, diloco=diloco, **options)


def run(train, steps=8, state=None, params=PARAMS, first=0):
    """[(outer parameters, state, metrics) after each step]."""
    params, state = train.init(params) if state is None else (params, state)
    found = []
    for i in range(first, first + steps):
        params, state, metrics = train.step(params, state, jnp.asarray(X[i % len(X)]))
        found.append((jax.tree.map(np.array, params), state, metrics))
    return found


def numpy_diloco(steps, every, rate, momentum, centres=2, fragments=None, overlap=0, alpha=0.0):
    """DiLoCo of `quadratic` with SGD of rate 1/4, with Nesterov's momentum outside: outer parameters after each step."""
    f = np.float32
    outer = {name: np.asarray(x) for name, x in PARAMS.items()}
    own = [dict(outer) for _ in range(centres)]
    velocity = {name: np.zeros_like(x) for name, x in outer.items()}
    fragments, found, waiting = fragments or [list(outer)], [], {}
    period = every // len(fragments)
    for t in range(1, steps + 1):
        for m, params in enumerate(own):
            target = X[(t - 1) % len(X)].reshape(centres, -1, 6)[m].mean(0)
            gradients = {"w": params["w"] - target[:, None], "b": 2 * params["b"], "s": 2 * params["s"]}
            for name, g in gradients.items():
                params[name] = (params[name] - f(0.25) * g.astype(f)).astype(f)
        if t % period == 0:
            names = fragments[t // period % len(fragments)]
            waiting[t + overlap] = {name: sum(outer[name] - p[name] for p in own) / f(centres) for name in names}
        for name, mean in waiting.pop(t, {}).items():
            velocity[name] = (f(momentum) * velocity[name] + mean).astype(f)
            outer[name] = (outer[name] - f(rate) * (mean + f(momentum) * velocity[name])).astype(f)
            for params in own:
                params[name] = f(alpha) * params[name] + f(1 - alpha) * outer[name]
        found.append(dict(outer))
    return found


def nesterov(rate=0.5, momentum=0.5):
    return optax.sgd(rate, momentum=momentum, nesterov=True)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_to_the_bit(types):
    train = trainer(cgx.wan.diloco(INNER, nesterov(), every=3), mesh_of(types=types))
    got, expected = run(train, 7), numpy_diloco(7, 3, 0.5, 0.5)
    assert any((expected[2][name] != np.asarray(PARAMS[name])).any() for name in PARAMS)
    for (params, _, _), outer in zip(got, expected):
        assert_same_trees(params, outer)

"""Tests the pages for users of other systems, docs/from-*.md: each of their programs runs and learns."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pages
import pytest
from helpers import assert_trees, normal
from pages import loss_fn

import jaxcgx as cgx

PAGES = sorted(path.stem for path in (pages.ROOT / "docs").glob("from-*.md"))
FOUND = [(f"{page}-{i}", code) for page in PAGES for i, code in enumerate(pages.programs(f"docs/{page}"))]
PROGRAMS = [pytest.param(code, id=name) for name, code in FOUND]
STEPS = 60
X = normal((64, 8), 1)
BATCH = X, jnp.sin(X[:, :3])
PARAMS = {"w": normal((8, 256), 2, scale=0.3), "v": normal((256, 3), 3, scale=0.1)}


def run(program):
    """Returns the variables of the program. It gets the first parameters and the batches, as its page says."""
    found = dict(params=jax.tree.map(jnp.copy, PARAMS), batches=[BATCH] * STEPS)
    with jax.numpy_dtype_promotion("standard"):
        exec(program, found)
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_learns(program):
    found = run(program)
    params = getattr(found["state"], "params", found["params"])  # a step by hand has them apart
    assert float(loss_fn(jax.device_get(params), BATCH)) < 0.7 * float(loss_fn(PARAMS, BATCH))


def test_one_bit_adam():
    """Until its variance is frozen, it equals Adam without bias correction."""
    found = run(next(code for _, code in FOUND if "OneBitAdam" in code))
    train = cgx.make_train_step(loss_fn, optax.scale(-1e-2), found["mesh"], found["OneBitAdam"](freeze_step=STEPS))
    state = train.init(PARAMS)
    mean = variance = jax.tree.map(jnp.zeros_like, PARAMS)
    plain = PARAMS
    for _ in range(5):
        state, _ = train.step(state, BATCH)
        grads = jax.grad(loss_fn)(plain, BATCH)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        variance = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, variance, grads)
        plain = jax.tree.map(lambda p, m, v: p - 0.01 * m / (v**0.5 + 1e-8), plain, mean, variance)
    assert_trees(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), state.params, plain)


def test_zero_quantized_gradients():
    """The arguments of the row about qgZ train."""
    page = (pages.ROOT / "docs/from-deepspeed.md").read_text()
    exchange = eval(re.search(r"qgZ\) \| `(.*?)` and `params` of", page)[1], {"cgx": cgx})
    axes = "node", "local"
    mesh = pages.make_mesh((2, 2), axes)
    sharding = cgx.Sharding(axes, params=cgx.shard_specs(PARAMS, mesh, axes))
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, exchange, sharding=sharding)
    state = train.init(PARAMS)
    for _ in range(STEPS):
        state, _ = train.step(state, BATCH)
    assert float(loss_fn(jax.device_get(state.params), BATCH)) < 0.7 * float(loss_fn(PARAMS, BATCH))

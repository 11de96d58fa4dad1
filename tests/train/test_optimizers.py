"""Tests every optimizer of optax and of optax.contrib in make_train_step. It gives its own numbers, or a clear error.

One parameter is frozen. No optimizer sees it.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import FULL, assert_same_bytes, normal
from training import mesh_of

import jaxcgx as cgx

pytestmark = pytest.mark.usefixtures("promotion")

contrib = pytest.importorskip("optax.contrib")
PARAMS = {"w": normal((3, 4), 1, scale=0.3), "b": jnp.zeros(4)}
FROZEN = {"frozen": 1 + jnp.eye(3)}
PLAN = cgx.Plan(cgx.Raw(), [("frozen", cgx.Skip())])
X = normal((4, 3), 2)

# Arguments of those that need more than a learning rate.
MADE = {
    "normalize": lambda f: f(),
    "reduce_on_plateau": lambda f: f(),
    "hutchinson_estimator_diag_hessian": lambda f: f(),
    "mechanize": lambda f: f(optax.sgd(0.1)),
    "split_real_and_imaginary": lambda f: f(optax.sgd(0.1)),
    "sam": lambda f: f(optax.sgd(0.1), optax.sgd(0.1)),
    "sam in a chain": lambda _: optax.chain(optax.identity(), contrib.sam(optax.sgd(0.1), optax.sgd(0.1))),
    "schedule_free": lambda f: f(optax.sgd(0.1), 0.1),
    "noisy_sgd": lambda f: f(0.1, 0.01, 0.55, 0),
    "lbfgs without a search": lambda _: optax.lbfgs(0.1, linesearch=None),
}
CALLS_THE_LOSS = ("lbfgs", "sophia", "hutchinson_estimator_diag_hessian")
# These need the gradient of every example. A rank has the mean over its batch.
PER_EXAMPLE = ("dpsgd", "differentially_private_aggregate")
NO_OPTIMIZERS = ("schedule_free_eval_params",)
# By default beside MADE: moments, norms of layers, matrices, factors, signs, and the value of the loss.
USUAL = {"sgd", "adamw", "lars", "muon", "adafactor", "lion", "polyak_sgd", "cocob"}


def optimizers():
    """Returns {name: function} of the optimizers of optax that take a learning rate, and of all in contrib."""
    found = {}
    for module in (optax, contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            first = next(iter(inspect.signature(function).parameters), "")
            if module is contrib or first in ("learning_rate", "max_learning_rate"):
                found[name] = function
    left_out = (*PER_EXAMPLE, *NO_OPTIMIZERS)
    return {name: f for name, f in found.items() if not name.startswith(("_", "scale_by_")) and name not in left_out}


def make(name):
    return MADE.get(name, lambda f: f(0.1))(optimizers().get(name))


def loss_fn(params, x):
    return ((jnp.tanh(x @ params["frozen"] @ params["w"] + params["b"]) - 1) ** 2).mean()


def test_all_are_there():
    assert {*USUAL, *CALLS_THE_LOSS} <= optimizers().keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(((optimizers().keys() if FULL else USUAL) | MADE.keys()) - {*CALLS_THE_LOSS}))
def test_the_numbers_are_its_own(name):
    optimizer = make(name)
    train = cgx.make_train_step(loss_fn, optimizer, mesh_of(2), PLAN)
    state = train.init(PARAMS | FROZEN)
    plain = optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p | FROZEN, X))(params)
        values = {} if name.startswith("sam") else {"value": loss}
        updates, state = plain.update(grads, state, params, **values)
        return optax.apply_updates(params, updates), state

    expected, plain_state = PARAMS, optimizer.init(PARAMS)
    for _ in range(2):
        state, _ = train.step(state, X)
        expected, plain_state = step(expected, plain_state)
    found = {key: state.params[key] for key in PARAMS}, state.opt_state
    words = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    for x, y in zip(*map(jax.tree.leaves, (found, (expected, plain_state))), strict=True):
        np.testing.assert_allclose(words(x), words(y), rtol=1e-4, atol=1e-6)
    assert_same_bytes(state.params["frozen"], FROZEN["frozen"])
    assert any((expected[key] != PARAMS[key]).any() for key in PARAMS)


@pytest.mark.parametrize("name", CALLS_THE_LOSS)
def test_those_that_call_the_loss(name):
    train = cgx.make_train_step(loss_fn, make(name), mesh_of(2), cgx.Raw())
    with raises(ValueError, says("make_train_step", "optimizer", got="one", remedy="linesearch=None")):
        train.step(train.init(PARAMS | FROZEN), X)

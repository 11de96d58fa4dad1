"""Tests Dion against its algorithm (arXiv 2504.05295) in NumPy, in one process and with a buffer for each rank."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from helpers import mesh_with, normal
from jax.sharding import PartitionSpec as P
from steps import run
from training import mesh_of

import jaxcgx as cgx
from jaxcgx.codecs.powersgd import _start

PARAMS = {
    "wide": normal((8, 20), 1, scale=0.3),
    "tall": normal((20, 8), 2, scale=0.3),
    "small": normal((8, 2), 3, scale=0.3),  # of a rank below that of the factors
    "embed": normal((8, 40), 4, scale=0.3),
    "bias": jnp.zeros(20),
}
X = normal((12, 8), 5)
RANK, MU, RATE = 3, 0.9, 0.05
MATRICES = "wide", "tall", "small"


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["wide"] + params["bias"]) @ params["tall"]
    return ((hidden - x[:, ::-1]) ** 2).mean() + ((hidden @ params["small"]) ** 2).mean() + (x @ params["embed"]).mean()


gradient = jax.jit(jax.grad(loss_fn))


def orthonormal(p):
    q, r = np.linalg.qr(p)
    return q * np.sign(np.diag(r))


def dion(x, grads, buffers, q, synchronized):
    """A step of Dion (algorithm 1) for a matrix. Each rank has its gradient and its buffer; P and R are means.

    `synchronized`: ranks subtract the mean R from their buffers, and not their own R.
    """
    fed = [m + g for m, g in zip(buffers, grads)]
    p = orthonormal(np.mean([b @ q for b in fed], 0))
    own = [b.T @ p for b in fed]
    r = np.mean(own, 0)
    buffers = [b - (1 - MU) * p @ (r if synchronized else each).T for b, each in zip(fed, own)]
    q = r / np.linalg.norm(r, axis=0)
    return x - RATE * np.sqrt(x.shape[1] / x.shape[0]) * p @ q.T, buffers, q


def by_numpy(ranks, steps, synchronized):
    """Returns (the matrices after some steps, the buffers of all ranks)."""
    matrices = {name: np.float64(PARAMS[name]) for name in MATRICES}
    factors = {name: min(RANK, *x.shape) for name, x in matrices.items()}
    q = {name: np.float64(_start(factors[name], x.shape[1])).T for name, x in matrices.items()}
    buffers = {name: [np.zeros_like(x)] * ranks for name, x in matrices.items()}
    others = {name: x for name, x in PARAMS.items() if name not in MATRICES}
    for _ in range(steps):
        given = others | {name: jnp.float32(x) for name, x in matrices.items()}
        parts = [gradient(given, x) for x in np.split(X, ranks)]
        for name, x in matrices.items():
            grads = [np.float64(part[name]) for part in parts]
            matrices[name], buffers[name], q[name] = dion(x, grads, buffers[name], q[name], synchronized)
    return matrices, buffers


def make(exchange, mesh, axis="data", **options):
    rates = {"dion": optax.sgd(RATE), "other": optax.set_to_zero()}
    optimizer = optax.partition(rates, exchange.labels)
    return cgx.make_train_step(loss_fn, optimizer, mesh, exchange, sharding=cgx.Sharding(axis), **options)


@pytest.mark.parametrize("ranks", [1, 3, (2, 2)], ids=str)
def test_numpy(ranks):
    """Updates are those of the algorithm, whichever R leaves the buffers. Buffers are those with each rank's own R."""
    exchange = cgx.Dion(RANK, momentum=MU, rules=[("embed", cgx.Raw())])
    mesh, axis = (mesh_of(ranks), "data") if isinstance(ranks, int) else (None, ("dc", "data"))
    mesh = mesh or mesh_with(dc=2, data=2)
    state, _ = run(make(exchange, mesh, axis), 5, PARAMS, X)
    for synchronized in (False, True):
        expected, buffers = by_numpy(int(np.prod(ranks)), 5, synchronized)
        for name in MATRICES:
            np.testing.assert_allclose(state.params[name], expected[name], rtol=1e-4, atol=1e-4)
            own = np.asarray(state.exchange.own.momentum[name])
            np.testing.assert_allclose(own.mean(0), np.mean(buffers[name], 0), rtol=1e-3, atol=1e-4)
            if not synchronized:
                np.testing.assert_allclose(own, buffers[name], rtol=1e-3, atol=1e-4)


def test_low_rank_gradients():
    """Columns of P without a share of the gradient aren't in the update. Rounding decides their direction."""
    params, x = {"w": normal((64, 128), 6)}, normal((4, 64), 7)
    for ranks in (1, 4):
        train = cgx.make_train_step(
            lambda p, x: (jnp.tanh(x @ p["w"]) ** 2).mean(), optax.sgd(1.0), mesh_of(ranks), cgx.Dion(16)
        )
        state, _ = train.step(train.init(params), x)
        update = np.asarray(state.params["w"] - params["w"])
        np.testing.assert_allclose((update**2).sum(), 4 * 128 / 64, rtol=1e-4)  # 4 columns have the norm sqrt(n / m)


def test_what_travels():
    """Only factors of matrices. Other leaves get their mean, raw or as their rule says, and frozen ones nothing."""
    rules = [("embed", cgx.MaxMin(4, 64)), ("small", cgx.Skip())]
    exchange = cgx.Dion(RANK, rules=rules)
    assert exchange.labels(PARAMS) == dict(wide="dion", tall="dion", small="other", embed="other", bias="other")
    rates = {"dion": optax.set_to_zero(), "other": optax.sgd(1.0)}
    train = cgx.make_train_step(loss_fn, optax.partition(rates, exchange.labels), mesh_of(2), exchange)
    state = train.init(PARAMS)
    factors = 4 * RANK * 2 * (8 + 20)
    assert factors <= cgx.explain(train.step, state, X, show=False).bytes < factors + 4 * (20 + 8 * 40)
    state, _ = train.step(state, X)
    grads = gradient(PARAMS, X)
    np.testing.assert_allclose(state.params["bias"], -grads["bias"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state.params["embed"], PARAMS["embed"] - grads["embed"], atol=0.05)
    assert (state.params["small"] == PARAMS["small"]).all() and state.exchange.own.momentum["small"] is None


def test_other_steps():
    """The buffers keep their mean for other ranks. A step that is not finite changes nothing."""
    exchange = cgx.Dion(RANK, momentum=MU, rules=[("embed", cgx.Raw())], skip_nonfinite=True)
    train = make(exchange, mesh_of(2), overlap=cgx.Priority(), donate=False)
    state, _ = run(train, 3, PARAMS, X)
    state = train.finish(state)
    means = jax.tree.map(lambda m: m.mean(0), state.exchange.own.momentum)
    fewer = cgx.reshard_state(state, 3).exchange.own.momentum
    jax.tree.map(lambda m, mean: np.testing.assert_allclose(m, [mean] * 3, rtol=1e-5), fewer, means)
    bad = train.finish(train.step(state, X.at[3, 2].set(jnp.nan))[0])
    jax.tree.map(np.testing.assert_array_equal, bad.exchange.own, state.exchange.own)
    jax.tree.map(np.testing.assert_array_equal, bad.exchange.shared.factors, state.exchange.shared.factors)


def with_sharded_matrices():
    mesh = mesh_with(data=2, model=2)
    specs = jax.tree.map(lambda _: P(), PARAMS) | dict(wide=P(None, "model"))
    train = cgx.make_train_step(loss_fn, optax.sgd(RATE), mesh, cgx.Dion(RANK), sharding=cgx.Sharding(params=specs))
    train.step(train.init(PARAMS), X)


test_errors = table({"Dion": [(with_sharded_matrices, ValueError, "rules ['wide']", "none for one over ('model',)")]})

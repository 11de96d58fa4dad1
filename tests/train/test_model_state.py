"""Tests make_train_step with a model's state: batch statistics, counters and streams of random keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from helpers import assert_trees, mesh_with, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import run
from training import CODEC, NESTED, SHARDED, SPECS, X, mesh_of

import jaxcgx as cgx
from jaxcgx.train.state import PerRank

fold = jax.random.fold_in
W = normal((30, 8), 1)
STATE = {
    "mean": jnp.zeros(30),
    "half": jnp.zeros(30, jnp.bfloat16),
    "count": jnp.uint32(0),
    "flag": jnp.bool_(True),
    "key": jax.random.key(7),
}


def loss_fn(w, state, x):
    """A loss of the numbers minus their running mean. The state also keeps the numbers that the key draws."""
    key, draw = jax.random.split(state["key"])
    mean = 0.5 * state["mean"] + x.mean(0)
    half = state["half"] + jax.random.uniform(draw, (30,), jnp.bfloat16)
    new = {"mean": mean, "half": half, "count": state["count"] + 1, "flag": ~state["flag"], "key": key}
    return (((x - mean) @ w) ** 2).mean(), new


gradient = jax.jit(jax.grad(loss_fn, has_aux=True))


def make(loss=loss_fn, ranks=4, mode="mean", exchange=cgx.Raw(), **options):
    mesh = mesh_of(ranks) if isinstance(ranks, int) else ranks
    return cgx.make_train_step(loss, optax.sgd(0.1), mesh, exchange, model_state=mode, **options)


def by_hand(w, states, x, accumulate):
    """Returns new parameters and states after one step of SGD on each rank's part, without communication."""
    grads, after = [], []
    for state, part in zip(states, jnp.split(x, len(states))):
        for piece in jnp.split(part, accumulate):
            grad, state = gradient(w, state, piece)
            grads.append(grad)
        after.append(state)
    return w - 0.1 * sum(grads) / len(grads), after


def close(found, expected):
    numbers = lambda x: (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.astype(jnp.float32)
    )

    def check(a, b):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=2e-2 if a.dtype == jnp.bfloat16 else 1e-4, atol=1e-5)

    assert_trees(check, *map(jax.tree.leaves, (found, expected)))


def after_splits(key, times):
    """Returns the key that plain JAX has after some splits."""
    for _ in range(times):
        key, _ = jax.random.split(key)
    return key


@pytest.mark.parametrize(("kind", "accumulate"), [(AxisType.Auto, 3), (AxisType.Explicit, 1)], ids=str)
def test_mean(kind, accumulate):
    found, _ = run(make(ranks=mesh_of(4, kind), accumulate=accumulate), 3, W, model_state=STATE)
    w, state = W, STATE
    for _ in range(3):
        ranks = [{**state, "key": fold(state["key"], rank)} for rank in range(4)]
        w, after = by_hand(w, ranks, X, accumulate)
        mean = lambda *xs: sum(x.astype(jnp.float32) for x in xs).astype(xs[0].dtype) / 4
        means = {name: mean(*(each[name] for each in after)) for name in ("mean", "half")}
        key = after_splits(state["key"], accumulate)
        state = {**after[0], **means, "key": key}  # that of plain JAX
    close((found.params, found.model_state), (w, state))
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(found.model_state))


def test_per_rank():
    found, _ = run(make(mode="per_rank", accumulate=3), 3, W, model_state=STATE)
    w, states = W, [{**STATE, "key": fold(STATE["key"], rank)} for rank in range(4)]
    for _ in range(3):
        w, states = by_hand(w, states, X, 3)
    close(found.params, w)
    assert isinstance(found.model_state, PerRank)
    close(found.model_state.rows, jax.tree.map(lambda *xs: jnp.stack(xs), *states))
    for x in jax.tree.leaves(found.model_state):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh_of(4), P("data")), x.ndim)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_does_not_change(accumulate):
    """These values are not averaged, because means over three ranks are rounded, and communication costs time."""

    def loss(w, state, x):
        seen = jax.random.uniform(fold(state["key"], state["count"]))
        return (x @ w * state["numbers"][:8]).mean(), ({**state, "count": state["count"] + 1}, seen)

    first = {"numbers": normal((1000,), 5), "key": jax.random.key(3), "count": 0}
    train = make(loss, 3, exchange=CODEC, has_aux=True, accumulate=accumulate)
    state, metrics = run(train, 3, W, model_state=first)
    close(state.model_state, {**first, "count": jnp.int32(3 * accumulate)})
    np.testing.assert_array_equal(state.model_state["numbers"], first["numbers"])
    counts = range(2 * accumulate, 3 * accumulate)
    drawn = [jax.random.uniform(fold(fold(first["key"], rank), n)) for rank in range(3) for n in counts]
    np.testing.assert_allclose(metrics[2].aux, np.mean(drawn), rtol=1e-5)
    plain = [c for c in cgx.explain(train.step, state, X, show=False).collectives if not c.function]
    assert sum(c.raw_bytes for c in plain) < 100


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_returns_the_next_keys(accumulate):
    """They are those of plain JAX, though each rank and each micro-batch draws noise of its own."""

    def loss(w, state, x, key):
        (key, noise), (state, other) = jax.random.split(key), jax.random.split(state)
        drawn = jax.random.uniform(noise, len(x)) + jax.random.uniform(other, len(x))
        return (x @ w).mean(), (state, {"key": key, "drawn": drawn})

    train = make(loss, 2, has_aux=True, accumulate=accumulate)
    state, metrics = train.step(train.init(W, jax.random.key(5)), X[:4], key=jax.random.key(3))
    close(metrics.aux["key"], after_splits(jax.random.key(3), 1))
    close(state.model_state, after_splits(jax.random.key(5), accumulate))
    assert len(set(metrics.aux["drawn"].tolist())) == 4


def test_random_keys_compile_one_program():
    def loss(w, key, x):
        traces.append(1)
        return (x @ w).mean(), jax.random.split(key)[0]

    traces = []
    run(make(loss, 2), 4, W, model_state=jax.random.key(3))
    assert len(traces) == 2  # for the keys of ranks, and for the key of plain JAX, which is kept


@NESTED
def test_an_axis_for_the_partitioner():
    def loss(params, mean, x):
        hidden = jnp.tanh(x @ params["up"] + params["bias"])
        new = 0.5 * mean + hidden.mean(0)
        return (((hidden - new) @ params["down"] - x) ** 2).mean(), new

    found = {}
    for model in (1, 2):
        train = make(loss, mesh_with(data=2, model=model), sharding=cgx.Sharding(params=SPECS))
        state, _ = run(train, 3, SHARDED, model_state=jnp.zeros(64))
        found[model] = state.params, state.model_state
    close(found[2], found[1])


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (lambda n, x: n + len(x) * jax.lax.axis_size("data"), 12),
        (lambda n, x: n + jax.lax.psum(len(x), "data"), 12),
        (lambda n, x: n + jax.lax.psum((x[:, 0] > 0).sum(), "data"), int((X[:12, 0] > 0).sum())),
        (lambda n, x: n + 1, 1),
        (lambda n, x: n + (jax.lax.axis_index("data") == 0), 1),  # the first rank's
    ],
    ids=["axis_size", "psum", "psum of values", "steps", "first"],
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_counters(count, expected, accumulate):
    """Integers are those of the first rank, which a loss may add up over all ranks."""
    loss = lambda w, n, x: (((x @ w) ** 2).mean(), jnp.asarray(count(n, x), jnp.int32))
    with jax.numpy_dtype_promotion("standard"):
        x = jnp.repeat(X[:12].reshape(4, 3, 30), accumulate, 0).reshape(-1, 30)
        state, _ = run(make(loss, accumulate=accumulate), 1, W, x, model_state=0)
    assert state.model_state == expected * accumulate


def step_to(new):
    train = make(lambda w, state, x: ((x @ w).mean(), new(state)), 2)
    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(train.step, train.init(W, {"a": jnp.zeros(2), "b": 0}), X)


ANOTHER_STATE = {
    "make_train_step": [
        (lambda s: {**s, "more": s["a"]}, ValueError, "loss_fn", "with ['more'] more"),
        (lambda s: {"b": s["b"]}, ValueError, "loss_fn", "without ['a']"),
        (lambda s: {**s, "a": jnp.zeros(3)}, ValueError, "loss_fn ['a']", "float32[3]"),
        (lambda s: {**s, "b": s["b"] + 0.5}, ValueError, "loss_fn ['b']", "float32[]"),
    ]
}
test_another_state = table(ANOTHER_STATE, step_to)


def step_from(rows):
    train = make(ranks=2, mode="per_rank")
    train.step(train.init(W, STATE).replace(model_state=rows), X)


def without_a_state():
    alone = make(lambda *_: jnp.zeros(()), 2)
    alone.step(alone.init(W, STATE), X)


of_four = lambda: jax.device_get(make(mode="per_rank").init(W, {"mean": jnp.zeros(30)}).model_state)
ERRORS = {
    "make_train_step": [
        (lambda: make(mode="all"), ValueError, "model_state", "'all'"),
        (without_a_state, ValueError, "loss_fn", "one"),
    ],
    "train.init": [
        (lambda: make(mode=None).init(W, STATE), ValueError, "model_state", "one", 'model_state="mean"'),
        (lambda: make().init(W), ValueError, "model_state", "none", "init(params, state)"),
    ],
    "train.step": [
        (lambda: step_from(STATE), ValueError, "state", "dict"),
        (lambda: step_from(of_four()), ValueError, "state .rows['mean']", "float32[4, 30]", "jaxcgx.reshard_state"),
    ],
}
test_errors = table(ERRORS)

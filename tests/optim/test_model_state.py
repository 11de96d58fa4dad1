"""Tests make_train_step with a model's state: batch statistics, counters and streams of random keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_same_trees, assert_trees, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import CODEC, NESTED, SHARDED, SPECS, X, mesh_of

import jaxcgx as cgx

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


@pytest.mark.parametrize(("kind", "accumulate"), [(AxisType.Auto, 3), (AxisType.Explicit, 1)], ids=str)
def test_mean(kind, accumulate):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    options = dict(plan=cgx.Raw(), model_state="mean", accumulate=accumulate)
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, **options)
    found = train.init(W, STATE)
    w, state = W, STATE
    for _ in range(3):
        *found, _ = train.step(*found, X)
        ranks = [{**state, "key": fold(state["key"], rank)} for rank in range(4)]
        w, after = by_hand(w, ranks, X, accumulate)
        mean = lambda *xs: sum(x.astype(jnp.float32) for x in xs).astype(xs[0].dtype) / 4
        state = {**after[0], **{name: mean(*(each[name] for each in after)) for name in ("mean", "half")}}
    close(found[:2], (w, state))
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(found[1]))


def test_per_rank():
    options = dict(plan=cgx.Raw(), model_state="per_rank", accumulate=3)
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh_of(4), **options)
    found = train.init(W, STATE)
    w, states = W, [{**STATE, "key": fold(STATE["key"], rank)} for rank in range(4)]
    for _ in range(3):
        *found, _ = train.step(*found, X)
        w, states = by_hand(w, states, X, 3)
    close(found[0], w)
    close(found[1].rows, jax.tree.map(lambda *xs: jnp.stack(xs), *states))
    assert isinstance(found[1], cgx.optim.PerRank)
    for x in jax.tree.leaves(found[1]):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh_of(4), P("data")), x.ndim)
    reshards(found[1])


def reshards(state):
    """A state per rank is resharded like that of an optimizer."""
    assert set(jax.tree.leaves(cgx.state_specs(state, "data"))) == {P("data")}
    new = cgx.reshard_state(state, 6).rows
    np.testing.assert_allclose(new["mean"], np.tile(state.rows["mean"].mean(0), (6, 1)), rtol=1e-6)
    assert new["half"].shape == (6, 30) and new["half"].dtype == jnp.bfloat16
    assert new["count"].tolist() == [state.rows["count"][0]] * 6
    assert len(np.unique(jax.random.key_data(new["key"]), axis=0)) == 6
    close(cgx.reshard_state(state, 4), state)


def test_with_auxiliary_outputs_and_a_key():
    """The step compiles once, donates its arguments, and doesn't delete the caller's arrays."""

    def loss(w, state, x, key):
        traces.append(1)
        return (x @ w).mean(), (state + 1.0, jax.random.uniform(key))

    traces, given = [], jax.device_put(jnp.zeros(3), NamedSharding(mesh_of(2), P()))
    train = cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(2), plan=CODEC, model_state="mean", has_aux=True)
    first = found = train.init(W, given)
    for _ in range(3):
        *found, metrics = train.step(*found, X[:4], key=jax.random.key(3))
    assert train.step._cache_size() == 1 and len(traces) == 3  # two of them look for rows among auxiliary outputs
    assert found[1].tolist() == [3, 3, 3]
    draws = [jax.random.uniform(fold(jax.random.key(3), rank)) for rank in range(2)]
    np.testing.assert_allclose(metrics.aux, np.mean(draws), rtol=1e-6)
    assert all(x.is_deleted() for x in jax.tree.leaves(first)) and not given.is_deleted()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_does_not_change(accumulate):
    """These values are not averaged, because means over three ranks are rounded, and communication costs time."""

    def loss(w, state, x):
        seen = jax.random.uniform(fold(state["key"], state["count"]))
        return (x @ w * state["numbers"][:8]).mean(), ({**state, "count": state["count"] + 1}, seen)

    first = {"numbers": normal((1000,), 5), "key": jax.random.key(3), "count": 0}
    options = dict(plan=CODEC, model_state="mean", has_aux=True, accumulate=accumulate)
    train = cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(3), **options)
    found = train.init(W, first)
    for _ in range(3):
        *found, metrics = train.step(*found, X)
    close(found[1], {**first, "count": jnp.int32(3 * accumulate)})
    np.testing.assert_array_equal(found[1]["numbers"], first["numbers"])
    counts = range(2 * accumulate, 3 * accumulate)
    drawn = [jax.random.uniform(fold(fold(first["key"], rank), n)) for rank in range(3) for n in counts]
    np.testing.assert_allclose(metrics.aux, np.mean(drawn), rtol=1e-5)
    plain = [c for c in cgx.explain(train.step, *found, X, show=False).collectives if not c.function]
    assert sum(c.raw_bytes for c in plain) < 100


def test_random_keys_compile_one_program():
    def loss(w, key, x):
        traces.append(1)
        return (x @ w).mean(), jax.random.split(key)[0]

    traces = []
    train = cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(2), plan=cgx.Raw(), model_state="mean")
    found = train.init(W, jax.random.key(3))
    for _ in range(4):
        *found, _ = train.step(*found, X)
    assert len(traces) == 1


@NESTED
def test_an_axis_for_the_partitioner():
    def loss(params, mean, x):
        hidden = jnp.tanh(x @ params["up"] + params["bias"])
        new = 0.5 * mean + hidden.mean(0)
        return (((hidden - new) @ params["down"] - x) ** 2).mean(), new

    found = {}
    for model in (1, 2):
        axes, devices = ("data", "model"), jax.devices()[: 2 * model]
        mesh = jax.make_mesh((2, model), axes, axis_types=(AxisType.Auto,) * 2, devices=devices)
        options = dict(param_specs=SPECS, plan=cgx.Raw(), model_state="mean")
        train = cgx.make_train_step(loss, optax.sgd(0.5), mesh, **options)
        found[model] = train.init(SHARDED, jnp.zeros(64))
        for _ in range(3):
            *found[model], _ = train.step(*found[model], X)
    close(found[2][:2], found[1][:2])


def test_flax_nnx():
    """Batch norm with the statistics of all ranks trains as in a plain program.

    Dropout draws differently on each rank.
    """
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")

    class Model(nnx.Module):
        def __init__(self, rate=0.0, axis_name=None):
            rngs = nnx.Rngs(0)
            self.first, self.second = nnx.Linear(30, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
            self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)
            self.dropout = nnx.Dropout(rate, rngs=rngs)

        def __call__(self, x):
            return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))

    error = lambda model, x: ((model(x) - x.mean(-1, keepdims=True)) ** 2).mean()

    def train(model, steps, **options):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, rest, x):
            model = nnx.merge(graph, params, rest)
            return error(model, x), nnx.state(model, nnx.Not(nnx.Param))

        train = cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(4), **options)
        found = train.init(params, rest)
        for _ in range(steps):
            *found, metrics = train.step(*found, X)
        return *found[:2], metrics

    plain = Model()
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(error)(model, x)
        optimizer.update(model, grads)
        return loss

    with jax.numpy_dtype_promotion("standard"):
        params, rest, metrics = train(Model(axis_name="data"), 5, plan=cgx.Raw(), model_state="mean")
        losses = [step(plain, optimizer, X) for _ in range(5)]
        np.testing.assert_allclose(metrics.loss, losses[-1], rtol=1e-4)
        close(nnx.to_pure_dict(params), nnx.to_pure_dict(nnx.state(plain, nnx.Param)))
        close(rest["norm"]["mean"][...], plain.norm.mean[...])
        # The second layer is frozen, and every rank has its own statistics and noise.
        plan = cgx.Plan(CODEC, [("second", cgx.Skip())], min_size=0)
        options = dict(plan=plan, model_state="per_rank", accumulate=3)
        params, rest, metrics = train(Model(0.5), 2, **options)
    assert_same_trees(params["second"]["kernel"][...], Model().second.kernel[...])
    assert rest.rows["dropout"]["rngs"]["count"][...].tolist() == [6] * 4
    assert len(np.unique(rest.rows["norm"]["mean"][...], axis=0)) == 4


def more_by(steps):
    """Returns a function of (n, x) that adds something to n in a program inside of the loss."""
    return lambda n, x: jax.lax.scan(lambda c, _: ((c[0] + steps(x), c[1] * 2), None), (n, x), length=3)[0][0]


# Counters of a loss: the numbers of a rank's part and of all, or what plain JAX adds for the whole batch.
COUNTERS = {
    "rank": (lambda n, x: n + jnp.asarray(len(x), n.dtype), (3, 12)),
    "jit": (lambda n, x: jax.jit(lambda n, x: (n + jnp.asarray(len(x), n.dtype), 2 * x))(n, x)[0], (3, 12)),
    "checkpoint": (lambda n, x: jax.checkpoint(lambda n: n + jnp.asarray(len(x), n.dtype))(n), (3, 12)),
    "array": (lambda n, x: n + jnp.asarray(np.full(2, len(x)))[0].astype(n.dtype), (3, 12)),
    "pmean": (lambda n, x: jax.lax.pmean(n.astype(float) + len(x), "data").astype(n.dtype), (3, 12)),
    "sum": (lambda n, x: n + jnp.ones(len(x)).sum().astype(n.dtype), (3, 12)),
    "scan": (more_by(lambda x: len(x)), (9, 36)),
    "axis_size": (lambda n, x: n + jnp.asarray(len(x) * jax.lax.axis_size("data"), n.dtype), 12),
    "psum": (lambda n, x: n + jnp.asarray(jax.lax.psum(len(x), "data"), n.dtype), 12),
    "psum of an array": (lambda n, x: n + jax.lax.psum(jnp.asarray(len(x), n.dtype), "data"), 12),
    "steps": (lambda n, x: n + jnp.asarray(1, n.dtype), 1),
    "mean": (lambda n, x: n + jnp.ones(len(x)).mean().astype(n.dtype), 1),
    "mean of steps": (lambda n, x: jax.lax.pmean(n.astype(float) + 1, "data").astype(n.dtype), 1),
    "steps in a scan": (more_by(lambda x: 1), 3),
    "only 3 examples": (lambda n, x: n + jnp.asarray(x.reshape(3, 30).shape[0], n.dtype), None),
}


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("name", COUNTERS)
def test_counters(name, dtype):
    """A counter of a rank's examples is an error, and a counter of all examples is that of plain JAX."""
    count, expected = COUNTERS[name]

    def loss(w, state, x):
        return ((x @ w) ** 2).mean(), {"n": count(state["n"], x), "mean": 0.5 * state["mean"] + x.mean(0)}

    for accumulate in (1, 4):
        options = dict(plan=cgx.Raw(), model_state="mean", accumulate=accumulate)
        train = cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(4), **options)
        given = train.init(W, {"n": dtype(0), "mean": jnp.zeros(30)})
        x = jnp.tile(X[:12], (accumulate, 1))
        with jax.numpy_dtype_promotion("standard"):
            if isinstance(expected, tuple):
                part, whole = (str(dtype(n)) for n in expected)
                words = says(
                    "make_train_step",
                    "loss_fn",
                    "leaf ['n']",
                    expected="model state number of examples in a rank's part",
                    got=f"{part} of a rank's part, {whole} of all",
                    remedy='multiply x.shape[0] by jax.lax.axis_size("data")',
                )
                with raises(ValueError, words):
                    train.step(*given, x)
            else:
                _, state, *_ = train.step(*given, x)
                assert state["n"] == (3 if expected is None else expected) * accumulate


def test_counters_of_each_rank():
    """Each rank may count its own examples."""
    loss = lambda w, n, x: ((x @ w).mean(), n + x.shape[0])
    train = cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(4), plan=cgx.Raw(), model_state="per_rank")
    _, state, *_ = train.step(*train.init(W, 0), X)
    assert state.rows.tolist() == [6] * 4


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (
            lambda s: {**s, "more": s["a"]},
            says("make_train_step", "loss_fn", expected="state", got="with ['more'] more"),
        ),
        (lambda s: {"b": s["b"]}, says("make_train_step", "loss_fn", expected="state", got="without ['a']")),
        (
            lambda s: {**s, "a": jnp.zeros(3)},
            says("make_train_step", "loss_fn", "leaf ['a']", "float32[2]", "float32[3]"),
        ),
        (lambda s: {**s, "b": s["b"] + 0.5}, says("make_train_step", "loss_fn", "leaf ['b']", "int32[]", "float32[]")),
    ],
    ids=["more", "less", "shape", "dtype"],
)
def test_another_state(new, words):
    loss = lambda w, state, x: ((x @ w).mean(), new(state))
    train = cgx.make_train_step(loss, optax.sgd(0.1), mesh_of(2), plan=cgx.Raw(), model_state="mean")
    with raises(ValueError, words), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(train.step, *train.init(W, {"a": jnp.zeros(2), "b": 0}), X)


def test_errors():
    make = functools.partial(cgx.make_train_step, loss_fn, optax.sgd(0.1), mesh_of(2), plan=cgx.Raw())
    with raises(ValueError, says("make_train_step", "model_state", expected="'mean' 'per_rank'", got="'all'")):
        make(model_state="all")
    with raises(ValueError, says("train.init", "model_state", expected="none", got="one", remedy='model_state="mean"')):
        make().init(W, STATE)
    with raises(
        ValueError, says("train.init", "model_state", expected="state", got="none", remedy="init(params, state)")
    ):
        make(model_state="mean").init(W)
    train = make(model_state="per_rank")
    w, _, state = train.init(W, STATE)
    with raises(ValueError, says("train.step", "model_state", expected="PerRank init", got="dict")):
        train.step(w, STATE, state, X)
    _, of_four, _ = cgx.make_train_step(
        loss_fn, optax.sgd(0.1), mesh_of(4), plan=cgx.Raw(), model_state="per_rank"
    ).init(W, {"mean": jnp.zeros(30)})
    rows = says(
        "train.step",
        "model_state",
        "leaf .rows['mean']",
        "2 rows rank",
        "float32[4, 30]",
        remedy="jaxcgx.reshard_state",
    )
    with raises(ValueError, rows):
        train.step(w, jax.device_get(of_four), state, X)
    alone = cgx.make_train_step(
        lambda *_: jnp.zeros(()), optax.sgd(0.1), mesh_of(2), plan=cgx.Raw(), model_state="mean"
    )
    with raises(ValueError, says("make_train_step", "loss_fn", expected="(loss, model state)", got="one")):
        alone.step(*alone.init(W, STATE), X)

"""Tests value_and_grad and grad: the gradients of jit programs over sharded batches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, refused, rows, says
from helpers import assert_same_trees, assert_trees, normal, sent
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import NESTED

import jaxcgx as cgx

RANKS = 4
CODEC = cgx.MaxMin(4, 64)
PARAMS = {"w": normal((30, 40), 1, scale=0.2), "b": jnp.zeros(40)}
X, MASK = normal((24, 30), 2), jnp.float32(jnp.arange(24) % 7 < jnp.arange(24) // 5)
MAPPED = pytest.mark.parametrize("ranks", ["shard_map", "vmap"])
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


@functools.lru_cache
def mesh_of(kind, *axes):
    axes = axes or (("data", RANKS),)
    names, sizes = zip(*axes)
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def errors_of(params, x):
    return (jnp.tanh(x @ params["w"] + params["b"]) - x.mean(-1, keepdims=True)) ** 2


def loss_fn(params, x, mask=None):
    return errors_of(params, x).mean()


def weighted_fn(params, x, mask):
    return (errors_of(params, x).mean(-1) * mask).sum(), mask.sum()


def global_mean(params, x, mask):
    total, weight = weighted_fn(params, x, mask)
    return total / weight


def learned_fn(params, x, mask):
    """The weights depend on the parameters."""
    weights = mask * jax.nn.sigmoid(x @ params["w"][:, 0])
    return (errors_of(params, x).mean(-1) * weights).sum(), weights.sum()


def place(mesh, tree, spec=P("data")):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def close(found, expected):
    assert_trees(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), *map(jax.tree.leaves, (found, expected))
    )


# Sources of the mesh and of the shardings.
def called(how, mesh, f, params, *batch):
    batch = place(mesh, batch)
    if how == "jit":
        with jax.set_mesh(mesh):
            return jax.jit(f)(place(mesh, params, P()), *batch)
    if how == "context":
        with jax.set_mesh(mesh):
            return f(params, *batch)
    return f(params, *batch)


@KINDS
@MAPPED
@pytest.mark.short
@pytest.mark.parametrize("how", ["jit", "context", "arrays"])
@pytest.mark.parametrize("weighted", [False, True])
def test_like_jax_with_raw(kind, ranks, how, weighted):
    mesh = mesh_of(kind)
    fun, plain = (learned_fn, lambda *args: jnp.divide(*learned_fn(*args))) if weighted else (loss_fn, loss_fn)
    options = dict(weighted=weighted, ranks=ranks)
    found = called(how, mesh, cgx.value_and_grad(fun, "data", cgx.Raw(), **options), PARAMS, X, MASK)
    expected = jax.value_and_grad(plain)(PARAMS, X, MASK)
    close(found, expected)
    if how == "jit":  # grad takes its mesh and shardings from the same place
        close(called(how, mesh, cgx.grad(fun, "data", cgx.Raw(), **options), PARAMS, X, MASK), expected[1])


def own_fn(params, x, mask=None):
    """A rank's loss. The mean over the ranks is the weighted mean of the whole batch."""
    if mask is None:
        return loss_fn(params, x)
    total, weight = weighted_fn(params, x, mask)
    return total / lax.pmean(weight, "data")


def every_way(place, params, *batch):
    """Returns the gradients of every way to write a step in that place."""
    weighted = len(batch) == 2
    fun = weighted_fn if weighted else loss_fn
    asked = cgx.grad(fun, "data", cgx.Raw(), weighted=weighted)
    if place in ("Auto", "Explicit"):
        mapped = cgx.grad(fun, "data", cgx.Raw(), weighted=weighted, ranks="vmap")
        return {"value_and_grad": asked(params, *batch), "vmap": mapped(params, *batch)}
    mean = lambda grads: cgx.compressed_pmean(grads, "data", cgx.Raw())
    synchronised = lambda params, *batch: own_fn(cgx.sync_in_backward(params, "data", cgx.Raw()), *batch)
    found = {
        "value_and_grad": asked(params, *batch),
        "and the mean that was there": lax.pmean(asked(params, *batch), "data"),
        "local_value_and_grad": mean(cgx.local_value_and_grad(own_fn, "data")(params, *batch)[1]),
        "sync_in_backward": jax.grad(synchronised)(params, *batch),
    }
    if place != "check_vma":  # under check_vma JAX has summed these already, and compressed_pmean raises an error
        found["jax.grad"] = mean(jax.grad(own_fn)(params, *batch))
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("place", ["Auto", "Explicit", "check_vma", "no check_vma", "pmap"])
def test_no_style_changes_a_number(place, weighted):
    batch = (X, MASK) if weighted else (X,)
    mesh = mesh_of(AxisType.Explicit if place == "Explicit" else AxisType.Auto)
    step = functools.partial(every_way, place)
    if place == "pmap":
        parts = [x.reshape(RANKS, -1, *x.shape[1:]) for x in batch]
        found = jax.pmap(step, axis_name="data", in_axes=(None, *[0] * len(batch)))(PARAMS, *parts)
        found = jax.tree.map(lambda x: x[0], found)
    else:
        if "vma" in place:
            specs = (P(), *[P("data")] * len(batch))
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=place == "check_vma")
        with jax.set_mesh(mesh):
            found = jax.jit(step)(
                jax.device_put(PARAMS, NamedSharding(mesh, P())), *jax.device_put(batch, NamedSharding(mesh, P("data")))
            )
    expected = jax.grad(global_mean if weighted else loss_fn)(PARAMS, *batch)
    assert len(found) == {"Auto": 2, "Explicit": 2, "check_vma": 4}.get(place, 5)
    for grads in found.values():
        close(grads, expected)


@jax.custom_vjp
def scaled(x, scale):
    return x * scale


scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), lambda kept, ct: (ct * kept[1], (ct * kept[0]).sum(0)))


# Programs that check_vma refuses, or whose inner gradients JAX sums over the ranks, because they start from constants.
def scanned(params, x):
    step = lambda h, x: (jnp.tanh(x[:, None] * params["b"][:30] + h), None)
    return lax.scan(step, jnp.zeros((len(x), 30)), x.T)[0].mean() + loss_fn(params, x)


def conditional(params, x):
    return lax.cond(x[0, 0] < 100, lambda: loss_fn(params, x), lambda: 0.0)


def looped(params, x):
    return lax.fori_loop(0, 3, lambda i, sum: sum + loss_fn(params, x * i), 0.0)


def with_inner_gradient(params, x):
    return jax.grad(lambda scale: loss_fn({**params, "b": params["b"] + scale}, x))(0.5)


def with_custom_vjp(params, x):
    return scaled(x @ params["w"], jnp.ones(40)).mean() + loss_fn(params, x)


LOSSES = [scanned, conditional, looped, with_inner_gradient, with_custom_vjp, jax.checkpoint(loss_fn)]


@KINDS
@MAPPED
def test_losses_that_start_from_constants(kind, ranks):
    def everything(params, x):
        found = [cgx.value_and_grad(f, "data", cgx.Raw(), ranks=ranks)(params, x) for f in LOSSES]
        vmapped = jax.vmap(cgx.value_and_grad(loss_fn, "data", cgx.Raw(), ranks=ranks), (0, None))
        return found, vmapped(jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params), x)

    found, vmapped = called("jit", mesh_of(kind), everything, PARAMS, X)
    close(found, jax.jit(lambda: [jax.value_and_grad(f)(PARAMS, X) for f in LOSSES])())
    close(jax.tree.map(lambda x: x[1], vmapped), jax.value_and_grad(loss_fn)(jax.tree.map(lambda p: 2 * p, PARAMS), X))


@KINDS
@MAPPED
def test_losses_that_look_at_all_ranks(kind, ranks):
    """Such losses have a mean over ranks, a sum, or a batch norm with statistics as auxiliary outputs."""
    declared = dict(has_aux=True, aux_specs=(None, "first"), ranks=ranks)

    def normalised(params, count, x, mean=lambda h: lax.pmean(h, "data")):
        h = x @ params["w"]
        center = mean(h.mean(0))
        return ((h - center) ** 2).mean() + jnp.sin(center).mean(), (center, count + 1)

    def both(params, x):
        mean = lambda p, x: lax.pmean(loss_fn(p, x), "data")
        averaged = cgx.value_and_grad(mean, "data", cgx.Raw(), ranks=ranks)(params, x)
        total = lambda p, x: (errors_of(p, x).sum(), 1 / lax.axis_size("data"))
        summed = cgx.value_and_grad(total, "data", cgx.Raw(), weighted=True, ranks=ranks)(params, x)
        return (
            averaged,
            summed,
            cgx.value_and_grad(normalised, "data", cgx.Raw(), **declared)(params, jnp.int32(3), x),
        )

    averaged, summed, ((value, (center, count)), grads) = called("jit", mesh_of(kind), both, PARAMS, X)
    close(averaged, jax.value_and_grad(loss_fn)(PARAMS, X))
    close(summed, jax.value_and_grad(lambda p: errors_of(p, X).sum())(PARAMS))
    plain = functools.partial(normalised, mean=lambda h: h)
    (expected, (whole, _)), whole_grads = jax.value_and_grad(plain, has_aux=True)(PARAMS, jnp.int32(3), X)
    close((value, center, grads["w"]), (expected, whole, whole_grads["w"]))
    assert count == 4 and count.dtype == jnp.int32


def test_numbers_that_are_equal_are_not_the_same():
    """Arguments that are not arrays are static, so 1, 1.0 and True give three programs."""
    f = cgx.value_and_grad(lambda p, x, n: loss_fn(p, x) * len(type(n).__name__), "data", cgx.Raw())
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        three, five, four = (f(PARAMS, X, n)[0] for n in (1, 1.0, True))
    np.testing.assert_allclose((five, four), (three * 5 / 3, three * 4 / 3), rtol=1e-5)


def test_without_jit():
    """Under jax.disable_jit, a call is still one program of all ranks."""
    f = cgx.value_and_grad(loss_fn, "data", cgx.Raw(), mesh=mesh_of(AxisType.Auto))
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    with jax.disable_jit():
        close(f(PARAMS, X), expected)


def test_a_loop_outside_of_jit():
    """Arrays that a loss closes over are read at every call. Other arrays or a new loss function compile nothing."""
    compiled = []
    listen = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    teacher, scale, mesh = {"w": PARAMS["w"], "b": np.ones(40, np.float32)}, 1.0, mesh_of(AxisType.Auto)

    def distilled(params, x):
        return scale * ((errors_of(params, x) - jax.nn.relu(errors_of(teacher, x))) ** 2).mean()

    def asked():
        again = lambda params, x: distilled(params, x)
        return cgx.value_and_grad(again, "data", {"data": cgx.Raw()}, argnums=[0], mesh=mesh)(PARAMS, X)

    stale, expected = asked(), lambda: jax.value_and_grad(lambda *args: distilled(*args))(PARAMS, X)
    teacher = jax.device_get(jax.tree.map(lambda x: x / 2, teacher))
    jax.monitoring.register_event_duration_secs_listener(listen)
    value, (grads,) = asked()
    jax.monitoring.unregister_event_duration_listener(listen)
    assert value != stale[0] and not compiled
    close((value, grads), expected())
    scale = 2.0
    close(asked(), expected())


@MAPPED
def test_auxiliary_outputs_count_as_much_as_their_ranks(ranks):
    def fun(params, x, mask):
        total, weight = weighted_fn(params, x, mask)
        return (total, weight), {"mse": total / weight, "each": errors_of(params, x).mean(-1)}

    mask = MASK.at[:6].set(0)  # one rank has no examples
    options = dict(weighted=True, has_aux=True, ranks=ranks)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), **options, mesh=mesh_of(AxisType.Auto))
    (value, aux), grads = f(PARAMS, X, mask)
    expected = jax.value_and_grad(global_mean)(PARAMS, X, mask)
    close((value, grads, aux["mse"], aux["each"]), (*expected, expected[0], errors_of(PARAMS, X).mean(-1)))


def by_hand(params, x, carry=None):
    def step(params, x, carry):
        _, grads = cgx.local_value_and_grad(loss_fn, "data")(params, x)
        if carry is None:
            return cgx.compressed_pmean(grads, "data", CODEC), None
        mean, kept = cgx.compressed_pmean(grads, "data", CODEC, carry=jax.tree.map(lambda r: r[0], carry))
        return mean, jax.tree.map(lambda r: r[None], kept)

    mesh = mesh_of(AxisType.Auto)
    specs = (P(), P("data"), P("data"))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P("data"))))(params, x, carry)


@KINDS
def test_the_bits_of_a_step_by_hand(kind):
    _, grads = called("jit", mesh_of(kind), cgx.value_and_grad(loss_fn, "data", CODEC), PARAMS, X)
    assert_same_trees(grads, by_hand(PARAMS, X)[0])


@KINDS
@pytest.mark.parametrize("how", ["jit", "arrays"])
def test_feedback(kind, how):
    mesh = mesh_of(kind)
    f = cgx.value_and_grad(loss_fn, "data", cgx.Feedback(CODEC))
    state = f.init(place(mesh, PARAMS, P()))
    residuals = state.own.residuals
    assert residuals["w"].sharding.shard_shape((RANKS, 30, 40)) == (1, 30, 40)
    expected = cgx.Carry(jax.tree.map(np.zeros_like, residuals))
    for _ in range(2):
        (_, grads), state = called(how, mesh, lambda p, x, s=state: f(p, x, state=s), place(mesh, PARAMS, P()), X)
        mean, expected = by_hand(PARAMS, X, expected)
        assert_same_trees((grads, state.own.residuals), (mean, expected.residuals))
    assert state.shared.count == 2 and any(np.any(r) for r in jax.tree.leaves(state.own))


def test_an_exchange_with_momentum():
    """It is the exchange of a step by hand: compress_gradients."""
    exchange, mesh = cgx.DGC(0.1, clip_norm=1.0), mesh_of(AxisType.Auto, ("data", RANKS))
    f, transformation = cgx.value_and_grad(loss_fn, "data", exchange), cgx.compress_gradients("data", exchange)

    def step(params, x, state):
        return transformation.update(cgx.local_value_and_grad(loss_fn, "data")(params, x)[1], state, params)

    with jax.set_mesh(mesh):
        state, expected = f.init(PARAMS), transformation.init(PARAMS)
        specs = cgx.state_specs(expected, "data")
        step = jax.jit(jax.shard_map(step, in_specs=(P(), P("data"), specs), out_specs=(P(), specs)))
        for _ in range(2):
            (_, grads), state = f(PARAMS, place(mesh, X), state=state)
            mean, expected = step(PARAMS, place(mesh, X), expected)
            assert_same_trees((grads, state), (mean, expected))


@KINDS
@MAPPED
def test_aux_keys_keywords_and_what_is_no_array(kind, ranks):
    mesh, key = mesh_of(kind), jax.random.key(3)

    def fun(params, batch, key, *, scale, flag):
        assert flag is True and scale == 2.0
        noise = jax.random.normal(key, batch["x"].shape)
        found = errors_of(params, batch["x"])
        return scale * found.mean(), {"mean": found.mean(), "each": found.mean(-1), "noise": noise}

    f = cgx.value_and_grad(fun, "data", cgx.Raw(), has_aux=True, ranks=ranks)
    with jax.set_mesh(mesh):
        (value, aux), grads = jax.jit(lambda p, b, k: f(p, b, k, scale=2.0, flag=True))(
            PARAMS, place(mesh, {"x": X}), key
        )
        grads_alone, aux_alone = cgx.grad(fun, "data", cgx.Raw(), has_aux=True)(
            PARAMS, place(mesh, {"x": X}), key, scale=2.0, flag=True
        )
    expected = errors_of(PARAMS, X)
    close((value, aux["mean"], aux["each"]), (2 * expected.mean(), expected.mean(), expected.mean(-1)))
    close(grads, jax.grad(lambda p: 2 * errors_of(p, X).mean())(PARAMS))
    close((grads_alone, aux_alone), (grads, aux))
    parts = np.asarray(aux["noise"]).reshape(RANKS, -1)
    assert len({part.tobytes() for part in parts}) == RANKS
    np.testing.assert_array_equal(parts[1], jax.random.normal(jax.random.fold_in(key, 1), (6, 30)).reshape(-1))


@KINDS
@MAPPED
@pytest.mark.parametrize("argnums", [1, (2, 0)])
def test_argnums(kind, ranks, argnums):
    def fun(w, x, b):
        return errors_of({"w": w, "b": b}, x).mean() if argnums != 1 else errors_of({"w": x, "b": b[0]}, w).mean()

    args = (PARAMS["w"], X, PARAMS["b"]) if argnums != 1 else (X, PARAMS["w"], PARAMS["b"][None])
    specs = P("data") if argnums != 1 else (P("data"), P())
    options = dict(argnums=argnums, batch_specs=specs, ranks=ranks)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), **options, mesh=mesh_of(kind))
    close(f(*args), jax.value_and_grad(fun, argnums)(*args))


@MAPPED
def test_leaves_without_gradients(ranks):
    """An activation and a count have no gradient, but a Python number has one in JAX."""
    params = {**PARAMS, "f": jnp.tanh, "scale": 2.0, "steps": jnp.arange(3)}

    def fun(params, x):
        return (params["f"](x @ params["w"] + params["b"]) * params["scale"] * jnp.float32(params["steps"][2])).mean()

    floats = {k: params[k] for k in ("w", "b", "scale")}
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh_of(AxisType.Auto), ranks=ranks)
    f = dataclasses.replace(f, exchange=cgx.Feedback(cgx.Raw()))
    (value, grads), _ = f(params, X, state=f.init(params))
    expected = jax.value_and_grad(lambda p: fun({**params, **p}, X))(floats)
    close((value, {k: grads[k] for k in floats}), expected)
    assert [k for k in params if grads[k] is None] == ["f", "steps"]


@MAPPED
def test_a_module_that_changes(ranks):
    """NNX: a module keeps what it assigns to itself, such as statistics and counts."""
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")

    class Model(nnx.Module):
        def __init__(self, axis_name, rngs):
            self.norm = nnx.BatchNorm(30, axis_name=axis_name, rngs=rngs)
            self.rnn = nnx.RNN(nnx.SimpleCell(30, 8, rngs=rngs))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls.set_value(self.calls.get_value() + 1)
            return self.rnn(self.norm(x).reshape(-1, 1, 30))

    def run(value_and_grad, axis_name, x):
        model = Model(axis_name, nnx.Rngs(0))
        step = nnx.jit(lambda model, x: value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, x))
        for _ in range(2):
            loss, grads = step(model, x)
        return loss, grads, nnx.state(model)

    mesh = mesh_of(AxisType.Auto)
    with jax.numpy_dtype_promotion("standard"):
        expected = run(nnx.value_and_grad, None, X)
        with jax.set_mesh(mesh):
            found = run(lambda f: cgx.value_and_grad(f, "data", cgx.Raw(), ranks=ranks), "data", place(mesh, X))
    in_numbers = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    close(*(jax.tree.map(in_numbers, tree) for tree in (found, expected)))


# Functions of (parameters, a rank's part): what `aux_specs` says, and what plain JAX has for the whole batch.
AUX = {
    "sum": (lambda params, x: len(x), 24),
    "first": (lambda params, x: lax.axis_size("data"), 4),
    "mean": (lambda params, x: x.mean(), X.mean()),
    P(None, "data"): (lambda params, x: x.T, X.T),
    None: (lambda params, x: jax.random.key(len(x) * 0), jax.random.key(0)),
}


@KINDS
@MAPPED
@pytest.mark.parametrize("said", AUX, ids=str)
def test_auxiliary_outputs_are_declared(said, ranks, kind):
    output, expected = AUX[said]
    loss = lambda params, x: (loss_fn(params, x), {"n": output(params, x), "loss": loss_fn(params, x)})
    specs = {"n": said, "loss": None}
    f = cgx.value_and_grad(loss, "data", cgx.Raw(), has_aux=True, aux_specs=specs, ranks=ranks)
    (value, aux), _ = called("context", mesh_of(kind), f, PARAMS, X)
    numbers = lambda x: jax.random.key_data(x) if said is None else x
    np.testing.assert_allclose(*map(numbers, (aux["n"], expected)), rtol=1e-5)
    np.testing.assert_allclose(aux["loss"], value, rtol=1e-6)


def test_the_loss_does_not_run_while_it_is_traced():
    ran, traced = [], []

    def loss(params, x):
        traced.append(1)
        total = lax.stop_gradient(params["b"].sum())
        total = jax.pure_callback(lambda x: (ran.append(1), x)[1], jax.ShapeDtypeStruct((), jnp.float32), total)
        return loss_fn(params, x), total + jnp.ones(len(x)).mean()

    jax.jit(cgx.value_and_grad(loss, "data", CODEC, has_aux=True, mesh=mesh_of(AxisType.Auto))).lower(PARAMS, X)
    assert not ran and len(traced) <= 2


@MAPPED
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_how_often_a_loss_is_traced(ranks, how):
    """Once, also if each rank has a single example. Twice, if an output may have a row for each example."""
    traced = []

    def loss(params, x):
        traced.append(1)
        return loss_fn(params, x), errors_of(params, x)[:, 0]

    alone, mesh = lambda params, x: loss(params, x)[0], mesh_of(AxisType.Auto)
    for fun, has_aux, times in ((alone, False, 1), (loss, True, 2)):
        f = cgx.value_and_grad(fun, "data", CODEC, has_aux=has_aux, mesh=mesh, ranks=ranks)
        for x in (X, X[:RANKS]):
            traced.clear()
            (jax.jit(f) if how == "jit" else f)(PARAMS, x)
            assert len(traced) == times


def test_modules_that_a_pytree_does_not_have():
    """NNX: a variable in two places, a new attribute, and a changed attribute that is not an array."""
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")

    class Model(nnx.Module):
        def __init__(self, tied=False):
            self.inner = nnx.Linear(30, 30, use_bias=False, rngs=nnx.Rngs(0))
            self.outer = self.inner if tied else nnx.Linear(30, 30, use_bias=False, rngs=nnx.Rngs(1))
            self.calls = 0

        def __call__(self, x):
            return self.outer(jnp.tanh(self.inner(x)))

    def sowing(model, x):
        model.mean = nnx.Intermediate(x.mean())  # as sow does
        return model(x).mean()

    def counting(model, x):
        model.calls += 1
        return model(x).mean()

    mesh = mesh_of(AxisType.Auto)
    for fun in (sowing, counting):
        with raises(ValueError, says("value_and_grad", "loss_fn", remedy="__init__ has_aux")):
            cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh)(Model(), X)
    loss = lambda model, x: (model(x) ** 2).mean()
    at = "leaf [0][0].outer.kernel"
    with raises(ValueError, says("value_and_grad", "loss_fn", at=at, remedy="nnx.split")):
        cgx.value_and_grad(loss, "data", cgx.Raw(), mesh=mesh)(Model(tied=True), X)
    graph, params, rest = nnx.split(Model(tied=True), nnx.Param, ...)
    merged = lambda params, x: loss(nnx.merge(graph, params, rest), x)
    found = cgx.grad(merged, "data", cgx.Raw(), mesh=mesh)(params, X)
    close(found, jax.grad(merged)(params, X))
    with raises(TypeError, says("value_and_grad", "argnums", got="DiffState", remedy="cgx.Skip")):
        cgx.value_and_grad(loss, "data", CODEC, argnums=nnx.DiffState(0, nnx.Param))


class Statistics:
    """A module whose pytree doesn't have the names of its attributes."""

    def __init__(self, w, mean):
        self.w, self.mean = w, mean

    def __call__(self, x):
        self.mean = x.mean()
        return x @ self.w


jax.tree_util.register_pytree_node(Statistics, lambda m: ((m.w, m.mean), None), lambda _, leaves: Statistics(*leaves))


def test_a_change_that_would_be_lost_is_refused():
    f = cgx.value_and_grad(lambda model, x: model(x).mean(), "data", CODEC, mesh=mesh_of(AxisType.Auto))
    words = says("value_and_grad", "loss_fn", at="leaf [0][0][<flat index 1>]", got="one")
    with raises(ValueError, words):
        f(Statistics(PARAMS["w"], jnp.zeros(())), X)
    popped = cgx.value_and_grad(lambda p, batch: loss_fn(p, batch.pop("x")), "data", cgx.Raw(), mesh=f.mesh)
    close(popped(PARAMS, {"x": X}), jax.value_and_grad(loss_fn)(PARAMS, X))


@KINDS
@MAPPED
def test_skipped_leaves(kind, ranks):
    """Gradients are those of stop_gradient, and there are no residuals."""
    loss = lambda p, x: ((x @ p["w"] + jax.nn.relu(x @ p["frozen"])) ** 2).mean()
    params, mesh = {"w": normal((30, 40), 1), "frozen": normal((30, 40), 2)}, mesh_of(kind)
    plan = cgx.Plan(cgx.MaxMin(8), [("^frozen$", cgx.Skip())])
    f = cgx.value_and_grad(loss, "data", cgx.Feedback(plan), mesh=mesh, ranks=ranks)
    (value, grads), state = f(params, place(mesh, X), state=f.init(params))
    assert f.init(params).own.residuals["frozen"] is state.own.residuals["frozen"] is None
    assert state.own.residuals["w"].any()
    stopped = lambda p, x: loss({**p, "frozen": lax.stop_gradient(p["frozen"])}, x)
    expected = jax.value_and_grad(stopped)(params, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(grads["w"], expected[1]["w"], atol=0.02 * np.abs(expected[1]["w"]).max())
    assert not grads["frozen"].any()


@NESTED
@KINDS
@MAPPED
def test_other_axes_stay_sharded(kind, ranks):
    """Shards over "model" are compressed on their devices."""
    mesh = mesh_of(kind, ("data", 2), ("model", 2))
    specs = {"w": P(None, "model"), "b": P("model")}
    params = jax.tree.map(lambda x, spec: place(mesh, x, spec), PARAMS, specs)

    def fun(params, x):
        h = x @ params["w"] + params["b"]
        return (h**2).mean()

    given = specs if kind == AxisType.Auto else None
    f = cgx.value_and_grad(fun, "data", cgx.Feedback(cgx.MaxMin(8, 20)), param_specs=given, ranks=ranks)
    with jax.set_mesh(mesh):
        state = f.init(params)
        step = jax.jit(lambda p, x, s: f(p, x, state=s))
        (value, grads), state = step(params, place(mesh, X), state)
        text = step.lower(params, place(mesh, X), state).compile().as_text()
    expected = jax.value_and_grad(fun)(PARAMS, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for k, g in expected[1].items():
        np.testing.assert_allclose(grads[k], g, atol=0.02 * np.abs(g).max())
    assert grads["w"].sharding.shard_shape((30, 40)) == (30, 20)
    assert state.own.residuals["w"].sharding.shard_shape((2, 30, 40)) == (1, 30, 20)
    if kind == AxisType.Auto:  # on an Explicit mesh, JAX gathers all arguments and results of such a shard_map
        assert ("all-gather", "f32") not in sent(text)
    assert ("all-gather", "u8") in sent(text)


@NESTED
@MAPPED
def test_specs_that_programs_have(ranks):
    """Trees of NamedShardings, tuples of axes, one spec for several arguments, and what Flax NNX returns."""
    mesh = mesh_of(AxisType.Auto, ("data", 2), ("model", 2))
    specs = {"w": P(None, "model"), "b": P("model")}
    params = jax.tree.map(lambda x, spec: place(mesh, x, spec), PARAMS, specs)
    tuples = {name: tuple(spec) for name, spec in specs.items()}
    whole = {"w": (None, "model"), "b": ()}
    for given in (jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs), tuples, whole):
        f = cgx.value_and_grad(loss_fn, "data", cgx.Raw(), param_specs=given, ranks=ranks)
        _, grads = found = f(params, place(mesh, X))
        close(found, jax.value_and_grad(loss_fn)(PARAMS, X))
        assert grads["w"].sharding.shard_shape((30, 40)) == (30, 20)
    of_two = lambda w, b, x: loss_fn({"w": w, "b": b}, x)
    options = dict(argnums=(0, 1), ranks=ranks)
    f = cgx.value_and_grad(of_two, "data", cgx.Raw(), param_specs=NamedSharding(mesh, P()), **options)
    close(f(params["w"], params["b"], place(mesh, X))[1], jax.grad(of_two, (0, 1))(PARAMS["w"], PARAMS["b"], X))


@NESTED
@MAPPED
@pytest.mark.parametrize("of", ["module", "state"])
def test_specs_of_nnx(ranks, of):
    """Gradients are what nnx.value_and_grad returns: an nnx.State of nnx.Params."""
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    mesh = mesh_of(AxisType.Auto, ("data", 2), ("model", 2))
    sharded = nnx.with_partitioning(nnx.initializers.normal(), (None, "model"))

    class Model(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(30, 40, rngs=nnx.Rngs(0), kernel_init=sharded)
            self.mean = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.mean.set_value(x.mean())
            return jnp.tanh(self.inner(x)) ** 2

    with jax.set_mesh(mesh):
        model = Model()
    expected = nnx.value_and_grad(lambda model, x: model(x).mean())(model, X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    merged = lambda params, rest, x: nnx.merge(graph, params, nnx.clone(rest))(x).mean()
    fun, args = ((lambda model, x: model(x).mean()), (model,)) if of == "module" else (merged, (params, rest))
    for given in (nnx.get_partition_spec(params), nnx.get_named_sharding(params, mesh)):
        specs = (*[P()] * (len(args) - 1), P("data"))
        f = cgx.value_and_grad(fun, "data", cgx.Raw(), param_specs=given, batch_specs=specs, ranks=ranks)
        with jax.set_mesh(mesh):
            value, grads = f(*args, place(mesh, X))
        assert type(grads) is nnx.State and jax.tree.structure(grads) == jax.tree.structure(expected[1])
        close((value, grads), expected)
        assert grads["inner"]["kernel"].get_value().sharding.shard_shape((30, 40)) == (30, 20)


@NESTED
@KINDS
@MAPPED
def test_16_bits_beside_another_axis(kind, ranks):
    """XLA on CPUs aborts when it compiles a sum of 16-bit numbers over ranks beside an axis of the partitioner."""
    mesh = mesh_of(kind, ("data", 2), ("model", 2))
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, X))
    fun = lambda params, x: (loss_fn(params, x), x.max().astype(jnp.float16))
    options = dict(has_aux=True, param_specs={"w": P(), "b": P()}, ranks=ranks)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), **options)
    with jax.set_mesh(mesh):
        (value, aux), _ = jax.jit(f)(place(mesh, params, P()), place(mesh, x))
    assert value.dtype == jnp.bfloat16 and aux.dtype == jnp.float16
    np.testing.assert_allclose(value, loss_fn(PARAMS, X), rtol=0.02)
    np.testing.assert_allclose(aux, X.reshape(2, -1).max(1).mean(), rtol=0.01)


def test_stochastic_rounding_takes_a_key():
    mesh, codec = mesh_of(AxisType.Auto), cgx.MaxMin(2, 64, rounding="stochastic")
    f = cgx.value_and_grad(loss_fn, "data", codec, mesh=mesh)
    one, same, other = (f(PARAMS, X, codec_key=jax.random.key(i))[1] for i in (0, 0, 1))
    assert_same_trees(one, same)
    assert np.any(one["w"] != other["w"])
    with raises(ValueError, says("value_and_grad", "codec_key", got="None", remedy="codec_key=")):
        f(PARAMS, X)


def test_explain_counts_what_is_saved():
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        step = jax.jit(cgx.value_and_grad(loss_fn, "data", cgx.Plan(CODEC, min_size=100)))
        found = cgx.explain(step, PARAMS, place(mesh_of(AxisType.Auto), X), show=False)
    assert found.ratio > 2 and any(c.codec for c in found.collectives)
    assert {leaf.path for leaf in found.raw} == {"['b']"}  # the path in the argument, which a plan's rules see


@KINDS
@MAPPED
def test_micro_batches_share_an_exchange(kind, ranks):
    """Gradients of ranks are added up in a scan. Their mean is exchanged once."""
    mesh, codec = mesh_of(kind), cgx.MaxMin(8, 64)
    f = cgx.value_and_grad(loss_fn, "data", cgx.Feedback(codec), ranks=ranks)

    def step(params, batches, state):
        def add(total, x):
            loss, rows = f.local(params, x)
            return jax.tree.map(jnp.add, total, rows), loss

        total, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, f.local(params, batches[0])[1]), batches)
        mean = jax.tree.map(lambda x: x / len(batches), total)
        return losses.mean(), *f.mean(mean, params, state=state, value=losses.mean())

    with jax.set_mesh(mesh):
        batches = place(mesh, X.reshape(3, 8, 30), P(None, "data"))
        state, params = f.init(PARAMS), place(mesh, PARAMS, P())
        value, grads, state = jax.jit(step)(params, batches, state)
        found = cgx.explain(jax.jit(step), params, batches, state, show=False).collectives
    assert [(c.operation, c.times) for c in found if c.codec] == [("all-gather", 1)]
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for name, g in expected[1].items():
        np.testing.assert_allclose(grads[name], g, atol=0.02 * np.abs(g).max())
    assert state.shared.count == 1 and np.any(state.own.residuals["w"])


def test_a_mean_of_gradients_by_hand():
    """Without jit, and with a plan alone. Rows must be those of all ranks."""
    f = cgx.value_and_grad(loss_fn, "data", CODEC, mesh=mesh_of(AxisType.Auto))
    value, rows = f.local(PARAMS, X)
    assert_same_trees((value, f.mean(rows, PARAMS)), f(PARAMS, X))
    with raises(ValueError, says("value_and_grad", "rows", got="{'b'")):
        f.mean(PARAMS, PARAMS)
    with raises(ValueError, says("value_and_grad", "state", got="some")):
        f.mean(rows, PARAMS, state=first(FED))
    with raises(ValueError, says("value_and_grad", "state", got="one", remedy="mean")):
        f.local(PARAMS, X, state=first(FED))


def test_a_mean_of_gradients_of_modules():
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    model = nnx.Linear(30, 40, rngs=nnx.Rngs(0))
    f = cgx.value_and_grad(lambda model, x: model(x).mean(), "data", cgx.Raw(), mesh=mesh_of(AxisType.Auto))
    _, rows = f.local(model, X)
    assert_same_trees(f.mean(rows, model), f(model, X)[1])


@KINDS
@MAPPED
def test_a_loss_that_closes_over_the_batch(kind, ranks):
    """As a step of Flax defines it. Functions that the loss calls may close over the batch, too."""
    fed = cgx.compress_gradients("data", FED)

    def step(params, batch, scale, state):
        x = batch["x"]

        def errors(params):
            return errors_of(params, x) * scale

        def loss(params, power=2, *, shift=1.0):
            return (errors(params) ** power * batch["y"][:, None]).mean() + shift

        options = dict(ranks=ranks, closes_over=(batch, x))
        plain = cgx.value_and_grad(loss, "data", cgx.Raw(), **options)(params)
        return plain, cgx.value_and_grad(loss, "data", FED, **options)(params, state=state)

    mesh, batch = mesh_of(kind), {"x": X, "y": jnp.arange(24.0)}
    with jax.set_mesh(mesh):
        state = fed.init(PARAMS)
        found, (_, state) = jax.jit(step)(PARAMS, place(mesh, batch), 2.0, state)
    loss = lambda params: ((errors_of(params, X) * 2) ** 2 * batch["y"][:, None]).mean() + 1
    close(found, jax.value_and_grad(loss)(PARAMS))
    assert np.any(state.own.residuals["w"])


def test_what_a_loss_does_not_close_over():
    loss = lambda params: loss_fn(params, X)
    f = cgx.value_and_grad(loss, "data", CODEC, mesh=mesh_of(AxisType.Auto), closes_over=(X + 0,))
    with raises(ValueError, says("value_and_grad", "closes_over", got="something", remedy="argument")):
        f(PARAMS)


def test_a_loss_that_holds_the_batch_elsewhere_too():
    """Uses that closes_over can't replace would see the examples of all ranks."""
    mesh = mesh_of(AxisType.Auto)
    for x in X, np.asarray(X):
        ratio = jax.jit(lambda x=x: jnp.mean(x))
        f = cgx.value_and_grad(lambda p: loss_fn(p, x) * ratio(), "data", CODEC, mesh=mesh, closes_over=(x,))
        with raises(ValueError, says("value_and_grad", "closes_over", got="float32[24, 30]", remedy="arguments")):
            f(PARAMS)


def test_functions_that_call_each_other_close_over_the_batch():
    x = X

    def even(params, n):
        return loss_fn(params, x) + (odd(params, n - 1) if n else 0)

    def odd(params, n):
        return 2 * loss_fn(params, x) + even(params, n - 1)

    loss = lambda params: even(params, 4)
    f = cgx.value_and_grad(loss, "data", cgx.Raw(), mesh=mesh_of(AxisType.Auto), closes_over=x)
    with_x = lambda params, x: 7 * loss_fn(params, x)
    close(f(PARAMS), jax.value_and_grad(with_x)(PARAMS, X))


def test_gradients_of_single_examples():
    """Under vmap, whose dimension may be that of the examples, an error's note says what to write."""
    f = jax.vmap(cgx.grad(loss_fn, "data", CODEC, mesh=mesh_of(AxisType.Auto)), (None, 0))
    with raises(ValueError, says("value_and_grad", "batch_specs", got="None", remedy="batch_specs=")) as caught:
        f(PARAMS, jnp.ones((24, 4)) @ jnp.ones((4, 32)))
    assert re.search(r"jax.vmap\(jax.grad\(loss_fn\).*compressed_pmean", " ".join(caught.value.__notes__))


def test_errors_suggest_specs_for_the_call():
    """They number the arguments as the caller wrote them, and suggest what works."""

    def fun(batch, scale, params, y, *, shift):
        return (errors_of(params, batch["x"]).mean(-1) * scale[y] + shift[y]).mean()

    args = {"x": X, "n": jnp.arange(3.0)}, jnp.ones(8), PARAMS, jnp.arange(24) % 8
    specs, shift = ({"n": P(), "x": P("data")}, P(), P("data"), {"shift": P()}), jnp.ones(8)
    options = dict(argnums=2, mesh=mesh_of(AxisType.Auto))
    with pytest.raises(ValueError, match=re.escape(f"batch_specs={specs}")) as caught:
        cgx.value_and_grad(fun, "data", cgx.Raw(), **options)(*args, shift=shift)
    assert "leaf [0]['n']" in str(caught.value)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), **options, batch_specs=specs)
    close(f(*args, shift=shift), jax.value_and_grad(fun, 2)(*args, shift=shift))


def test_what_a_loss_closes_over_does_not_fit_to_its_part():
    """JAX's error says that shapes differ, and a note adds the reason."""
    closing = lambda p, x: ((errors_of(p, x) - X[:, :1]) ** 2).mean()
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        cgx.value_and_grad(closing, "data", CODEC, mesh=mesh_of(AxisType.Auto))(PARAMS, X)
    assert re.search("gets a rank's part .* must be an argument", " ".join(caught.value.__notes__))


def asked(fun=loss_fn, axis="data", plan=CODEC, params=PARAMS, batch=(X,), given=None, **options):
    f = cgx.value_and_grad(fun, axis, plan, mesh=mesh_of(AxisType.Auto), **options)
    return f(params, *batch, **given or {})


def first(exchange, ranks=RANKS):
    """Returns a first state."""
    return cgx.value_and_grad(loss_fn, "data", exchange, mesh=mesh_of(AxisType.Auto, ("data", ranks))).init(PARAMS)


def of_eight():
    asked(plan=FED, given=dict(state=first(FED, 8)))


def constrained(sharding):
    loss = lambda p, x: loss_fn(p, lax.with_sharding_constraint(x, sharding))
    return jax.jit(lambda x: asked(loss, batch=(x,))).trace(X)


NAMED = NamedSharding(mesh_of(AxisType.Auto), P("data"))


def closing_over_shards(**options):
    inner = lambda x: lambda p, y: ((x @ p["w"]) * y[:, :1]).mean()
    outer = lambda x, y: cgx.value_and_grad(inner(x), "data", CODEC, **options)(PARAMS, y)
    jax.jit(outer).trace(*place(mesh_of(AxisType.Explicit), (X, X)))


FED, UNUSED = cgx.Feedback(CODEC), cgx.Feedback(cgx.Plan(CODEC, rules=[("none", CODEC)]))
SHARDED = place(mesh_of(AxisType.Auto), jnp.ones(8))
pair = lambda p, x: (loss_fn(p, x), 1.0)
vectors = lambda p, x: (errors_of(p, x).mean(-1), jnp.ones(len(x)))
matmul = lambda p, x: jnp.dot(x, p["w"], out_sharding=P("data")).mean()
counted = lambda p, x: (loss_fn(p, x), {"n": (x > 0).sum()})
BAD_CALLS = {
    "value_and_grad": [
        (lambda: asked(plan=4), TypeError, "exchange", "4"),
        (lambda: asked(plan=UNUSED.plan), ValueError, "exchange", "none"),
        (lambda: asked(plan={"other": CODEC}), ValueError, "exchange", "{'other'"),
        (lambda: asked(plan=cgx.wan.Diloco(CODEC, 4)), TypeError, "exchange", "Diloco", "make_train_step"),
        (
            lambda: jax.jit(cgx.value_and_grad(loss_fn, "data", CODEC))(PARAMS, X),
            ValueError,
            "mesh",
            "None",
            "jax.set_mesh",
        ),
        (lambda: asked(axis="model"), ValueError, "axis_name", "'model'"),
        (lambda: asked(argnums=3), ValueError, "argnums", "3"),
        (lambda: asked(argnums="w"), TypeError, "argnums", "'w'"),
        (lambda: asked(lambda w, x: (w * x).mean(), params=2), ValueError, "argnums", "'int'", "float"),
        (lambda: asked(weighted=True), ValueError, "loss_fn"),
        (lambda: asked(vectors, weighted=True), TypeError, "loss_fn", "float32[6]"),
        (lambda: asked(counted, has_aux=True), ValueError, "loss_fn [0]['n']", "int32[]", "aux_specs"),
        (lambda: asked(pair), TypeError, "loss_fn", "a tuple", "has_aux=True weighted=True"),
        (lambda: asked(has_aux=True), ValueError, "loss_fn", "", "has_aux"),
        (lambda: asked(lambda p, x: (pair(p, x), x), has_aux=True), TypeError, "loss_fn", "a tuple", "weighted=True"),
        (lambda: asked(matmul), ValueError, "loss_fn", "one"),
        (lambda: constrained(P("data")), ValueError, "loss_fn", "one", 'ranks="vmap"'),
        (lambda: constrained(NAMED), ValueError, "loss_fn", "one", 'ranks="vmap"'),
        (closing_over_shards, ValueError, "loss_fn", "", "pass"),
        (lambda: closing_over_shards(ranks="vmap"), ValueError, "loss_fn", "", "pass"),
        (lambda: asked(ranks="pmap"), ValueError, "ranks", "'pmap'"),
        (lambda: asked(batch=(X, jnp.zeros(8))), ValueError, "batch_specs", "leaves [1]", "P()"),
        (lambda: asked(batch=(X[:22],)), ValueError, "batch_specs [1]", "float32[22, 30]"),
        (lambda: asked(batch=()), ValueError, "batch_specs", "none", "argument"),
        (lambda: asked(params=SHARDED), ValueError, "params [0]", "one sharded", "docs/fsdp.md"),
        (lambda: asked(plan=FED), ValueError, "state", "none"),
        (of_eight, ValueError, "state .own.residuals['b']", "float32[8, 40]", "jaxcgx.restore_state"),
        (lambda: asked(given=dict(state=PARAMS)), ValueError, "state", "some", "jaxcgx.Feedback(plan)"),
        (lambda: asked(batch_specs=P("model")), ValueError, "batch_specs [1]", "'model'"),
        (lambda: asked(batch_specs=P(None, None, "data")), ValueError, "batch_specs [1]", "P"),
        (lambda: asked(param_specs={"w": P()}), ValueError, "param_specs", "[{'w'"),
        (lambda: asked(param_specs=P("data")), ValueError, "param_specs [0]['b']", "'data'"),
    ],
    "Feedback": [(lambda: first(UNUSED), ValueError, "plan", "none")],
}


@pytest.mark.parametrize("row", rows(BAD_CALLS))
def test_bad_calls(row):
    refused(*row)


averaged = lambda p, x: lax.pmean(loss_fn(p, x), "data")
INSIDE = {
    "value_and_grad": [
        (dict(loss_fn=averaged), ValueError, "loss_fn", "one", "pmean"),
        (dict(batch_specs=P("data")), ValueError, "batch_specs", "", "leave"),
        (dict(ranks="vmap"), ValueError, "ranks", "'vmap'", "leave"),
        (dict(exchange=cgx.Feedback(CODEC)), ValueError, "exchange", "", "carry="),
        (dict(axis_name=("data", "model")), NameError, "axis_name", "", "jax.shard_map"),
    ]
}


@pytest.mark.parametrize("row", rows(INSIDE))
def test_bad_calls_inside_of_shard_map(row):
    def inside(options):
        given = dict(loss_fn=loss_fn, axis_name="data", exchange=CODEC) | options
        step = lambda x: cgx.value_and_grad(**given)(PARAMS, x)
        jax.eval_shape(jax.shard_map(step, mesh=mesh_of(AxisType.Auto), in_specs=P("data"), out_specs=P()), X)

    refused(*row, run=inside)


def classes_fn(params, x, y, scale):
    """A loss with an argument that is not an example."""
    return (errors_of(params, x).mean(-1) * scale[y]).mean()


def test_an_argument_that_is_no_example():
    """It is passed next to a batch with a known sharding, and by keyword."""
    mesh, y, scale = mesh_of(AxisType.Auto), jnp.arange(24) % 8, jnp.arange(1.0, 9.0)
    words = says("value_and_grad", "batch_specs", got="leaves", remedy="P() keyword")
    expected = jax.value_and_grad(classes_fn)(PARAMS, X, y, scale)
    batch = place(mesh, (X, y))
    with raises(ValueError, words):
        cgx.value_and_grad(classes_fn, "data", cgx.Raw())(PARAMS, *batch, scale)
    specs = P("data"), P("data")
    with raises(ValueError, says("value_and_grad", "batch_specs", remedy="keyword")):
        cgx.value_and_grad(classes_fn, "data", cgx.Raw(), batch_specs=specs)(PARAMS, *batch, scale=scale)
    with raises(ValueError, says("value_and_grad", "batch_specs")):
        f = cgx.value_and_grad(
            classes_fn, "data", cgx.Raw(), batch_specs=(P("data"), {"y": P("data"), "scale": P(), "z": P()})
        )
        f(PARAMS, batch[0], y=batch[1], scale=scale)
    f = cgx.value_and_grad(classes_fn, "data", cgx.Raw(), batch_specs=(*specs, {"scale": P()}), mesh=mesh)
    close(jax.jit(f)(PARAMS, X, y, scale=scale), expected)
    f = cgx.value_and_grad(loss_fn, "data", cgx.Raw(), batch_specs={"x": P("data")}, mesh=mesh)
    close(f(PARAMS, x=X), jax.value_and_grad(loss_fn)(PARAMS, X))


@MAPPED
def test_one_example_of_a_rank_is_not_broadcast(ranks):
    mesh, x, y = mesh_of(AxisType.Auto), X[:RANKS], normal((RANKS, 40), 5)
    fun = lambda params, x, y: ((x @ params["w"] - y) ** 2).mean()
    options = dict(mesh=mesh, ranks=ranks)
    closing = lambda p, x, y: cgx.value_and_grad(lambda p, x: fun(p, x, y), "data", cgx.Raw(), **options)(p, x)
    words = says("value_and_grad", "loss_fn", got="one that closes over float32[4, 40]")
    for call in (closing, jax.jit(closing)):
        with raises(ValueError, words):
            call(PARAMS, x, y)
    with raises(ValueError, says("value_and_grad", "batch_specs", at="leaf [2]", remedy="shard")):
        cgx.value_and_grad(fun, "data", cgx.Raw())(PARAMS, place(mesh, x), place(mesh, y, P()))
    bank = lambda params, x, y: (x @ params["w"] @ y.T).mean()
    f = cgx.value_and_grad(bank, "data", cgx.Raw(), batch_specs=(P("data"), P()))
    close(f(PARAMS, place(mesh, x), place(mesh, y, P())), jax.value_and_grad(bank)(PARAMS, x, y))


def test_labels_that_every_rank_has_whole_are_no_part_of_a_split_batch():
    """The labels would be indexed as those of other ranks' examples. JAX would clamp these indices."""
    mesh, y = mesh_of(AxisType.Auto), jnp.arange(len(X)) % 8
    fun = lambda params, x, y: jax.nn.log_softmax(x @ params["w"])[jnp.arange(len(y)), y].mean()
    with raises(ValueError, says("value_and_grad", "batch_specs", at="leaf [2]", remedy="shard")):
        cgx.value_and_grad(fun, "data", cgx.Raw())(PARAMS, place(mesh, X), place(mesh, y, P()))
    f = cgx.value_and_grad(fun, "data", cgx.Raw())
    close(f(PARAMS, place(mesh, X), place(mesh, y)), jax.value_and_grad(fun)(PARAMS, X, y))


@MAPPED
@pytest.mark.parametrize("specs", [None, (P("data"), P())], ids=["guessed", "given"])
def test_kinds_of_keys(specs, ranks):
    """Each rank draws its own noise, with typed and with raw keys, one call after the other."""
    noise = lambda params, x, key: (jnp.sum(params * x), jax.random.normal(key, len(x)))
    options = dict(has_aux=True, batch_specs=specs, ranks=ranks)
    f = cgx.value_and_grad(noise, "data", cgx.Raw(), **options, mesh=mesh_of(AxisType.Auto))
    for key in jax.random.PRNGKey(3), jax.random.key(3), jax.random.PRNGKey(4):
        (_, drawn), _ = f(jnp.ones(30), X, key)
        for rank, part in enumerate(jnp.split(drawn, RANKS)):
            np.testing.assert_array_equal(part, jax.random.normal(jax.random.fold_in(key, rank), len(X) // RANKS))


@KINDS
@MAPPED
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_loss_that_returns_the_next_key(kind, ranks, make):
    """The key is that of plain JAX, though each rank draws noise of its own. XLA computes the rest of the loss once."""

    def threaded(params, x, seeds):
        key, noise = jax.random.split(seeds["dropout"])
        drawn = jax.random.normal(noise, len(x))
        center = lax.pmean(x.mean(), "data")
        return (errors_of(params, x).mean(-1) + drawn * center).mean(), {"seeds": {"dropout": key}, "drawn": drawn}

    seeds, mesh, floats = {"dropout": make(3)}, mesh_of(kind), []
    said = None if make is jax.random.key else {"seeds": "key", "drawn": None}
    for fun, specs in ((threaded, said), (lambda *args: (threaded(*args)[0], None), None)):
        f = cgx.value_and_grad(fun, "data", cgx.Raw(), has_aux=True, aux_specs=specs, ranks=ranks)
        step = jax.jit(lambda params, x, f=f: f(params, x, seeds))
        with jax.set_mesh(mesh):
            found = cgx.explain(step, PARAMS, place(mesh, X), show=False).collectives
        floats.append(sum(c.bytes for c in found if c.dtype == "float32"))
    assert floats[0] == floats[1] > 0
    f = cgx.value_and_grad(threaded, "data", cgx.Raw(), has_aux=True, aux_specs=said, ranks=ranks)
    (_, aux), _ = called("jit", mesh, lambda params, x: f(params, x, seeds), PARAMS, X)
    plain = jax.random.split(seeds["dropout"])[0]
    words = lambda key: jax.random.key_data(key) if make is jax.random.key else key
    assert_same_trees(words(aux["seeds"]["dropout"]), words(plain))
    drawn = [jax.random.normal(jax.random.split(jax.random.fold_in(seeds["dropout"], i))[1], 6) for i in range(RANKS)]
    np.testing.assert_array_equal(aux["drawn"], np.concatenate(drawn))


def test_a_raw_key_is_declared():
    """It may be two counts, so aux_specs says what it is."""
    loss = lambda params, x: (loss_fn(params, x), {"key": jax.random.PRNGKey(3)})
    options = dict(has_aux=True, mesh=mesh_of(AxisType.Auto))
    with raises(
        ValueError, says("value_and_grad", "loss_fn", at="leaf [0]['key']", got="uint32[2]", remedy='"key" aux_specs')
    ):
        cgx.value_and_grad(loss, "data", CODEC, **options)(PARAMS, X)
    f = cgx.value_and_grad(loss, "data", CODEC, aux_specs={"key": "key"}, **options)
    assert_same_trees(f(PARAMS, X)[0][1], {"key": jax.random.PRNGKey(3)})


def test_two_words_or_a_batch_of_two():
    mesh, words = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), jnp.uint32([1, 3])
    fun = lambda params, x, ids: (x @ params["w"] * params["b"][ids][:, None] + params["w"][ids][:, :1]).mean()
    with raises(ValueError, says("value_and_grad", "batch_specs", at="leaf [2]", remedy="jax.random.key P()")):
        cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh)(PARAMS, X[:2], words)
    expected = jax.value_and_grad(fun)(PARAMS, X[:2], words)
    f = cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh)
    close(f(PARAMS, X[:2], place(mesh, words)), expected)


@MAPPED
def test_axes_in_another_order(ranks):
    mesh = mesh_of(AxisType.Auto, ("a", 2), ("b", 2))
    x = place(mesh, X, P(("b", "a")))
    with raises(ValueError, says("value_and_grad", "batch_specs", at="leaf [1]", remedy="name the axes")):
        cgx.value_and_grad(loss_fn, ("a", "b"), cgx.Raw())(PARAMS, x)
    f = cgx.value_and_grad(loss_fn, ("b", "a"), cgx.Raw(), ranks=ranks)
    close(f(PARAMS, x), jax.value_and_grad(loss_fn)(PARAMS, X))

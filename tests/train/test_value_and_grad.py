"""Tests value_and_grad and grad: the gradients of jit programs over sharded batches, and what they refuse."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says, table
from gradients import CODEC, KINDS, MAPPED, MASK, RANKS, called, close, errors_of, fed, loss_fn, mesh_of, place
from helpers import assert_same_trees, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import PARAMS, X

import jaxcgx as cgx


def weighted_fn(params, x, mask, learned=True):
    """A weighted mean. The weights may depend on the parameters."""
    weights = mask * jax.nn.sigmoid(x @ params["w"][:, 0]) if learned else mask
    return (errors_of(params, x).mean(-1) * weights).sum(), weights.sum()


def own_fn(params, x, mask=None):
    """A rank's loss. The mean over the ranks is the weighted mean of the whole batch."""
    if mask is None:
        return loss_fn(params, x)
    total, weight = weighted_fn(params, x, mask, learned=False)
    return total / lax.pmean(weight, "data")


def every_way(place, params, *batch):
    """Returns the gradients of every way to write a step in that place: of `fun`, and of `own_fn`."""
    weighted = len(batch) == 2
    fun = weighted_fn if weighted else loss_fn
    asked = cgx.grad(fun, "data", cgx.Raw(), weighted=weighted)
    if place in ("Auto", "Explicit"):
        mapped = cgx.grad(fun, "data", cgx.Raw(), weighted=weighted, ranks="vmap")
        return [asked(params, *batch), mapped(params, *batch)], []
    mean = lambda grads: cgx.compressed_pmean(grads, "data", cgx.Raw())
    synchronised = lambda params, *batch: own_fn(cgx.sync_in_backward(params, "data", cgx.Raw()), *batch)
    own = [mean(cgx.grad(own_fn, "data", None)(params, *batch)), jax.grad(synchronised)(params, *batch)]
    if place != "check_vma":  # under check_vma JAX has summed these already, and compressed_pmean raises an error
        own.append(mean(jax.grad(own_fn)(params, *batch)))
    return [asked(params, *batch), lax.pmean(asked(params, *batch), "data")], own


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "place", [pytest.param("Auto", marks=pytest.mark.short), "Explicit", "check_vma", "no check_vma", "pmap"]
)
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
    for ways, learned in zip(found, (True, False), strict=True):
        plain = lambda *args: jnp.divide(*weighted_fn(*args, learned=learned)) if weighted else loss_fn(*args)
        for grads in ways:
            close(grads, jax.grad(plain)(PARAMS, *batch))


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
        whole = cgx.value_and_grad(normalised, "data", cgx.Raw(), **declared)(params, jnp.int32(3), x)
        return averaged, summed, whole

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


@KINDS
@pytest.mark.parametrize("how", ["jit", "arrays"])
@pytest.mark.parametrize("exchange", [CODEC, cgx.DGC(0.1, clip_norm=1.0)], ids=["feedback", "momentum"])
def test_an_exchange_of_all_ranks(kind, how, exchange):
    """It is the exchange of a step by hand, inside of shard_map."""
    mesh = mesh_of(kind)
    transformation, state = fed(exchange, mesh)
    assert state.own.residuals["w"].sharding.shard_shape((RANKS, 30, 40)) == (1, 30, 40)

    def step(params, x, state):
        return transformation.update(cgx.grad(loss_fn, "data", None)(params, x), state, params)

    expected, specs, params = state, cgx.state_specs(state, "data"), place(mesh, PARAMS, P())
    inside = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), specs), out_specs=(P(), specs)))
    for _ in range(2):
        grads, state = called(how, mesh, lambda p, x, s=state: step(p, x, s), params, X)
        mean, expected = inside(params, place(mesh, X), expected)
        assert_same_trees((grads, state), (mean, expected))
    assert state.shared.count == 2 and any(np.any(r) for r in jax.tree.leaves(state.own))


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
    value, grads = cgx.value_and_grad(fun, "data", cgx.Raw(), mesh=mesh_of(AxisType.Auto), ranks=ranks)(params, X)
    expected = jax.value_and_grad(lambda p: fun({**params, **p}, X))(floats)
    close((value, {k: grads[k] for k in floats}), expected)
    assert [k for k in params if grads[k] is None] == ["f", "steps"]


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


def test_stochastic_rounding_takes_a_key():
    mesh, codec = mesh_of(AxisType.Auto), cgx.MaxMin(2, 64, rounding="stochastic")
    f = cgx.value_and_grad(loss_fn, "data", codec, mesh=mesh)
    one, same, other = (f(PARAMS, X, codec_key=jax.random.key(i))[1] for i in (0, 0, 1))
    assert_same_trees(one, same)
    assert np.any(one["w"] != other["w"])
    with raises(ValueError, says("value_and_grad", "codec_key", got="None", remedy="codec_key=")):
        f(PARAMS, X)


def test_grad_has_the_signature_of_value_and_grad():
    assert inspect.signature(cgx.grad) == inspect.signature(cgx.value_and_grad)


def test_explain_counts_what_is_saved():
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        step = jax.jit(cgx.value_and_grad(loss_fn, "data", cgx.Plan(CODEC, min_size=100)))
        found = cgx.explain(step, PARAMS, place(mesh_of(AxisType.Auto), X), show=False)
    assert found.ratio > 2 and any(c.codec for c in found.collectives)
    assert {leaf.path for leaf in found.raw} == {"['b']"}  # the path in the argument, which a plan's rules see


def test_an_optimizer_of_modules():
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    model = nnx.Linear(30, 40, rngs=nnx.Rngs(0))
    before, loss = nnx.clone(model), lambda model, x: model(x).mean()
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        tx = optax.chain(cgx.compress_gradients("data", cgx.Raw()), optax.sgd(0.5))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.update(model, cgx.grad(loss, "data", None)(model, X))
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(before), nnx.grad(loss)(before, X))
    close(nnx.state(model), expected)


@KINDS
@pytest.mark.parametrize("within", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_step_with_feedback_is_compiled_once(kind, within):
    """If its parameters are placed as the page says. `init` finds the mesh in context."""
    tx = optax.chain(cgx.compress_gradients("data", cgx.Feedback(cgx.MaxMin(8))), optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(params, state, x):
        updates, state = tx.update(cgx.grad(loss_fn, "data", None)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh_of(kind)):
        spell = lambda x: P(*[None] * x.ndim) if kind == AxisType.Explicit else P()
        params = jax.tree.map(lambda x: jax.device_put(x, spell(x)), PARAMS)
        state, x = within(tx.init)(params), jax.device_put(X, P("data"))
        for _ in range(3):
            params, state = step(params, state, x)
    assert step._cache_size() == 1


@KINDS
def test_states_of_rows(kind):
    """Leaves without gradient have no state, and rows and states may come without shardings."""
    mesh, grads = mesh_of(kind), {"w": normal((RANKS, 6, 2), 1), "n": None}
    params = {"w": normal((6, 2), 2), "n": jnp.int32(3)}
    with jax.set_mesh(mesh):
        for exchange in cgx.Momentum(cgx.MaxMin(8)), cgx.Feedback(cgx.MaxMin(8), telemetry=True):
            made = cgx.compress_gradients("data", exchange)
            mean, state = made.update(grads, made.init(params), params)
            again, _ = jax.jit(made.update)(grads, jax.tree.map(np.asarray, state), params)
            np.testing.assert_allclose(mean["w"], np.mean(grads["w"], 0), atol=0.05)
            assert again["w"].shape == (6, 2)


def test_gradients_of_single_examples():
    """Under vmap, whose dimension may be that of the examples, an error's note says what to write."""
    f = jax.vmap(cgx.grad(loss_fn, "data", CODEC, mesh=mesh_of(AxisType.Auto)), (None, 0))
    with raises(ValueError, says("value_and_grad", "batch_specs", got="None", remedy="batch_specs=")) as caught:
        f(PARAMS, jnp.ones((24, 4)) @ jnp.ones((4, 32)))
    assert re.search(r"jax.vmap\(jax.grad\(loss_fn\).*compressed_pmean", " ".join(caught.value.__notes__))


def asked(fun=loss_fn, axis="data", plan=CODEC, params=PARAMS, batch=(X,), given=None, **options):
    f = cgx.value_and_grad(fun, axis, plan, mesh=mesh_of(AxisType.Auto), **options)
    return f(params, *batch, **given or {})


UNUSED = cgx.Plan(CODEC, rules=[("none", CODEC)])
(EXCHANGE, STATE), ROWS = fed(CODEC), jax.tree.map(lambda x: jnp.stack([x] * RANKS), PARAMS)
constrained = lambda sharding: asked(lambda p, x: loss_fn(p, lax.with_sharding_constraint(x, sharding)))
NAMED = NamedSharding(mesh_of(AxisType.Auto), P("data"))


def closing_over_shards(**options):
    inner = lambda x: lambda p, y: ((x @ p["w"]) * y[:, :1]).mean()
    outer = lambda x, y: cgx.value_and_grad(inner(x), "data", CODEC, **options)(PARAMS, y)
    jax.jit(outer).trace(*place(mesh_of(AxisType.Explicit), (X, X)))


def two_kinds_of_axes():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    specs = {"w": P(None, "model"), "b": P("model")}
    cgx.value_and_grad(loss_fn, "data", CODEC, mesh=mesh, param_specs=specs)(PARAMS, X)


SHARDED, NO_MESH = place(mesh_of(AxisType.Auto), jnp.ones(8)), cgx.value_and_grad(loss_fn, "data", CODEC)
pair = lambda p, x: (loss_fn(p, x), 1.0)
weights = lambda p, x: (loss_fn(p, x), jnp.ones(len(x)))
matmul = lambda p, x: jnp.dot(x, p["w"], out_sharding=P("data")).mean()
counted = lambda p, x: (loss_fn(p, x), {"n": (x > 0).sum()})
drawing = lambda p, x: (loss_fn(p, x), {"key": jax.random.PRNGKey(3)})
BAD_CALLS = {
    "value_and_grad": [
        (lambda: asked(plan=UNUSED), ValueError, "plan", "none"),
        (lambda: asked(plan={"other": CODEC}), ValueError, "plan", "{'other'"),
        (lambda: asked(plan=cgx.Feedback(CODEC)), TypeError, "plan", "Feedback", "jaxcgx.compress_gradients('data'"),
        (lambda: asked(plan=None, given=dict(codec_key=jax.random.key(0))), ValueError, "codec_key", "one", "seed="),
        (lambda: jax.jit(NO_MESH)(PARAMS, X), ValueError, "mesh", "None", "jax.set_mesh"),
        (lambda: asked(axis="model"), ValueError, "axis_name", "'model'"),
        (lambda: asked(argnums=3), ValueError, "argnums", "3"),
        (lambda: asked(argnums="w"), TypeError, "argnums", "'w'"),
        (lambda: asked(lambda w, x: (w * x).mean(), params=2), ValueError, "argnums", "'int'", "float"),
        (lambda: asked(weighted=True), ValueError, "loss_fn"),
        (lambda: asked(weights, weighted=True), TypeError, "loss_fn", "float32[6]"),
        (lambda: asked(counted, has_aux=True), ValueError, "loss_fn [0]['n']", "int32[]", "aux_specs"),
        (lambda: asked(drawing, has_aux=True), ValueError, "loss_fn [0]['key']", "uint32[2]", '"key" aux_specs'),
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
        (lambda: asked(batch_specs=P("model")), ValueError, "batch_specs [1]", "'model'"),
        (lambda: asked(batch_specs=P(None, None, "data")), ValueError, "batch_specs [1]", "P"),
        (lambda: asked(param_specs={"w": P()}), ValueError, "param_specs", "[{'w'"),
        (lambda: asked(param_specs=P("data")), ValueError, "param_specs [0]['b']", "'data'"),
        (two_kinds_of_axes, ValueError, "mesh ['b']", "'model'"),
    ],
    "Feedback": [(lambda: fed(cgx.Feedback(UNUSED)), ValueError, "plan", "none")],
    "compress_gradients": [
        (lambda: EXCHANGE.update(PARAMS, STATE, PARAMS), ValueError, "updates", "{'b'", "jaxcgx.value_and_grad"),
        (lambda: EXCHANGE.update(ROWS, STATE.own, PARAMS), TypeError, "state", ""),
    ],
}
test_bad_calls = table(BAD_CALLS)


def call_in_shard_map(options):
    given = dict(loss_fn=loss_fn, axis_name="data", plan=CODEC) | options
    step = lambda x: cgx.value_and_grad(**given)(PARAMS, x)
    jax.eval_shape(jax.shard_map(step, mesh=mesh_of(AxisType.Auto), in_specs=P("data"), out_specs=P()), X)


averaged = lambda p, x: lax.pmean(loss_fn(p, x), "data")
INSIDE = {
    "value_and_grad": [
        (dict(loss_fn=averaged), ValueError, "loss_fn", "one", "pmean"),
        (dict(batch_specs=P("data")), ValueError, "batch_specs", "", "leave"),
        (dict(ranks="vmap"), ValueError, "ranks", "'vmap'", "leave"),
        (dict(axis_name=("data", "model")), NameError, "axis_name", "", "jax.shard_map"),
    ]
}
test_bad_calls_inside_of_shard_map = table(INSIDE, call_in_shard_map)

"""Tests the errors of value_and_grad."""

import re

import jax
import jax.numpy as jnp
import pytest
from errors import raises, refused, rows, says, table
from gradients import CODEC, RANKS, errors_of, fed, loss_fn, mesh_of, place
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import PARAMS, X

import jaxcgx as cgx


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


def constrained(sharding):
    return asked(lambda p, x: loss_fn(p, lax.with_sharding_constraint(x, sharding)))


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
vectors = lambda p, x: (errors_of(p, x).mean(-1), jnp.ones(len(x)))
matmul = lambda p, x: jnp.dot(x, p["w"], out_sharding=P("data")).mean()
counted = lambda p, x: (loss_fn(p, x), {"n": (x > 0).sum()})
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


averaged = lambda p, x: lax.pmean(loss_fn(p, x), "data")
INSIDE = {
    "value_and_grad": [
        (dict(loss_fn=averaged), ValueError, "loss_fn", "one", "pmean"),
        (dict(batch_specs=P("data")), ValueError, "batch_specs", "", "leave"),
        (dict(ranks="vmap"), ValueError, "ranks", "'vmap'", "leave"),
        (dict(axis_name=("data", "model")), NameError, "axis_name", "", "jax.shard_map"),
    ]
}


@pytest.mark.parametrize("row", rows(INSIDE))
def test_bad_calls_inside_of_shard_map(row):
    def inside(options):
        given = dict(loss_fn=loss_fn, axis_name="data", plan=CODEC) | options
        step = lambda x: cgx.value_and_grad(**given)(PARAMS, x)
        jax.eval_shape(jax.shard_map(step, mesh=mesh_of(AxisType.Auto), in_specs=P("data"), out_specs=P()), X)

    refused(*row, run=inside)

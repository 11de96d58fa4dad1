"""Tests platforms without kernels: operations are lowered to jnp, which gives the bytes of the kernels.

The programs are lowered for TPUs and for AMD's GPUs. The lowered operations run on the CPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import KEY, assert_same_trees, normal, planned
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import Layout

CODEC = cgx.MaxMin(4, 64, "stochastic")
LAYOUT = Layout(CODEC, ((300,),), (jnp.float32,), chunks=1)
X = normal(300, 1)


def operations(x):
    payload = cgx.encode(x, CODEC, jax.random.wrap_key_data(KEY))
    payloads = jnp.concatenate([ops.encode(LAYOUT, [x * n], KEY) for n in range(1, 4)])
    return {
        "encode": payload,
        "decode": cgx.decode(payload, CODEC, x.shape, x.dtype),
        "roundtrip": cgx.roundtrip(x, CODEC, jax.random.wrap_key_data(KEY)),
        "reduce": ops.reduce(LAYOUT, payloads),
        "sparse": cgx.encode(x, cgx.TopK(0.1)),
    }


def lowered(function, *args, platform):
    anywhere = [export.DisabledSafetyCheck.platform()]
    return export.export(jax.jit(function), platforms=[platform], disabled_checks=anywhere)(*args)


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_operations(platform):
    found = lowered(operations, X, platform=platform)
    assert "custom_call @jaxcgx" not in found.mlir_module()
    if platform == "tpu":
        assert_same_trees(jax.jit(found.call)(X), jax.jit(operations)(X))


def test_a_training_step():
    """The model rounds nothing, because its sums have whole numbers. jnp's code of these codecs compiles soon."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    loss_fn = lambda params, batch: (params["w"] * batch).sum() / 64
    train = cgx.make_train_step(loss_fn, optax.sgd(0.5), mesh, cgx.Cast())
    total = lambda x: cgx.compressed_psum(x, "data", planned(cgx.Cast("float16"), schedule="two_shot"))

    def step(state, batch):
        summed = jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P())(batch)
        return train.step(state, batch)[0], summed

    batch = jax.device_put(np.arange(2200, dtype=np.float32).reshape(2, 1100) % 37, NamedSharding(mesh, P("data")))
    args = train.init({"w": jnp.zeros(1100)}), batch
    found = lowered(step, *args, platform="tpu")
    text = found.mlir_module()
    assert "custom_call @jaxcgx" not in text and "all_to_all" in text and "ui8" in text
    assert_same_trees(jax.jit(found.call)(*args), jax.jit(step)(*args))


def test_several_platforms_at_once():
    known = [export.DisabledSafetyCheck.custom_call("jaxcgx_encode")]
    encode = jax.jit(lambda x: cgx.encode(x, cgx.MaxMin(4, 64)))
    found = export.export(encode, platforms=["cpu", "tpu"], disabled_checks=known)(X)
    assert "custom_call @jaxcgx_encode" in found.mlir_module()
    np.testing.assert_array_equal(jax.jit(found.call)(X), encode(X))


def test_programs_are_saved_and_loaded():
    """They run with the bytes of the program that was saved. All kernels are among the checks to disable."""
    kernels = {name for name in registration.module().handlers()["cpu"] if not re.search("exchange|tcp", name)}
    assert {check.is_custom_call() for check in cgx.EXPORT_CHECKS} == kernels
    program = jax.jit(lambda x: list(operations(x).values()))
    saved = export.export(program, disabled_checks=cgx.EXPORT_CHECKS)(X).serialize()
    assert_same_trees(jax.jit(export.deserialize(saved).call)(X), program(X))

"""Tests that exchanges in conditionals wait for the program's other exchanges, or these for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from order import unordered

import jaxcgx as cgx
from jaxcgx.wan import Differential, differential

AXES = "dc", "local"
PLAN, LATER = [cgx.Plan({"dc": cgx.MaxMin(bits), "local": cgx.Raw()}, min_size=0) for bits in (4, 8)]
BLOCKS = dict(block_bytes=256)
STEPS = {
    "DGT, defer": dict(compress=Differential(**BLOCKS)),
    "DGT, quantize": dict(compress=Differential(rest="quantize", **BLOCKS)),
    "DGT, drop": dict(compress=Differential(rest="drop", **BLOCKS)),
    "DGT, adaptive": dict(compress=Differential(adaptive=0.2, **BLOCKS)),
    "DGT, schedule": dict(compress=Differential(**BLOCKS), plan={0: PLAN, 2: LATER}),
    "schedule": dict(plan={0: PLAN, 2: LATER}),
    "mixed sync, schedule": dict(compress=cgx.wan.mixed_sync, plan={0: PLAN, 2: LATER}),
    "DGC, warm-up": dict(compress=cgx.dgc, warmup_epochs=2, steps_per_epoch=1),
}


def loss_fn(params, count, x):
    """Ranks share a loss, an output and the sum of a model's state."""
    loss = jnp.mean((x @ params["w"] @ params["v"] - 1) ** 2)
    return loss, (count + jnp.abs(x).max(), jnp.sum(x))


@pytest.mark.parametrize("name", STEPS)
def test_conditionals_wait_for_other_exchanges(name, monkeypatch):
    monkeypatch.setattr(differential, "LEVELS", 2)
    options = STEPS[name] if "warmup_epochs" in STEPS[name] else dict(plan=PLAN) | STEPS[name]
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    train = cgx.make_train_step(
        loss_fn, optax.sgd(0.1), mesh, data_axis=AXES, has_aux=True, model_state="mean", **options
    )
    state = train.init({"w": jnp.ones((40, 30)), "v": jnp.ones((30, 20))}, jnp.zeros(()))
    batch = np.ones((8, 40), np.float32)
    program = train.step.lower(*state, batch).compile().as_text()
    assert "conditional(" in program and not unordered(program)

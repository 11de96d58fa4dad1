"""Tests that exchanges in conditionals wait for the program's other exchanges, or these for them."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_with
from order import unordered

import jaxcgx as cgx
from jaxcgx.wan.geomx import differential
from jaxcgx.wan.geomx.differential import Differential

AXES, MESH = ("dc", "local"), mesh_with(dc=2, local=2)
PLAN, LATER = [cgx.Plan({"dc": cgx.MaxMin(bits), "local": cgx.Raw()}, min_size=0) for bits in (4, 8)]
BLOCKS = dict(block_bytes=256)
STEPS = {
    "DGT, defer": Differential(PLAN, **BLOCKS),
    "DGT, quantize": Differential(PLAN, rest="quantize", **BLOCKS),
    "DGT, drop": Differential(PLAN, rest="drop", **BLOCKS),
    "DGT, adaptive": Differential(PLAN, adaptive=0.2, **BLOCKS),
    "DGT, schedule": Differential({0: PLAN, 2: LATER}, **BLOCKS),
    "schedule": cgx.Feedback({0: PLAN, 2: LATER}),
    "mixed sync, schedule": cgx.wan.MixedSync({0: PLAN, 2: LATER}),
}
INSIDE = cgx.Plan(cgx.MaxMin(8), min_size=0)
OUTER = dict(seed=1, fragments=2)
CENTERS = {
    "DiLoCo": cgx.wan.Diloco(cgx.MaxMin(4), 4, inside=INSIDE, **OUTER),
    "DiLoCo, streaming": cgx.wan.Diloco(cgx.MaxMin(4), 4, inside=INSIDE, overlap=1, alpha=0.5, **OUTER),
    "DiLoCo, eager": cgx.wan.Diloco(cgx.MaxMin(4), 4, inside=INSIDE, eager=True, **OUTER),
    "HFA": cgx.wan.HFA(cgx.MaxMin(4), 2, 2, **OUTER),
}


@pytest.mark.parametrize("name", [*STEPS, *CENTERS])
def test_conditionals_wait_for_other_exchanges(name, monkeypatch):
    """Ranks share a loss, the sum of a model's state and, except with centers, an output."""
    monkeypatch.setattr(differential, "LEVELS", 2)
    has_aux = name in STEPS

    def loss_fn(params, count, x):
        loss, count = jnp.mean((x @ params["w"] @ params["v"] - 1) ** 2), count + jnp.abs(x).max()
        return loss, (count, jnp.sum(x)) if has_aux else count

    options = dict(sharding=cgx.Sharding(AXES), model_state="mean", has_aux=has_aux)
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), MESH, (STEPS | CENTERS)[name], **options)
    state = train.init({"w": jnp.ones((40, 30)), "v": jnp.ones((30, 20))}, jnp.zeros(()))
    program = train.step.lower(state, np.ones((8, 40), np.float32)).compile().as_text()
    assert "conditional(" in program and not unordered(program)

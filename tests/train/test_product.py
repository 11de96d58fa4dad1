"""Compares exchanges of gradients with a model in NumPy: kinds of leaves x options x ways to travel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exchanging import exchange_of, fields_of
from helpers import mesh_with
from jax.sharding import PartitionSpec as P
from model import Model, State

import jaxcgx as cgx

AXES = ("node", "local")


# The only part that calls jaxcgx.
def steps_of(model):
    """Returns a function from the gradients of a step to (means, fields of the state)."""
    names = AXES[-len(model.ranks) :]
    exchange = exchange_of(model, {start: _plan(model, plan, names) for start, plan in model.plans.items()})
    mesh, params = mesh_with(**dict(zip(names, model.ranks))), jax.tree.map(jnp.asarray, model.params)
    if model.cuts:  # ZeRO-1: the optimizer keeps the slices of the mean that it gets
        keep = optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params),
            lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
        )
        specs = {k: P(*[None] * model.cuts[k], names) if k in model.cuts else P() for k in params}
        loss = lambda params, batch: sum(jnp.vdot(params[k], g[0]) for k, g in batch.items())
        sharding = cgx.Sharding(names, optimizer=specs)
        train = cgx.make_train_step(loss, keep, mesh, exchange, sharding=sharding, donate=False)
        state = train.init(params)

        def step(grads):
            nonlocal state
            state, _ = train.step(state, grads)
            return state.opt_state, fields_of(state)
    else:
        transformation = cgx.compress_gradients(names, exchange, axis_size=model.size)
        state = transformation.init(params)
        specs = cgx.state_specs(state, names)
        # Where a step leaves it, so that it is compiled once.
        state = jax.device_put(state, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))

        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(names), specs), out_specs=(P(), specs))
        def update(grads, state):
            return transformation.update(jax.tree.map(lambda g: g[0], grads), state, params)

        def step(grads):
            nonlocal state
            means, state = update(grads, state)
            return means, fields_of(state)

    return step


def _plan(model, codecs, names):
    rules = [(f"^{k}$", dict(zip(names, codec)) if isinstance(codec, tuple) else codec) for k, codec in codecs.items()]
    travel = dict(schedule=model.schedule, own=model.own, leader=model.leader)
    return cgx.Plan(cgx.Raw(), rules, min_size=0, skip_1d=False, **travel)


SHAPES = {
    "raw": (130, 128),  # too large to share a collective
    "joined": (5,),
    "joined too": (3, 2),
    "dense": (16, 12),
    "dense too": (8, 24),
    "sparse": (44, 32),  # the shares of three ranks are padded
    "low rank": (24, 20),
    "low rank too": (4, 6, 20),  # a matrix of the same shape
}
PARAMS = {k: np.random.RandomState(i).standard_normal(n).astype(np.float32) for i, (k, n) in enumerate(SHAPES.items())}
DENSE = cgx.MaxMin(3, 8)
PLAN = {"dense": DENSE, "dense too": DENSE, "sparse": cgx.TopK(0.05), "low rank": cgx.PowerSGD(2)}
PLAN |= {"low rank too": PLAN["low rank"]}
# Leaves with residuals travel raw for a while, and change their codecs.
PLANS = {
    0: PLAN,
    3: {"sparse": cgx.TopK(0.1), "low rank": cgx.PowerSGD(1)},
    6: {"dense": cgx.Sign(8), "low rank": DENSE, "dense too": DENSE},
}
MOVING = dict(momentum=0.5, momentum_masking=True)
MODES = {
    "feedback": dict(plans={0: PLAN}),
    "overflow": dict(plans={0: PLAN}, schedule="one_shot", nesterov=True, weight_decay=0.25, **MOVING),
    "skip": dict(plans={0: PLAN}, own="encoded", skip_nonfinite=True, reset_every=4, **MOVING),
    "schedule": dict(plans=PLANS, beta=0.25, **MOVING),
}
LOSSY = cgx.Micro("mxfp4")  # its scales are powers of two, so its sums are exact
WAYS = {
    "flat": dict(ranks=(4,)),
    "shards": dict(ranks=(4,), cuts={"raw": 1, "dense": 1, "dense too": 0, "sparse": 0}),
    "hierarchy": dict(ranks=(2, 3), inner={"dense": LOSSY, "dense too": LOSSY}),
    "leader": dict(ranks=(2, 3), inner={"sparse": LOSSY, "low rank": LOSSY}, leader=True),
}
# Every kind of leaf overflows once on one rank: {step: (leaf, value)}.
OVERFLOWS = {
    1: ("raw", np.inf), 2: ("joined", np.nan), 3: ("dense", -np.inf), 4: ("sparse", np.inf), 5: ("low rank", np.nan),
    6: ("dense too", np.inf), 7: ("dense", np.inf),
}  # fmt: skip


def gradients(ranks, step, overflows):
    random = np.random.RandomState(100 + step)
    grads = {k: random.standard_normal((ranks, *shape)).astype(np.float32) for k, shape in SHAPES.items()}
    if overflows and step in OVERFLOWS:
        name, value = OVERFLOWS[step]
        grads[name][step % ranks].flat[3] = value
    return grads


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
@jax.numpy_rank_promotion("raise")
def test_exchange_is_the_models(mode, way):
    options = dict(MODES[mode], **WAYS[way])
    inner = options.pop("inner", {})
    if way == "shards":  # slices have no momentum, and no low rank
        for name in ("momentum", "momentum_masking", "nesterov", "weight_decay"):
            options.pop(name, None)

    def codec_of(name, codec):
        if way == "shards":
            return cgx.Raw() if codec.low_rank else codec
        return codec if way == "flat" or codec.raw else (codec, inner.get(name, cgx.Raw()))

    options["plans"] = {
        start: {name: codec_of(name, plan.get(name, cgx.Raw())) for name in SHAPES}
        for start, plan in options["plans"].items()
    }
    model = Model(params=PARAMS, **options)
    step = steps_of(model)
    for number in range(3 if mode == "feedback" else 9):
        grads = gradients(model.size, number, mode != "feedback")
        (means, state), expected = step(grads), model.step(grads)
        kept = {"means": means} | {field: getattr(state, field) or {} for field in State._fields}
        for field, wanted in {"means": expected, **model.state._asdict()}.items():
            assert {k for k, x in kept[field].items() if x is not None} == set(wanted), field
            for k, x in wanted.items():
                # MaxMin rounds the width of its levels to few bits: an input's last bit may matter.
                error = 1e-3 if k in PLAN else 1e-5
                words = f"step {number}: {field} of {k}"
                np.testing.assert_allclose(kept[field][k], x, rtol=error, atol=error, err_msg=words)
        # The model goes on with what is kept, so differences of rounding don't add up.
        model.state = State(
            *({k: np.array(kept[field][k]) for k in getattr(model.state, field)} for field in State._fields)
        )

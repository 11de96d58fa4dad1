"""Tests that options out of range or of another type are errors. They name the class, the option and the value."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says, table
from ranks import mesh
from training import CODEC, mesh_of

import jaxcgx as cgx
from jaxcgx import wan
from jaxcgx.plan.overlay import Overlay, Tree
from jaxcgx.transports.xla import Axes

RAW = cgx.Raw()
MATRICES = dict(a=np.ones((2, 3), np.float32), b=np.ones((2, 3), np.float32))
given = functools.partial  # a function with arguments that are right

FEEDBACK, MOMENTUM = given(cgx.Feedback, CODEC), given(cgx.Momentum, CODEC)
COMPRESS = given(cgx.compress_gradients, axis_name="data", exchange=CODEC)
DILOCO = given(wan.Diloco, RAW, every=500)
DECOUPLED = given(wan.Decoupled, addresses=["a:1", "b:1"], place=0)
DIFFERENTIAL = given(wan.Differential, RAW)
TOPOLOGY = given(wan.Topology, mesh(4), cgx.Tcp("a"))
PLAN, RULE = given(cgx.Plan, CODEC), given(cgx.Rule, CODEC)
FROM_ENV = given(cgx.Plan.from_env, environ={})

# {function: {argument: values that it refuses}}. given(function) is another key of the same function.
OUT_OF_RANGE = {
    cgx.MaxMin: dict(bits=[0, 9], bucket_size=[-1, 0, 2**70], rounding=["up"]),
    given(cgx.MaxMin, rotate=True): dict(bucket_size=[100]),
    cgx.AbsMax: dict(bits=[1]),
    given(cgx.AbsMax, rotate=True): dict(bucket_size=[100]),
    cgx.Micro: dict(format=["fp4"]),
    given(cgx.Micro, "mxfp4"): dict(rounding=["eden"]),
    cgx.Cast: dict(dtype=["float32", 3]),
    cgx.Feedback: dict(plan=[{5: CODEC}, {0: CODEC, -1: CODEC}, {0: CODEC, "data": CODEC}]),
    FEEDBACK: dict(beta=[0, 2, jnp.float32(-0.5)], reset_every=[0]),
    given(FEEDBACK, beta=0.5): dict(keep=[False]),
    given(FEEDBACK, reset_every=5): dict(keep=[False]),
    MOMENTUM: dict(momentum=[1.0, -0.1, jnp.float32(1)], weight_decay=[-1], weight_decay_mask=[True], masking=[True]),
    given(cgx.Momentum, cgx.TopK(1)): dict(masking=[True]),  # it sends every element
    given(cgx.Momentum, cgx.TopK(), masking=True): dict(keep=[False]),
    cgx.DGC: dict(schedule=["star"], ratio=[0, 1], values=[cgx.PowerSGD(2)], select=["random"], pull=["some"]),
    given(cgx.DGC): dict(min_size=[-1], clip_norm=[0], momentum=[1]),
    cgx.BSC: dict(own=["mine"], threshold=[2, 0], size_bound=[-1], beta=[2]),
    cgx.MPQ: dict(threshold=[0]),
    given(cgx.WarmUp, steps_per_epoch=1): dict(epochs=[-1, 0]),
    given(cgx.WarmUp, 1, 9): dict(coeff=[[2], [0.1, 0.1]]),
    COMPRESS: dict(exchange=[{5: CODEC}, {0: CODEC, -1: CODEC}], axis_name=[None, jnp.zeros(2)], axis_size=[0]),
    cgx.Dion: dict(rank=[0], momentum=[1.0]),
    cgx.Priority: dict(slice_elements=[0]),
    given(cgx.Stacks, MATRICES): dict(ranks=[0], leave=["("]),
    DILOCO: dict(every=[0], alpha=[1.0], decay=[0], forward=["int8"]),
    given(DILOCO, eager=True): dict(alpha=[0.5]),
    given(DILOCO, keep=False): dict(decay=[0.9]),
    given(DILOCO, forward="float16"): dict(keep=[False]),
    wan.SparseLoCo: dict(rate=[0]),
    wan.MuLoCo: dict(every=[0]),
    given(wan.Pier, RAW, every=9, rounds=4): dict(rate=[0.0]),
    given(wan.HFA, RAW): dict(k1=[0], k2=[0]),
    given(wan.MixedSync, RAW): dict(staleness=[0], compensation=[-1]),
    wan.Demo: dict(decay=[1.5], k=[0], side=[0]),
    DIFFERENTIAL: dict(k=[0, 1.5], block_bytes=[4095, 0], alpha=[1], rest=["later"], deadline=[-1], adaptive=[0.9]),
    DECOUPLED: dict(addresses=[["a:1", "a:1"]], place=[2], quorum=[3], grace=[-1], weights=["bytes"]),
    given(DECOUPLED): dict(average=["median"], plan=[{0: RAW, 5: CODEC}]),
    TOPOLOGY: dict(shape=["star"], greed=[1.1], decay=[1], probe_bytes=[100]),
    given(cgx.Plan.mixed_precision): dict(axis_name=[("a", "a")], size_bound=[-1]),
    given(cgx.Plan.bsc): dict(threshold=[2], size_bound=[-1], axis_name=[()], pull=["push"]),
    given(cgx.Plan.bytegrad): dict(axis_name=[()]),
    FROM_ENV: dict(axis_name=[3, ("a", None)], bits=[0, 9, 16], bucket_size=[0]),
    PLAN: dict(min_size=[-1], fusion_mb=[0, float("nan")], schedule=["star"], own=["mine"]),
    RULE: dict(min_size=[-1], ndim=[-1]),
    given(RULE, min_size=8): dict(max_size=[7]),
    given(Overlay.owners, 4): dict(owners=[5, 0]),
    given(Overlay.owners, 3): dict(owners=[[0, 0, 0], [1, 1], 1.5]),
    Overlay.tree: dict(ranks=[0]),
    Overlay.ring: dict(order=[[0, 1, 1]]),
    Overlay: dict(trees=[(Tree((-1, 0)), Tree((-1,)))]),
    Tree: dict(parents=[(-1, 2, 1), (0, 0)]),
}
OF_ANOTHER_TYPE = {
    cgx.MaxMin: dict(bits=[True, "4"], skip_incomplete=[2], rotate=[1]),
    cgx.ByteGrad: dict(compatible=["no"]),
    cgx.Sign: dict(bucket_size=[1.0]),
    cgx.Feedback: dict(plan=[4, {"data": 4}, {0: CODEC, 9: "raw"}]),
    FEEDBACK: dict(keep=[1], telemetry=["yes"], skip_nonfinite=[None], seed=["a", 0.5], reset_every=[2.5]),
    given(FEEDBACK): dict(beta=["1", jnp.zeros(2)]),
    MOMENTUM: dict(nesterov=[1]),
    cgx.DGC: dict(ratio=["1%", jnp.float32(0.1)], skip_1d=[0], clip_value=["a"], warm_up=[{0: 0.1}]),
    given(cgx.WarmUp, 4): dict(steps_per_epoch=[None]),
    COMPRESS: dict(exchange=[None, "MaxMin", cgx.DGC, optax.sgd(0.1), {"data": 4}, {0: CODEC, 9: "raw"}]),
    given(COMPRESS): dict(axis_name=[mesh_of(2)]),
    DILOCO: dict(outer=["adam"], keep=[3], seed=[0.5]),
    given(wan.Diloco, every=500): dict(plan=[4]),
    DECOUPLED: dict(addresses=[5]),
    given(cgx.Plan.mixed_precision): dict(size_bound=[100000.0]),
    FROM_ENV: dict(bits=[4.0]),
    cgx.Plan: dict(default=["maxmin"]),
    PLAN: dict(rules=["kernel", [("a", CODEC, 1)]], min_size=[1.5], skip_1d=[1], fusion_mb=["64"], leader=[None]),
    given(PLAN): dict(strict=[1]),
    RULE: dict(where=["a"], max_size=[1.5], priority=["high"], optional=["yes"]),
}


def cases():
    for error, functions in (ValueError, OUT_OF_RANGE), (TypeError, OF_ANOTHER_TYPE):
        for function, arguments in functions.items():
            name = getattr(function, "func", function).__qualname__
            for argument, values in arguments.items():
                for value in values:
                    yield pytest.param(function, name, argument, value, error, id=f"{name} {argument} {value}"[:60])


@pytest.mark.filterwarnings("ignore:.*may lose too much")  # comes before the error about masking
@pytest.mark.parametrize(("function", "name", "argument", "value", "error"), list(cases()))
def test_values(function, name, argument, value, error):
    got = repr(value) if isinstance(value, int | float | str | tuple | None) else ""
    with raises(error, says(name, argument, got=got)):
        function(**{argument: value})


# What came has another text here, or the error says what to write instead.
OTHERS = {
    "Decoupled": [
        (lambda: DECOUPLED(addresses=["a:1"]), ValueError, "addresses", "['a:1']"),
        (lambda: DECOUPLED(addresses=["a:1", "b"]), ValueError, "addresses", "'b'"),
        (lambda: DECOUPLED(addresses=[1, 2]), TypeError, "addresses", "1"),
        (lambda: DECOUPLED(every=2, overlap=2), ValueError, "overlap", "2", "overlap=1"),
    ],
    "Demo": [
        (lambda: wan.Demo(values=cgx.MaxMin(rounding="stochastic")), ValueError, "values", "MaxMin", "rounding"),
        (lambda: wan.Demo(values=cgx.TopK(0.1)), ValueError, "values", "TopK"),
    ],
    "Differential": [(lambda: wan.Differential(cgx.PowerSGD(2)), ValueError, "plan", "PowerSGD", "jaxcgx.MaxMin")],
    "Diloco": [
        (lambda: DILOCO(every=10, fragments=4), ValueError, "every", "10", "every=8"),
        (lambda: DILOCO(every=8, fragments=4, overlap=2), ValueError, "overlap", "2", "overlap=1"),
        (lambda: wan.Diloco({0: RAW, 9: CODEC}, 500), ValueError, "plan", "a schedule"),
    ],
    "Dion": [(lambda: cgx.Dion(rules=[("embed", cgx.PowerSGD(2))]), ValueError, "rules", "PowerSGD")],
    "HFA": [
        # A center's ranks would exchange parameters that they have not averaged.
        (lambda: wan.HFA(RAW, 2, 5, fragments=2), ValueError, "fragments", "2", "fragments=1 k2=6"),
        (lambda: wan.HFA(RAW, 2, 5, fragments=3), ValueError, "fragments", "3", "fragments=1 k2=6"),
        (lambda: wan.HFA(RAW, 2, 2, overlap=9), ValueError, "overlap", "9", "k1 k2 fragments larger k1 k2"),
    ],
    "MaxMin": [(lambda: cgx.Plan.cgx(9), ValueError, "bits", "9")],
    "MixedSync": [(lambda: wan.MixedSync(cgx.Dion()), ValueError, "exchange", "Dion", "optax.contrib.muon")],
    "Overlay": [(lambda: Overlay(()), ValueError, "trees", "none")],
    "Plan": [
        (lambda: cgx.Plan({}), ValueError, "default", "{}"),
        (lambda: cgx.Plan({"a": 4}), TypeError, "default", "4"),
        (lambda: PLAN(rules=["kernel"]), TypeError, "rules", "'kernel'"),
        (lambda: PLAN(rules=[(3, CODEC)]), TypeError, "rules", "("),
        (lambda: PLAN(schedule={}), ValueError, "schedule", "{}"),
        (lambda: PLAN(schedule={"node": 3}), ValueError, "schedule", "3"),
        (lambda: PLAN(own="encoded", schedule={"a": "ring"}), ValueError, "own", '"encoded"', 'own="raw"'),
        (lambda: cgx.Plan({"node": cgx.Skip(), "local": RAW}), ValueError, "default", "Skip()", "rule"),
        (lambda: PLAN(schedule={"a": "auto", "b": Overlay.tree(2)}), ValueError, "schedule"),
    ],
    "Plan.bsc": [(lambda: cgx.Plan.bsc(0), ValueError, "threshold", "0", "0.01")],
    "Plan.mixed_precision": [(lambda: cgx.Plan.mixed_precision({"a": CODEC, "b": RAW}), TypeError, "codec", "{'a'")],
    "Plan.from_env": [
        (lambda: cgx.Plan.from_env([]), ValueError, "axis_name", "[]"),
        (lambda: cgx.Plan.from_env(("inner", "cross")), ValueError, "axis_name", "('inner'", '("cross",'),
        (lambda: cgx.Plan.from_env({"HOME": "/root"}), ValueError, "axis_name", "{'HOME'"),
        (lambda: cgx.from_env({"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}, bits=9), ValueError, "bits", "9"),
    ],
    "Rule": [
        (lambda: RULE(path=b"a"), TypeError, "path", "b'a'"),
        (lambda: PLAN([("a", 4)]), TypeError, "codec", "4"),
        (lambda: PLAN([("a(", CODEC)]), ValueError, "path", "'a('", "unterminated"),
    ],
    "compress_gradients": [(lambda: COMPRESS(axis_name=("a", Axes(("a",)))), TypeError, "axis_name", "a communicator")],
    "backward_order": [(lambda: cgx.backward_order(1, {}), TypeError, "loss_fn", "1")],
}
test_others = table(OTHERS)

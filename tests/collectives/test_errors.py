"""Tests that bad input to a collective raises an error at trace time, with all facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says, table
from helpers import normal, planned
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.exchange.routes import Routes, by_parts
from jaxcgx.transports.base import Transport


class Levelless(Transport):
    """A user's transport over an axis, without `parts`."""

    names = ("a",)


CODEC, STOCHASTIC = cgx.MaxMin(4), cgx.MaxMin(4, rounding="stochastic")
KEY = jax.random.key(0)


def trace(f, check_vma=True):
    """Runs f with a float32[8] and a replicated one, on four ranks of 'a' and two of 'b'."""
    run = jax.shard_map(f, mesh=mesh(4, 2), in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")), check_vma=check_vma)
    jax.make_jaxpr(run)(normal(64), normal(8))


psum = lambda x, axis="a", plan=CODEC, **kwargs: cgx.compressed_psum(x, axis, plan, **kwargs)
scatter = lambda x, plan=CODEC, **kwargs: cgx.compressed_psum_scatter(x, "a", plan, **kwargs)
gather = lambda x, plan=CODEC, **kwargs: cgx.compressed_all_gather(x, "a", plan, **kwargs)
exchange = lambda x, split=0, concat=0, **kwargs: cgx.compressed_all_to_all(x, "a", split, concat, CODEC, **kwargs)


@pytest.mark.parametrize(
    ("f", "error", "text"),
    [
        (
            lambda x: psum(x, "rows"),
            NameError,
            "compressed_psum: argument 'axis_name': no axis 'rows' is bound here; call compressed_psum inside "
            "jax.shard_map over a mesh with that axis (or pmap, or vmap with axis_name='rows'); for the gradients of a "
            "program that leaves the ranks to jit, take jaxcgx.value_and_grad(loss_fn, 'rows', plan) or "
            "jaxcgx.make_train_step(loss_fn, optimizer, mesh, plan)",
        ),
        (
            lambda x: psum(x, ("a", "b"), {"a": CODEC, "c": CODEC}),
            ValueError,
            "compressed_psum: argument 'plan': expected a codec for each axis of ('a', 'b'), got {'a': MaxMin(bits=4, "
            "bucket_size=512, rounding='nearest', skip_incomplete=False, rotate=False), 'c': MaxMin(bits=4, "
            "bucket_size=512, rounding='nearest', skip_incomplete=False, rotate=False)} ('b' missing; 'c' not among "
            "them)",
        ),
        (
            lambda x: psum({"n": x.astype(jnp.int32)}, plan=planned(CODEC, strict=True)),
            TypeError,
            "compressed_psum: argument 'plan', leaf ['n']: expected a leaf that can be compressed, as the plan is "
            "strict, got one that can't, because int32 is not float32, bfloat16 or float16",
        ),
        (
            lambda x: psum(x, plan=planned(CODEC, leader=True)),
            ValueError,
            "compressed_psum: argument 'plan': expected leader=False without a hierarchy, got leader=True; name "
            "several axes, and give the plan a codec for each axis, {axis: codec}",
        ),
        (
            lambda x: scatter({"w": x}),
            ValueError,
            "compressed_psum_scatter: argument 'scatter_dimension', leaf ['w']: expected dimension 0 to have 4 "
            "elements, one for each rank, got float32[8]; pass tiled=True to split a longer one",
        ),
    ],
)
def test_wordings(f, error, text):
    with pytest.raises(error) as caught:
        trace(lambda x, s: f(x))
    assert str(caught.value) == text


SAME = "one that is the same on every rank of 'a'"
RING = planned(CODEC, schedule="ring")
ALL, AXES, BOTH = cgx.TopK(0.05), ("a", "b"), {"a": CODEC, "b": CODEC}
HALF, SKIPS = lambda x: x.astype(jnp.bfloat16), cgx.Plan(cgx.Skip())
fed = lambda x, residuals: psum({"a": x, "b": x.astype(jnp.int32)}, carry=cgx.Carry(residuals))
moving = lambda x, momentum, plan=CODEC: psum({"w": x}, plan=plan, carry=cgx.Carry({"w": x}, {"w": momentum}))
of_reduced_gradients = lambda x, s: jax.grad(lambda w: psum(jax.grad(lambda w: (w * x).sum())(w)).sum())(s)
with_a_key_of_its_own = lambda x, s: psum(x, plan=STOCHASTIC, key=jax.random.fold_in(KEY, jax.lax.axis_index("a")))
slices_of_nodes = lambda x, s: cgx.compressed_psum_scatter(x, AXES, BOTH, carry=cgx.Carry(x), tiled=True)


def sync(s, residuals=None, plan=CODEC, **options):
    carry = {} if residuals is None else dict(carry=cgx.Carry(residuals))
    return cgx.sync_in_backward({"w": s, "n": jnp.arange(3)}, "a", plan, **carry, **options)


def averaged(x, *aux):
    mean = lambda w: jax.lax.pmean((w * x).sum(), "a")
    return lambda w: (mean(w), *aux) if aux else mean(w)


# Calls with a float32[8] and a replicated one.
CALLS = {
    "compressed_psum": [
        (lambda x, s: psum({"w": s}), ValueError, "x ['w']", SAME, "jax.lax.pcast("),
        (lambda x, s: psum(psum(x, "b"), ("a", "b")), ValueError, "x", "one that is the same on every rank of 'b'"),
        (of_reduced_gradients, ValueError, "x", SAME, "reduced"),
        (lambda x, s: psum(x, [["a"]]), ValueError, "axis_name", "[['a']]"),
        (lambda x, s: psum(x, mesh(4, 2)), TypeError, "axis_name", "a mesh, Mesh", "'a'"),
        (lambda x, s: psum(x, "a", {0: CODEC, 5: CODEC}), ValueError, "plan", "", "schedule"),
        (lambda x, s: psum(x, ("a", "b"), {"a": CODEC}), ValueError, "plan", "{'a'", "'b'"),
        (lambda x, s: psum(x, "a", {"a": CODEC, "b": CODEC}), ValueError, "plan", "{'a'", "'b'"),
        (lambda x, s: psum(x, ("a", "b"), {"a": CODEC, "b": "raw"}), TypeError, "plan", "'raw'"),
        (lambda x, s: psum(x, plan=cgx.MaxMin), TypeError, "plan", "<class 'jaxcgx.codecs.maxmin.MaxMin'>"),
        (lambda x, s: psum(x, plan=STOCHASTIC), ValueError, "key", "None", "key=jax.random.key(...)"),
        (lambda x, s: psum(x, plan=STOCHASTIC, key=jnp.zeros(3, jnp.uint32)), TypeError, "key", "uint32[3]"),
        (with_a_key_of_its_own, ValueError, "key", "one that varies over 'a'"),
        (lambda x, s: psum({"rng": KEY, "x": x}), TypeError, "x ['rng']", "key<fry>[]", "jax.random.key_data(key)"),
        (lambda x, s: psum({"w": [x, object]}), TypeError, "x ['w'][1]", "<class 'object'>"),
        # Plans
        (lambda x, s: psum(x, plan=cgx.Plan(CODEC, [("nothing", cgx.Raw())])), ValueError, "plan", "none for Rule("),
        (lambda x, s: psum(x, plan=cgx.Plan(CODEC, schedule={"b": "ring"})), ValueError, "plan", "{'b'", "'a'"),
        (lambda x, s: psum(x, plan=cgx.Skip()), ValueError, "plan", "Skip()", "jaxcgx.Plan"),
        (lambda x, s: psum(x, plan=planned(ALL, schedule="ring")), ValueError, "plan", '"ring"', 'pull="top"'),
        (lambda x, s: psum(x, plan=planned(ALL, schedule="gather")), ValueError, "plan", '"gather"', '"auto"'),
        # What the last step kept
        (lambda x, s: psum(x, plan=RING, carry=cgx.Carry(x)), ValueError, "plan", '"ring"', '"one_shot"'),
        (lambda x, s: fed(x, [x]), ValueError, "carry.residuals", "PyTreeDef([*])"),
        (lambda x, s: fed(x, {"a": x[:3], "b": None}), ValueError, "carry.residuals ['a']", "float32[3]"),
        (lambda x, s: fed(x, {"a": HALF(x), "b": None}), ValueError, "carry.residuals ['a']", "bfloat16[8]"),
        (lambda x, s: fed(x, {"a": 1.0, "b": None}), ValueError, "carry.residuals ['a']", "1.0"),
        (lambda x, s: fed(x, {"a": None, "b": x}), ValueError, "carry.residuals ['b']", "float32[8]"),
        (lambda x, s: psum(x, plan=ALL, carry=cgx.Carry(momentum=x)), ValueError, "carry.residuals", "None"),
        (lambda x, s: moving(x, x), ValueError, "carry.momentum ['w']"),
        (lambda x, s: moving(x, x[:5], ALL), ValueError, "carry.momentum ['w']", "float32[5]"),
    ],
    "compressed_pmean": [(lambda x, s: cgx.compressed_pmean({"w": s}, "a", cgx.Raw()), ValueError, "x ['w']", SAME)],
    "compressed_psum_scatter": [
        (lambda x, s: scatter({"w": s}, tiled=True), ValueError, "x ['w']", SAME),
        (lambda x, s: scatter(jax.random.split(KEY, 4)), TypeError, "x", "key<fry>[4]", "jax.random.key_data(key)"),
        (lambda x, s: scatter(x, planned(CODEC, schedule="tree"), tiled=True), ValueError, "plan", "tree"),
        (lambda x, s: scatter(x, planned(CODEC, leader=True), tiled=True), ValueError, "plan", "leader=True"),
        (lambda x, s: scatter(x, RING, carry=cgx.Carry(x), tiled=True), ValueError, "plan", '"ring"', '"two_shot"'),
        (lambda x, s: scatter(x, planned(ALL, schedule="ring"), tiled=True), ValueError, "plan"),
        (lambda x, s: scatter(x, backward_plan=SKIPS, tiled=True), ValueError, "backward_plan", "one", "leave"),
        (slices_of_nodes, ValueError, "plan", "a codec per axis"),
        (lambda x, s: scatter(x[:7], tiled=True), ValueError, "scatter_dimension", "float32[7]"),
        (lambda x, s: scatter(x.sum()), ValueError, "scatter_dimension", "0"),
        (lambda x, s: scatter(x, scatter_dimension="rows"), TypeError, "scatter_dimension", "'rows'"),
    ],
    "compressed_all_gather": [
        (lambda x, s: gather({"w": s}), ValueError, "x ['w']", SAME),
        (lambda x, s: gather(x, backward_plan=4), TypeError, "backward_plan", "4"),
        (lambda x, s: gather(x, backward_plan=STOCHASTIC), ValueError, "key", "None"),
        (lambda x, s: gather(x, to="replicated"), ValueError, "to", "'replicated'"),
        (lambda x, s: gather({"w": x}, axis={"v": 0}), ValueError, "axis", "{'v': 0}"),
        (lambda x, s: gather(x, axis=True), TypeError, "axis", "True"),
        (lambda x, s: gather(x, axis=2), ValueError, "axis", "2"),
        (lambda x, s: gather(x, axis=-2, tiled=True), ValueError, "axis", "-2"),
        (lambda x, s: gather({"w": x}, cgx.Plan(CODEC, [("w", cgx.Skip())])), ValueError, "plan ['w']", "one", "leave"),
        (lambda x, s: cgx.compressed_all_gather(x, AXES, CODEC, backward_plan=BOTH), ValueError, "backward_plan"),
    ],
    "compressed_all_to_all": [
        (lambda x, s: exchange({"w": s}, tiled=True), ValueError, "x ['w']", SAME),
        (lambda x, s: exchange(x), ValueError, "split_axis", "float32[8]"),
        (lambda x, s: exchange(x, concat=1, tiled=True), ValueError, "concat_axis", "1"),
    ],
    "sync_in_backward": [
        (lambda x, s: sync(s, residuals={"w": s, "n": None}), ValueError, "carry.residuals ['w']", SAME),
        (lambda x, s: sync(s, residuals=[]), ValueError, "carry.residuals", "PyTreeDef"),
        (lambda x, s: sync(s, residuals={"w": x, "n": None}, plan=RING), ValueError, "plan", '"ring"'),
        (lambda x, s: sync(s, order=(0, 0)), ValueError, "order", "(0, 0)"),
        (lambda x, s: sync(s, order=3), ValueError, "order", "3"),
        (lambda x, s: sync(s, plan=planned(CODEC, strict=True)), TypeError, "plan ['n']", "one that can't"),
        (lambda x, s: cgx.sync_in_backward(s, "data", CODEC), NameError, "axis_name"),
    ],
    "value_and_grad": [  # its gradients would be divided by the number of ranks twice
        (lambda x, s: cgx.value_and_grad(averaged(x), "a", None)(s), ValueError, "loss_fn", SAME, "pmean"),
        (lambda x, s: cgx.grad(averaged(x, 1), "a", CODEC, has_aux=True)(s), ValueError, "loss_fn", SAME, "pmean"),
    ],
    "check_replicas": [(lambda x, s: cgx.check_replicas(s, "data"), NameError, "axis_name")],
}
test_calls = table(CALLS, trace)


def test_outside_of_any_axis():
    unbound = says("compressed_psum", "axis_name", remedy="jax.shard_map mesh")
    with raises(NameError, unbound):
        psum(normal(8))
    with raises(NameError, unbound), jax.set_mesh(mesh(4)):
        jax.jit(psum)(normal(8))


@pytest.mark.parametrize(
    "call",
    [lambda x: psum(x, key=KEY), lambda x: cgx.compressed_all_gather(x, "a", cgx.ByteGrad(), key=KEY, tiled=True)],
)
def test_a_key_that_nobody_uses(call):
    with pytest.warns(
        UserWarning, match=r"argument 'key' is not used: (MaxMin|ByteGrad)\(.*\) draws no random numbers"
    ) as caught:
        trace(lambda x, s: call(x) + 0 * x[0])
    assert caught[0].filename == __file__


def test_without_check_vma_what_varies_is_the_callers_affair():
    trace(lambda x, same: psum(same), check_vma=False)
    jax.vmap(lambda x: psum(x, "v"), axis_name="v")(np.ones((2, 3)))


def test_numbers_of_python_and_numpy():
    psum_of = lambda x: psum({"python": 1.5, "numpy": np.ones(3), "x": x}, "v", cgx.Cast("bfloat16"))
    sums = jax.vmap(psum_of, axis_name="v", out_axes=None)(np.ones((2, 3)))
    assert sums["python"] == 3 and (sums["numpy"] == 2).all() and (sums["x"] == 2).all()
    assert [(x.shape, str(x.dtype)) for x in sums.values()] == [((3,), "float32"), ((), "float32"), ((3,), "float32")]


@pytest.mark.parametrize("what", ["a codec", "a schedule"])
def test_a_transport_without_levels(what):
    """Only errors about communicators name jaxcgx.mpi.hierarchy()."""
    with raises(ValueError, says("psum", "plan", remedy=f"write {what}")):
        by_parts(Routes.of("psum", cgx.Plan(cgx.Raw()), ()), {"a": "ring"}, Levelless(), what=what)

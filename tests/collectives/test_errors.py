"""Tests that bad input to a collective raises an error at trace time, with all facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from helpers import normal, planned
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.exchange.routes import by_parts
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


def psum(x, axis="a", plan=CODEC, **kwargs):
    return cgx.compressed_psum(x, axis, plan, **kwargs)


def scatter(x, plan=CODEC, **kwargs):
    return cgx.compressed_psum_scatter(x, "a", plan, **kwargs)


def gather(x, plan=CODEC, **kwargs):
    return cgx.compressed_all_gather(x, "a", plan, **kwargs)


def exchange(x, split=0, concat=0, **kwargs):
    return cgx.compressed_all_to_all(x, "a", split, concat, CODEC, **kwargs)


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
        trace(lambda x, same: f(x))
    assert str(caught.value) == text


PSUM, PMEAN, SCATTER, GATHER, EXCHANGE = (
    f"compressed_{op}" for op in ("psum", "pmean", "psum_scatter", "all_gather", "all_to_all")
)
AT_W = dict(at="leaf ['w']")
SAME = dict(expected="varies 'a'", got="one that is the same on every rank of 'a'")
NAMES = "name tuple names"
BY_AXIS = "a codec for each axis of ('a', 'b')"
TOO_MANY = "dimension float32[8]"


@pytest.mark.parametrize(
    ("f", "error", "op", "argument", "words"),
    [
        (
            lambda x, same: psum({"w": same}),
            ValueError,
            PSUM,
            "x",
            SAME | AT_W | dict(remedy="jaxcgx.local_value_and_grad jax.lax.pcast("),
        ),
        (lambda x, same: cgx.compressed_pmean({"w": same}, "a", cgx.Raw()), ValueError, PMEAN, "x", SAME | AT_W),
        (lambda x, same: scatter({"w": same}, tiled=True), ValueError, SCATTER, "x", SAME | AT_W),
        (lambda x, same: gather({"w": same}), ValueError, GATHER, "x", SAME | AT_W),
        (lambda x, same: exchange({"w": same}, tiled=True), ValueError, EXCHANGE, "x", SAME | AT_W),
        (
            lambda x, same: psum(psum(x, "b"), ("a", "b")),
            ValueError,
            PSUM,
            "x",
            dict(expected="varies 'a' 'b'", got="one that is the same on every rank of 'b'"),
        ),
        (
            lambda x, same: jax.grad(lambda w: psum(jax.grad(lambda w: (w * x).sum())(w)).sum())(same),
            ValueError,
            PSUM,
            "x",
            SAME | dict(remedy="JAX reduced"),
        ),
        (lambda x, same: psum(x, 3), ValueError, PSUM, "axis_name", dict(expected=NAMES, got="3")),
        (lambda x, same: psum(x, [["a"]]), ValueError, PSUM, "axis_name", dict(expected=NAMES, got="[['a']]")),
        (lambda x, same: psum(x, ()), ValueError, PSUM, "axis_name", dict(expected=NAMES, got="()")),
        (lambda x, same: psum(x, ("a", "a")), ValueError, PSUM, "axis_name", dict(expected=NAMES, got="('a', 'a')")),
        (
            lambda x, same: psum(x, mesh(4, 2)),
            TypeError,
            PSUM,
            "axis_name",
            dict(expected="name", got="a mesh, Mesh", remedy="'a' 'b'"),
        ),
        (
            lambda x, same: psum(x, "a", {0: CODEC, 5: CODEC}),
            ValueError,
            PSUM,
            "plan",
            dict(expected="a codec for each axis", remedy="a schedule of plans, by steps"),
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC}),
            ValueError,
            PSUM,
            "plan",
            dict(expected=BY_AXIS, got="{'a'", remedy="'b' missing"),
        ),
        (
            lambda x, same: psum(x, "a", {"a": CODEC, "b": CODEC}),
            ValueError,
            PSUM,
            "plan",
            dict(expected="codec axis 'a'", got="{'a'", remedy="'b' not"),
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC, "b": "raw"}),
            TypeError,
            PSUM,
            "plan",
            dict(expected="codec", got="'raw'"),
        ),
        (
            lambda x, same: psum(x, plan=cgx.MaxMin),
            TypeError,
            PSUM,
            "plan",
            dict(expected="codec", got="<class 'jaxcgx.codecs.maxmin.MaxMin'>"),
        ),
        (
            lambda x, same: gather(x, backward_plan=4),
            TypeError,
            GATHER,
            "backward_plan",
            dict(expected="codec", got="4"),
        ),
        (
            lambda x, same: psum(x, plan=STOCHASTIC),
            ValueError,
            PSUM,
            "key",
            dict(expected="random key MaxMin(bits=4", got="None", remedy="key=jax.random.key(...) every rank"),
        ),
        (
            lambda x, same: gather(x, backward_plan=STOCHASTIC),
            ValueError,
            GATHER,
            "key",
            dict(expected="random key MaxMin(bits=4", got="None"),
        ),
        (
            lambda x, same: psum(x, plan=STOCHASTIC, key=7),
            TypeError,
            PSUM,
            "key",
            dict(expected="key jax.random.key PRNGKey", got="7"),
        ),
        (
            lambda x, same: psum(x, plan=STOCHASTIC, key=jnp.zeros(3, jnp.uint32)),
            TypeError,
            PSUM,
            "key",
            dict(expected="key jax.random.key PRNGKey", got="uint32[3]"),
        ),
        (
            lambda x, same: psum(x, plan=STOCHASTIC, key=jax.random.split(KEY)),
            ValueError,
            PSUM,
            "key",
            dict(expected="key", got="an array of keys of shape"),
        ),
        (
            lambda x, same: psum(x, plan=STOCHASTIC, key=jax.random.fold_in(KEY, jax.lax.axis_index("a"))),
            ValueError,
            PSUM,
            "key",
            dict(expected="key rank", got="one that varies over 'a'"),
        ),
        (
            lambda x, same: psum({"rng": KEY, "x": x}),
            TypeError,
            PSUM,
            "x",
            dict(at="leaf ['rng']", expected="numbers", got="key<fry>[]", remedy="jax.random.key_data(key)"),
        ),
        (
            lambda x, same: scatter(jax.random.split(KEY, 4)),
            TypeError,
            SCATTER,
            "x",
            dict(expected="numbers", got="key<fry>[4]", remedy="jax.random.key_data(key)"),
        ),
        (lambda x, same: psum("x"), TypeError, PSUM, "x", dict(expected="array", got="'x'")),
        (
            lambda x, same: psum({"w": [x, object]}),
            TypeError,
            PSUM,
            "x",
            dict(at="leaf ['w'][1]", expected="array", got="<class 'object'>"),
        ),
        (
            lambda x, same: scatter(x, planned(CODEC, schedule="tree"), tiled=True),
            ValueError,
            SCATTER,
            "plan",
            dict(expected='the schedule "auto" "two_shot" "one_shot" "ring" slice', got="tree"),
        ),
        (
            lambda x, same: scatter(x, planned(CODEC, leader=True), tiled=True),
            ValueError,
            SCATTER,
            "plan",
            dict(expected="leader=False slice", got="leader=True"),
        ),
        (
            lambda x, same: scatter(x, planned(CODEC, schedule="ring"), tiled=True, carry=cgx.Carry(residuals=x)),
            ValueError,
            SCATTER,
            "plan",
            dict(expected='"one_shot" residuals', got='"ring"', remedy='schedule="two_shot"'),
        ),
        (
            lambda x, same: gather(x, to="replicated"),
            ValueError,
            GATHER,
            "to",
            dict(expected="'varying' 'invarying'", got="'replicated'"),
        ),
        (
            lambda x, same: scatter(x[:7], tiled=True),
            ValueError,
            SCATTER,
            "scatter_dimension",
            dict(expected="dimension 0 multiple 4 elements rank", got="float32[7]"),
        ),
        (
            lambda x, same: scatter(x, scatter_dimension=1),
            ValueError,
            SCATTER,
            "scatter_dimension",
            dict(expected=TOO_MANY, got="1"),
        ),
        (
            lambda x, same: scatter(x.sum()),
            ValueError,
            SCATTER,
            "scatter_dimension",
            dict(expected="dimension float32[]", got="0"),
        ),
        (
            lambda x, same: scatter(x, scatter_dimension="rows"),
            TypeError,
            SCATTER,
            "scatter_dimension",
            dict(expected="integer", got="'rows'"),
        ),
        (
            lambda x, same: gather({"w": x}, axis={"v": 0}),
            ValueError,
            GATHER,
            "axis",
            dict(expected="integer tree x", got="{'v': 0}"),
        ),
        (lambda x, same: gather(x, axis=True), TypeError, GATHER, "axis", dict(expected="integer", got="True")),
        (
            lambda x, same: gather(x, axis=2),
            ValueError,
            GATHER,
            "axis",
            dict(expected="dimension float32[8] one more", got="2"),
        ),
        (lambda x, same: gather(x, axis=-2, tiled=True), ValueError, GATHER, "axis", dict(expected=TOO_MANY, got="-2")),
        (
            lambda x, same: exchange(x),
            ValueError,
            EXCHANGE,
            "split_axis",
            dict(expected="dimension 0 4 elements rank", got="float32[8]"),
        ),
        (
            lambda x, same: exchange(x, concat=1, tiled=True),
            ValueError,
            EXCHANGE,
            "concat_axis",
            dict(expected=TOO_MANY, got="1"),
        ),
    ],
)
def test_calls(f, error, op, argument, words):
    with raises(error, says(op, argument, **words)):
        trace(f)


def test_outside_of_any_axis():
    unbound = says("compressed_psum", "axis_name", expected="no axis 'a'", remedy="jax.shard_map mesh")
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
        trace(lambda x, same: call(x) + 0 * x[0])
    assert caught[0].filename == __file__


def test_without_check_vma_what_varies_is_the_callers_affair():
    trace(lambda x, same: psum(same), check_vma=False)
    jax.vmap(lambda x: psum(x, "v"), axis_name="v")(np.ones((2, 3)))


def test_numbers_of_python_and_numpy():
    run = jax.vmap(
        lambda x: psum({"python": 1.5, "numpy": np.ones(3), "x": x}, "v", cgx.Cast("bfloat16")),
        axis_name="v",
        out_axes=None,
    )
    sums = run(np.ones((2, 3)))
    assert sums["python"] == 3 and (sums["numpy"] == 2).all() and (sums["x"] == 2).all()
    assert {k: (v.shape, str(v.dtype)) for k, v in sums.items()} == {
        "python": ((), "float32"),
        "numpy": ((3,), "float32"),
        "x": ((3,), "float32"),
    }


@pytest.mark.parametrize("what", ["a codec", "a schedule"])
def test_a_transport_without_levels(what):
    """Only errors about communicators name jaxcgx.mpi.hierarchy()."""
    with raises(ValueError, says("psum", "plan", expected=f"{what} for all ranks of ('a',)", remedy=f"write {what}")):
        by_parts("psum", {"a": "ring"}, Levelless(), what=what)

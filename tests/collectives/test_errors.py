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
from jaxcgx.collectives.old_arguments import check_schedules, check_stages
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


def psum(x, axis="a", codec=CODEC, **kwargs):
    return cgx.compressed_psum(x, axis, codec, **kwargs)


@pytest.mark.parametrize(
    ("f", "error", "text"),
    [
        (
            lambda x, same: psum(x, "rows"),
            NameError,
            "compressed_psum: argument 'axis_name': no axis 'rows' is bound here; call compressed_psum inside "
            "jax.shard_map over a mesh with that axis (or pmap, or vmap with axis_name='rows'); for the gradients of a "
            "program that leaves the ranks to jit, take jaxcgx.value_and_grad(loss_fn, 'rows', codec), or with "
            "momentum jaxcgx.make_train_step(loss_fn, optimizer, mesh, compress=jaxcgx.dgc)",
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC, "c": CODEC}),
            ValueError,
            "compressed_psum: argument 'codec': expected a codec for each axis of ('a', 'b'), got {'a': MaxMin(bits=4, "
            "bucket_size=512, rounding='nearest', skip_incomplete=False, rotate=False), 'c': MaxMin(bits=4, "
            "bucket_size=512, rounding='nearest', skip_incomplete=False, rotate=False)} ('b' missing; 'c' not among "
            "them)",
        ),
        (
            lambda x, same: psum({"n": x.astype(jnp.int32)}, strict=True),
            TypeError,
            "compressed_psum: argument 'x', leaf ['n']: int32 is not float32, bfloat16 or float16, and strict=True "
            "allows no such leaf",
        ),
        (
            lambda x, same: psum(x, leader=True),
            ValueError,
            "compressed_psum: argument 'leader': expected False without a hierarchy, got True; give axis_name a tuple "
            "and codec a dict with a codec for each name",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter({"w": x}, "a", CODEC),
            ValueError,
            "compressed_psum_scatter: argument 'scatter_dimension', leaf ['w']: expected dimension 0 to have 4 "
            "elements, one for each rank, got float32[8]; pass tiled=True to split a longer one",
        ),
    ],
)
def test_wordings(f, error, text):
    with pytest.raises(error) as caught:
        trace(f)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (
            lambda x, same: psum(x, "a", {0: CODEC, 5: CODEC}),
            ValueError,
            says("compressed_psum", "codec", expected="a codec for each axis", remedy="a schedule of plans, by steps"),
        ),
        (
            lambda x, same: psum({"w": same}),
            ValueError,
            says(
                "compressed_psum",
                "x",
                at="leaf ['w']",
                expected="varies 'a'",
                got="one that is the same on every rank of 'a'",
            ),
        ),
        (
            lambda x, same: cgx.compressed_pmean({"w": same}, "a", cgx.Raw()),
            ValueError,
            says(
                "compressed_pmean",
                "x",
                at="leaf ['w']",
                expected="varies 'a'",
                got="one that is the same on every rank of 'a'",
            ),
        ),
        (
            lambda x, same: psum({"w": same}),
            ValueError,
            says(
                "compressed_psum",
                "x",
                at="leaf ['w']",
                expected="varies 'a'",
                got="one that is the same on every rank of 'a'",
                remedy="jaxcgx.local_value_and_grad jax.lax.pcast(",
            ),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter({"w": same}, "a", CODEC, tiled=True),
            ValueError,
            says(
                "compressed_psum_scatter",
                "x",
                at="leaf ['w']",
                expected="varies 'a'",
                got="one that is the same on every rank of 'a'",
            ),
        ),
        (
            lambda x, same: cgx.compressed_all_gather({"w": same}, "a", CODEC),
            ValueError,
            says(
                "compressed_all_gather",
                "x",
                at="leaf ['w']",
                expected="varies 'a'",
                got="one that is the same on every rank of 'a'",
            ),
        ),
        (
            lambda x, same: cgx.compressed_all_to_all({"w": same}, "a", 0, 0, CODEC, tiled=True),
            ValueError,
            says(
                "compressed_all_to_all",
                "x",
                at="leaf ['w']",
                expected="varies 'a'",
                got="one that is the same on every rank of 'a'",
            ),
        ),
        (
            lambda x, same: psum(cgx.compressed_psum(x, "b", CODEC), ("a", "b")),
            ValueError,
            says("compressed_psum", "x", expected="varies 'a' 'b'", got="one that is the same on every rank of 'b'"),
        ),
        (
            lambda x, same: jax.grad(lambda w: psum(jax.grad(lambda w: (w * x).sum())(w)).sum())(same),
            ValueError,
            says(
                "compressed_psum",
                "x",
                expected="varies 'a'",
                got="one that is the same on every rank of 'a'",
                remedy="JAX reduced",
            ),
        ),
        (
            lambda x, same: psum(x, "rows"),
            NameError,
            says(
                "compressed_psum",
                "axis_name",
                expected="no axis 'rows'",
                remedy="jax.shard_map pmap vmap axis_name='rows'",
            ),
        ),
        (
            lambda x, same: psum(x, 3),
            ValueError,
            says("compressed_psum", "axis_name", expected="name tuple names", got="3"),
        ),
        (
            lambda x, same: psum(x, [["a"]]),
            ValueError,
            says("compressed_psum", "axis_name", expected="name tuple names", got="[['a']]"),
        ),
        (
            lambda x, same: psum(x, ()),
            ValueError,
            says("compressed_psum", "axis_name", expected="name tuple names", got="()"),
        ),
        (
            lambda x, same: psum(x, ("a", "a")),
            ValueError,
            says("compressed_psum", "axis_name", expected="name tuple names", got="('a', 'a')"),
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC}),
            ValueError,
            says("compressed_psum", "codec", expected="codec axis 'a' 'b'", got="{'a'"),
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC}),
            ValueError,
            says("compressed_psum", "codec", expected="codec axis 'a' 'b'", got="{'a'", remedy="'b' missing"),
        ),
        (
            lambda x, same: psum(x, "a", {"a": CODEC, "b": CODEC}),
            ValueError,
            says("compressed_psum", "codec", expected="codec axis 'a'", got="{'a'", remedy="'b' not"),
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC, "c": CODEC}),
            ValueError,
            says("compressed_psum", "codec", expected="codec axis 'a' 'b'", got="{'a'", remedy="'b' missing 'c' not"),
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC, "b": "raw"}),
            TypeError,
            says("compressed_psum", "codec", expected="codec", got="'raw'"),
        ),
        (
            lambda x, same: psum(x, codec=cgx.MaxMin),
            TypeError,
            says("compressed_psum", "codec", expected="codec", got="<class 'jaxcgx.codecs.maxmin.MaxMin'>"),
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, backward_plan=4),
            TypeError,
            says("compressed_all_gather", "backward_codec", expected="codec", got="4"),
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC),
            ValueError,
            says(
                "compressed_psum",
                "key",
                expected="random key MaxMin(bits=4",
                got="None",
                remedy="key=jax.random.key(...) every rank",
            ),
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, backward_plan=STOCHASTIC),
            ValueError,
            says("compressed_all_gather", "key", expected="random key MaxMin(bits=4", got="None"),
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC, key=7),
            TypeError,
            says("compressed_psum", "key", expected="key jax.random.key PRNGKey", got="7"),
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC, key=jnp.zeros(3, jnp.uint32)),
            TypeError,
            says("compressed_psum", "key", expected="key jax.random.key PRNGKey", got="uint32[3]"),
        ),
        (
            lambda x, same: psum({"rng": KEY, "x": x}),
            TypeError,
            says(
                "compressed_psum",
                "x",
                at="leaf ['rng']",
                expected="numbers",
                got="key<fry>[]",
                remedy="jax.random.key_data(key)",
            ),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(jax.random.split(KEY, 4), "a", CODEC),
            TypeError,
            says(
                "compressed_psum_scatter", "x", expected="numbers", got="key<fry>[4]", remedy="jax.random.key_data(key)"
            ),
        ),
        (
            lambda x, same: psum(x, mesh(4, 2)),
            TypeError,
            says("compressed_psum", "axis_name", expected="name", got="a mesh, Mesh", remedy="'a' 'b'"),
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC, key=jax.random.split(KEY)),
            ValueError,
            says("compressed_psum", "key", expected="key", got="an array of keys of shape"),
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC, key=jax.random.fold_in(KEY, jax.lax.axis_index("a"))),
            ValueError,
            says("compressed_psum", "key", expected="key rank", got="one that varies over 'a'"),
        ),
        (
            lambda x, same: psum({"n": x.astype(jnp.int32)}, strict=True),
            TypeError,
            says("compressed_psum", "x", at="leaf ['n']", expected="int32 float32 bfloat16 float16 strict=True"),
        ),
        (
            lambda x, same: psum(x, strict=1),
            TypeError,
            says("compressed_psum", "strict", expected="True False", got="1"),
        ),
        (
            lambda x, same: psum(x, schedule="star"),
            ValueError,
            says("compressed_psum", "schedule", expected="'auto' 'two_shot' 'one_shot' 'ring'", got="'star'"),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x, "a", planned(CODEC, schedule="two_shot"), tiled=True),
            ValueError,
            says("compressed_psum_scatter", "schedule", expected="'auto' 'one_shot' 'ring'", got="'two_shot'"),
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", planned(CODEC, schedule="ring")),
            ValueError,
            says("compressed_all_gather", "schedule", expected="'auto' 'one_shot'", got="'ring'"),
        ),
        (
            lambda x, same: psum(x, own="mine"),
            ValueError,
            says("compressed_psum", "own", expected="'raw' 'encoded'", got="'mine'"),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(
                x, "a", planned(CODEC, schedule="ring", own="encoded"), tiled=True
            ),
            ValueError,
            says(
                "compressed_psum_scatter", "own", expected='"raw" schedule="ring"', got='"encoded"', remedy='own="raw"'
            ),
        ),
        (
            lambda x, same: psum(x, own="encoded", schedule="ring"),
            ValueError,
            says("compressed_psum", "own", expected='"raw" schedule="ring"', got='"encoded"', remedy='own="raw"'),
        ),
        (
            lambda x, same: psum(x, leader=True),
            ValueError,
            says("compressed_psum", "leader", expected="False", got="True", remedy="axis_name tuple codec"),
        ),
        (
            lambda x, same: psum(x, leader="yes"),
            TypeError,
            says("compressed_psum", "leader", expected="True False", got="'yes'"),
        ),
        (
            lambda x, same: psum(x, fusion_mb=0),
            ValueError,
            says("compressed_psum", "fusion_mb", expected="positive number", got="0"),
        ),
        (
            lambda x, same: psum(x, fusion_mb="64"),
            TypeError,
            says("compressed_psum", "fusion_mb", expected="positive number", got="'64'"),
        ),
        (
            lambda x, same: psum(x, fusion_mb=float("nan")),
            ValueError,
            says("compressed_psum", "fusion_mb", expected="positive number", got="nan"),
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, to="replicated"),
            ValueError,
            says("compressed_all_gather", "to", expected="'varying' 'invarying'", got="'replicated'"),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x[:7], "a", CODEC, tiled=True),
            ValueError,
            says(
                "compressed_psum_scatter",
                "scatter_dimension",
                expected="dimension 0 multiple 4 elements rank",
                got="float32[7]",
            ),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter({"w": x}, "a", CODEC),
            ValueError,
            says(
                "compressed_psum_scatter",
                "scatter_dimension",
                at="leaf ['w']",
                expected="dimension 0 4 elements rank",
                got="float32[8]",
                remedy="tiled=True",
            ),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x, "a", CODEC, scatter_dimension=1),
            ValueError,
            says("compressed_psum_scatter", "scatter_dimension", expected="dimension float32[8]", got="1"),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x.sum(), "a", CODEC),
            ValueError,
            says("compressed_psum_scatter", "scatter_dimension", expected="dimension float32[]", got="0"),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(
                x, "a", planned(CODEC, schedule="ring"), tiled=True, carry=cgx.Carry(residuals=x)
            ),
            ValueError,
            says(
                "compressed_psum_scatter",
                "schedule",
                expected='"one_shot" residuals',
                got='"ring"',
                remedy='schedule="one_shot"',
            ),
        ),
        (
            lambda x, same: cgx.compressed_all_gather({"w": x}, "a", CODEC, axis={"v": 0}),
            ValueError,
            says("compressed_all_gather", "axis", expected="integer tree x", got="{'v': 0}"),
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x, "a", CODEC, scatter_dimension="rows"),
            TypeError,
            says("compressed_psum_scatter", "scatter_dimension", expected="integer", got="'rows'"),
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, axis=True),
            TypeError,
            says("compressed_all_gather", "axis", expected="integer", got="True"),
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, axis=2),
            ValueError,
            says("compressed_all_gather", "axis", expected="dimension float32[8] one more", got="2"),
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, axis=-2, tiled=True),
            ValueError,
            says("compressed_all_gather", "axis", expected="dimension float32[8]", got="-2"),
        ),
        (
            lambda x, same: cgx.compressed_all_to_all(x, "a", 0, 0, CODEC),
            ValueError,
            says("compressed_all_to_all", "split_axis", expected="dimension 0 4 elements rank", got="float32[8]"),
        ),
        (
            lambda x, same: cgx.compressed_all_to_all(x, "a", 0, 1, CODEC, tiled=True),
            ValueError,
            says("compressed_all_to_all", "concat_axis", expected="dimension float32[8]", got="1"),
        ),
        (lambda x, same: psum("x"), TypeError, says("compressed_psum", "x", expected="array", got="'x'")),
        (
            lambda x, same: psum({"w": [x, object]}),
            TypeError,
            says("compressed_psum", "x", at="leaf ['w'][1]", expected="array", got="<class 'object'>"),
        ),
    ],
)
def test_calls(f, error, words):
    with raises(error, words):
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


def test_a_transport_without_levels():
    """Only errors about communicators name jaxcgx.mpi.hierarchy()."""
    net = Levelless()
    with raises(ValueError, says("psum", "codec", expected="codec all ranks 'a'", remedy="Levelless no levels")):
        check_stages("psum", "codec", {"a": CODEC}, net)
    with raises(ValueError, says("psum", "schedule", expected="schedule all ranks 'a'", remedy="Levelless no levels")):
        check_schedules("psum", {"a": "ring"}, net.parts, net)

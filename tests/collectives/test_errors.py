"""Bad input to a collective: which function, which argument, what was expected, what came, what to do. At trace time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx

CODEC, STOCHASTIC = cgx.MaxMin(4), cgx.MaxMin(4, rounding="stochastic")
KEY = jax.random.key(0)
VARIES = "argument 'x', leaf ['w']: expected an array that varies over 'a', got one that is the same on every rank of 'a' (float32[8]"


def trace(f, check_vma=True):
    """f of a float32[8] and a replicated one, on four ranks of 'a' and two of 'b'."""
    run = jax.shard_map(f, mesh=mesh(4, 2), in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")), check_vma=check_vma)
    jax.make_jaxpr(run)(normal(64), normal(8))


def psum(x, axis="a", codec=CODEC, **kwargs):
    return cgx.compressed_psum(x, axis, codec, **kwargs)


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda x, same: psum({"w": same}), ValueError, f"compressed_psum: {VARIES}"),
        (lambda x, same: cgx.compressed_pmean({"w": same}, "a", cgx.Raw()), ValueError, f"compressed_pmean: {VARIES}"),
        (
            lambda x, same: psum({"w": same}),
            ValueError,
            "Take it with jaxcgx.local_value_and_grad, or differentiate with respect to jax.lax.pcast(",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter({"w": same}, "a", CODEC, tiled=True),
            ValueError,
            f"compressed_psum_scatter: {VARIES}",
        ),
        (
            lambda x, same: cgx.compressed_all_gather({"w": same}, "a", CODEC),
            ValueError,
            f"compressed_all_gather: {VARIES}",
        ),
        (
            lambda x, same: cgx.compressed_all_to_all({"w": same}, "a", 0, 0, CODEC, tiled=True),
            ValueError,
            f"compressed_all_to_all: {VARIES}",
        ),
        (
            lambda x, same: psum(cgx.compressed_psum(x, "b", CODEC), ("a", "b")),
            ValueError,
            "that varies over 'a', 'b', got one that is the same on every rank of 'b'",
        ),
        (
            lambda x, same: jax.grad(lambda w: psum(jax.grad(lambda w: (w * x).sum())(w)).sum())(same),
            ValueError,
            "if it is a gradient, JAX has reduced it already",
        ),
        (
            lambda x, same: psum(x, "rows"),
            NameError,
            "compressed_psum: argument 'axis_name': no axis 'rows' is bound here; call compressed_psum inside jax.shard_map over a mesh with that axis (or pmap, or vmap with axis_name='rows')",
        ),
        (lambda x, same: psum(x, 3), ValueError, "expected a name or a tuple of different names, got 3"),
        (lambda x, same: psum(x, [["a"]]), ValueError, "expected a name or a tuple of different names, got [['a']]"),
        (
            lambda x, same: psum(x, ()),
            ValueError,
            "compressed_psum: argument 'axis_name': expected a name or a tuple of different names, got ()",
        ),
        (
            lambda x, same: psum(x, ("a", "a")),
            ValueError,
            "expected a name or a tuple of different names, got ('a', 'a')",
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC}),
            ValueError,
            "compressed_psum: argument 'codec': expected a codec for each axis of ('a', 'b'), got",
        ),
        (lambda x, same: psum(x, ("a", "b"), {"a": CODEC}), ValueError, "('b' missing)"),
        (lambda x, same: psum(x, "a", {"a": CODEC, "b": CODEC}), ValueError, "('b' not among them)"),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC, "c": CODEC}),
            ValueError,
            "('b' missing; 'c' not among them)",
        ),
        (
            lambda x, same: psum(x, ("a", "b"), {"a": CODEC, "b": "raw"}),
            TypeError,
            "compressed_psum: argument 'codec': expected a codec such as jaxcgx.MaxMin(bits=4), got 'raw'",
        ),
        (
            lambda x, same: psum(x, codec=cgx.MaxMin),
            TypeError,
            "compressed_psum: argument 'codec': expected a codec such as",
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, backward_codec=4),
            TypeError,
            "compressed_all_gather: argument 'backward_codec': expected a codec such as jaxcgx.MaxMin(bits=4), got 4",
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC),
            ValueError,
            "compressed_psum: argument 'key': MaxMin(bits=4, bucket_size=512, rounding='stochastic', skip_incomplete=False) rounds stochastically and needs a random key, got None; pass key=jax.random.key(...), the same on every rank and another one every step",
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, backward_codec=STOCHASTIC),
            ValueError,
            "compressed_all_gather: argument 'key'",
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC, key=7),
            TypeError,
            "compressed_psum: argument 'key': expected a random key (jax.random.key or PRNGKey), got 7",
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC, key=jax.random.split(KEY)),
            ValueError,
            "compressed_psum: argument 'key': expected one key",
        ),
        (
            lambda x, same: psum(x, codec=STOCHASTIC, key=jax.random.fold_in(KEY, jax.lax.axis_index("a"))),
            ValueError,
            "compressed_psum: argument 'key': expected the same key on every rank, got one that varies over 'a'",
        ),
        (
            lambda x, same: psum({"n": x.astype(jnp.int32)}, strict=True),
            TypeError,
            "compressed_psum: argument 'x', leaf ['n']: int32 is not float32, bfloat16 or float16, and strict=True allows no such leaf",
        ),
        (
            lambda x, same: psum(x, strict=1),
            TypeError,
            "compressed_psum: argument 'strict': expected True or False, got 1",
        ),
        (
            lambda x, same: psum(x, schedule="tree"),
            ValueError,
            "compressed_psum: argument 'schedule': expected one of 'auto', 'two_shot', 'one_shot', 'ring', got 'tree'",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x, "a", CODEC, schedule="two_shot", tiled=True),
            ValueError,
            "compressed_psum_scatter: argument 'schedule': expected one of 'auto', 'one_shot', 'ring', got 'two_shot'",
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, schedule="ring"),
            ValueError,
            "compressed_all_gather: argument 'schedule': expected one of 'auto', 'one_shot', got 'ring'",
        ),
        (
            lambda x, same: psum(x, own="mine"),
            ValueError,
            "compressed_psum: argument 'own': expected one of 'raw', 'encoded', got 'mine'",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x, "a", CODEC, own="encoded", schedule="ring", tiled=True),
            ValueError,
            'compressed_psum_scatter: argument \'own\': expected "raw" with schedule="ring", got "encoded": a ring adds every rank\'s part as it is',
        ),
        (
            lambda x, same: psum(x, own="encoded", schedule="ring"),
            ValueError,
            'compressed_psum: argument \'own\': expected "raw" with schedule="ring", got "encoded": a ring adds every rank\'s part as it is',
        ),
        (
            lambda x, same: psum(x, leader=True),
            ValueError,
            "compressed_psum: argument 'leader': expected False without a hierarchy, got True; give axis_name a tuple and codec a dict",
        ),
        (
            lambda x, same: psum(x, leader="yes"),
            TypeError,
            "compressed_psum: argument 'leader': expected True or False, got 'yes'",
        ),
        (
            lambda x, same: psum(x, fusion_mb=0),
            ValueError,
            "compressed_psum: argument 'fusion_mb': expected a positive number, got 0",
        ),
        (
            lambda x, same: psum(x, fusion_mb="64"),
            TypeError,
            "compressed_psum: argument 'fusion_mb': expected a positive number, got '64'",
        ),
        (lambda x, same: psum(x, fusion_mb=float("nan")), ValueError, "expected a positive number, got nan"),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, to="replicated"),
            ValueError,
            "compressed_all_gather: argument 'to': expected one of 'varying', 'invarying', got 'replicated'",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x[:7], "a", CODEC, tiled=True),
            ValueError,
            "compressed_psum_scatter: argument 'scatter_dimension': expected dimension 0 to have a multiple of 4 elements, one share for each rank, got float32[7]",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter({"w": x}, "a", CODEC),
            ValueError,
            "argument 'scatter_dimension', leaf ['w']: expected dimension 0 to have 4 elements, one for each rank, got float32[8]; pass tiled=True to split a longer one",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x, "a", CODEC, scatter_dimension=1),
            ValueError,
            "compressed_psum_scatter: argument 'scatter_dimension': expected a dimension of float32[8], got 1",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x.sum(), "a", CODEC),
            ValueError,
            "expected a dimension of float32[], got 0",
        ),
        (
            lambda x, same: cgx.compressed_psum_scatter(x, "a", CODEC, scatter_dimension="rows"),
            TypeError,
            "compressed_psum_scatter: argument 'scatter_dimension': expected an integer, got 'rows'",
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, axis=2),
            ValueError,
            "compressed_all_gather: argument 'axis': expected a dimension of float32[8] with one more, got 2",
        ),
        (
            lambda x, same: cgx.compressed_all_gather(x, "a", CODEC, axis=-2, tiled=True),
            ValueError,
            "compressed_all_gather: argument 'axis': expected a dimension of float32[8], got -2",
        ),
        (
            lambda x, same: cgx.compressed_all_to_all(x, "a", 0, 0, CODEC),
            ValueError,
            "compressed_all_to_all: argument 'split_axis': expected dimension 0 to have 4 elements",
        ),
        (
            lambda x, same: cgx.compressed_all_to_all(x, "a", 0, 1, CODEC, tiled=True),
            ValueError,
            "compressed_all_to_all: argument 'concat_axis': expected a dimension of float32[8], got 1",
        ),
        (lambda x, same: psum("x"), TypeError, "compressed_psum: argument 'x': expected an array, got 'x'"),
        (
            lambda x, same: psum({"w": [x, object]}),
            TypeError,
            "compressed_psum: argument 'x', leaf ['w'][1]: expected an array, got <class 'object'>",
        ),
    ],
)
def test_calls(f, error, words):
    with pytest.raises(error) as caught:
        trace(f)
    assert words in str(caught.value)


def test_outside_of_any_axis():
    with pytest.raises(NameError, match="compressed_psum: argument 'axis_name': no axis 'a' is bound here"):
        psum(normal(8))
    with pytest.raises(NameError, match="inside jax.shard_map over a mesh with that axis"), jax.set_mesh(mesh(4)):
        jax.jit(psum)(normal(8))


@pytest.mark.parametrize(
    "call",
    [lambda x: psum(x, key=KEY), lambda x: cgx.compressed_all_gather(x, "a", cgx.ByteGrad(), key=KEY, tiled=True)],
)
def test_a_key_that_nobody_uses(call):
    with pytest.warns(
        UserWarning, match=r"argument 'key': (MaxMin|ByteGrad)\(.*\) draws no random numbers: the key is not used"
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

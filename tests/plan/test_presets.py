"""Tests plans that do what other systems do, and CGX's environment variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, refused, rows, says
from helpers import normal
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.plan import environment

TREE = {
    "bias": jnp.zeros(2000),
    "large": jnp.zeros((500, 401)),
    "small": jnp.zeros((31, 33)),
    "weights": jnp.zeros((500, 400)),
}
FOUR, HALF, RAW = cgx.MaxMin(4), cgx.Cast("float16"), cgx.Raw()


def codecs(plan):
    found = jax.tree_util.tree_flatten_with_path(TREE)[0]
    return [codec for codec, _ in plan.assign("test", "x", [path for path, _ in found], [leaf for _, leaf in found])]


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (cgx.Plan.cgx(), [RAW, cgx.MaxMin(4, 1024), RAW, cgx.MaxMin(4, 1024)]),
        (
            cgx.Plan.cgx(2, 128, "stochastic"),
            [RAW, cgx.MaxMin(2, 128, "stochastic"), RAW, cgx.MaxMin(2, 128, "stochastic")],
        ),
        (cgx.Plan.bytegrad(), [cgx.ByteGrad()] * 4),
        (cgx.Plan.bytegrad("data"), [cgx.ByteGrad()] * 4),
        (cgx.Plan.bytegrad(("node", "local")), [{"node": cgx.ByteGrad(), "local": RAW}] * 4),
        (cgx.Plan.fp16(), [HALF] * 4),
        (cgx.Plan.fp16(("dc", "local")), [{"dc": HALF, "local": HALF}] * 4),
        (cgx.Plan.mixed_precision(), [HALF, FOUR, HALF, HALF]),
        (cgx.Plan.mixed_precision(cgx.Float8(), size_bound=199_999), [HALF, cgx.Float8(), HALF, cgx.Float8()]),
        (cgx.Plan.mixed_precision(size_bound=0), [FOUR] * 4),
        (
            cgx.Plan.mixed_precision(axis_name=("dc", "rack", "local")),
            [
                {"dc": HALF, "rack": HALF, "local": HALF},
                {"dc": FOUR, "rack": RAW, "local": RAW},
                *[{"dc": HALF, "rack": HALF, "local": HALF}] * 2,
            ],
        ),
        (cgx.Plan.mixed_precision(cgx.TopK(0.01)), [HALF, cgx.TopK(0.01), HALF, HALF]),
        (cgx.Plan.bsc(), [RAW, cgx.TopK(0.01, select="sampled"), RAW, RAW]),
        (
            cgx.Plan.bsc(0.1, 199_999, ("dc", "rack", "local"), "top", "exact"),
            [
                {"dc": RAW, "rack": RAW, "local": RAW},
                {"dc": cgx.TopK(0.1, pull="top"), "rack": RAW, "local": RAW},
                {"dc": RAW, "rack": RAW, "local": RAW},
                {"dc": cgx.TopK(0.1, pull="top"), "rack": RAW, "local": RAW},
            ],
        ),
        (cgx.Plan.bsc(size_bound=0, select="exact"), [cgx.TopK(0.01)] * 4),
    ],
    ids=[
        "cgx",
        "cgx with arguments",
        "bytegrad",
        "bytegrad on an axis",
        "bytegrad hierarchical",
        "fp16",
        "fp16 hierarchical",
        "mixed precision",
        "mixed precision with arguments",
        "all large",
        "mixed precision hierarchical",
        "mixed precision, sparse",
        "bsc",
        "bsc hierarchical",
        "bsc for all",
    ],
)
def test_presets(plan, found):
    assert codecs(plan) == found


BAD_ARGUMENTS = {
    "MaxMin": [(lambda: cgx.Plan.cgx(9), ValueError, "bits", "9")],
    "Plan.bytegrad": [(lambda: cgx.Plan.bytegrad(()), ValueError, "axis_name", "()")],
    "Plan.mixed_precision": [
        (lambda: cgx.Plan.mixed_precision(axis_name=("a", "a")), ValueError, "axis_name", "('a', 'a')"),
        (lambda: cgx.Plan.mixed_precision(size_bound=-1), ValueError, "size_bound", "-1"),
        (lambda: cgx.Plan.mixed_precision(size_bound=100000.0), TypeError, "size_bound", "100000.0"),
        (lambda: cgx.Plan.mixed_precision({"a": FOUR}), TypeError, "codec", "{'a'"),
        (lambda: cgx.Plan.mixed_precision({"a": FOUR, "b": RAW}, axis_name=("a", "b")), TypeError, "codec", "{'a'"),
    ],
    "Plan.bsc": [
        (lambda: cgx.Plan.bsc(2), ValueError, "threshold", "2"),
        (lambda: cgx.Plan.bsc(0), ValueError, "threshold", "0", "0.01"),
        (lambda: cgx.Plan.bsc(size_bound=-1), ValueError, "size_bound", "-1"),
        (lambda: cgx.Plan.bsc(axis_name=()), ValueError, "axis_name", "()"),
        (lambda: cgx.Plan.bsc(pull="push"), ValueError, "pull", "'push'"),
    ],
    "Plan.from_env": [
        (lambda: cgx.Plan.from_env([]), ValueError, "axis_name", "[]"),
        (lambda: cgx.Plan.from_env(("inner", "cross")), ValueError, "axis_name", "('inner'", '("cross",'),
        (lambda: cgx.Plan.from_env(3), ValueError, "axis_name", "3"),
        (lambda: cgx.Plan.from_env(("a", None)), ValueError, "axis_name", "('a', None)"),
        (lambda: cgx.Plan.from_env({"HOME": "/root"}), ValueError, "axis_name", "{'HOME'"),
    ],
}


@pytest.mark.parametrize("row", rows(BAD_ARGUMENTS))
def test_bad_arguments(row):
    refused(*row)


BITS, TUPLE = {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}, ("node", "local")


def env(**variables):
    return BITS | {f"CGX_{name}": value for name, value in variables.items()}


@pytest.mark.parametrize(
    ("axis_name", "environ", "expected"),
    [
        # One network.
        (None, {}, dict(default=RAW, schedule="two_shot")),
        (None, {"CGX_COMPRESSION_QUANTIZATION_BITS": "32"}, dict(default=RAW, schedule="two_shot")),
        (None, env(), dict(default=FOUR, schedule="two_shot")),
        ("data", env(), dict(default=FOUR, schedule="two_shot")),
        (("data",), env(), dict(default=FOUR, schedule="two_shot")),
        (
            None,
            env(COMPRESSION_QUANTIZATION_BITS="1", COMPRESSION_BUCKET_SIZE="33"),
            dict(default=cgx.MaxMin(1, 33), schedule="two_shot"),
        ),
        (
            None,
            env(COMPRESSION_SKIP_INCOMPLETE_BUCKETS="1"),
            dict(default=cgx.MaxMin(4, skip_incomplete=True), schedule="two_shot"),
        ),
        (None, env(COMPRESSION_MINIMAL_SIZE="3"), dict(default=FOUR, schedule="two_shot", min_size=17)),
        (None, env(COMPRESSION_MINIMAL_SIZE="17"), dict(default=FOUR, schedule="two_shot", min_size=18)),
        (None, env(COMPRESSION_MINIMAL_SIZE=str(2**40 - 1)), dict(default=FOUR, schedule="two_shot", min_size=2**40)),
        (None, env(FUSION_BUFFER_SIZE_MB="8"), dict(default=FOUR, schedule="two_shot", fusion_mb=8)),
        (None, env(INNER_REDUCTION_TYPE="Ring"), dict(default=FOUR, schedule="ring")),
        (
            None,
            env(CROSS_REDUCTION_TYPE="SRA", INTRA_BROADCAST="1", INTRA_COMPRESS="0"),
            dict(default=FOUR, schedule="two_shot"),
        ),
        (
            None,
            env(DEBUG_ALL_TO_ALL_REDUCTION="1", INNER_REDUCTION_TYPE="Ring"),
            dict(default=FOUR, schedule="one_shot"),
        ),
        (None, env(DEBUG_DUMMY_COMPRESSION="1"), dict(default=RAW, schedule="two_shot")),
        (
            None,
            env(INNER_COMMUNICATOR_TYPE="NCCL", CROSS_COMMUNICATOR_TYPE="NCCL"),
            dict(default=FOUR, schedule="two_shot"),
        ),
        (None, {"HOME": "/root", "CGXX": "1"}, dict(default=RAW, schedule="two_shot")),
        # Nodes, and ranks within a node.
        (
            TUPLE,
            env(),
            dict(default={"node": FOUR, "local": FOUR}, schedule={"node": "ring", "local": "two_shot"}, leader=True),
        ),
        (
            TUPLE,
            env(INTRA_BROADCAST="0"),
            dict(default={"node": FOUR, "local": FOUR}, schedule={"node": "ring", "local": "two_shot"}),
        ),
        (
            TUPLE,
            env(INTRA_COMPRESS="0"),
            dict(default={"node": FOUR, "local": RAW}, schedule={"node": "ring", "local": "two_shot"}, leader=True),
        ),
        (
            TUPLE,
            env(CROSS_REDUCTION_TYPE="SRA", INNER_REDUCTION_TYPE="Ring"),
            dict(default={"node": FOUR, "local": FOUR}, schedule={"node": "two_shot", "local": "ring"}, leader=True),
        ),
        (
            TUPLE,
            env(DEBUG_ALL_TO_ALL_REDUCTION="1"),
            dict(
                default={"node": FOUR, "local": FOUR}, schedule={"node": "one_shot", "local": "one_shot"}, leader=True
            ),
        ),
        (
            TUPLE,
            {},
            dict(default={"node": RAW, "local": RAW}, schedule={"node": "ring", "local": "two_shot"}, leader=True),
        ),
        (
            ("a", "b", "c"),
            env(INTRA_COMPRESS="0"),
            dict(
                default={"a": FOUR, "b": RAW, "c": RAW},
                schedule={"a": "ring", "b": "two_shot", "c": "two_shot"},
                leader=True,
            ),
        ),
    ],
    ids=str,
)
def test_cgx_variables(axis_name, environ, expected):
    assert cgx.Plan.from_env(axis_name, environ) == cgx.Plan(**dict(min_size=17, skip_1d=False) | expected)


@pytest.mark.parametrize(
    "environ",
    [
        env(),
        env(INTRA_BROADCAST="0"),
        env(INTRA_COMPRESS="0", CROSS_REDUCTION_TYPE="SRA"),
        env(DEBUG_ALL_TO_ALL_REDUCTION="1"),
        env(INNER_REDUCTION_TYPE="Ring", INTRA_BROADCAST="0"),
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", ["a", ("a", "b")])
def test_collectives_take_what_variables_ask_for(axes, environ):
    plan = cgx.Plan.from_env(axes, environ)
    x = {"large": normal((2, 2, 40, 30)), "tiny": normal((2, 2, 16), 1)}
    found, exact = (
        on_ranks(f, mesh(2, 2))(x)
        for f in (lambda x: cgx.compressed_psum(x, axes, plan), lambda x: jax.lax.psum(x, axes))
    )
    np.testing.assert_allclose(found["large"], exact["large"], atol=5 if environ else 1e-5)
    np.testing.assert_allclose(found["tiny"], exact["tiny"], rtol=1e-5)
    assert (np.abs(found["large"] - exact["large"]) > 1e-3).any() == bool(environ)


def test_the_process_has_variables(monkeypatch):
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", "7")
    assert cgx.Plan.from_env().default == cgx.MaxMin(7)
    assert environment.read().bits == 7


def test_what_only_transports_need():
    assert (environment.read({}).inner_communicator, environment.read({}).cross_communicator) == (None, "MPI")
    found = environment.read({"CGX_INNER_COMMUNICATOR_TYPE": "MPI", "CGX_CROSS_COMMUNICATOR_TYPE": "NCCL"})
    assert (found.inner_communicator, found.cross_communicator) == ("MPI", "NCCL")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("CGX_COMPRESSION_QUANTIZATION_BITS", "16", "one of 1, 2, 3, 4, 5, 6, 7, 8, 32"),
        ("CGX_COMPRESSION_QUANTIZATION_BITS", "", "one of 1, "),
        ("CGX_COMPRESSION_BUCKET_SIZE", "0", "an integer of at least 1"),
        ("CGX_COMPRESSION_BUCKET_SIZE", "1e3", "an integer of at least 1"),
        ("CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS", "yes", "one of 0, 1"),
        ("CGX_COMPRESSION_MINIMAL_SIZE", "-1", "an integer of at least 0"),
        ("CGX_COMPRESSION_MINIMAL_SIZE", str(2**40), "an integer of at least 0 (and less than 2^40)"),
        ("CGX_COMPRESSION_BUCKET_SIZE", "9" * 5000, "an integer of at least 1"),
        ("CGX_FUSION_BUFFER_SIZE_MB", "0", "an integer of at least 1"),
        ("CGX_INNER_COMMUNICATOR_TYPE", "GLOO", "one of MPI, SHM, NCCL"),
        ("CGX_CROSS_COMMUNICATOR_TYPE", "SHM", "one of MPI, NCCL"),
        ("CGX_INNER_REDUCTION_TYPE", "Tree", "one of SRA, Ring"),
        ("CGX_CROSS_REDUCTION_TYPE", "ring", "one of SRA, Ring"),
        ("CGX_INTRA_BROADCAST", "2", "one of 0, 1"),
        ("CGX_INTRA_COMPRESS", "on", "one of 0, 1"),
        ("CGX_DEBUG_ALL_TO_ALL_REDUCTION", "true", "one of 0, 1"),
        ("CGX_DEBUG_DUMMY_COMPRESSION", "x", "one of 0, 1"),
        ("CGX_REMOTE_BUF_COMPRESSION", "2", "one of 0, 1"),
    ],
)
def test_bad_variables(variable, value, expected):
    with pytest.raises(ValueError) as caught:
        cgx.Plan.from_env(environ={variable: value})
    assert str(caught.value).startswith(f"Plan.from_env: variable {variable}: expected {expected}")
    assert str(caught.value).endswith(f"got {value!r}")


def test_a_ratio_that_makes_sums_wrong():
    words = says(
        "Plan.from_env", "CGX_COMPRESSION_FAKE_RATIO", expected="1 1.0", got="'0.5'", remedy="wrong sums unset"
    )
    with raises(ValueError, words):
        cgx.Plan.from_env(environ={"CGX_COMPRESSION_FAKE_RATIO": "0.5"})
    harmless = {"CGX_COMPRESSION_FAKE_RATIO": "1.0", "CGX_REMOTE_BUF_COMPRESSION": "1"}
    assert cgx.Plan.from_env(environ=harmless) == cgx.Plan.from_env(environ={})


def test_arguments_come_before_variables():
    """CGXState does the same. The ring, the leader and the fusion are still those of the variables."""
    given = env(COMPRESSION_BUCKET_SIZE="64", COMPRESSION_MINIMAL_SIZE="99", FUSION_BUFFER_SIZE_MB="8")
    found = cgx.Plan.from_env(TUPLE, given, bits=2, bucket_size=128, min_size=1024, skip_1d=True)
    codec = cgx.MaxMin(2, 128)
    assert found == cgx.Plan(
        {"node": codec, "local": codec}, fusion_mb=8, schedule={"node": "ring", "local": "two_shot"}, leader=True
    )
    assert cgx.Plan.from_env(None, given, bits=32).default == RAW
    assert cgx.Plan.from_env(None, given, min_size=0).min_size == 17
    for bits in (0, 9, 16):
        with raises(ValueError, says("Plan.from_env", "bits", expected="1 8 32", got=str(bits))):
            cgx.Plan.from_env(bits=bits, environ={})
    with raises(TypeError, says("Plan.from_env", "bits", expected="integer", got="4.0")):
        cgx.Plan.from_env(bits=4.0, environ={})
    with raises(ValueError, says("Plan.from_env", "bucket_size", expected="integer 1", got="0")):
        cgx.Plan.from_env(bucket_size=0, environ={})


def test_a_variable_that_cgx_does_not_have():
    words = says(
        "Plan.from_env",
        "CGX_COMPRESSION_BITS",
        expected="one of CGX_COMPRESSION_QUANTIZATION_BITS,",
        got="'CGX_COMPRESSION_BITS'",
        remedy="unset it",
    )
    with raises(ValueError, words):
        cgx.Plan.from_env(environ={"CGX_COMPRESSION_BITS": "4"})

"""Tests plans that do what other systems do, and CGX's environment variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import refused
from helpers import normal
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.plan import environment

SHAPES = {"bias": (2000,), "large": (500, 401), "small": (31, 33), "weights": (500, 400)}
TREE = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
FOUR, HALF, RAW = cgx.MaxMin(4), cgx.Cast("float16"), cgx.Raw()
SPARSE, LEVELS = cgx.TopK(0.01, select="sampled"), ("dc", "rack", "local")


def levels(codec):
    """Returns a codec for the outermost axis."""
    return dict.fromkeys(LEVELS, RAW) | {"dc": codec}


def codecs(plan):
    return [route.codec for route in plan.routes("test", "x", TREE)]


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (cgx.Plan.cgx(), [RAW, cgx.MaxMin(4, 1024)] * 2),
        (cgx.Plan.cgx(2, 128, "stochastic"), [RAW, cgx.MaxMin(2, 128, "stochastic")] * 2),
        (cgx.Plan.bytegrad(), [cgx.ByteGrad()] * 4),
        (cgx.Plan.bytegrad("data"), [cgx.ByteGrad()] * 4),
        (cgx.Plan.bytegrad(("node", "local")), [{"node": cgx.ByteGrad(), "local": RAW}] * 4),
        (cgx.Plan.fp16(), [HALF] * 4),
        (cgx.Plan.fp16(("dc", "local")), [{"dc": HALF, "local": HALF}] * 4),
        (cgx.Plan.mixed_precision(), [HALF, SPARSE, HALF, HALF]),
        (cgx.Plan.mixed_precision(cgx.Float8(), size_bound=199_999), [HALF, cgx.Float8(), HALF, cgx.Float8()]),
        (cgx.Plan.mixed_precision(size_bound=0), [SPARSE] * 4),
        (
            cgx.Plan.mixed_precision(axis_name=LEVELS),
            [dict.fromkeys(LEVELS, HALF), levels(SPARSE), *[dict.fromkeys(LEVELS, HALF)] * 2],
        ),
        (cgx.Plan.bsc(), [RAW, cgx.TopK(0.01, select="sampled"), RAW, RAW]),
        (
            cgx.Plan.bsc(0.1, 199_999, LEVELS, "top", "exact"),
            [dict.fromkeys(LEVELS, RAW), levels(cgx.TopK(0.1, pull="top"))] * 2,
        ),
        (cgx.Plan.bsc(size_bound=0, select="exact"), [cgx.TopK(0.01)] * 4),
    ],
    ids=str,
)
def test_presets(plan, found):
    assert codecs(plan) == found


BITS, TUPLE = {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}, ("node", "local")


def env(**variables):
    return BITS | {f"CGX_{name}": value for name, value in variables.items()}


def one(default=FOUR, schedule="two_shot", **fields):
    """Returns the fields of a plan for one network."""
    return dict(default=default, schedule=schedule, **fields)


def two(between=FOUR, within=FOUR, schedules=("ring", "two_shot"), leader=True):
    """Returns the fields of a plan for nodes, and ranks within a node."""
    return dict(default=dict(zip(TUPLE, (between, within))), schedule=dict(zip(TUPLE, schedules)), leader=leader)


THREE = dict(default={"a": FOUR, "b": RAW, "c": RAW}, schedule={"a": "ring", "b": "two_shot", "c": "two_shot"})
COMMUNICATORS = env(INNER_COMMUNICATOR_TYPE="NCCL", CROSS_COMMUNICATOR_TYPE="NCCL")


@pytest.mark.parametrize(
    ("axis_name", "environ", "expected"),
    [
        (None, {}, one(RAW)),
        (None, {"CGX_COMPRESSION_QUANTIZATION_BITS": "32"}, one(RAW)),
        (None, env(), one()),
        ("data", env(), one()),
        (("data",), env(), one()),
        (None, env(COMPRESSION_QUANTIZATION_BITS="1", COMPRESSION_BUCKET_SIZE="33"), one(cgx.MaxMin(1, 33))),
        (None, env(COMPRESSION_SKIP_INCOMPLETE_BUCKETS="1"), one(cgx.MaxMin(4, skip_incomplete=True))),
        (None, env(COMPRESSION_MINIMAL_SIZE="3"), one(min_size=17)),
        (None, env(COMPRESSION_MINIMAL_SIZE="17"), one(min_size=18)),
        (None, env(COMPRESSION_MINIMAL_SIZE=str(2**40 - 1)), one(min_size=2**40)),
        (None, env(FUSION_BUFFER_SIZE_MB="8"), one(fusion_mb=8)),
        (None, env(INNER_REDUCTION_TYPE="Ring"), one(schedule="ring")),
        (None, env(CROSS_REDUCTION_TYPE="SRA", INTRA_BROADCAST="1", INTRA_COMPRESS="0"), one()),
        (None, env(DEBUG_ALL_TO_ALL_REDUCTION="1", INNER_REDUCTION_TYPE="Ring"), one(schedule="one_shot")),
        (None, env(DEBUG_DUMMY_COMPRESSION="1"), one(RAW)),
        (None, COMMUNICATORS, one()),
        (None, {"HOME": "/root", "CGXX": "1"}, one(RAW)),
        (TUPLE, env(), two()),
        (TUPLE, env(INTRA_BROADCAST="0"), two(leader=False)),
        (TUPLE, env(INTRA_COMPRESS="0"), two(within=RAW)),
        (TUPLE, env(CROSS_REDUCTION_TYPE="SRA", INNER_REDUCTION_TYPE="Ring"), two(schedules=("two_shot", "ring"))),
        (TUPLE, env(DEBUG_ALL_TO_ALL_REDUCTION="1"), two(schedules=("one_shot", "one_shot"))),
        (TUPLE, {}, two(RAW, RAW)),
        (("a", "b", "c"), env(INTRA_COMPRESS="0"), THREE | dict(leader=True)),
    ],
    ids=str,
)
def test_cgx_variables(axis_name, environ, expected):
    assert cgx.Plan.from_env(axis_name, environ) == cgx.Plan(**dict(min_size=17, skip_1d=False) | expected)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        env(),
        env(INTRA_BROADCAST="0"),
        env(INTRA_COMPRESS="0", CROSS_REDUCTION_TYPE="SRA"),
        env(DEBUG_ALL_TO_ALL_REDUCTION="1"),
        env(INNER_REDUCTION_TYPE="Ring", INTRA_BROADCAST="0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", ["a", ("a", "b")])
def test_collectives_take_what_variables_ask_for(axes, environ):
    plan = cgx.Plan.from_env(axes, environ)
    x = {"large": normal((2, 2, 40, 30)), "tiny": normal((2, 2, 16), 1)}
    f = lambda x: (cgx.compressed_psum(x, axes, plan), jax.lax.psum(x, axes))
    found, exact = on_ranks(f, mesh(2, 2))(x)
    np.testing.assert_allclose(found["large"], exact["large"], atol=5 if environ else 1e-5)
    np.testing.assert_allclose(found["tiny"], exact["tiny"], rtol=1e-5)
    assert (np.abs(found["large"] - exact["large"]) > 1e-3).any() == bool(environ)


def test_the_process_has_variables(monkeypatch):
    monkeypatch.setenv("CGX_COMPRESSION_QUANTIZATION_BITS", "7")
    assert cgx.Plan.from_env().default == cgx.MaxMin(7)


def test_a_message_has_up_to_64_mib_without_variables():
    rows = cgx.Plan.from_env(environ=BITS).explain([jax.ShapeDtypeStruct((8, 2**20), jnp.float32)] * 3, 2).rows
    assert [row.message for row in rows] == [1, 1, 2]


def test_what_only_transports_need():
    assert (environment.read({}).inner_communicator, environment.read({}).cross_communicator) == (None, "MPI")
    found = environment.read({"CGX_INNER_COMMUNICATOR_TYPE": "MPI", "CGX_CROSS_COMMUNICATOR_TYPE": "NCCL"})
    assert (found.inner_communicator, found.cross_communicator) == ("MPI", "NCCL")


BAD_VARIABLES = {
    "COMPRESSION_QUANTIZATION_BITS": ["16", ""],
    "COMPRESSION_BUCKET_SIZE": ["0", "1e3", "9" * 5000],
    "COMPRESSION_SKIP_INCOMPLETE_BUCKETS": ["yes"],
    "COMPRESSION_MINIMAL_SIZE": ["-1", str(2**40)],
    "FUSION_BUFFER_SIZE_MB": ["0"],
    "INNER_COMMUNICATOR_TYPE": ["GLOO"],
    "CROSS_COMMUNICATOR_TYPE": ["SHM"],
    "INNER_REDUCTION_TYPE": ["Tree"],
    "CROSS_REDUCTION_TYPE": ["ring"],
    "INTRA_BROADCAST": ["2"],
    "INTRA_COMPRESS": ["on"],
    "DEBUG_ALL_TO_ALL_REDUCTION": ["true"],
    "DEBUG_DUMMY_COMPRESSION": ["x"],
    "REMOTE_BUF_COMPRESSION": ["2"],
    "COMPRESSION_FAKE_RATIO": ["0.5"],  # it would make sums wrong
    "COMPRESSION_BITS": ["4"],  # CGX has no such variable
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD_VARIABLES for value in BAD_VARIABLES[name]])
def test_bad_variables(name, value):
    variable = f"CGX_{name}"
    got, remedy = (variable, "unset") if name == "COMPRESSION_BITS" else (value, "")
    call = lambda: cgx.Plan.from_env(environ={variable: value})
    refused("Plan.from_env", call, ValueError, variable, repr(got), remedy)


def test_variables_that_change_nothing():
    harmless = {"CGX_COMPRESSION_FAKE_RATIO": "1.0", "CGX_REMOTE_BUF_COMPRESSION": "1"}
    assert cgx.Plan.from_env(environ=harmless) == cgx.Plan.from_env(environ={})


def test_arguments_come_before_variables():
    """As in CGXState. Of the smallest sizes, the larger one counts. The rest is that of the variables."""
    given = env(COMPRESSION_BUCKET_SIZE="64", COMPRESSION_MINIMAL_SIZE="99", FUSION_BUFFER_SIZE_MB="8")
    found = cgx.Plan.from_env(TUPLE, given, bits=2, bucket_size=128, min_size=1024, skip_1d=True)
    codec = cgx.MaxMin(2, 128)
    assert found == cgx.Plan(**two(codec, codec), fusion_mb=8)
    assert cgx.Plan.from_env(None, given, bits=32).default == RAW
    assert cgx.Plan.from_env(None, given, min_size=0).min_size == 100
    assert cgx.Plan.from_env(None, env(), min_size=0).min_size == 17

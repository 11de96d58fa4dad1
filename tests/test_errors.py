"""Tests that bad input raises errors at trace time, with function, argument, expected and given value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import names
from helpers import normal

import jaxcgx as cgx
from jaxcgx.native import registration

STOCHASTIC = cgx.MaxMin(4, rounding="stochastic")
X, PAYLOAD, KEYS = jnp.zeros(3), jnp.zeros(32, jnp.uint8), jax.random.split(jax.random.key(0))


@dataclasses.dataclass
class Thawed(cgx.Codec):
    x: int = 1


@dataclasses.dataclass(frozen=True)
class Wrong(cgx.Codec):
    def code_bytes(self, n, dtype):
        return n

    def encode_buckets(self, x, noise):
        return jnp.zeros((len(x), 0)), x.astype(jnp.int32)


def said(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_wordings():
    """Seven whole wordings. Five more are in collectives/test_errors.py. Other tests check whom an error names."""
    assert (
        said(TypeError, lambda: cgx.MaxMin(2.5)) == "MaxMin: argument 'bits': expected an integer from 1 to 8, got 2.5"
    )
    assert said(ValueError, lambda: cgx.Float8("e3m4")) == (
        "Float8: argument 'format': expected one of 'e4m3', 'e5m2', got 'e3m4'"
    )
    assert said(TypeError, lambda: cgx.encode(X, "maxmin")) == (
        "encode: argument 'codec': expected a codec such as jaxcgx.MaxMin(bits=4), got 'maxmin'"
    )
    assert said(ValueError, lambda: cgx.encode(X, STOCHASTIC)) == (
        "encode: argument 'key': expected a random key, because MaxMin(bits=4, rounding='stochastic') draws "
        "random bits, got None; pass key=jax.random.key(...), another one every step"
    )
    assert said(ValueError, lambda: decode(PAYLOAD[1:])) == (
        "decode: argument 'payload': expected uint8[32], which is what MaxMin(bits=4, bucket_size=512, "
        "rounding='nearest', skip_incomplete=False, rotate=False) makes of float32[9], got uint8[31]"
    )
    plan = cgx.Plan(cgx.MaxMin(), [("kernal", cgx.Raw())])
    assert said(ValueError, lambda: plan.explain({"kernel": jnp.zeros((9, 9))}, 2)) == (
        "Plan.explain: argument 'tree': expected a leaf for every rule of the plan, got none for Rule(codec=Raw(), "
        "path='kernal') among 'kernel'; correct the rule, take it out, or make it optional=True"
    )
    assert said(ValueError, lambda: cgx.Plan.from_env(environ={"CGX_INTRA_BROADCAST": "2"})) == (
        "Plan.from_env: variable CGX_INTRA_BROADCAST: expected one of 0, 1, got '2'"
    )


def decode(payload=PAYLOAD, shape=(9,), dtype="float32"):
    return cgx.decode(payload, cgx.MaxMin(), shape, dtype)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: cgx.MaxMin().wire_bytes((3,), "int32"), TypeError, "MaxMin.wire_bytes dtype int32"),
        (lambda: cgx.encode(jnp.arange(3), cgx.MaxMin()), TypeError, "encode x int32"),
        (lambda: cgx.encode(jnp.zeros(3, jnp.complex64), cgx.Raw()), TypeError, "encode x complex64"),
        (lambda: cgx.encode(np.zeros(3), cgx.Raw()), TypeError, "encode x float64"),
        (lambda: cgx.encode(None, cgx.Raw()), TypeError, "encode x None"),
        (lambda: cgx.encode("abc", cgx.Raw()), TypeError, "encode x 'abc'"),
        (lambda: cgx.encode(X, cgx.MaxMin), TypeError, "encode codec <class 'jaxcgx.codecs.maxmin.MaxMin'>"),
        (lambda: cgx.encode(X, Thawed()), TypeError, "encode codec Thawed(x=1) dataclass(frozen=True)"),
        (lambda: cgx.encode(X, Wrong()), TypeError, "Wrong.encode_buckets - int32[1, 3]"),
        (lambda: cgx.encode(X, STOCHASTIC, key=3), TypeError, "encode key 3"),
        (lambda: cgx.encode(X, STOCHASTIC, key=KEYS), ValueError, "encode key an array of keys of shape (2,)"),
        (lambda: cgx.roundtrip(jnp.zeros(3, bool), cgx.Raw()), TypeError, "roundtrip x bool"),
        (lambda: jax.jit(lambda x: cgx.roundtrip(x, STOCHASTIC))(X), ValueError, "roundtrip key None"),
        (lambda: decode(jnp.zeros(48, jnp.uint8)), ValueError, "decode payload uint8[48]"),
        (lambda: jax.jit(decode)(PAYLOAD[1:]), ValueError, "decode payload uint8[31]"),
        (lambda: decode(PAYLOAD.astype(jnp.int8)), ValueError, "decode payload int8[32]"),
        (lambda: decode(b"123"), ValueError, "decode payload bytes"),
        (lambda: decode(dtype="foo"), TypeError, "decode dtype foo"),
        (lambda: decode(dtype="int8"), TypeError, "decode dtype int8"),
        (lambda: decode(shape=9), TypeError, "decode shape 9"),
        (lambda: decode(shape=(-9,)), ValueError, "decode shape (-9,)"),
    ],
)
def test_calls(call, error, words):
    with names(error, words):
        call()


def test_a_gpu_without_the_cuda_half_says_so():
    if registration.MODULE and registration.MODULE.build_info()["cuda"]:
        pytest.skip("this build has a CUDA half")
    traced = jax.jit(lambda x: cgx.encode(x, cgx.MaxMin())).trace(jnp.zeros(3))
    with names(NotImplementedError, "jaxcgx_encode - GPU CUDA nvcc -Ccmake.define.JAXCGX_CUDA=ON JAXCGX_REFERENCE=1"):
        traced.lower(lowering_platforms=("cuda",))


def test_keys_of_every_kind_are_accepted():
    x = normal(100)
    typed = cgx.encode(x, STOCHASTIC, jax.random.key(5))
    assert (typed == cgx.encode(x, STOCHASTIC, jax.random.PRNGKey(5))).all()
    assert (typed == cgx.encode(x, STOCHASTIC, jax.random.key_data(jax.random.key(5)))).all()
    rbg = [cgx.encode(x, STOCHASTIC, jax.random.key(seed, impl="rbg")) for seed in (0, 1)]
    assert (rbg[0] != rbg[1]).any()


def test_what_numpy_and_python_numbers_become():
    assert cgx.roundtrip(np.ones(3, np.float32), cgx.MaxMin()).dtype == jnp.float32
    assert cgx.roundtrip([1.0, 2.0], cgx.MaxMin()).dtype == jnp.float32
    assert cgx.MaxMin(bits=np.int64(4)) == cgx.MaxMin(4) and hash(cgx.MaxMin(bits=np.int64(4))) == hash(cgx.MaxMin(4))
    assert cgx.Cast(jnp.bfloat16) == cgx.Cast("bfloat16")

"""Tests that bad input raises errors at trace time, with function, argument, expected and given value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, says
from helpers import normal

import jaxcgx as cgx
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import Layout

STOCHASTIC = cgx.MaxMin(4, rounding="stochastic")
LAYOUT = Layout(cgx.MaxMin(4, 64), ((100,), (7,)), (jnp.float32, jnp.bfloat16), chunks=2)
LEAVES = [jnp.zeros(100), jnp.zeros(7, jnp.bfloat16)]
PAYLOADS = jnp.zeros((3, LAYOUT.chunk_bytes), jnp.uint8)


@dataclasses.dataclass
class Thawed(cgx.Codec):
    x: int = 1


@dataclasses.dataclass(frozen=True)
class Wrong(cgx.Codec):
    def code_bytes(self, n, dtype):
        return n

    def encode_buckets(self, x, noise):
        return jnp.zeros((len(x), 0)), x.astype(jnp.int32)


# Seven whole wordings. Five more are in collectives/test_errors.py. All other tests compare the fields of an error.
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cgx.MaxMin(bits=2.5), TypeError, "MaxMin: argument 'bits': expected an integer from 1 to 8, got 2.5"),
        (
            lambda: cgx.Float8("e3m4"),
            ValueError,
            "Float8: argument 'format': expected one of 'e4m3', 'e5m2', got 'e3m4'",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), "maxmin"),
            TypeError,
            "encode: argument 'codec': expected a codec such as jaxcgx.MaxMin(bits=4), got 'maxmin'",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), STOCHASTIC),
            ValueError,
            "encode: argument 'key': expected a random key, because MaxMin(bits=4, rounding='stochastic') draws "
            "random bits, got None; pass key=jax.random.key(...), another one every step",
        ),
        (
            lambda: cgx.decode(jnp.zeros(31, jnp.uint8), cgx.MaxMin(), (9,), "float32"),
            ValueError,
            "decode: argument 'payload': expected uint8[32], which is what MaxMin(bits=4, bucket_size=512, "
            "rounding='nearest', skip_incomplete=False, rotate=False) makes of float32[9], got uint8[31]",
        ),
        (
            lambda: cgx.Plan(cgx.MaxMin(), [("kernal", cgx.Raw())]).explain({"kernel": jnp.zeros((9, 9))}, 2),
            ValueError,
            "Plan.explain: argument 'tree': expected a leaf for every rule of the plan, got none for Rule(codec=Raw(), "
            "path='kernal') among 'kernel'; correct the rule, take it out, or make it optional=True",
        ),
        (
            lambda: cgx.Plan.from_env(environ={"CGX_INTRA_BROADCAST": "2"}),
            ValueError,
            "Plan.from_env: variable CGX_INTRA_BROADCAST: expected one of 0, 1, got '2'",
        ),
    ],
)
def test_wordings(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: cgx.MaxMin(bits=0), ValueError, says("MaxMin", "bits", expected="integer 1 8", got="0")),
        (lambda: cgx.MaxMin(bits=9), ValueError, says("MaxMin", "bits", expected="integer 1 8", got="9")),
        (lambda: cgx.MaxMin(bits=2.5), TypeError, says("MaxMin", "bits", expected="integer 1 8", got="2.5")),
        (lambda: cgx.MaxMin(bits=True), TypeError, says("MaxMin", "bits", expected="integer 1 8", got="True")),
        (lambda: cgx.MaxMin(bits="4"), TypeError, says("MaxMin", "bits", expected="integer 1 8", got="'4'")),
        (
            lambda: cgx.MaxMin(bucket_size=-1),
            ValueError,
            says("MaxMin", "bucket_size", expected="integer 1 2^40", got="-1"),
        ),
        (
            lambda: cgx.MaxMin(bucket_size=2**70),
            ValueError,
            says("MaxMin", "bucket_size", expected="integer 1 2^40", got="1180591620717411303424"),
        ),
        (
            lambda: cgx.MaxMin(bucket_size=0),
            ValueError,
            says("MaxMin", "bucket_size", expected="integer 1 2^40", got="0"),
        ),
        (
            lambda: cgx.MaxMin(rounding="up"),
            ValueError,
            says("MaxMin", "rounding", expected="'nearest' 'stochastic' 'correlated'", got="'up'"),
        ),
        (
            lambda: cgx.MaxMin(skip_incomplete=2),
            TypeError,
            says("MaxMin", "skip_incomplete", expected="True False", got="2"),
        ),
        (
            lambda: cgx.ByteGrad(compatible="no"),
            TypeError,
            says("ByteGrad", "compatible", expected="True False", got="'no'"),
        ),
        (lambda: cgx.AbsMax(bits=1), ValueError, says("AbsMax", "bits", expected="integer 2 8", got="1")),
        (
            lambda: cgx.Micro("fp4"),
            ValueError,
            says("Micro", "format", expected="'nvfp4' 'mxfp4' 'mxfp8'", got="'fp4'"),
        ),
        (lambda: cgx.Float8("e3m4"), ValueError, says("Float8", "format", expected="'e4m3' 'e5m2'", got="'e3m4'")),
        (
            lambda: cgx.Cast("float32"),
            ValueError,
            says("Cast", "dtype", expected="'bfloat16' 'float16'", got="'float32'"),
        ),
        (
            lambda: cgx.Sign(bucket_size=1.0),
            TypeError,
            says("Sign", "bucket_size", expected="integer 1 2^40", got="1.0"),
        ),
        (lambda: cgx.Cast(3), ValueError, says("Cast", "dtype", expected="'bfloat16' 'float16'", got="3")),
    ],
)
def test_codecs(make, error, words):
    with raises(error, words):
        make()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: cgx.encode(jnp.arange(3), cgx.MaxMin()),
            TypeError,
            says("encode", "x", expected="float32 bfloat16 float16", got="int32"),
        ),
        (
            lambda: cgx.encode(jnp.zeros(3, jnp.complex64), cgx.Raw()),
            TypeError,
            says("encode", "x", expected="float32 bfloat16 float16", got="complex64"),
        ),
        (
            lambda: cgx.encode(np.zeros(3), cgx.Raw()),
            TypeError,
            says("encode", "x", expected="float32 bfloat16 float16", got="float64"),
        ),
        (
            lambda: cgx.roundtrip(jnp.zeros(3, bool), cgx.Raw()),
            TypeError,
            says("roundtrip", "x", expected="float32 bfloat16 float16", got="bool"),
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), "maxmin"),
            TypeError,
            says("encode", "codec", expected="codec", got="'maxmin'"),
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), cgx.MaxMin),
            TypeError,
            says("encode", "codec", expected="codec", got="<class 'jaxcgx.codecs.maxmin.MaxMin'>"),
        ),
        (lambda: cgx.encode(None, cgx.Raw()), TypeError, says("encode", "x", expected="array", got="None")),
        (lambda: cgx.encode("abc", cgx.Raw()), TypeError, says("encode", "x", expected="array", got="'abc'")),
        (
            lambda: cgx.encode(jnp.zeros(3), Thawed()),
            TypeError,
            says("encode", "codec", expected="hashable", got="Thawed(x=1)", remedy="dataclass(frozen=True)"),
        ),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), (9,), "foo"),
            TypeError,
            says("decode", "dtype", expected="float32 bfloat16 float16", got="foo"),
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), Wrong()),
            TypeError,
            says("Wrong.encode_buckets", expected="uint8[1,3]", got="int32[1, 3]"),
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), STOCHASTIC),
            ValueError,
            says(
                "encode",
                "key",
                expected="random key MaxMin(bits=4 draws random bits",
                got="None",
                remedy="key=jax.random.key(",
            ),
        ),
        (
            lambda: jax.jit(lambda x: cgx.roundtrip(x, STOCHASTIC))(jnp.zeros(3)),
            ValueError,
            says("roundtrip", "key", expected="random key MaxMin(bits=4 draws random bits", got="None"),
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), STOCHASTIC, key=3),
            TypeError,
            says("encode", "key", expected="key jax.random.key PRNGKey", got="3"),
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), STOCHASTIC, key=jax.random.split(jax.random.key(0))),
            ValueError,
            says("encode", "key", expected="one key", got="an array of keys of shape (2,)"),
        ),
        (
            lambda: cgx.decode(cgx.encode(normal(9), cgx.MaxMin())[:-1], cgx.MaxMin(), (9,), "float32"),
            ValueError,
            says("decode", "payload", expected="uint8[32] MaxMin(bits=4 float32[9]", got="uint8[31]"),
        ),
        (
            lambda: cgx.decode(jnp.zeros(48, jnp.uint8), cgx.MaxMin(), (9,), "float32"),
            ValueError,
            says("decode", "payload", expected="uint8[32] MaxMin(bits=4 float32[9]", got="uint8[48]"),
        ),
        (
            lambda: jax.jit(lambda p: cgx.decode(p, cgx.MaxMin(), (9,), "float32"))(jnp.zeros(31, jnp.uint8)),
            ValueError,
            says("decode", "payload", expected="uint8[32] MaxMin(bits=4 float32[9]", got="uint8[31]"),
        ),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.int8), cgx.MaxMin(), (9,), "float32"),
            ValueError,
            says("decode", "payload", expected="uint8[32] MaxMin(bits=4 float32[9]", got="int8[32]"),
        ),
        (
            lambda: cgx.decode(b"123", cgx.MaxMin(), (9,), "float32"),
            ValueError,
            says("decode", "payload", expected="uint8[32] MaxMin(bits=4 float32[9]", got="bytes"),
        ),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), (9,), "int8"),
            TypeError,
            says("decode", "dtype", expected="float32 bfloat16 float16", got="int8"),
        ),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), 9, "float32"),
            TypeError,
            says("decode", "shape", expected="tuple integers", got="9"),
        ),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), (-9,), "float32"),
            ValueError,
            says("decode", "shape", expected="sizes 0", got="(-9,)"),
        ),
        (
            lambda: cgx.MaxMin().wire_bytes((3,), "int32"),
            TypeError,
            says("MaxMin.wire_bytes", "dtype", expected="float32 bfloat16 float16", got="int32"),
        ),
    ],
)
def test_calls(call, error, words):
    with raises(error, words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.encode(LAYOUT, LEAVES[:1]), says("encode", "leaves", expected="2 arrays", got="1")),
        (
            lambda: ops.encode(LAYOUT, LEAVES[::-1]),
            says("encode", "leaves", at="leaf [0]", expected="float32[100]", got="bfloat16[7]"),
        ),
        (
            lambda: ops.encode_fed(LAYOUT, LEAVES, LEAVES),
            says("encode_fed", "residuals", at="leaf [1]", expected="float32[7]", got="bfloat16[7]"),
        ),
        (
            lambda: ops.encode(Layout.of(STOCHASTIC, LEAVES), LEAVES),
            says("encode", "key", expected="uint32[2] MaxMin(bits=4", got="None"),
        ),
        (
            lambda: ops.encode(Layout.of(STOCHASTIC, LEAVES), LEAVES, jnp.zeros(4, jnp.uint32)),
            says("encode", "key", expected="uint32[2]", got="uint32[4]"),
        ),
        (
            lambda: ops.decode(LAYOUT, PAYLOADS),
            says("decode", "payload", expected=f"uint8[2 {LAYOUT.chunk_bytes}]", got=f"uint8[3, {LAYOUT.chunk_bytes}]"),
        ),
        (
            lambda: ops.decode(LAYOUT, PAYLOADS[:2].astype(jnp.float32)),
            says("decode", "payload", expected="uint8[2", got="float32[2"),
        ),
        (
            lambda: ops.reduce_encoded(LAYOUT, PAYLOADS[:, 1:]),
            says("reduce_encoded", "payloads", expected=f"uint8[3 {LAYOUT.chunk_bytes}]", got="uint8[3, "),
        ),
        (
            lambda: ops.reduce(LAYOUT, PAYLOADS),
            says("reduce", "layout", expected="layout one chunk", got="one of 2", remedy="reduce_encoded"),
        ),
        (
            lambda: ops.reduce_encoded(LAYOUT, PAYLOADS, divisor=0),
            says("reduce_encoded", "divisor", expected="positive number 2^-126", got="0"),
        ),
        (
            lambda: ops.reduce_fed(LAYOUT, PAYLOADS, LEAVES, divisor=1e-38),
            says("reduce_fed", "divisor", expected="positive number 2^-126", got="1e-38"),
        ),
        (
            lambda: ops.reduce_encoded(LAYOUT, PAYLOADS, own=ops.Own(LEAVES[:1], 0)),
            says("reduce_encoded", "own", expected="2 arrays", got="1"),
        ),
        (
            lambda: ops.reduce_fed(LAYOUT, PAYLOADS, LEAVES),
            says("reduce_fed", "residuals", at="leaf [1]", expected="float32[7]", got="bfloat16[7]"),
        ),
    ],
)
def test_operations(call, words):
    with raises(ValueError, words):
        jax.make_jaxpr(call)()


def test_a_gpu_without_the_cuda_half_says_so():
    if registration.MODULE and registration.MODULE.build_info()["cuda"]:
        pytest.skip("this build has a CUDA half")
    traced = jax.jit(lambda x: cgx.encode(x, cgx.MaxMin())).trace(jnp.zeros(3))
    words = says("jaxcgx_encode", expected="GPU CUDA nvcc -Ccmake.define.JAXCGX_CUDA=ON JAXCGX_REFERENCE=1")
    with raises(NotImplementedError, words):
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    "other",
    [
        says("psum", "x", at="leaf ['w']", expected="array 'a'", got="float32[8]", remedy="pass tiled=True"),
        says("compressed_psum", "y", at="leaf ['w']"),
        says("compressed_psum", "x"),
        says("compressed_psum", "x", at="leaf ['w']", expected="'a' array"),
        says("compressed_psum", "x", at="leaf ['w']", expected="float32[8]"),
        says("compressed_psum", "x", at="leaf ['w']", got="float32"),
        says("compressed_psum", "x", at="leaf ['w']", got="array"),
        says("compressed_psum", "x", at="leaf ['w']", remedy="tiled=False"),
    ],
    ids=["function", "argument", "leaf", "order", "expected", "a part", "got", "remedy"],
)
def test_fields_that_differ(other):
    text = "compressed_psum: argument 'x', leaf ['w']: expected an array of 'a', got float32[8]; pass tiled=True"
    says("compressed_psum", "x", at="leaf ['w']", expected="array 'a'", got="float32[8]", remedy="tiled=True").check(
        text
    )
    with pytest.raises(AssertionError):
        other.check(text)


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

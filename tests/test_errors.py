"""Bad input: which function, which argument, what was expected, what came, what to do. At trace time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: cgx.MaxMin(bits=0), ValueError, "MaxMin: argument 'bits': expected an integer from 1 to 8, got 0"),
        (lambda: cgx.MaxMin(bits=9), ValueError, "MaxMin: argument 'bits': expected an integer from 1 to 8, got 9"),
        (lambda: cgx.MaxMin(bits=2.5), TypeError, "MaxMin: argument 'bits': expected an integer from 1 to 8, got 2.5"),
        (
            lambda: cgx.MaxMin(bits=True),
            TypeError,
            "MaxMin: argument 'bits': expected an integer from 1 to 8, got True",
        ),
        (lambda: cgx.MaxMin(bits="4"), TypeError, "MaxMin: argument 'bits': expected an integer from 1 to 8, got '4'"),
        (
            lambda: cgx.MaxMin(bucket_size=-1),
            ValueError,
            "MaxMin: argument 'bucket_size': expected an integer from 1 to 2^40, got -1",
        ),
        (
            lambda: cgx.MaxMin(bucket_size=2**70),
            ValueError,
            "MaxMin: argument 'bucket_size': expected an integer from 1 to 2^40, got 1180591620717411303424",
        ),
        (
            lambda: cgx.MaxMin(bucket_size=0),
            ValueError,
            "MaxMin: argument 'bucket_size': expected an integer from 1 to 2^40, got 0",
        ),
        (
            lambda: cgx.MaxMin(rounding="up"),
            ValueError,
            "MaxMin: argument 'rounding': expected one of 'nearest', 'stochastic', got 'up'",
        ),
        (
            lambda: cgx.MaxMin(skip_incomplete=2),
            TypeError,
            "MaxMin: argument 'skip_incomplete': expected True or False, got 2",
        ),
        (
            lambda: cgx.ByteGrad(compatible="no"),
            TypeError,
            "ByteGrad: argument 'compatible': expected True or False, got 'no'",
        ),
        (lambda: cgx.AbsMax(bits=1), ValueError, "AbsMax: argument 'bits': expected an integer from 2 to 8, got 1"),
        (
            lambda: cgx.Float8("e3m4"),
            ValueError,
            "Float8: argument 'format': expected one of 'e4m3', 'e5m2', got 'e3m4'",
        ),
        (
            lambda: cgx.Cast("float32"),
            ValueError,
            "Cast: argument 'dtype': expected one of 'bfloat16', 'float16', got 'float32'",
        ),
        (
            lambda: cgx.Sign(bucket_size=1.0),
            TypeError,
            "Sign: argument 'bucket_size': expected an integer from 1 to 2^40, got 1.0",
        ),
        (lambda: cgx.Cast(3), ValueError, "Cast: argument 'dtype': expected one of 'bfloat16', 'float16', got 3"),
    ],
)
def test_codecs(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: cgx.encode(jnp.arange(3), cgx.MaxMin()),
            TypeError,
            "encode: argument 'x': expected float32, bfloat16 or float16, got int32",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3, jnp.complex64), cgx.Raw()),
            TypeError,
            "encode: argument 'x': expected float32, bfloat16 or float16, got complex64",
        ),
        (
            lambda: cgx.encode(np.zeros(3), cgx.Raw()),
            TypeError,
            "encode: argument 'x': expected float32, bfloat16 or float16, got float64",
        ),
        (
            lambda: cgx.roundtrip(jnp.zeros(3, bool), cgx.Raw()),
            TypeError,
            "roundtrip: argument 'x': expected float32, bfloat16 or float16, got bool",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), "maxmin"),
            TypeError,
            "encode: argument 'codec': expected a codec such as jaxcgx.MaxMin(bits=4), got 'maxmin'",
        ),
        (lambda: cgx.encode(jnp.zeros(3), cgx.MaxMin), TypeError, "encode: argument 'codec': expected a codec"),
        (lambda: cgx.encode(None, cgx.Raw()), TypeError, "encode: argument 'x': expected an array, got None"),
        (lambda: cgx.encode("abc", cgx.Raw()), TypeError, "encode: argument 'x': expected an array, got 'abc'"),
        (lambda: cgx.encode(jnp.zeros(3), Thawed()), TypeError, "make Thawed a dataclass(frozen=True)"),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), (9,), "foo"),
            TypeError,
            "decode: argument 'dtype': expected float32, bfloat16 or float16, got foo",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), Wrong()),
            TypeError,
            "Wrong.encode_buckets: expected codes uint8[1,3], got int32[1, 3]",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), STOCHASTIC),
            ValueError,
            "rounds stochastically, got None; pass key=jax.random.key(",
        ),
        (
            lambda: jax.jit(lambda x: cgx.roundtrip(x, STOCHASTIC))(jnp.zeros(3)),
            ValueError,
            "roundtrip: argument 'key'",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), STOCHASTIC, key=3),
            TypeError,
            "encode: argument 'key': expected a random key (jax.random.key or PRNGKey), got 3",
        ),
        (
            lambda: cgx.encode(jnp.zeros(3), STOCHASTIC, key=jax.random.split(jax.random.key(0))),
            ValueError,
            "encode: argument 'key': expected one key",
        ),
        (
            lambda: cgx.decode(cgx.encode(normal(9), cgx.MaxMin())[:-1], cgx.MaxMin(), (9,), "float32"),
            ValueError,
            "decode: argument 'payload': expected uint8[32], which is what MaxMin(bits=4, bucket_size=512, "
            "rounding='nearest', skip_incomplete=False) makes of float32[9], got uint8[31]",
        ),
        (lambda: cgx.decode(jnp.zeros(48, jnp.uint8), cgx.MaxMin(), (9,), "float32"), ValueError, "expected uint8[32]"),
        (
            lambda: jax.jit(lambda p: cgx.decode(p, cgx.MaxMin(), (9,), "float32"))(jnp.zeros(31, jnp.uint8)),
            ValueError,
            "expected uint8[32]",
        ),
        (lambda: cgx.decode(jnp.zeros(32, jnp.int8), cgx.MaxMin(), (9,), "float32"), ValueError, "got int8[32]"),
        (lambda: cgx.decode(b"123", cgx.MaxMin(), (9,), "float32"), ValueError, "got bytes"),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), (9,), "int8"),
            TypeError,
            "decode: argument 'dtype': expected float32, bfloat16 or float16, got int8",
        ),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), 9, "float32"),
            TypeError,
            "decode: argument 'shape': expected a tuple of integers, got 9",
        ),
        (
            lambda: cgx.decode(jnp.zeros(32, jnp.uint8), cgx.MaxMin(), (-9,), "float32"),
            ValueError,
            "decode: argument 'shape'",
        ),
        (
            lambda: cgx.MaxMin().wire_bytes((3,), "int32"),
            TypeError,
            "MaxMin.wire_bytes: argument 'dtype': expected float32, bfloat16 or float16, got int32",
        ),
    ],
)
def test_calls(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.encode(LAYOUT, LEAVES[:1]), "encode: argument 'leaves': expected 2 arrays, got 1"),
        (
            lambda: ops.encode(LAYOUT, LEAVES[::-1]),
            "encode: argument 'leaves', leaf [0]: expected float32[100], got bfloat16[7]",
        ),
        (
            lambda: ops.encode_fed(LAYOUT, LEAVES, LEAVES),
            "encode_fed: argument 'residuals', leaf [1]: expected float32[7], got bfloat16[7]",
        ),
        (
            lambda: ops.encode(Layout.of(STOCHASTIC, LEAVES), LEAVES),
            "encode: argument 'key': expected uint32[2], because MaxMin(bits=4",
        ),
        (
            lambda: ops.encode(Layout.of(STOCHASTIC, LEAVES), LEAVES, jnp.zeros(4, jnp.uint32)),
            "encode: argument 'key': expected uint32[2], got uint32[4]",
        ),
        (
            lambda: ops.decode(LAYOUT, PAYLOADS),
            f"decode: argument 'payload': expected uint8[2, {LAYOUT.chunk_bytes}], got uint8[3, {LAYOUT.chunk_bytes}]",
        ),
        (lambda: ops.decode(LAYOUT, PAYLOADS[:2].astype(jnp.float32)), "got float32[2"),
        (lambda: ops.reduce_encoded(LAYOUT, PAYLOADS[:, 1:]), "reduce_encoded: argument 'payloads'"),
        (
            lambda: ops.reduce(LAYOUT, PAYLOADS),
            "reduce: argument 'layout': expected a layout of one chunk, got one of 2; reduce_encoded takes it",
        ),
        (
            lambda: ops.reduce_encoded(LAYOUT, PAYLOADS, divisor=0),
            "reduce_encoded: argument 'divisor': expected a positive number, 2^-126 or more, got 0",
        ),
        (
            lambda: ops.reduce_fed(LAYOUT, PAYLOADS, LEAVES, divisor=1e-38),
            "reduce_fed: argument 'divisor': expected a positive number, 2^-126 or more, got 1e-38",
        ),
        (
            lambda: ops.reduce_encoded(LAYOUT, PAYLOADS, own=ops.Own(LEAVES[:1], 0)),
            "reduce_encoded: argument 'own': expected 2 arrays, got 1",
        ),
        (
            lambda: ops.reduce_fed(LAYOUT, PAYLOADS, LEAVES),
            "reduce_fed: argument 'residuals', leaf [1]: expected float32[7], got bfloat16[7]",
        ),
    ],
)
def test_operations(call, words):
    with pytest.raises(ValueError) as caught:
        jax.make_jaxpr(call)()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        (
            "cuda",
            r"jaxcgx_encode: the computation is placed on a GPU, and this build has no CUDA half; "
            ".*nvcc.*JAXCGX_CUDA=ON.*JAXCGX_REFERENCE=1",
        ),
        ("tpu", r"jaxcgx_encode: there are kernels for CPUs and NVIDIA GPUs, not for .*JAXCGX_REFERENCE=1"),
    ],
)
def test_a_platform_without_kernels_says_so(platform, words):
    if platform == "cuda" and registration.MODULE and registration.MODULE.build_info()["cuda"]:
        pytest.skip("this build has a CUDA half")
    traced = jax.jit(lambda x: cgx.encode(x, cgx.MaxMin())).trace(jnp.zeros(3))
    with pytest.raises(NotImplementedError, match=words):
        traced.lower(lowering_platforms=(platform,))


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

"""What a codec is, and encoding and decoding one array."""

import dataclasses
import enum
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_array
from jaxcgx.native import ops
from jaxcgx.native.layout import DTYPES, Layout
from jaxcgx.native.rng import key_words


class Codec:
    """How a vector becomes bytes and back. Subclass it as a frozen dataclass: codecs are static under jit.

    A codec sees buckets of float32 and never needs to know about messages, ranks or dtypes. To write one:

    - ``bucket_size``: elements that share metadata (a field or an attribute), and ``meta``, how many float32 of
      metadata a bucket has. Without metadata leave both: the codec then sees stretches of any length; or, with
      ``whole = True``, all of a leaf in a chunk at once.
    - ``code_bytes(n, dtype)``: bytes of the codes of n elements of one bucket, for a leaf of that dtype.
    - ``encode_buckets(x, noise)``: ``x`` is float32[buckets, n], every element valid; the result is
      (float32[buckets, meta], uint8[buckets, code_bytes(n)]).
    - ``decode_buckets(meta, codes, n)``: the way back, float32[buckets, n]. Any bytes must give defined values.
    - ``stochastic = True`` if it draws noise: ``noise`` is then int32[buckets, n], uniform in [0, 65536), else None.

    A bucket with a NaN or an infinity should decode to NaN, and a constant bucket exactly.
    """

    bucket_size = None
    meta = 0
    whole = False  # a bucket is all of a leaf in a chunk
    stochastic = False
    skip_incomplete = False  # the elements after the last whole bucket of a leaf travel as they are
    raw = False  # all elements travel as they are
    contracts = (
        True  # of normally distributed numbers it loses less than it is given (squares), so feedback stays bounded
    )
    native = None  # what the kernels are told; None: this codec has no kernel, jnp runs
    most = 2**40  # elements of a leaf in a chunk
    state = ("residuals",)  # what a sum with it can keep from call to call, by the names of compressed_psum's arguments
    sparse = False  # it sends some elements only, `indices` says which
    low_rank = False  # it makes no bytes: sums add up factors of it (PowerSGD)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "native" not in cls.__dict__:
            cls.native = None  # what a subclass of a built-in codec changes, that codec's kernel doesn't know

    def code_bytes(self, n: int, dtype) -> int:
        raise NotImplementedError(f"{type(self).__name__}.code_bytes")

    def weight(self, n: int, dtype) -> int:
        """What n elements count where a message is cut into chunks of the same weight."""
        return self.code_bytes(n, dtype)

    def of_sum(self, ranks: int):
        """The codec of a sum of what so many ranks sent with this one."""
        return self

    def encode_buckets(self, x, noise):
        raise NotImplementedError(f"{type(self).__name__}.encode_buckets")

    def decode_buckets(self, meta, codes, n: int):
        raise NotImplementedError(f"{type(self).__name__}.decode_buckets")

    def split_buckets(self, meta, codes, n: int):
        """(base, value) with base + value the decoded bucket: sums over ranks add the bases first."""
        return jnp.zeros((codes.shape[0], 1), jnp.float32), self.decode_buckets(meta, codes, n)

    def why_raw(self, shape, dtype):
        """Why an array of that shape and dtype travels as it is; None where this codec takes it."""
        return

    def wire_bytes(self, shape, dtype) -> int:
        """Bytes on the wire of an array of that shape and dtype."""
        name = f"{type(self).__name__}.wire_bytes"
        return layout_of(self, check_shape(name, shape), check_dtype(name, "dtype", dtype)).chunk_bytes


class Kind(enum.IntEnum):
    """Kind in xla_ffi/codec/base.h."""

    RAW, MAXMIN, BYTEGRAD, ABSMAX, FLOAT8, CAST, SIGN, TOPK = range(8)


def spell(value):
    """A codec, or what has codecs in it, as somebody would write it: without what it is by default."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {spell(v)}' for key, v in value.items())}}}"
    if not isinstance(value, Codec) and not dataclasses.is_dataclass(value):
        return repr(value)
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    said = [f for i, f in enumerate(fields) if i == 0 or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={spell(getattr(value, f.name))}' for f in said)})"


_DENSE = dict(
    kind=np.int32,
    bits=np.int32,
    bucket_size=np.int64,
    stochastic=np.int32,
    skip_incomplete=np.int32,
    compatible=np.int32,
)
_SPARSE = dict(
    ratio=np.float64,
    lists=np.int64,
    top=np.int32,
    select=np.int32,
    share=np.float64,
    lower=np.float64,
    refinements=np.int32,
)
_NATIVE = _DENSE | _SPARSE | {f"values_{name}": dtype for name, dtype in _DENSE.items()}


def native_codec(
    kind: Kind,
    bits=0,
    bucket_size=0,
    stochastic=False,
    skip_incomplete=False,
    compatible=False,
    *,
    values=None,
    **sparse,
):
    """The attribute that tells a kernel its codec: each_field in xla_ffi/codec/fields.h. values: of TopK's that of
    its values."""
    given = dict(
        kind=kind,
        bits=bits,
        bucket_size=bucket_size,
        stochastic=stochastic,
        skip_incomplete=skip_incomplete,
        compatible=compatible,
    )
    given |= sparse | {f"values_{name}": values[name] for name in _DENSE if values}
    return {name: dtype(given.get(name, 0)) for name, dtype in _NATIVE.items()}


def check_codec(name: str, codec, argument="codec") -> Codec:
    if not isinstance(codec, Codec):
        raise TypeError(f"{name}: argument '{argument}': expected a codec such as jaxcgx.MaxMin(bits=4), got {codec!r}")
    try:
        hash(codec)
    except TypeError:
        raise TypeError(
            f"{name}: argument '{argument}': expected something hashable, got {codec!r}; make {type(codec).__name__} a "
            "dataclass(frozen=True)"
        ) from None
    return codec


def check_encodes(name: str, codec: Codec, argument="codec"):
    """That a codec makes bytes."""
    if codec.low_rank:
        raise ValueError(
            f"{name}: argument '{argument}': expected a codec that makes bytes of an array, such as "
            "jaxcgx.MaxMin(bits=4), got "
            f"{spell(codec)}, which is for sums; pass it to compressed_psum, compressed_pmean or what is made of them"
        )


def check_dtype(name: str, argument: str, dtype):
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        pass
    if dtype not in DTYPES:
        raise TypeError(f"{name}: argument '{argument}': expected float32, bfloat16 or float16, got {dtype}")
    return dtype


def check_shape(name: str, shape):
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise TypeError(f"{name}: argument 'shape': expected a tuple of integers, got {shape!r}") from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name}: argument 'shape': expected sizes of at least 0, got {sizes}")
    return sizes


def check_key(name: str, codec: Codec, key):
    """The key's words where the codec draws noise; an error where there is no key."""
    if not codec.stochastic:
        return None
    if key is None:
        raise ValueError(
            f"{name}: argument 'key': {codec} rounds stochastically and needs a random key, got None; "
            "pass key=jax.random.key(...), another one every step"
        )
    return key_words(name, key)


def check_leaf(name: str, x):
    """x as an array that codecs take."""
    if not hasattr(x, "dtype"):
        x = check_array(name, "x", x)
    check_dtype(name, "x", x.dtype)  # before JAX makes a float32 of NumPy's float64
    return jnp.asarray(x)


@functools.lru_cache
def layout_of(codec: Codec, shape, dtype) -> Layout:
    return Layout(codec, (shape,), (dtype,))


def encode(x, codec: Codec, key=None):
    """The bytes of `x`: uint8[codec.wire_bytes(x.shape, x.dtype)].

    x: an array of any shape, float32, bfloat16 or float16. key: a random key, for codecs that round stochastically.
    """
    check_encodes("encode", check_codec("encode", codec))
    x = check_leaf("encode", x)
    return ops.encode(layout_of(codec, x.shape, x.dtype), [x], check_key("encode", codec, key)).reshape(-1)


def decode(payload, codec: Codec, shape, dtype):
    """The array of that shape and dtype that `payload` holds. Any bytes of the right number decode to something."""
    check_encodes("decode", check_codec("decode", codec))
    dtype = check_dtype("decode", "dtype", dtype)
    shape = check_shape("decode", shape)
    layout = layout_of(codec, shape, dtype)
    got = getattr(payload, "dtype", type(payload).__name__), getattr(payload, "shape", None)
    if got != (jnp.uint8, (layout.chunk_bytes,)):
        raise ValueError(
            f"decode: argument 'payload': expected uint8[{layout.chunk_bytes}], which is what {codec} makes of "
            f"{dtype}{list(shape)}, got {got[0]}{list(got[1]) if got[1] is not None else ''}"
        )
    return ops.decode(layout, jnp.asarray(payload).reshape(1, layout.chunk_bytes))[0]


def roundtrip(x, codec: Codec, key=None):
    """decode(encode(x)): what the other end will see; of a codec for sums, the sum over one rank. Its gradient is the
    identity (straight-through)."""
    check_codec("roundtrip", codec)
    x = check_leaf("roundtrip", x)
    return _roundtrip(codec, x, check_key("roundtrip", codec, key))


# Quantization is a staircase: its derivative is zero almost everywhere and tells an optimizer nothing. What is
# wanted is the derivative of what it stands for, x -> x, so the tangent passes as it is. The key has no tangent.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _roundtrip(codec, x, key):
    return codec.approximate(x) if codec.low_rank else ops.roundtrip(codec, x, key)


@_roundtrip.defjvp
def _roundtrip_jvp(codec, primals, tangents):
    return _roundtrip(codec, *primals), tangents[0]

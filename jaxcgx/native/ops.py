"""The native operations as JAX primitives. Each works on a message of many leaves in one call.

Every primitive is written in the same order: function, abstract evaluation, attributes of the call, differentiation,
registration. `bind` gets the leaves of the operands (reference.py), and their structure as the static parameter `tree`.
Operands have the axes of `batch` before their own axes, one message for each index. vmap adds an axis there, and one
call handles all messages.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.checks import wrong
from jaxcgx.native import reference
from jaxcgx.native.layout import Layout
from jaxcgx.native.reference import Clear, Decode, Encode, Reduce
from jaxcgx.native.rng import kernel_key
from jaxcgx.native.rules import batch_rule, define_impl, one_by_one, partitioned, register, zero_jvp
from jaxcgx.typing import ArrayLike


def _bind(primitive: Any, operands: NamedTuple, **params: object) -> list[jax.Array]:
    leaves, tree = jax.tree.flatten(operands)
    return primitive.bind(*_compat.match_varying(*leaves), tree=tree, batch=(), **params)


def _key(codec: Any, key: Any) -> jax.Array | None:
    """Returns the key for the kernels if the codec draws noise, else None."""
    if codec.stochastic and key is None:
        raise wrong(type(codec).__name__, "key", f"uint32[2], because {codec} draws random bits", None)
    return kernel_key(key) if codec.stochastic else None


# encode: turns leaves into a payload and, with feedback, residuals into new residuals

encode_p: _compat.Primitive = _compat.Primitive("jaxcgx_encode")


def encode(layout: Layout, leaves: Iterable[ArrayLike], key: ArrayLike | None = None) -> jax.Array:
    """Returns the leaves, of the layout's shapes and dtypes, as one message: uint8[layout.chunks, layout.chunk_bytes].

    The key is uint32[2], for stochastic codecs; or uint32[3], with an offset (rng.py).
    """
    if not layout.shapes:  # the payload is empty, and no operand says which axes it varies over
        return jnp.zeros((layout.chunks, 0), jnp.uint8)
    return _bind(encode_p, Encode(list(leaves), key=_key(layout.codec, key)), layout=layout)[0]


def encode_fed(
    layout: Layout, leaves: Iterable[ArrayLike], residuals: Iterable[ArrayLike], key: ArrayLike | None = None
) -> tuple[jax.Array, list[jax.Array]]:
    """Encodes with feedback, like `encode`. Returns (payload of leaves + residuals, new residuals).

    Residuals are float32 arrays of the leaves' shapes. A new residual is the loss of encoding. Where the loss is not
    finite (an overflow, a NaN), the residual stays unchanged. Donated residuals are updated in place.
    """
    if not layout.shapes:
        return jnp.zeros((layout.chunks, 0), jnp.uint8), []
    operands = Encode(list(leaves), list(residuals), _key(layout.codec, key))
    payload, *residuals = _bind(encode_p, operands, layout=layout)
    return payload, residuals


def _encode_abstract(operands: Encode, layout: Layout, batch: tuple[Any, ...]) -> Any:
    result = functools.partial(_compat.result_aval, jax.tree.leaves(operands), rows=len(batch))
    payload = result((*batch, layout.chunks, layout.chunk_bytes), jnp.uint8)
    return payload, [result(x.shape, jnp.float32) for x in operands.residuals or []]


# Payloads are integers, which have no tangent, so a gradient through them would be zero in silence. Exchanges have
# derivatives of their own.
def _encode_jvp(primals: Any, tangents: Any, *, tree: Any, **params: object) -> Any:
    if any(type(t) is not ad.Zero for t in tree.unflatten(tangents).leaves):
        remedy = (
            "write cgx.roundtrip where it is decoded at once, cgx.compressed_ppermute or another collective where it "
            "moves, and jax.lax.stop_gradient(x) where no gradient is wanted"
        )
        expected = "an array that is not differentiated, because bytes have no derivative"
        raise wrong("encode", "x", expected, "one that is", remedy, kind=TypeError)
    return zero_jvp(encode_p)(primals, tangents, tree=tree, **params)


register(
    encode_p,
    "encode",
    abstract=_encode_abstract,
    attributes=lambda operands, layout: (dict(feedback=operands.residuals is not None), dict(payloads=0, encodes=True)),
    function=reference.encode,
    jvp=_encode_jvp,
)


# decode: turns a payload into leaves

decode_p: _compat.Primitive = _compat.Primitive("jaxcgx_decode")


def decode(layout: Layout, payload: jax.Array) -> list[jax.Array]:
    """Returns the leaves of a payload uint8[layout.chunks, layout.chunk_bytes]."""
    return _bind(decode_p, Decode(payload), layout=layout) if layout.shapes else []


def _decode_abstract(operands: Decode, layout: Layout, batch: tuple[Any, ...]) -> Any:
    result = functools.partial(_compat.result_aval, operands, rows=len(batch))
    return [result((*batch, *shape), dtype) for shape, dtype in zip(layout.shapes, layout.dtypes)]


register(decode_p, "decode", abstract=_decode_abstract, function=reference.decode)


# reduce: sums payloads of one chunk. The sum is leaves or encoded again. With feedback, residuals become new residuals.

reduce_p: _compat.Primitive = _compat.Primitive("jaxcgx_reduce")


class Own(NamedTuple):
    """Raw leaves that replace the payload of one rank in a sum."""

    leaves: Iterable[ArrayLike]  # of the layout's shapes and dtypes
    rank: ArrayLike  # may be traced; out of range, it is an error on CPU, and NaN on GPU, where kernels cannot raise


def reduce(layout: Layout, payloads: jax.Array, *, own: Own | None = None, divisor: float = 1.0) -> list[jax.Array]:
    """Returns the sum of messages as float32 leaves. Messages are added in float32, in rank order, then divided.

    `layout` is that of each message, with one chunk. `payloads` are uint8[ranks, layout.chunk_bytes]. `own` replaces
    the payload of one rank. `divisor` is 2^-126 or more.
    """
    operands = _operands(payloads, own=own)
    return _bind(reduce_p, operands, layout=layout, divisor=float(divisor), encoded=False) if layout.shapes else []


def reduce_encoded(
    layout: Layout,
    payloads: jax.Array,
    *,
    chunk: ArrayLike = 0,
    own: Own | None = None,
    divisor: float = 1.0,
    key: ArrayLike | None = None,
) -> jax.Array:
    """Returns the sum of one chunk of messages, encoded again: uint8[layout.of_sum(ranks).chunk_bytes].

    Arguments are as in `reduce`. `chunk` is the number of the payloads' chunk in the layout; it may be traced, as
    `Own.rank`. The leaves of `own` are whole, not only the chunk's part. The sum is divided before it is encoded. The
    key is uint32[2], if the codec of the sum is stochastic.
    """
    if not layout.shapes:
        return payloads[0]
    operands = _operands(payloads, chunk=chunk, own=own, key=_key(layout.of_sum(len(payloads)).codec, key))
    return _bind(reduce_p, operands, layout=layout, divisor=float(divisor), encoded=True)[0]


def reduce_fed(
    layout: Layout,
    payloads: jax.Array,
    residuals: Iterable[ArrayLike],
    *,
    chunk: ArrayLike = 0,
    divisor: float = 1.0,
    key: ArrayLike | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Sums with feedback, like `reduce_encoded`. Returns (payload of the sum + residuals, new residuals).

    Residuals are float32 arrays in the shapes of the whole leaves. Only the chunk's elements of the residuals are added
    to the sum, before it is divided. Only these elements change. They become the loss of encoding, sum - divisor *
    decoded. Where the loss is not finite, they stay unchanged. Donated residuals are updated in place.
    """
    if not layout.shapes:
        return payloads[0], []
    key = _key(layout.of_sum(len(payloads)).codec, key)
    operands = _operands(payloads, chunk=chunk, key=key)._replace(residuals=list(residuals))
    payload, *residuals = _bind(reduce_p, operands, layout=layout, divisor=float(divisor), encoded=True)
    return payload, residuals


def _operands(
    payloads: jax.Array, *, chunk: ArrayLike = 0, own: Own | None = None, key: jax.Array | None = None
) -> Reduce:
    where = jnp.stack([jnp.asarray(chunk, jnp.int32), jnp.asarray(0 if own is None else own.rank, jnp.int32)])
    return Reduce(payloads, where, own=None if own is None else list(own.leaves), key=key)


def _reduce_abstract(operands: Reduce, layout: Layout, batch: tuple[Any, ...], divisor: float, encoded: bool) -> Any:
    result = functools.partial(_compat.result_aval, jax.tree.leaves(operands), rows=len(batch))
    if not encoded:
        return [result((*batch, *shape), jnp.float32) for shape in layout.shapes]
    payload = result((*batch, layout.of_sum(operands.payloads.shape[-2]).chunk_bytes), jnp.uint8)
    return payload, [result(x.shape, jnp.float32) for x in operands.residuals or []]


def _reduce_attributes(
    operands: Reduce, layout: Layout, divisor: float, encoded: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    ranks = operands.payloads.shape[-2]
    attributes = dict(
        ranks=np.int64(ranks),
        own=operands.own is not None,
        encoded=encoded,
        divisor=np.float32(divisor),
        feedback=operands.residuals is not None,
    )
    return attributes, dict(payloads=ranks, encodes=encoded)


# sum = (own + decoded payloads) / divisor is linear in own. The payloads are integers, which have no tangent.
def _reduce_jvp(
    primals: Any, tangents: Any, *, tree: Any, divisor: float, encoded: bool, **params: object
) -> tuple[list[Any], list[Any]]:
    params |= dict(tree=tree, divisor=divisor, encoded=encoded)
    own = tree.unflatten(tangents).own
    if encoded or own is None:
        return zero_jvp(reduce_p)(primals, tangents, **params)
    results = reduce_p.bind(*primals, **params)
    return results, [
        _compat.zero_tangent(r) if type(t) is ad.Zero else t.astype(r.dtype) / divisor for r, t in zip(results, own)
    ]


register(
    reduce_p,
    "reduce",
    abstract=_reduce_abstract,
    attributes=_reduce_attributes,
    function=reference.reduce,
    jvp=_reduce_jvp,
    over=one_by_one,
)


# clear: sets the elements that are in a payload of a sparse codec to 0

clear_p: _compat.Primitive = _compat.Primitive("jaxcgx_clear")


def clear(layout: Layout, payload: jax.Array, arrays: Iterable[ArrayLike]) -> list[jax.Array]:
    """Returns the arrays with 0 in place of every element that the payload of a sparse codec has.

    The payload is uint8[layout.chunks, layout.chunk_bytes]. Donated arrays are updated in place.
    """
    return _bind(clear_p, Clear(payload, list(arrays)), layout=layout) if layout.shapes else []


def _clear_abstract(operands: Clear, layout: Layout, batch: tuple[Any, ...]) -> Any:
    return [_compat.result_aval([operands.payload, x], x.shape, x.dtype, rows=len(batch)) for x in operands.arrays]


register(clear_p, "clear", abstract=_clear_abstract, function=reference.clear)


# roundtrip: encodes and decodes an array

roundtrip_p: _compat.Primitive = _compat.Primitive("jaxcgx_roundtrip")


class Roundtrip(NamedTuple):
    x: jax.Array
    key: jax.Array | None = None  # uint32[3], for stochastic codecs: rng.kernel_key


def roundtrip(codec: Any, x: jax.Array, key: ArrayLike | None = None) -> jax.Array:
    """Returns decode(encode(x)), where x is a separate message. The caller defines the derivative."""
    return _bind(roundtrip_p, Roundtrip(x, _key(codec, key)), codec=codec)[0]


# The elements of x stay on their devices, so the result has the sharding of x's type (Explicit meshes).
def _roundtrip_abstract(*avals: Any, tree: Any, codec: Any, batch: tuple[Any, ...]) -> list[Any]:
    return [tree.unflatten(avals).x.update(weak_type=False)]


def _roundtrip_lowered(*leaves: Any, tree: Any, codec: Any, batch: tuple[Any, ...]) -> list[jax.Array]:
    def one(*leaves: Any) -> list[jax.Array]:
        operands = tree.unflatten(leaves)
        layout = Layout.of(codec, [operands.x])
        return decode(layout, encode(layout, [operands.x], operands.key))

    for _ in batch:
        one = jax.vmap(one)
    return one(*leaves)


def _roundtrip_keeps(shape: Sequence[int], shards: Sequence[int], *, codec: Any, tree: Any) -> bool:
    """Returns whether every shard, encoded alone, rounds to the same numbers as in the whole array."""
    # The elements of a shard along its last sharded axis, and along the axes after it, are consecutive in the leaf.
    last = max((k for k, n in enumerate(shards) if n > 1), default=None)
    if last is None:
        return True
    if any(size % n for size, n in zip(shape, shards)):
        return False
    return codec.may_cut(math.prod(shape[last:]) // shards[last])


roundtrip_p.multiple_results = True
define_impl(roundtrip_p)
roundtrip_p.def_abstract_eval(_roundtrip_abstract)
batching.primitive_batchers[roundtrip_p] = functools.partial(batch_rule, roundtrip_p)
mlir.register_lowering(
    roundtrip_p, partitioned(roundtrip_p, mlir.lower_fun(_roundtrip_lowered, multiple_results=True), _roundtrip_keeps)
)

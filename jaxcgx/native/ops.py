"""The native operations as JAX primitives: encode, decode, reduce and clear, of messages of many leaves in one call.

Each in the same order: function, lowering, abstract evaluation, batching, differentiation, registration.

A primitive's operands carry the axes of `batch` in front of their own, one message for each index: vmap adds an axis
to them, and one call does them all.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.native import partitioning, reference, registration
from jaxcgx.native.layout import Layout


def _bind(primitive, operands, **params):
    return primitive.bind(*_compat.match_varying(*operands), **params)


def _one_by_one(function):
    """As jax.vmap, for what switches: vmap would compute every branch of each, and JAX can't under shard_map's
    check_vma."""
    return lambda *operands: lax.map(lambda each: function(*each), operands)


def _lower_to_reference(function, over):
    """A lowering rule to jnp. over: what maps it."""

    def batched(*operands, batch, **params):
        one = functools.partial(function, **params)
        for _ in batch:
            one = over(one)
        return one(*map(_compat.whole, operands))

    return mlir.lower_fun(batched, multiple_results=True)


def _lower_to_handler(target, attributes, workspace_bytes):
    """A lowering rule to an FFI call. A workspace is one more result of it, which nobody sees."""

    def rule(ctx, *operands, layout, batch, **params):
        extra, aliases = attributes(layout, ctx.avals_in, **params)
        message = layout.attributes | dict(batch=np.int64(math.prod(batch)))
        results = ctx.avals_out
        payloads = extra.get("ranks", 0 if target == "encode" else 1)
        if hidden := workspace_bytes(
            **message, payloads=payloads, encodes=target == "encode" or params.get("encoded", False)
        ):
            ctx = ctx.replace(avals_out=[*results, _compat.result_aval(ctx.avals_in, (hidden,), np.dtype("uint8"))])
        call = jax.ffi.ffi_lowering(f"jaxcgx_{target}", operand_output_aliases=aliases)
        return call(ctx, *operands, **message, **extra)[: len(results)]

    return rule


def _refuse(target, why):
    def rule(ctx, *operands, **params):
        raise NotImplementedError(f"jaxcgx_{target}: {why}")

    return rule


def _lower(to_kernel, to_reference):
    """A lowering rule: `to_kernel` where the codec has kernels, else `to_reference`."""

    def rule(ctx, *operands, layout, **params):
        chosen = to_reference if layout.codec.native is None else to_kernel
        return chosen(ctx, *operands, layout=layout, **params)

    return rule


def _check(op, argument, arrays, shapes, dtypes):
    """That there are as many arrays as shapes, of these shapes and dtypes."""
    expected = [(tuple(s), jnp.dtype(d)) for s, d in zip(shapes, dtypes)]
    got = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in arrays]
    if len(got) != len(expected):
        raise ValueError(f"{op}: argument '{argument}': expected {len(expected)} arrays, got {len(got)}")
    for i, (e, g) in enumerate(zip(expected, got)):
        if e != g:
            raise ValueError(
                f"{op}: argument '{argument}', array {i}: expected {e[1]}{list(e[0])}, got "
                + (f"{g[1]}{list(g[0])}" if g[1] is not None else repr(arrays[i]))
            )


def _check_key(op, codec, key):
    """[key] where the codec draws noise, else []."""
    if not codec.stochastic:
        return []
    if key is None:
        raise ValueError(f"{op}: argument 'key': {codec} rounds stochastically and needs uint32[2], got None")
    _check(op, "key", [key], [(2,)], ["uint32"])
    return [key]


def in_front(operands, dims, size=None):
    """Every operand with the axis that vmap maps in front; one that it doesn't map is repeated. size: of the axis,
    which perhaps no
    operand has."""
    size = size or next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]


def _batch(primitive, operands, dims, batch, **params):
    moved = in_front(operands, dims)
    results = primitive.bind(*moved, batch=(len(moved[0]), *batch), **params)
    return results, [0] * len(results)


def _zero_jvp(primitive):
    """The differentiation rule of an operation whose results are constant to calculus."""

    def rule(primals, tangents, **params):
        results = primitive.bind(*primals, **params)
        return results, [_compat.zero_tangent(r) for r in results]

    return rule


def _register(primitive, target, function, attributes, abstract, jvp, over=jax.vmap):
    primitive.multiple_results = True
    primitive.def_impl(
        jax.jit(primitive.bind, static_argnames=("layout", "batch", "feedback", "own", "encoded", "divisor"))
    )
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = jvp
    to_reference = _lower_to_reference(function, over)
    if registration.MODULE is None:
        mlir.register_lowering(primitive, to_reference)
        return

    def to_handler(workspace):
        return partitioning.lower(primitive, _lower_to_handler(target, attributes, workspace))

    rules = {
        None: _refuse(
            target,
            "there are kernels for CPUs and NVIDIA GPUs, not for the platform that the computation is placed on; "
            "set JAXCGX_REFERENCE=1 to run plain jnp there",
        ),
        "cpu": to_handler(lambda **message: 0),
        "cuda": to_handler(registration.MODULE.workspace_bytes)
        if hasattr(registration.MODULE, "workspace_bytes")
        else _refuse(
            target, f"the computation is placed on a GPU, and this build has no CUDA half; {registration.CUDA_REMEDY}"
        ),
    }
    for platform, rule in rules.items():
        mlir.register_lowering(primitive, _lower(rule, to_reference), platform=platform)


# encode: leaves to a payload, and with feedback residuals to new residuals

encode_p = _compat.Primitive("jaxcgx_encode")


def encode(layout, leaves, key=None, residuals=None):
    """uint8[layout.chunks, layout.chunk_bytes]: the leaves as one message.

    key: uint32[2], for stochastic codecs. residuals: float32 of the leaves' shapes, added to the leaves before they
    are encoded; the result is then (payload, new residuals), what encoding lost. Where what was lost is not finite
    (an overflow, a NaN) the residual stays as it was. A residual that is donated is overwritten in place.
    """
    leaves, residuals = list(leaves), residuals if residuals is None else list(residuals)
    _check("encode", "leaves", leaves, layout.shapes, layout.dtypes)
    if residuals is not None:
        _check("encode", "residuals", residuals, layout.shapes, [jnp.float32] * len(leaves))
    if not leaves:  # nothing to say over which axes the result varies, and nothing in it
        payload = jnp.zeros((layout.chunks, 0), jnp.uint8)
        return payload if residuals is None else (payload, [])
    operands = [*leaves, *(residuals or []), *_check_key("encode", layout.codec, key)]
    payload, *new = _bind(encode_p, operands, layout=layout, batch=(), feedback=residuals is not None)
    return payload if residuals is None else (payload, new)


def _encode_reference(*operands, layout, feedback):
    n = len(layout.shapes)
    key = operands[-1] if layout.codec.stochastic else None
    payload, new = reference.encode(layout, operands[:n], key, operands[n : 2 * n] if feedback else None)
    return [payload, *new]


def _encode_attributes(layout, avals, feedback):
    n = len(layout.shapes)
    return dict(feedback=feedback), {n + i: 1 + i for i in range(n)} if feedback else {}


def _encode_abstract(*avals, layout, batch, feedback):
    result = functools.partial(_compat.result_aval, avals, rows=len(batch))
    payload = result((*batch, layout.chunks, layout.chunk_bytes), jnp.uint8)
    return [payload, *(result((*batch, *s), jnp.float32) for s in layout.shapes if feedback)]


# Integers have no tangent, and a residual is what rounding lost: straight-through counts it as constant.
_register(encode_p, "encode", _encode_reference, _encode_attributes, _encode_abstract, _zero_jvp(encode_p))


# decode: a payload to leaves

decode_p = _compat.Primitive("jaxcgx_decode")


def decode(layout, payload):
    """The leaves of a payload uint8[layout.chunks, layout.chunk_bytes]."""
    _check("decode", "payload", [payload], [(layout.chunks, layout.chunk_bytes)], ["uint8"])
    return _bind(decode_p, [payload], layout=layout, batch=()) if layout.shapes else []


def _decode_reference(payload, *, layout):
    return reference.decode(layout, payload)


def _decode_attributes(layout, avals):
    return {}, {}


def _decode_abstract(payload, *, layout, batch):
    return [_compat.result_aval([payload], (*batch, *s), d, len(batch)) for s, d in zip(layout.shapes, layout.dtypes)]


_register(decode_p, "decode", _decode_reference, _decode_attributes, _decode_abstract, _zero_jvp(decode_p))


# reduce: payloads of one chunk to their sum, as leaves or as a payload again, and with feedback residuals to new
# residuals

reduce_p = _compat.Primitive("jaxcgx_reduce")


def reduce(layout, payloads, *, chunk=0, own=None, rank=0, divisor=1.0, encoded=False, key=None, residuals=None):
    """The sum of payloads uint8[ranks, layout.chunk_bytes], in fp32 in rank order, divided by `divisor`.

    chunk: which of the layout's chunks they are. own: leaves, raw, that stand for the payload of `rank`. The result is
    float32 leaves (of a layout of one chunk), or with `encoded` the sum encoded again,
    uint8[layout.of_sum(ranks).chunk_bytes],
    for which stochastic codecs need a key, uint32[2]. chunk and rank may be traced. Of a chunk or own rank that there
    is not
    the CPU's kernels make an error, the GPU's, which can't stop, NaNs.

    residuals: float32 of the leaves' whole shapes, for a sum that is encoded. Those of the chunk's elements are added
    to
    the sum before it is divided; the result is then (payload, new residuals), in which the chunk's elements are what
    encoding lost of the sum: sum - divisor * decoded, or where that is not finite what they were. All others stay. A
    residual that is donated is updated in place.
    """
    _check("reduce", "payloads", [payloads], [(*jnp.shape(payloads)[:1], layout.chunk_bytes)], ["uint8"])
    if own is not None:
        _check("reduce", "own", own := list(own), layout.shapes, layout.dtypes)
    if not divisor >= 2.0**-126:  # of a smaller one 1 / divisor may be infinite
        raise ValueError(f"reduce: argument 'divisor': expected a positive number, 2^-126 or more, got {divisor}")
    if not encoded and layout.chunks != 1:
        raise ValueError(
            f"reduce: argument 'encoded': a sum as leaves is of a layout of one chunk, got {layout.chunks}; pass "
            "encoded=True"
        )
    if residuals is not None:
        if not encoded:
            raise ValueError(
                "reduce: argument 'residuals': expected None where the sum is not encoded, and loses nothing, got "
                "residuals; pass encoded=True"
            )
        if own is not None:
            raise ValueError(
                "reduce: argument 'own': expected None with residuals, which hold what the own payload lost, got "
                "leaves; "
                "leave them out"
            )
        _check("reduce", "residuals", residuals := list(residuals), layout.shapes, [jnp.float32] * len(layout.shapes))
    if not layout.shapes:
        sums = payloads[0] if encoded else []
        return sums if residuals is None else (sums, [])
    where = jnp.stack([jnp.asarray(chunk, jnp.int32), jnp.asarray(rank, jnp.int32)])
    operands = [
        payloads,
        where,
        *(own or residuals or []),
        *(_check_key("reduce", layout.of_sum(len(payloads)).codec, key) if encoded else []),
    ]
    results = _bind(
        reduce_p,
        operands,
        layout=layout,
        batch=(),
        own=own is not None,
        divisor=float(divisor),
        encoded=encoded,
        feedback=residuals is not None,
    )
    if residuals is not None:
        return results[0], results[1:]
    return results[0] if encoded else results


def _reduce_reference(payloads, where, *rest, layout, own, divisor, encoded, feedback):
    n = len(layout.shapes) if own or feedback else 0
    key = rest[n] if encoded and layout.of_sum(payloads.shape[0]).codec.stochastic else None
    return reference.reduce(
        layout, payloads, where, rest[:n] if own else None, divisor, encoded, key, rest[:n] if feedback else None
    )


def _reduce_attributes(layout, avals, own, divisor, encoded, feedback):
    attributes = dict(
        ranks=np.int64(avals[0].shape[-2]), own=own, encoded=encoded, divisor=np.float32(divisor), feedback=feedback
    )
    return attributes, {2 + i: 1 + i for i in range(len(layout.shapes))} if feedback else {}


def _reduce_abstract(*avals, layout, batch, own, divisor, encoded, feedback):
    result = functools.partial(_compat.result_aval, avals, rows=len(batch))
    payload = [result((*batch, layout.of_sum(avals[0].shape[-2]).chunk_bytes), jnp.uint8)] if encoded else []
    return [*payload, *(result((*batch, *s), jnp.float32) for s in layout.shapes if feedback or not encoded)]


# sum = (own + what the payloads decode to) / divisor: linear in own; the payloads are integers.
def _reduce_jvp(primals, tangents, **params):
    if params["encoded"] or not params["own"]:
        return _zero_jvp(reduce_p)(primals, tangents, **params)
    results = reduce_p.bind(*primals, **params)
    own = tangents[2 : 2 + len(params["layout"].shapes)]
    return results, [
        _compat.zero_tangent(r) if type(t) is ad.Zero else t.astype(r.dtype) / params["divisor"]
        for r, t in zip(results, own)
    ]


_register(reduce_p, "reduce", _reduce_reference, _reduce_attributes, _reduce_abstract, _reduce_jvp, over=_one_by_one)


# clear: arrays without what a payload of a sparse codec has sent

clear_p = _compat.Primitive("jaxcgx_clear")


def clear(layout, payload, arrays):
    """Arrays of the leaves' shapes and dtypes, 0 where the payload uint8[layout.chunks, layout.chunk_bytes], of a codec
    that sends
    some elements only, has an element. An array that is donated is updated in place."""
    _check("clear", "payload", [payload], [(layout.chunks, layout.chunk_bytes)], ["uint8"])
    _check("clear", "arrays", arrays := list(arrays), layout.shapes, layout.dtypes)
    return _bind(clear_p, [payload, *arrays], layout=layout, batch=()) if arrays else []


def _clear_reference(payload, *arrays, layout):
    return reference.clear(layout, payload, arrays)


def _clear_attributes(layout, avals):
    return {}, {1 + i: i for i in range(len(layout.shapes))}


def _clear_abstract(payload, *arrays, layout, batch):
    return [_compat.result_aval([payload, x], x.shape, x.dtype, len(batch)) for x in arrays]


_register(clear_p, "clear", _clear_reference, _clear_attributes, _clear_abstract, _zero_jvp(clear_p))


# roundtrip: an array as the other end will see it

roundtrip_p = _compat.Primitive("jaxcgx_roundtrip")


def roundtrip(codec, x, key=None):
    """decode(encode(x)), as a message of its own. Its derivative is its caller's business."""
    return _bind(roundtrip_p, [x, *_check_key("roundtrip", codec, key)], codec=codec, batch=())[0]


def _roundtrip_lowered(*operands, codec, batch):
    def one(x, key=None):
        layout = Layout.of(codec, [x])
        return decode(layout, encode(layout, [x], key))

    for _ in batch:
        one = jax.vmap(one)
    return one(*operands)


def _roundtrip_keeps(shape, shards, codec):
    """Whether shards consist of whole buckets: what lies together in one, behind the last axis that is cut, must. Noise
    depends on where in the leaf an element lies, which a shard doesn't know."""
    last = max((k for k, n in enumerate(shards) if n > 1), default=None)
    if last is None:
        return True
    if codec.stochastic or codec.whole or any(size % n for size, n in zip(shape, shards)):
        return False
    return math.prod(shape[last:]) // shards[last] % (codec.bucket_size or 1) == 0


roundtrip_p.multiple_results = True
roundtrip_p.def_impl(jax.jit(roundtrip_p.bind, static_argnames=("codec", "batch")))
# Rounded where it lies: the type's sharding (Explicit meshes) stays.
roundtrip_p.def_abstract_eval(lambda x, *key, codec, batch: [x.update(weak_type=False)])
batching.primitive_batchers[roundtrip_p] = functools.partial(_batch, roundtrip_p)
mlir.register_lowering(
    roundtrip_p,
    partitioning.lower(roundtrip_p, mlir.lower_fun(_roundtrip_lowered, multiple_results=True), _roundtrip_keeps),
)


class Own(tuple):
    def __new__(cls, leaves, rank):
        return super().__new__(cls, (leaves, rank))


_reduce_all = reduce


def reduce(layout, payloads, *, own=None, divisor=1.0, **kw):
    if kw:
        return _reduce_all(layout, payloads, own=own, divisor=divisor, **kw)
    return _reduce_all(layout, payloads, own=own and own[0], rank=own[1] if own else 0, divisor=divisor)


def reduce_encoded(layout, payloads, *, chunk=0, own=None, divisor=1.0, key=None):
    return _reduce_all(
        layout,
        payloads,
        chunk=chunk,
        own=own and own[0],
        rank=own[1] if own else 0,
        divisor=divisor,
        encoded=True,
        key=key,
    )


def reduce_fed(layout, payloads, residuals, *, chunk=0, divisor=1.0, key=None):
    return _reduce_all(layout, payloads, chunk=chunk, residuals=residuals, divisor=divisor, encoded=True, key=key)

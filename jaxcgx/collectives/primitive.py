"""What the compressed collectives have in common as JAX primitives, a bind for each message.

Operands: the message's leaves, then, for codecs that draw noise, the two words of a key. Each carries in front an axis for
every entry of the parameter `batch`, a pair of its size and its name. The name is None for an axis that vmap added; it is
the name of the axis where the collective itself runs over what vmap(axis_name=...) maps.

Linearisation ignores quantization (straight-through): a collective is linear in its leaves, and the derivative of a
staircase is of no use to anybody. So a tangent goes through the same collective, compressed alike, with the same key.
"""
import functools

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir


def split(operands, params):
    """(leaves, key or None)."""
    n = len(params["ids"])
    return list(operands[:n]), operands[n] if len(operands) > n else None


def bind(primitive, leaves, key, **params):
    if key is not None:  # what noise varies over, results do; what else is in the message doesn't matter
        leaves = [*(_compat.vary(x, _compat.varying_axes(key)) for x in leaves), key]
    return primitive.bind(*leaves, **{"batch": (), **params})


def define(name, run, shape, transpose, same, invarying=lambda **params: False):
    """A primitive.

    run(leaves, key, **params): what it does, in terms of lax and the native operations.
    shape(shape, **params): the shape that a leaf of a shape becomes. transpose(leaves, cts, key, **params): cotangents of
    the leaves, of which only the types are given. same: the results are the same on every rank. invarying(**params): and
    say so in their types.
    """
    primitive = _compat.Primitive(f"jaxcgx_{name}")
    primitive.multiple_results = True

    @functools.lru_cache
    def compiled(params):
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    primitive.def_impl(lambda *operands, **params: compiled(tuple(params.items()))(*operands))

    def lower(*operands, batch, **params):
        def mapped(*operands):
            leaves, key = split(operands, params)
            return run(leaves, key, **params)

        for _, axis in reversed(batch):
            mapped = jax.vmap(mapped, axis_name=axis)
        return mapped(*operands)

    mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=True))

    def abstract(*avals, batch, axes, **params):
        bound = [axis for axis in axes if axis not in [name for _, name in batch]]
        sizes, n = tuple(size for size, _ in batch), len(batch)
        gone = axes if invarying(**params) else ()
        leaves, _ = split(avals, params)
        return [_compat.result_aval([aval], sizes + shape(aval.shape[n:], axes=axes, **params), aval.dtype, n, gone)
                for aval in leaves], _compat.axis_effects(bound)

    primitive.def_effectful_abstract_eval(abstract)

    def batched(axis, operands, dims, *, batch, axes, **params):
        ours = axis.name in axes
        if not ours and all(d is None for d in dims):  # vmap asks even about what it does not map
            results = primitive.bind(*operands, batch=batch, axes=axes, **params)
            return results, [None] * len(results)
        moved = [jnp.broadcast_to(x, (axis.size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)]
        batch = ((axis.size, axis.name if ours else None), *batch)
        results = primitive.bind(*moved, batch=batch, axes=axes, **params)
        if ours and same:
            return [r[0] for r in results], [None] * len(results)
        return results, [0] * len(results)

    batching.fancy_primitive_batchers[primitive] = batched

    def jvp(primals, tangents, **params):
        results = primitive.bind(*primals, **params)
        leaves, key = split(primals, params)
        moving, _ = split(tangents, params)
        if all(type(t) is ad.Zero for t in moving):
            return results, [_compat.zero_tangent(r) for r in results]
        return results, bind(primitive, list(map(ad.instantiate_zeros, moving)), key, **params)

    ad.primitive_jvps[primitive] = jvp

    def transposed(cts, *operands, **params):
        leaves, key = split(operands, params)
        if all(type(ct) is ad.Zero for ct in cts):
            back = [ad.Zero(x.aval) for x in leaves]
        else:
            avals = [x.aval for x in leaves]
            back = transpose(avals, list(map(ad.instantiate_zeros, cts)), key, **params)
            back = [_compat.vary(ct, _compat.varying_axes(aval)) for ct, aval in zip(back, avals)]
        return back + [None] * (len(operands) - len(leaves))

    ad.primitive_transposes[primitive] = transposed
    return primitive

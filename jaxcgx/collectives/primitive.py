"""What the compressed collectives have in common as JAX primitives, a bind for each message.

Operands: the message's leaves; with `feedback` a residual for each, which a result follows behind the leaves' own; for codecs
that draw noise the two words of a key. Each carries in front an axis for
every entry of the parameter `batch`, a pair of its size and its name. The name is None for an axis that vmap added; it is
the name of the axis where the collective itself runs over what vmap(axis_name=...) maps. `net` is the transport.

Linearisation ignores quantization (straight-through): a collective is linear in its leaves, and the derivative of a
staircase is of no use to anybody. So a tangent goes through the same collective, compressed alike, with the same key. What
rounding lost and will lose, residuals, counts as constant.
"""
import functools

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir


def split(operands, params):
    """(leaves, key or None, residuals or None)."""
    n = len(params["ids"])
    end = 2 * n if params.get("feedback") else n
    return list(operands[:n]), operands[end] if len(operands) > end else None, list(operands[n:end]) or None


def bind(primitive, leaves, key, residuals=None, **params):
    """The results, and behind them the new residuals, where there are any."""
    if key is not None:  # what noise varies over, results do; what else is in the message doesn't matter
        leaves = [_compat.vary(x, _compat.varying_axes(key)) for x in leaves]
    if residuals is not None:  # what is lost varies as what is sent does
        leaves, residuals = zip(*(_compat.match_varying(x, r) for x, r in zip(leaves, residuals)))
        params["feedback"] = True
    return primitive.bind(*leaves, *(residuals or []), *([] if key is None else [key]), **{"batch": (), **params})


def define(name, run, shape, transpose, same, invarying=lambda **params: False):
    """A primitive.

    run(leaves, key, [residuals,] **params): what it does, in terms of lax and the native operations.
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
        feedback = params.pop("feedback", False)

        def mapped(*operands):
            leaves, key, residuals = split(operands, dict(params, feedback=feedback))
            return run(leaves, key, *([residuals] if feedback else []), **params)

        for _, axis in reversed(batch):
            mapped = jax.vmap(mapped, axis_name=axis)
        return mapped(*operands)

    mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=True))

    def abstract(*avals, batch, net, **params):
        bound = [axis for axis in net.names if axis not in [name for _, name in batch]]
        sizes, n = tuple(size for size, _ in batch), len(batch)
        gone = net.names if invarying(**params) else ()
        leaves, _, residuals = split(avals, params)
        results = [_compat.result_aval([x], sizes + shape(x.shape[n:], **params), x.dtype, n, gone) for x in leaves]
        new = [_compat.result_aval([x], x.shape, x.dtype, n) for x in residuals or []]
        return results + new, _compat.axis_effects(bound) | net.effects

    primitive.def_effectful_abstract_eval(abstract)

    def batched(axis, operands, dims, *, batch, net, **params):
        ours = axis.name in net.names
        if not ours and all(d is None for d in dims):  # vmap asks even about what it does not map
            results = primitive.bind(*operands, batch=batch, net=net, **params)
            return results, [None] * len(results)
        moved = [jnp.broadcast_to(x, (axis.size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)]
        batch = ((axis.size, axis.name if ours else None), *batch)
        results = primitive.bind(*moved, batch=batch, net=net, **params)
        n = len(params["ids"]) if ours and same else 0  # residuals, behind the leaves, are every rank's own
        return [r[0] for r in results[:n]] + list(results[n:]), [None] * n + [0] * (len(results) - n)

    batching.fancy_primitive_batchers[primitive] = batched

    def jvp(primals, tangents, **params):
        results = primitive.bind(*primals, **params)
        leaves, key, _ = split(primals, params)
        moving, _, _ = split(tangents, params)
        if all(type(t) is ad.Zero for t in moving):
            return results, [_compat.zero_tangent(r) for r in results]
        linear = {name: value for name, value in params.items() if name != "feedback"}
        moved = bind(primitive, list(map(ad.instantiate_zeros, moving)), key, **linear)
        return results, moved + [_compat.zero_tangent(r) for r in results[len(leaves) :]]

    ad.primitive_jvps[primitive] = jvp

    def transposed(cts, *operands, **params):
        leaves, key, _ = split(operands, params)
        if all(type(ct) is ad.Zero for ct in cts):
            back = [ad.Zero(x.aval) for x in leaves]
        else:
            avals = [x.aval for x in leaves]
            back = transpose(avals, list(map(ad.instantiate_zeros, cts)), key, **params)
            back = [_compat.vary(ct, _compat.varying_axes(aval)) for ct, aval in zip(back, avals)]
        return back + [None] * (len(operands) - len(leaves))

    ad.primitive_transposes[primitive] = transposed
    return primitive

"""What the compressed collectives have in common as JAX primitives, a bind for each message.

Operands: the message's leaves; of each kind of `state` (STATE) an array for each leaf, and as many results behind the
leaves'
own; for codecs that draw noise the two words of a key. Each carries in front an axis for every entry of the parameter
`batch`, a
pair of its size and its name. The name is None for an axis that vmap added; it is the name of the axis where the
collective itself
runs over what vmap(axis_name=...) maps. `net` is the transport.

Linearisation ignores quantization (straight-through): a collective is linear in its leaves, and the derivative of a
staircase is of no use to anybody. So a tangent goes through the same collective, compressed alike, with the same key.
What
rounding lost and will lose, residuals, counts as constant; factors are those of the leaves, and tangents begin without.
"""

import functools

import jax

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.native import ops

# What a sum keeps from call to call, and whether it is a rank's own. factors: the same on every rank, vary as sums do.
STATE = {"residuals": True, "momentum": True, "factors": False}


def split(operands, params):
    """(leaves, key or None, {kind of state: its arrays})."""
    n = len(params["ids"])
    groups = [list(operands[k : k + n]) for k in range(0, n * (1 + len(params["state"])), n)]
    rest = operands[n * len(groups) :]
    return groups[0], rest[0] if rest else None, dict(zip(params["state"], groups[1:]))


def bind(primitive, leaves, key, state={}, **params):
    """The results, and behind them those of each kind of state."""
    if key is not None:  # what noise varies over, results do; what else is in the message doesn't matter
        leaves = [_compat.vary(x, _compat.varying_axes(key)) for x in leaves]
    for kind, arrays in state.items():  # what is kept varies as what is sent does
        leaves = [_compat.vary(x, _compat.varying_axes(kept)) for x, kept in zip(leaves, arrays)]
    gone = {kind: frozenset() if own else frozenset(params["net"].names) for kind, own in STATE.items()}
    arrays = [
        _compat.vary(kept, _compat.varying_axes(x) - gone[kind])
        for kind, kept_of in state.items()
        for x, kept in zip(leaves, kept_of)
    ]
    return primitive.bind(
        *leaves, *arrays, *([] if key is None else [key]), **{"batch": (), **params, "state": tuple(state)}
    )


def _stateless(params):
    """The parameters of the same without state."""
    return {name: value for name, value in params.items() if name != "state"}


def define(name, run, shape, transpose, same, invarying=lambda **params: False):
    """A primitive.

    run(leaves, key, [state of each kind,] **params): what it does, in terms of lax and the native operations.
    shape(shape, **params): the shape that a leaf of a shape becomes. transpose(leaves, cts, key, **params): cotangents
    of
    the leaves, of which only the types are given. same: the results are the same on every rank. invarying(**params):
    and
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
            leaves, key, state = split(operands, params)
            return run(leaves, key, **state, **_stateless(params))

        for _, axis in reversed(batch):
            mapped = jax.vmap(mapped, axis_name=axis)
        return mapped(*operands)

    mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=True))

    def abstract(*avals, batch, net, **params):
        bound = [axis for axis in net.names if axis not in [name for _, name in batch]]
        sizes, n = tuple(size for size, _ in batch), len(batch)
        gone = net.names if invarying(**params) else ()
        leaves, _, state = split(avals, params)
        results = [
            _compat.result_aval([x], sizes + shape(x.shape[n:], **_stateless(params)), x.dtype, n, gone) for x in leaves
        ]
        new = [_compat.result_aval([x], x.shape, x.dtype, n) for kept in state.values() for x in kept]
        return results + new, _compat.axis_effects(bound) | net.effects

    primitive.def_effectful_abstract_eval(abstract)

    def batched(axis, operands, dims, *, batch, net, **params):
        ours = axis.name in net.names
        if not ours and all(d is None for d in dims):  # vmap asks even about what it does not map
            results = primitive.bind(*operands, batch=batch, net=net, **params)
            return results, [None] * len(results)
        batch = ((axis.size, axis.name if ours else None), *batch)
        results = primitive.bind(*ops.in_front(operands, dims, axis.size), batch=batch, net=net, **params)
        n = len(params["ids"])
        alone = [ours and same and not STATE.get(kind) for kind in ("leaves", *params["state"]) for _ in range(n)]
        return [r[0] if one else r for r, one in zip(results, alone)], [None if one else 0 for one in alone]

    batching.fancy_primitive_batchers[primitive] = batched

    def jvp(primals, tangents, **params):
        results = primitive.bind(*primals, **params)
        leaves, key, _ = split(primals, params)
        moving, _, _ = split(tangents, params)
        if all(type(t) is ad.Zero for t in moving):
            return results, [_compat.zero_tangent(r) for r in results]
        moved = bind(primitive, list(map(ad.instantiate_zeros, moving)), key, **_stateless(params))
        return results, moved + [_compat.zero_tangent(r) for r in results[len(leaves) :]]

    ad.primitive_jvps[primitive] = jvp

    def transposed(cts, *operands, **params):
        leaves, key, _ = split(operands, params)
        if all(type(ct) is ad.Zero for ct in cts):
            back = [ad.Zero(x.aval) for x in leaves]
        else:
            avals = [x.aval for x in leaves]
            back = transpose(avals, list(map(ad.instantiate_zeros, cts)), key, **_stateless(params))
            back = [_compat.vary(ct, _compat.varying_axes(aval)) for ct, aval in zip(back, avals)]
        return back + [None] * (len(operands) - len(leaves))

    ad.primitive_transposes[primitive] = transposed
    return primitive

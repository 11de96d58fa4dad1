"""Gradients that JAX doesn't reduce itself, and their compressed reduction while the backward pass still runs."""

import functools

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.collectives import psum
from jaxcgx.transports.resolve import check_axes


def _vary(x, names):
    """The tree, varying over the axes where JAX tracks that."""
    tracked = _compat.tracked_axes(names)
    return jax.tree_util.tree_map(lambda leaf: _compat.vary(leaf, tracked), x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _own(names, loss):
    """The loss. That it is each rank's own is checked where it has a derivative: a constant may be the same
    everywhere."""
    return loss


@_own.defjvp
def _own_jvp(names, primals, tangents):
    varying = frozenset().union(*map(_compat.varying_axes, jax.tree.leaves(primals)))
    if same := [name for name in names if name in _compat.tracked_axes(names) - varying]:
        raise ValueError(
            "local_value_and_grad: argument 'fun': expected this rank's own loss, got one that is the same on every "
            "rank "
            f"of {', '.join(map(repr, same))}; take the pmean outside"
        )
    return *primals, *tangents


def local_value_and_grad(fun, axis_name, argnums=0, has_aux=False, holomorphic=False, allow_int=False):
    """`jax.value_and_grad` whose gradients are those of this rank alone.

    Under shard_map's check_vma JAX sums the gradient of a parameter that is the same on every rank over all of them, in
    full precision, before anybody sees it. Here the parameters count as each rank's own, so that the sum is left to do:
    `compressed_pmean(grads, axis_name, codec)`. Value and auxiliary outputs are this rank's, too.

    `fun` is this rank's own loss: the gradients of one that is averaged over the axis inside would be divided by the
    ranks twice.
    Under check_vma that is an error, but where its gradients are zero; without, nothing tells.

    axis_name: the axis, or a tuple of axes, that the gradients are not to be reduced over. The rest as in jax.
    """
    if not callable(fun):
        raise TypeError(f"local_value_and_grad: argument 'fun': expected a function, got {fun!r}")

    @functools.wraps(fun)
    def value_and_grad(*args, **kwargs):
        names, args = check_axes("local_value_and_grad", axis_name).names, list(args)
        for i in argnums if isinstance(argnums, (tuple, list)) else [argnums]:
            if -len(args) <= i < len(args):  # else jax says it better
                args[i] = _vary(args[i], names)

        def own(*args, **kwargs):
            match fun(*args, **kwargs):
                case (loss, aux) if has_aux:
                    return _own(names, loss), aux
                case found:  # with has_aux jax says what is wrong
                    return found if has_aux else _own(names, found)

        return jax.value_and_grad(own, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int)(
            *args, **kwargs
        )

    return value_and_grad


def sync_in_backward(
    params, axis_name, codec, *, key=None, schedule="auto", own="raw", leader=False, strict=False, fusion_mb=None
):
    """`params` as they are; in the backward pass their gradients become the compressed mean over the axis.

    Every message is exchanged as soon as the gradients of its leaves are known, while the rest of the backward pass
    still
    runs. Call it on the parameters inside the function that is differentiated:

        def loss(params, batch):
            params = jaxcgx.sync_in_backward(params, "data", codec)
            ...

    The gradients have the bits of `compressed_pmean(grads, ...)` at the end of the pass with the same arguments, which
    `compressed_pmean` explains. Smaller messages (`fusion_mb`) start earlier; more of them cost more latency. Reverse
    mode
    only. The loss is this rank's own: one that is averaged over the axis inside has its gradients divided by the ranks
    twice.
    """
    op = "sync_in_backward"
    net = check_axes(op, axis_name)
    call, plain, compressed = psum.prepare(
        op, params, net, codec, key, schedule, own, leader, strict, fusion_mb, mean=True, argument="params", local=False
    )

    def identity(leaves, key, exchange):
        """The leaves; their cotangents go through `exchange(cotangents, key)`."""
        varying = [_compat.varying_axes(x) for x in leaves]

        @jax.custom_vjp
        def f(leaves, key):
            return _vary(leaves, net.names)

        def backward(key, cts):
            return [_compat.vary(x, axes) for x, axes in zip(exchange(cts, key), varying)], None

        f.defvjp(lambda leaves, key: (f(leaves, key), key), backward)
        return f(leaves, key)

    def one(leaf, i):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf  # has no gradient
        return identity([leaf], None, lambda cts, _: [plain(cts[0], i)])[0]

    def message(leaves, key, ids, route):
        return identity(leaves, key, lambda cts, key: compressed(cts, key, ids, route))

    return call.run(one, message)

"""Low-rank sums (codecs/powersgd.py): ranks sum only factors, all P of a message at once, then all Q.

All ranks share one basis. A rank's residual is its own numbers minus their projection on that basis. Both are
orthogonal, so residuals stay bounded. The sum of all ranks' residuals is the error of the sum. (In the published
algorithm, a residual is the rank's numbers minus the mean, so differences between ranks accumulate in it.)

In a hierarchy the inner ranks first sum whole leaves with their own codecs. Each inner rank then knows the whole loss
of its node, and keeps an equal share of it as its residual.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxcgx import _compat
from jaxcgx.codecs.powersgd import PowerSGD
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange import schedules, scopes
from jaxcgx.exchange.message import BegunMessage, Message, Stage, Sum

PSUM = "psum"  # the schedule of factors that the transport's uncompressed collective sums
_SMALL = 2**14  # up to this many elements, leaves of a shape are multiplied at once


class _Stack(NamedTuple):
    """Leaves whose matrices have the same shape, so that one operation makes the bases of all of them."""

    ids: list[int]  # positions in the message
    terms: list[list[jax.Array]]  # float32[m, n] of each leaf: the leaf, and its residual; the sum of both is sent
    q: jax.Array  # float32[leaves, rank, n], from the previous step

    def times(self, product: Callable[[jax.Array, jax.Array], jax.Array], factors: jax.Array) -> jax.Array:
        """Returns the product of each leaf, which is linear, with its factor: float32[leaves, rank, ...].

        The terms are multiplied one by one, as their sum would be one more array. One product for all small leaves
        compiles sooner. Large leaves are not stacked: on CPUs, XLA takes longer to copy them than to multiply.
        """
        if self.terms[0][0].size <= _SMALL:
            return cast(jax.Array, sum(jax.vmap(product)(jnp.stack(each), factors) for each in zip(*self.terms)))
        return jnp.stack([sum(product(x, factor) for x in terms) for terms, factor in zip(self.terms, factors)])


def can_begin(stage: Stage) -> bool:
    """Returns whether the sums of factors go on by themselves."""
    return stage.schedule != PSUM and schedules.is_piecewise(_raw(stage))


def begin(stage: Stage, message: Message) -> BegunMessage:
    """Begins the sum of P. The leaves are those of this rank or, in a hierarchy, of its node: then with residuals."""
    codec = cast(PowerSGD, stage.codec)
    stacks = _stacks(stage, message, [message.leaves, message.residuals])
    products = [stack.times(codec.left, codec.begin(stack.q)) for stack in stacks]
    return BegunMessage(_begin_sum(stage, message, products), more=True, leaves=message.leaves)


def advance(stage: Stage, begun: BegunMessage, message: Message, inner: int, later: bool) -> BegunMessage:
    """Ends the sum of P, and begins that of Q. `inner`: the number of inner ranks. `later`: as in `schedules.end`."""
    codec = cast(PowerSGD, stage.codec)
    stacks = _stacks(stage, message, _terms(begun, message, inner))
    bases = [codec.orthonormal(p) for p in _end_sum(stage, begun.outer, later)]
    mine = [stack.times(codec.right, basis) for basis, stack in zip(bases, stacks)]
    return begun.replace(outer=_begin_sum(stage, message, mine), more=False, factors=list(zip(bases, mine)))


def end(stage: Stage, begun: BegunMessage, message: Message, how: Sum, *, inner: int, later: bool) -> Message:
    """Returns the divided sums of the leaves, and the new residuals and factors."""
    codec = cast(PowerSGD, stage.codec)
    stacks = _stacks(stage, message, _terms(begun, message, inner))
    leaves: list[Any] = [None] * len(message.leaves)
    lost, factors = list(leaves), list(leaves)
    for stack, (basis, mine), q in zip(stacks, begun.factors or (), _end_sum(stage, begun.outer, later)):
        q = q / how.divisor
        kept = jnp.where(jnp.isfinite(q).all((1, 2), keepdims=True), q, stack.q)
        for k, i in enumerate(stack.ids):
            x = message.leaves[i]
            sums = codec.result(basis[k], q[k]).reshape(x.shape)
            leaves[i], factors[i] = sums.astype(x.dtype), kept[k]
            if message.residuals is not None:
                gone = (sum(stack.terms[k]) - codec.gone(basis[k], mine[k])) / inner
                lost[i] = jnp.where(jnp.isfinite(sums), gone.reshape(x.shape), message.residuals[i])
    residuals = None if message.residuals is None else lost
    return Message(message.ids, leaves, residuals=residuals, factors=message.factors and factors)


def _terms(begun: BegunMessage, message: Message, inner: int) -> list[Any]:
    """Returns the leaves that `begin` got, and their residuals if it got them, too."""
    return [begun.leaves, message.residuals if inner == 1 else None]


def _stacks(stage: Stage, message: Message, terms: list[list[Any] | None]) -> list[_Stack]:
    """Returns the leaves by the shapes of their matrices. `terms`: the leaves, and their residuals or None."""
    codec, alike = cast(PowerSGD, stage.codec), dict[tuple[int, int], list[int]]()
    for i, x in enumerate(message.leaves):
        alike.setdefault(codec.matrix(x.shape), []).append(i)
    stacks: list[_Stack] = []
    for shape, ids in alike.items():
        matrices = [[x[i].astype(jnp.float32).reshape(shape) for x in terms if x is not None] for i in ids]
        if message.factors is None:
            q = jnp.zeros((len(ids), *codec.factor_shape(shape)), jnp.float32)
        else:
            q = jnp.stack([message.factors[i] for i in ids])
        stacks.append(_Stack(ids, matrices, q))
    return stacks


def _raw(stage: Stage) -> Stage:
    return stage._replace(codec=Raw(), backward=Raw())


def _begin_sum(stage: Stage, message: Message, arrays: list[Any]) -> Any:
    """Begins the sum of factors over ranks, all in one exchange."""
    raw, factors = _raw(stage), Message(tuple(range(len(arrays))), _compat.match_varying(*arrays))
    uncompressed = sum(x.size * x.dtype.itemsize for x in message.leaves)
    saving = uncompressed / sum(stage.codec.wire_bytes(x.shape, x.dtype) for x in message.leaves)
    if can_begin(stage):
        scope = schedules.scope_of(raw, factors)
        scope = dataclasses.replace(scope, codec=stage.codec, saving=scope.saving * saving)
        return schedules.begin(raw, factors, Sum(), named=scope).outer
    with scopes.scope(scopes.ExchangeScope("psum", stage.codec, saving)):
        if stage.schedule != PSUM:
            return schedules.allreduce(raw, factors, Sum()).leaves
        flat, unravel = ravel_pytree(factors.leaves)
        return unravel(stage.net.plain_psum(flat))


def _end_sum(stage: Stage, begun: Any, later: bool) -> list[jax.Array]:
    return stage.net.end_sum(begun, later)[0] if can_begin(stage) else begun

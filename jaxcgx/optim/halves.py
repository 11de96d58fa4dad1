"""Splits a function of one rank into two halves: the first begins sums, the second waits for them.

The second half may run in a later program. It has the operations that depend on results of the sums, and the exchanges
that can't begin in one program and end in another. The first half has all other operations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.exchange import sums
from jaxcgx.native.tcp_sum import tcp_begin_p, tcp_end_p


@dataclasses.dataclass(frozen=True, eq=False)
class Halves:
    """A traced function (shared, *args), split where it waits for sums. Both halves get `shared`."""

    before: Any  # the first half, a program (constants, shared, args) -> values
    behind: Any  # the second half, a program (constants, shared, values) -> results
    constants: list[Any]
    results: Any  # the shapes of the results, a tree like them

    @classmethod
    def of(cls, function: Callable[..., Any], shared: Any, *args: Any) -> "Halves":
        """Returns the halves of function(shared, *args)."""
        with sums.opened():
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(shared, *args)
        program = closed.jaxpr
        both = [*program.constvars, *program.invars[: len(jax.tree_util.tree_leaves(shared))]]
        leads = _leading(program.eqns)
        late: set[Any] = set()
        first, ends, rest = [], [], []
        for eqn in program.eqns:
            waits = any(x in late for x in _variables(eqn.invars))
            if eqn.primitive is tcp_end_p and not waits:
                ends.append(eqn.replace(params=eqn.params | {"how": eqn.params["how"]._replace(later=True)}))
            elif waits or (eqn.effects and id(eqn) not in leads):
                rest.append(eqn)
            else:
                first.append(eqn)
                continue
            late.update(eqn.outvars)
        used = _variables([x for eqn in [*ends, *rest] for x in eqn.invars] + program.outvars)
        values = [x for x in dict.fromkeys(used) if x not in late and x not in both]
        unnamed = dict(constvars=(), debug_info=program.debug_info.with_unknown_names())
        return cls(
            program.replace(invars=[*program.constvars, *program.invars], eqns=first, outvars=values, **unnamed),
            # The sum that began last ends first, because the next step needs its results first (P3).
            program.replace(invars=[*both, *values], eqns=[*reversed(ends), *rest], **unnamed),
            closed.consts,
            shapes,
        )

    def first(self, shared: Any, *args: Any) -> list[Any]:
        """Returns the values that the second half needs, as rows [1, ...]."""
        leaves = jax.tree_util.tree_leaves((shared, args))
        found = _compat.eval_jaxpr(self.before, [], *self.constants, *leaves)
        # A value [1, ...] is used as a row without a reshape, because XLA would copy it.
        return [x if x.shape[:1] == (1,) else x[None] for x in found]

    def second(self, shared: Any, values: list[Any], behind: Any = ()) -> Any:
        """Returns the results of the function, from the rows of the first half.

        `behind` is a tree of arrays that XLA computes before it waits for the sums. Without it, XLA may wait at once.
        """
        # JAX takes rows as different on every rank. Values that are the same on all ranks are marked so again.
        alike = lambda x, like: tuple(_compat.varying_axes(x) - _compat.varying_axes(like))
        rows = [(x.reshape(var.aval.shape), var.aval) for x, var in zip(values, self.before.outvars)]
        given = [sums.same(x, alike(x, like)) for x, like in rows]
        if zeros := [_zero(x) for x in jax.tree_util.tree_leaves(behind) if x.size]:
            ends = [eqn for eqn in self.behind.eqns if eqn.primitive is tcp_end_p]
            tickets = {eqn.params["tree"].unflatten(eqn.invars).ticket for eqn in ends}
            zero = sum(zeros)
            given = [x + zero if var in tickets else x for x, var in zip(given, self.before.outvars)]
        found = _compat.eval_jaxpr(self.behind, [], *self.constants, *jax.tree_util.tree_leaves(shared), *given)
        return jax.tree_util.tree_structure(self.results).unflatten(found)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["halves"])
@dataclasses.dataclass(frozen=True)
class Begun:
    """A function's sums that have begun. A pytree of rows [1, ...]."""

    values: list[Any]  # the values between the halves
    halves: Halves

    def end(self, behind: Any) -> Any:
        """Returns the results of the function. XLA computes the arrays in the tree `behind` before it waits."""
        return self.halves.second((), self.values, behind)

    def before(self, x: jax.Array) -> jax.Array:
        """Returns x. XLA begins the sums before it computes anything from the result."""
        return after(self.values, x)


def begin(function: Callable[..., Any], *args: Any) -> Begun:
    """Begins the sums of function(*args)."""
    halves = Halves.of(lambda _, *args: function(*args), (), *args)
    return Begun(halves.first((), *args), halves)


@dataclasses.dataclass(frozen=True)
class Early:
    """The function `update` of a transformation that has something to exchange before it gets gradients.

    Over transports whose exchanges go on during the computation, `make_train_step` calls `begin` before the loss
    function, and passes the result to `update` as the extra argument `begun`. Otherwise, `update` begins the exchange.
    """

    begin: Callable[[Any, Any], Begun | None]  # of (state, params); None: there is nothing to exchange
    update: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.update(*args, **kwargs)


def after(tree: Any, x: jax.Array) -> jax.Array:
    """Returns x. XLA computes the arrays in the tree before it computes anything from the result."""
    zeros = [_zero(y) for y in jax.tree_util.tree_leaves(tree) if y.size]
    return jnp.where(sum(zeros) > 0, jnp.zeros_like(x), x) if zeros else x


def _zero(x: jax.Array) -> jax.Array:
    """Returns 0. Nothing is above infinity, but XLA doesn't know this, so it computes x first."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return (jnp.real(x.reshape(-1)[0]).astype(jnp.float32) > jnp.inf).astype(jnp.uint32)


def _leading(eqns: Any) -> set[int]:
    """Returns the ids of the operations that begin sums, and of all operations on which these depend."""
    found, needed = set(), set()
    for eqn in reversed(eqns):
        if eqn.primitive is tcp_begin_p or not needed.isdisjoint(eqn.outvars):
            found.add(id(eqn))
            needed.update(_variables(eqn.invars))
    return found


def _variables(atoms: Any) -> list[Any]:
    return [x for x in atoms if not hasattr(x, "val")]  # literals have `val`

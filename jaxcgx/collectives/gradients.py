"""Gradients of one rank, which JAX doesn't reduce."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.typing import AxisName, PyTree


def vary(x: PyTree, names: tuple[AxisName, ...]) -> PyTree:
    """Returns the tree, marked as varying over the axes `names` if JAX tracks this for them."""
    tracked = _compat.tracked_axes(names)
    return jax.tree.map(lambda leaf: _compat.vary(leaf, tracked), x)


def _own(function: str, argument: str, names: tuple[AxisName, ...], loss: PyTree) -> PyTree:
    """Returns the loss. If it is differentiated, its type must vary over the ranks. A constant isn't checked."""
    return loss


def _own_jvp(
    function: str, argument: str, names: tuple[AxisName, ...], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, ...]:
    varying = frozenset[Any]().union(*map(_compat.varying_axes, jax.tree.leaves(primals)))
    if same := [name for name in names if name in _compat.tracked_axes(names) - varying]:
        got = f"one that is the same on every rank of {', '.join(map(repr, same))}"
        raise wrong(function, argument, "this rank's own loss", got, "take the pmean out of the loss")
    return *primals, *tangents


own: Any = jax.custom_jvp(_own, nondiff_argnums=(0, 1, 2))
own.defjvp(_own_jvp)


def local_value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function like `jax.value_and_grad(fun)` whose gradients are this rank's own, not summed over ranks.

    If a parameter is the same on every rank, JAX itself sums its gradient over all ranks, in full precision, under
    shard_map's check_vma. Here, parameters count as different on every rank, so JAX doesn't sum. Take the mean with
    `compressed_pmean(grads, axis_name, codec)`. The value and the auxiliary outputs are also this rank's own.

    `fun` must return this rank's loss. Averaging over ranks inside it divides the gradients by the number of ranks
    twice. Under check_vma this is an error, unless its gradients are zero. Without check_vma nothing detects it.

    Args:
      fun: the function to differentiate.
      axis_name: the axis, or a tuple of axes, over which gradients are not reduced.
      argnums, has_aux, holomorphic, allow_int: as in jax.value_and_grad.
    """
    if not callable(fun):
        raise wrong("local_value_and_grad", "fun", "a function", repr(fun), kind=TypeError)

    @functools.wraps(fun)
    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        names, given = transport_over_axes("local_value_and_grad", axis_name).names, list(args)
        for i in argnums if isinstance(argnums, Sequence) else [argnums]:
            if -len(given) <= i < len(given):  # otherwise jax raises its own error
                given[i] = vary(given[i], names)

        check = functools.partial(own, "local_value_and_grad", "fun", names)

        def checked(*args: Any, **kwargs: Any) -> Any:
            match fun(*args, **kwargs):
                case (loss, aux) if has_aux:
                    return check(loss), aux
                case found:  # with has_aux this isn't a pair, and jax raises its own error
                    return found if has_aux else check(found)

        differentiated = jax.value_and_grad(
            checked, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int
        )
        return differentiated(*given, **kwargs)

    return value_and_grad

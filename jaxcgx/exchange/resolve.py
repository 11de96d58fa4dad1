"""Finds the transport over the ranks that a caller names: by axes of a mesh, or by a communicator.

And refuses sharding constraints over the axes of ranks in a loss, which gets one rank's part of a batch.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.exchange.scopes import MessageScope, scope
from jaxcgx.transports.axes import Mark, Tcp, as_axis_names, is_communicator, marked
from jaxcgx.transports.base import Transport
from jaxcgx.transports.tcp import transport_over_tcp
from jaxcgx.transports.xla import Axes
from jaxcgx.typing import AxisName, PyTree

# {type of a mark: function}. function(op, names of all axes, marks among the axes) returns the transport.
MAKERS: dict[type[Mark], Callable[[str, tuple[Any, ...], Any], Transport]] = {Tcp: transport_over_tcp}


def transport_over(
    op: str, axis_name: AxisName, arrays: Mapping[str, PyTree], settings: Mapping[str, object]
) -> Transport:
    """Returns the transport over axes, all of which must be bound, or over a communicator.

    Over a communicator, the ranks compare the arguments of the call: {name: tree of arrays}, and {name: value} of the
    others. `op` is the function that the user called.
    """
    if not is_communicator(axis_name):
        net = transport_over_axes(op, axis_name)
        tracked = _compat.tracked_axes(net.names)  # JAX must track what varies for all of the axes or for none
        if tracked and (others := [name for name in net.names if name not in tracked]):
            got = f"both: vmap's {', '.join(map(repr, others))} among axes over which shard_map checks what varies"
            remedy = "call it for one after the other, or pass check_vma=False"
            raise wrong(op, "axis_name", "axes of a mesh or axes of vmap", got, remedy)
        return net
    from jaxcgx.mpi.ranks import enter  # this import starts MPI, which is optional

    with scope(MessageScope(op, (), ("digest",))):
        return enter(op, axis_name, arrays, settings)


def is_bound(names: tuple[Any, ...]) -> bool:
    """Returns whether the caller is inside of shard_map, pmap or vmap over one of the axes."""
    for name in names:
        with contextlib.suppress(NameError):
            jax.lax.axis_size(name)
            return True
    return False


def transport_over_axes(op: str, axis_name: AxisName) -> Transport:
    """Returns the transport over the axes, all of which must be bound."""
    names = as_axis_names(op, axis_name)
    for name in names:
        if not is_bound((name,)):
            raise NameError(
                f"{op}: argument 'axis_name': no axis {name!r} is bound here; call {op} inside jax.shard_map over "
                f"a mesh with that axis (or pmap, or vmap with axis_name={name!r}); for the gradients of a program "
                f"that leaves the ranks to jit, take jaxcgx.value_and_grad(loss_fn, {name!r}, plan) or "
                "jaxcgx.make_train_step(loss_fn, optimizer, mesh, plan)"
            )
    marks = marked(axis_name)
    kinds = list(dict.fromkeys(map(type, marks)))
    if len(kinds) > 1:
        raise wrong(op, "axis_name", "axes with one kind of mark", " and ".join(kind.__name__ for kind in kinds))
    return MAKERS[kinds[0]](op, names, marks) if kinds else Axes(names)


# JAX's errors for a sharding constraint over an axis of shard_map. The first three are for a constraint that is given
# as a spec, as a NamedSharding of the mesh, and as out_sharding. The last is raised without check_vma, at compile time.
_CONSTRAINED = (
    "can only refer to Auto axes",
    "should be of type `Manual`",
    "that are of type Auto or Manual",
    "contains a manual axes",
)


@contextlib.contextmanager
def without_constraints(function: str, names: tuple[AxisName, ...]) -> Generator[None]:
    """Turns JAX's errors about sharding constraints over the ranks' axes into an error that says what to write."""
    try:
        yield
    except ValueError as error:
        if not any(words in str(error) for words in _CONSTRAINED):
            raise
        axes = ", ".join(map(repr, names))
        expected = f"no sharding constraint over {axes} inside the loss, which gets one rank's part of a batch"
        remedy = (
            'outside of shard_map and pmap, take jaxcgx.value_and_grad(..., ranks="vmap"), in which it means the '
            "devices of the rank, or take it out; for other axes of the mesh, pass a PartitionSpec without the mesh: "
            'jax.lax.with_sharding_constraint(x, P(None, "model"))'
        )
        raise wrong(function, "loss_fn", expected, f"one: {error}", remedy) from error

"""Finds the transport over the axes that a caller names."""

from collections.abc import Callable
from typing import Any

from jax import lax

from jaxcgx.checks import wrong
from jaxcgx.transports.axes import Mark, Tcp, check_axis_names, marked
from jaxcgx.transports.base import Transport
from jaxcgx.transports.tcp import check_tcp
from jaxcgx.transports.xla import Axes
from jaxcgx.typing import AxisName

# {type of a mark: function}. function(op, names of all axes, marks among the axes) returns the transport.
MAKERS: dict[type[Mark], Callable[[str, tuple[Any, ...], Any], Transport]] = {Tcp: check_tcp}


def check_axes(op: str, axis_name: AxisName) -> Transport:
    """Returns the transport over the axes, all of which must be bound."""
    names = check_axis_names(op, axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise NameError(
                f"{op}: argument 'axis_name': no axis {name!r} is bound here; call {op} inside jax.shard_map over "
                f"a mesh with that axis (or pmap, or vmap with axis_name={name!r}); for the gradients of a program "
                f"that leaves the ranks to jit, take jaxcgx.value_and_grad(loss_fn, {name!r}, codec), or with momentum "
                "jaxcgx.make_train_step(loss_fn, optimizer, mesh, compress=jaxcgx.dgc)"
            ) from None
    marks = marked(axis_name)
    kinds = list(dict.fromkeys(type(mark) for mark in marks))
    if len(kinds) > 1:
        raise wrong(op, "axis_name", "axes with one kind of mark", " and ".join(kind.__name__ for kind in kinds))
    return MAKERS[kinds[0]](op, names, marks) if kinds else Axes(names)

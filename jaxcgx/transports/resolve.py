"""Finds the transport over the axes that a caller names."""

from jax import lax

from jaxcgx.transports.axes import check_axis_names, marked
from jaxcgx.transports.base import Transport
from jaxcgx.transports.tcp import check_tcp
from jaxcgx.transports.xla import Axes
from jaxcgx.typing import AxisName


def check_axes(op: str, axis_name: AxisName) -> Transport:
    """The transport over the axes, all of which must be bound."""
    names = check_axis_names(op, axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise NameError(
                f"{op}: argument 'axis_name': no axis {name!r} is bound here; call {op} inside jax.shard_map over "
                f"a mesh with that axis (or pmap, or vmap with axis_name={name!r}); for the gradients of a program "
                f"that leaves the ranks to jit, take jaxcgx.value_and_grad(loss_fn, {name!r}, codec)"
            ) from None
    marks = marked(axis_name)
    return check_tcp(op, names, marks) if marks else Axes(names)

"""begin_pmean, end_pmean: a mean that one program begins and a later program ends. Other programs may run between."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.collectives.calls import Route
from jaxcgx.collectives.old_arguments import Options
from jaxcgx.collectives.old_psum import Reduction, run
from jaxcgx.collectives.state import Kept, State
from jaxcgx.exchange import sums
from jaxcgx.exchange.message import Message
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.typing import AxisName


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["messages", "leaves"], meta_fields=["tree", "fed", "names"]
)
@dataclasses.dataclass(frozen=True)
class Ticket:
    """A mean that has begun, for `end_pmean`. It is a pytree of arrays with a leading axis of size one.

    If its arrays are zeros, nothing has begun.

    Attributes:
      messages: {numbers of the leaves: message whose exchange has begun}.
      leaves: {number of the leaf: mean that the first program has already computed}.
      tree: the tree structure of the means.
      fed: whether there are residuals.
      names: the axes of the ranks.
    """

    messages: dict[tuple[int, ...], Any]
    leaves: dict[int, jax.Array]
    tree: Any
    fed: bool
    names: tuple[Any, ...]


def begin_pmean(
    x: Any,
    axis_name: AxisName,
    codec: Codecs | Plan,
    *,
    key: jax.Array | None = None,
    residuals: Any = None,
    factors: Any = None,
    schedule: str | dict[Any, str] = "auto",
    own: Literal["raw", "encoded"] = "raw",
    strict: bool = False,
    fusion_mb: float | None = None,
) -> Any:
    """Begins a `compressed_pmean`, which `end_pmean` ends in this program or in a later one.

    The mean has the same bits as with `compressed_pmean`. Over `Tcp`, a message continues to travel while the programs
    between the two calls run. This needs a single codec over all axes: a codec with kernels, or `Raw()`. In all other
    cases, `begin_pmean` itself computes the mean, and the ticket has the result: other transports, hierarchies, `TopK`,
    `PowerSGD`, the schedule "ring", and leaves of other dtypes.

    All ranks must begin and end the same means in the same order. End every ticket exactly once. A ticket that isn't
    ended keeps the memory of its messages. More than 10,000 such messages are an error. Another process can't use a
    ticket, so don't save it in a checkpoint: end it first.

    Args:
      x: a pytree of arrays.
      axis_name: one name, or a tuple of names, outermost first.
      codec: a codec, {axis name: codec} or a `Plan`.
      key: a random key, as in `compressed_psum`. The arguments below are also as in `compressed_psum`.
      residuals: this rank's residuals, for error feedback. Pass the new residuals to `end_pmean`, which returns the
        final ones.
      factors: the factors of `PowerSGD`.
      schedule: how the bytes travel.
      own: how a rank adds its own part.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB; by default the plan's, or 64.

    Returns:
      A ticket, followed by the new residuals and the new factors if the caller gave residuals and factors. The ticket
      is a pytree of each rank's own arrays, whose first axis has size one. To pass it from program to program, shard
      this axis over all axes of the mesh in shard_map's specs. A ticket whose arrays are zeros means that nothing has
      begun.
    """
    op = "begin_pmean"
    net = check_axes(op, axis_name)
    options = Options(key=key, schedule=schedule, own=own, strict=strict, fusion_mb=fusion_mb)
    reduction = Reduction(op, x, net=net, codec=codec, options=options, mean=True)
    kept = Kept(reduction.call, State(residuals=residuals, factors=factors))
    messages: dict[tuple[int, ...], Any] = {}

    def begin(message: Message, route: Route) -> Message:
        begun = sums.begin(message, reduction.stages[route], reduction.how)
        if begun is None:
            return reduction.compressed(message, route)
        messages[message.ids] = dataclasses.replace(begun, residuals=None)
        return message.replace(leaves=[None] * len(message.ids), residuals=begun.residuals)

    results = reduction.call.tree.flatten_up_to(run(reduction, kept, begin))
    leaves = {i: y for i, y in enumerate(results) if y is not None}
    ticket = Ticket(messages, leaves, tree=reduction.call.tree, fed=residuals is not None, names=net.names)
    ticket = jax.tree_util.tree_map(lambda a: _compat.vary(a[None], frozenset(_compat.tracked_axes(net.names))), ticket)
    return (ticket, *kept.trees()) if kept.arrays else ticket


def end_pmean(ticket: Any, residuals: Any = None) -> Any:
    """Returns the mean that `begin_pmean` has begun, or zeros if the ticket says that nothing has begun.

    If the exchange has failed, `end_pmean` raises the error, which names the rank that is gone or late. Over `Tcp`,
    later exchanges of the program begin only when `end_pmean` has finished.

    Args:
      ticket: the ticket that `begin_pmean` returned.
      residuals: the residuals that `begin_pmean` returned, if it got some. The result is then a pair, the mean and the
        new residuals.
    """
    op = "end_pmean"
    if not isinstance(ticket, Ticket):
        raise wrong(op, "ticket", "what begin_pmean returned", repr(ticket), kind=TypeError)
    if ticket.fed != (residuals is not None):
        expected = "the residuals that begin_pmean returned" if ticket.fed else "None, as begin_pmean got none"
        raise wrong(op, "residuals", expected, "None" if ticket.fed else "some")
    ticket = jax.tree_util.tree_map(lambda a: a[0], ticket)
    found: list[Any] = [ticket.leaves.get(i) for i in range(ticket.tree.num_leaves)]
    lost = ticket.tree.flatten_up_to(residuals) if ticket.fed else []
    for ids, begun in ticket.messages.items():
        if ticket.fed:
            shapes = begun.layout.shapes
            given = [jnp.zeros(s, jnp.float32) if lost[i] is None else lost[i] for i, s in zip(ids, shapes)]
            begun = dataclasses.replace(begun, residuals=given)
        leaves, new = sums.end(begun)
        for k, i in enumerate(ids):
            found[i] = leaves[k]
            if ticket.fed and lost[i] is not None:
                lost[i] = new[k]
    mean = ticket.tree.unflatten([sums.same(y, ticket.names) for y in found])
    return (mean, ticket.tree.unflatten(lost)) if ticket.fed else mean

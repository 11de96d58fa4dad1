"""A step of one rank: its gradients, and their exchange with the other ranks."""

from collections.abc import Callable
from typing import Any

import jax

from jaxcgx import _programs
from jaxcgx.exchange.routes import Way
from jaxcgx.train.division import Division, addable, after, in_rows, row, without_row
from jaxcgx.train.exchange import At, Exchange, check_state, send
from jaxcgx.train.frozen import join, part
from jaxcgx.train.gradient import Gradient
from jaxcgx.train.state import ExchangeState, Pending, Priority
from jaxcgx.typing import Batch, Key, Params, PyTree

Reduced = tuple[PyTree, ExchangeState]  # (means of the trained leaves, the state after the exchange)


class Rank:
    """The functions of one rank. They run on all ranks by `Division.over`.

    Attributes:
      order: the numbers of the leaves in the order in which their gradients are ready. With an overlap, `step` learns
        it while it is traced.
      state_of: a function from gradients to the shapes of the exchange's state, which it must fit. None: it isn't
        checked.
    """

    division: Division
    exchange: Exchange
    skipped: PyTree
    overlap: str | Priority | None
    order: tuple[int, ...] | None
    state_of: Callable[[Params], ExchangeState] | None

    def __init__(
        self,
        division: Division,
        exchange: Exchange,
        skipped: PyTree,
        overlap: str | Priority | None,
        order: tuple[int, ...] | None = None,
        state_of: Callable[[Params], ExchangeState] | None = None,
    ) -> None:
        self.division, self.exchange, self.skipped = division, exchange, skipped
        self.overlap, self.order, self.state_of = overlap, order, state_of

    def step(
        self,
        gradient: Gradient,
        params: Params,
        model_state: PyTree,
        sent: ExchangeState,
        batch: Batch,
        keys: tuple[Key | None, Key | None],
    ) -> tuple[Any, ...]:
        """Returns (means, state of the exchange, model state, loss, outputs).

        With `Priority`, (rows of gradients or None, rows of a ticket or None) are in place of the means.
        """
        early, ticket = gradient.early, None
        if early:
            ticket, sent = self._begin(None, sent, params, None)
            # XLA begins the exchange before it computes anything from the batch.
            batch = jax.tree_util.tree_map(lambda x: after(ticket, x) if addable(x) else x, batch)
        find, args = gradient, (params, model_state, batch, keys)
        if self.overlap is not None:
            find = jax.jit(gradient)  # with jit, it is traced only once, for its order and for the step
            self.order = self._ready(find, args)
        grads, loss, model_state, aux = find(*args)
        if isinstance(self.overlap, Priority):
            found, sent = self._pend(grads, sent, params, loss)
        elif early:
            ticket = jax.tree_util.tree_map(lambda x: after(grads, x), ticket)
            found, sent = self._end(ticket, grads, sent, params, loss=loss)
        else:
            found, sent = self.reduce(grads, sent, params, loss)
        return found, sent, model_state, loss, aux

    def reduce(self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Reduced:
        """Returns (means, state) of an exchange that begins and ends here."""
        run = self.division.on_shards(self._send, sent)
        means, sent = run(self._whole(grads, params), sent, None if self.division.dims else params, loss)
        return part(means, self.skipped)[0], sent

    def receive(self, pending: Pending, sent: ExchangeState, params: Params) -> Reduced:
        """Returns (means, state) of the exchange of pending gradients."""
        if pending.ticket is None:
            return self.reduce(without_row(pending.grads), sent, params, pending.loss)
        grads = None if pending.grads is None else without_row(pending.grads)
        return self._end(pending.ticket, grads, sent, params, loss=pending.loss)

    def _pend(self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> tuple[Any, ExchangeState]:
        """Begins an exchange that the next step ends, if it can go on in between."""
        if not self.division.crosses or self.division.dims:
            return (row(grads), None), sent
        early = self.exchange.early
        ticket, sent = self._begin(None if early else grads, sent, params, loss)
        return (row(grads) if early else None, ticket), sent

    def _whole(self, grads: PyTree, params: Params) -> PyTree:
        """Returns gradients for all leaves, as plans expect. Nothing reads those that the plan skips."""
        return join(grads, part(self.division.like_whole(params), self.skipped)[1])

    def _at(self, params: Params, loss: jax.Array | None) -> At:
        way = Way(dims=self.division.dims, join=True, order=self.order)
        if isinstance(self.overlap, Priority):
            way = way._replace(slice_elements=self.overlap.slice_elements, later=True)
        return At(self.division.net(), params, loss, way, shards=self.division.shard_axes)

    def _begin(
        self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array | None
    ) -> tuple[PyTree, ExchangeState]:
        at, grads = self._at(params, loss), None if grads is None else row(self._whole(grads, params))
        begin = lambda own, grads: self.exchange.begin(grads, ExchangeState(own, sent.shared), at)
        ticket, new = in_rows(begin, sent.own, grads)
        return ticket, ExchangeState(new.own, without_row(new.shared))

    def _end(self, ticket: PyTree, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Reduced:
        at, grads = self._at(params, loss), row(self._whole(grads, params)) if self.exchange.early else None
        end = lambda own, ticket, grads: self.exchange.end(ticket, ExchangeState(own, sent.shared), at, grads)
        means, new = in_rows(end, sent.own, ticket, grads)
        return part(without_row(means), self.skipped)[0], ExchangeState(new.own, without_row(new.shared))

    def _send(self, grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Reduced:
        """Returns (means, state) of an exchange of all leaves, or of this device's shards of them."""
        if self.state_of is not None:
            check_state("train.step", sent, self.state_of(grads), self.division.remedy)
        return send(self.exchange, grads, sent, self._at(params, loss))

    def _ready(self, find: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Returns the order of all leaves. Those that are skipped come last."""
        skipped = jax.tree_util.tree_leaves(self.skipped)
        trained = [i for i, skip in enumerate(skipped) if not skip]
        ends = _programs.ready(jax.make_jaxpr(find)(*args), len(trained))
        return *(trained[i] for i in ends), *(i for i, skip in enumerate(skipped) if skip)

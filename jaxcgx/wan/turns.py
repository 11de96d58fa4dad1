"""The step of centers as Python calls it: exchanges are programs of their own, which run when they are due."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxcgx import _compat
from jaxcgx.optim.train import Step
from jaxcgx.optim.training import Training


class Ongoing(NamedTuple):
    """What a program of an exchange gets, and what becomes of it."""

    params: Any  # the outer parameters
    count: Any  # unchanged: the next step waits for it
    center: Any  # (the own parameters of the centers, those at the beginning of the round), as rows
    exchange: Any  # the state of the fragment


class CentersStep(Step):
    """The function `step` of the `TrainStep` of centers.

    A call from Python runs a program without exchanges, and then a program for each exchange that is due: Python knows
    the number of steps. In a traced call (jax.jit, lax.scan) the step has the exchanges in conditionals. XLA copies
    what a branch returns unchanged, so every step would copy the parameters and the states of the exchanges.
    """

    def __init__(self, jitted: Any, centers: Any, training: Training, donate: bool, place: int) -> None:
        super().__init__(jitted, centers.placement, place)
        self._centers, self._donate, self._signature = centers, donate, inspect.signature(jitted)

        def step(count: Any, centers_: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, ...]:
            return centers.train(training, count, centers_, model_state, batch=batch, key=key)

        def exchange(act: Any, p: int, given: Ongoing) -> Ongoing:
            return centers.act(training, act, p, given)

        self._train = jax.jit(step, donate_argnums=(0, 1, 2) if donate else ())
        self._act = jax.jit(exchange, static_argnums=(0, 1), donate_argnums=(2,) if donate else ())
        self._last: tuple[list[Any], int] = [], 0  # what the last call returned, and the number of its steps
        self._known: set[Any] = set()  # the kinds of arguments for which the exchanges have been compiled

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return super().__call__(*args, **kwargs)  # jit raises the error
        state, batch, params = (given[name] for name in ("opt_state", "batch", "params"))
        self._centers.check(state)
        if not _compat.is_eager():
            return super().__call__(*args, **kwargs)
        last, number = self._last
        now = [state.count, *jax.tree_util.tree_leaves(params)]
        if len(now) != len(last) or any(x is not y for x, y in zip(now, last)):
            number, params, state = self._begin(params, state)
        with self.checked(batch):
            count, centers, model_state, metrics = self._train(*_of_train(given, state))
        exchanges, center = list(state.exchanges), (centers.rows.params, centers.rows.start)
        for act, p in self._centers.acts(number + 1):
            params, count, center, exchanges[p] = self._act(act, p, Ongoing(params, count, center, exchanges[p]))
        rows = centers.rows._replace(params=center[0], start=center[1])
        state = state._replace(count=count, centers=centers._replace(rows=rows), exchanges=tuple(exchanges))
        self._last = [count, *jax.tree_util.tree_leaves(params)], number + 1
        metrics = self._centers.measured(metrics, state.exchanges)
        if self._donate:  # the state's own arrays may be donated to a later step
            metrics = metrics._replace(outer=jax.tree_util.tree_map(jnp.copy, metrics.outer))
        return (params, *((model_state,) if "model_state" in given else ()), state, metrics)

    def _begin(self, params: Any, state: Any) -> tuple[int, Any, Any]:
        """Prepares a call with arguments that the last call didn't return. Returns (number of steps, params, state).

        Arrays are placed, because a step returns those that no exchange changes as they are. All programs are compiled,
        because compiling an exchange over a Tcp connects its processes: without this they would wait for one another in
        the first exchange.
        """
        params, state = self._centers.placed(params, state)
        given = params, state.count, state.centers.rows.params, state.centers.rows.start, state.exchanges
        leaves, tree = jax.tree_util.tree_flatten(given)
        kind = tree, *((x.shape, x.dtype, x.sharding) for x in leaves)
        if kind not in self._known:
            self.exchanges(params, state)
            self._known.add(kind)
        return int(state.count.addressable_data(0)), params, state

    def programs(self, *args: Any, **kwargs: Any) -> list[Compiled]:
        given = self._signature.bind(*args, **kwargs).arguments
        params, state = self._centers.placed(given["params"], given["opt_state"])
        return [self._train.lower(*_of_train(given, state)).compile(), *self.exchanges(params, state)]

    def exchanges(self, params: Any, opt_state: Any) -> list[Compiled]:
        """Returns the compiled programs of all exchanges. JAX keeps them for the calls that follow."""
        center = opt_state.centers.rows.params, opt_state.centers.rows.start
        given = [Ongoing(params, opt_state.count, center, exchange) for exchange in opt_state.exchanges]
        return [self._act.lower(act, p, given[p]).compile() for act, p in self._centers.all_acts()]


def _of_train(given: dict[str, Any], state: Any) -> tuple[Any, ...]:
    """Returns the arguments of the program without exchanges, from those of a call with this state."""
    return state.count, state.centers, given.get("model_state"), given["batch"], given.get("key")

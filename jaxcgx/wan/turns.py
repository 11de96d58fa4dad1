"""The step of centers as Python calls it: exchanges are programs of their own, which run when they are due."""

import functools
import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxcgx.optim.train import Step
from jaxcgx.optim.training import Training

if TYPE_CHECKING:
    from jaxcgx.wan.centers import Centers


class CentersStep(Step):
    """The function `step` of the `TrainStep` of centers.

    A call from Python runs a program without exchanges, and then a program for each exchange that is due: Python knows
    the number of steps. In a traced call (jax.jit, lax.scan) the step has the exchanges in conditionals. XLA copies
    what a branch returns unchanged, so every step would copy the parameters and the states of the exchanges.
    """

    def __init__(self, jitted: Any, centers: "Centers", training: Training, donate: bool, place: int) -> None:
        super().__init__(jitted, centers.placement, place)
        self._centers, self._donate, self._signature = centers, donate, inspect.signature(jitted)
        every = lambda *places: places if donate else ()
        self._train = jax.jit(functools.partial(centers.train, training), donate_argnums=every(0, 1, 2))
        act = functools.partial(centers.act, training)
        self._act = jax.jit(act, static_argnums=(0, 1), donate_argnums=every(2, 3, 4, 5))
        self._last: tuple[Any, int] = None, 0  # the count that the last call returned, and its number

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = self._signature.bind(*args, **kwargs).arguments
        state, batch, params = (given[name] for name in ("opt_state", "batch", "params"))
        if not hasattr(state, "exchanges") or isinstance(state.count, Tracer):
            return super().__call__(*args, **kwargs)
        count = state.count
        last, number = self._last
        if count is not last:
            number, params = self._begin(state, params)
        with self.checked(batch):
            count, centers, model_state, metrics = self._train(
                count, state.centers, given.get("model_state"), batch, given.get("key")
            )
        exchanges, center = list(state.exchanges), (centers.rows.params, centers.rows.start)
        for act, p in self._centers.acts(number + 1):
            params, count, center, exchanges[p] = self._act(act, p, params, count, center, exchanges[p])
        rows = centers.rows._replace(params=center[0], start=center[1])
        state = state._replace(count=count, centers=centers._replace(rows=rows), exchanges=tuple(exchanges))
        if not isinstance(count, Tracer):  # in a traced call, it is one even with a concrete state
            self._last = count, number + 1
        metrics = self._centers.measured(metrics, state.exchanges)
        if self._donate:  # the state's own arrays may be donated to a later step
            metrics = metrics._replace(outer=jax.tree_util.tree_map(jnp.copy, metrics.outer))
        return (params, *((model_state,) if "model_state" in given else ()), state, metrics)

    def _begin(self, state: Any, params: Any) -> tuple[int, Any]:
        """Prepares a call with a state that isn't that of the last call. Returns the number of its steps, and `params`.

        The parameters are placed, because a step without an exchange returns them as they are. All programs are
        compiled, because compiling an exchange over a Tcp connects its processes: without this they would wait for one
        another in the first exchange.
        """
        params = jax.device_put(params, self._placement.shardings(jax.sharding.PartitionSpec()))
        self._compiled(params, state)
        return int(state.count.addressable_data(0) if isinstance(state.count, jax.Array) else state.count), params

    def _compiled(self, params: Any, state: Any) -> list[Any]:
        """Returns the compiled programs of all exchanges. JAX keeps them for the calls that follow."""
        center = state.centers.rows.params, state.centers.rows.start
        acts = self._centers.all_acts()
        return [self._act.lower(act, p, params, state.count, center, state.exchanges[p]).compile() for act, p in acts]

    def texts(self, params: Any, opt_state: Any) -> list[str]:
        """Returns the programs of all exchanges."""
        return [program.as_text() for program in self._compiled(params, opt_state)]

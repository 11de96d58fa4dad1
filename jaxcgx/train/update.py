"""The optimizer's update of the parameters that are trained."""

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxcgx.checks import wrong
from jaxcgx.train.batch import OP
from jaxcgx.train.division import Division
from jaxcgx.train.frozen import join, part
from jaxcgx.train.state import TrainState
from jaxcgx.typing import Key, Params, PyTree

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer, and the ranks that divide its work.

    It runs outside of shard_map, so that norms and other numbers are those of whole arrays.
    """

    optimizer: "optax.GradientTransformationExtraArgs"
    division: Division

    def init(self, params: Params, skipped: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (the optimizer's state, the errors of the gather of updates)."""
        return self.optimizer.init(part(params, skipped)[0]), self.division.init_lost(params, skipped)

    def specs(self, params: Params, skipped: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the PartitionSpecs of (updates, the optimizer's state)."""
        trained, _ = part(params, skipped)
        specs, _ = part(self.division.specs_of_updates(params), skipped)
        state = jax.eval_shape(self.optimizer.init, trained)
        return specs, self.division.specs_of_state(state, trained, specs)

    def __call__(
        self, state: TrainState, means: PyTree, loss: jax.Array, skipped: PyTree, key: Key | None
    ) -> TrainState:
        """Returns the state after an update with the means of gradients. `key` is that of the gather of updates."""
        from optax import apply_updates  # an optional dependency

        trained, frozen = part(state.params, skipped)
        run = self.division.over_devices(self._run, lambda: self.specs(state.params, skipped))
        updates, opt_state = run(means, state.opt_state, trained, loss)
        updates, lost = self.division.send_updates(updates, state.lost, skipped, key)
        moved = apply_updates(trained, updates)
        return state.replace(params=join(moved, frozen), opt_state=opt_state, lost=lost)

    def _run(self, means: PyTree, opt_state: PyTree, trained: Params, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns the optimizer's update.

        The optimizer gets the loss as `value`, unless it, or an optimizer inside of it, doesn't take this argument.
        """
        try:
            return self.optimizer.update(means, opt_state, trained, value=loss)
        except (TypeError, ValueError) as error:
            # Line searches and Sophia call the loss function.
            if asked := [name for name in ("value_fn", "obj_fn") if name in str(error)]:
                expected = "one that needs gradients, parameters and the loss"
                got = f"one that calls the loss itself, as {asked[0]!r}, whose gradients would travel uncompressed"
                raise wrong(OP, "optimizer", expected, got, "for optax.lbfgs pass linesearch=None") from error
            if "unexpected keyword argument 'value'" not in str(error):
                raise
        return self.optimizer.update(means, opt_state, trained)

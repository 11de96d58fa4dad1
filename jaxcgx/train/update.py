"""The optimizer's update of the trained parameters, their separation from frozen ones, and checks of optimizers."""

import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxcgx import _programs
from jaxcgx.checks import warn, wrong
from jaxcgx.exchange.message import Carry
from jaxcgx.train.batch import OP, filled
from jaxcgx.train.division import Division
from jaxcgx.train.state import ExchangeState, TrainState
from jaxcgx.typing import Key, Params, PyTree

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer, and the ranks that divide its work. It runs outside of shard_map, on whole arrays."""

    optimizer: "optax.GradientTransformationExtraArgs"
    division: Division

    def init(self, params: Params, skipped: PyTree) -> tuple[PyTree, PyTree]:
        return self.optimizer.init(part(params, skipped)), self.division.init_lost(params, skipped)

    def specs(self, params: Params, skipped: PyTree) -> tuple[PyTree, PyTree]:
        trained = part(params, skipped)
        specs = part(self.division.specs_of(params)[1], skipped)
        state = jax.eval_shape(self.optimizer.init, trained)
        return specs, self.division.specs_of_state(state, trained, specs)

    def __call__(
        self, state: TrainState, means: PyTree, loss: jax.Array, skipped: PyTree, key: Key | None
    ) -> TrainState:
        """Returns the state after an update with the means of gradients. `key` is that of the gather of updates."""
        from optax import apply_updates  # an optional dependency

        trained = part(state.params, skipped)
        run = self._run
        if self.division.spread:
            run = self.division.by_partitioner(run, self.specs(state.params, skipped))
        updates, opt_state = run(means, state.opt_state, trained, loss)
        updates, lost = self.division.send_updates(updates, state.lost, skipped, key)
        moved = apply_updates(trained, updates)
        params = filled(moved, part(state.params, skipped, frozen=True))
        return state.replace(params=params, opt_state=opt_state, lost=lost)

    def momentum(self, trained: Params) -> str | None:
        """Returns the name of a state whose first moment follows from the one before. With b1=0, Adam's doesn't."""
        state = jax.eval_shape(self.optimizer.init, trained)
        program = jax.make_jaxpr(self._run)(trained, state, trained, jax.ShapeDtypeStruct((), jnp.float32))
        places = itertools.count(len(jax.tree.leaves(trained)))  # of the state, behind gradients and updates
        place = jax.tree.map(lambda _: next(places), state)
        for node in jax.tree.leaves(place, is_leaf=lambda node: bool(_moments(node))):
            for moment in _moments(node).values():
                first = next(iter(jax.tree.leaves(moment)), None)
                if first is not None and _programs.depends(program, {first})[first]:
                    return type(node).__name__
        return None

    def _run(self, means: PyTree, opt_state: PyTree, trained: Params, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns the optimizer's update. It gets the loss as `value`, unless it, or one inside, doesn't take it."""
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


def part(tree: PyTree, skipped: PyTree, *, frozen: bool = False) -> PyTree:
    """Returns the tree with None in place of its frozen leaves, or of its trained ones. `filled` joins the two."""
    return jax.tree.map(lambda x, skip: x if skip == frozen else None, tree, skipped)


SAME = "behind compress_gradients, where gradients are the same on every rank"


def nodes(tree: PyTree, *kinds: type[Any]) -> list[Any]:
    is_node = lambda x: isinstance(x, kinds)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_node) if is_node(x)]


def check_nesting(function: str, opt_state: PyTree) -> None:
    """Refuses transformations around compress_gradients or before it whose state would need an axis of ranks."""
    optax = import_optax(function)
    for wrapper, name in (optax.MultiStepsState, "MultiSteps"), (optax.ApplyIfFiniteState, "apply_if_finite"):
        if any(nodes(node, ExchangeState) for node in nodes(opt_state, wrapper)):
            remedy = f"write optax.chain(jaxcgx.compress_gradients(...), optax.{name}(optimizer, ...))"
            raise wrong(function, "opt_state", f"optax.{name} {SAME}", "it around", remedy)
    # A chain's state is a tuple, in which compress_gradients has one of the entries.
    is_state = lambda x: isinstance(x, ExchangeState)
    like_gradients = lambda leaf: len(leaf.shape) > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)
    is_chain = lambda x: type(x) is tuple and any(map(is_state, x))
    for chain in filter(is_chain, jax.tree.leaves(opt_state, is_leaf=lambda x: is_chain(x) or is_state(x))):
        for node in itertools.takewhile(lambda x: not is_state(x), chain):
            if isinstance(node, tuple) and any(map(like_gradients, jax.tree.leaves(node))):
                expected = f"transformations with a state like the gradients {SAME}"
                got = f"{type(node).__name__} before it"
                remedy = "put it behind (in place of optax.trace before it, pass jaxcgx.Momentum to compress_gradients)"
                raise wrong(function, "opt_state", expected, got, remedy)


# optax's names of first moments, and the states that have one of these names for something else
MOMENTS = {"trace", "mu", "m", "m1", "ema", "exp_avg"}
NO_MOMENTS = {"ScaleByRStdDevState", "ScaleBySM3State", "MechanicState"}


def _moments(node: Any) -> dict[str, PyTree]:
    """Returns the first moments of a state of optax, {field: tree}; none for anything else."""
    fields = () if type(node).__name__ in NO_MOMENTS else getattr(node, "_fields", ())
    return {field: getattr(node, field) for field in fields if field in MOMENTS}


def warn_of_momentum(
    function: str,
    argument: str,
    opt_state: PyTree,
    exchange: ExchangeState | None = None,
    momentum: Callable[[], str | None] = lambda: None,
) -> None:
    """Warns if gradients have momentum, and the optimizer, too: optax.trace, or what `Update.momentum` finds."""
    if all(carry.momentum is None for carry in nodes((opt_state, exchange), Carry)):
        return
    if found := "optax.trace" if nodes(opt_state, import_optax(function).TraceState) else momentum():
        expected = "none with momentum of its own, because gradients already have momentum (jaxcgx.Momentum, DGC, BSC)"
        warn(str(wrong(function, argument, expected, found, "write optax.sgd(rate) or optax.adam(rate, b1=0)")))


def check_optimizer(op: str, argument: str, optimizer: Any, expected: str = "an optax.GradientTransformation") -> None:
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise wrong(op, argument, expected, repr(optimizer), kind=TypeError)


def import_optax(function: str) -> types.ModuleType:
    """Returns the module optax. If it isn't installed, the error names the public function `function`."""
    try:
        import optax
    except ImportError:
        raise ImportError(f"{function}: expected optax to be installed; pip install optax") from None
    return optax

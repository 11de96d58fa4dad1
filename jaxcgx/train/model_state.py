"""The state of a model besides its parameters: statistics, counters, random keys. A loss function returns a new one."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_array, check_choice, spell_array, wrong
from jaxcgx.train.batch import OP
from jaxcgx.train.division import addable, first_of, mean_of, row, wide, without_row
from jaxcgx.train.state import PerRank
from jaxcgx.transports.base import Transport
from jaxcgx.typing import PyTree


@dataclasses.dataclass(frozen=True)
class ModelState:
    """How ranks share a model's state: "mean" or "per_rank", as `make_train_step` explains. None: there is none."""

    mode: str | None

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice(OP, "model_state", self.mode, ("mean", "per_rank"))

    def check_given(self, state: PyTree) -> None:
        """Checks that `init` got a model state if `make_train_step` got a mode, and none otherwise."""
        if (self.mode is None) == (state is None):
            return
        expected, got = ("none", "one") if self.mode is None else ("the model's state", "none")
        remedy = "init(params, state)"
        if self.mode is None:
            remedy = 'pass model_state="mean" or "per_rank" to make_train_step'
        raise wrong("train.init", "model_state", f"{expected} with model_state={self.mode!r}", got, remedy)

    def check_rows(self, state: PyTree, count: int, remedy: str) -> None:
        """Checks that `step` got `count` rows if each rank has its own state."""
        if self.mode != "per_rank":
            return
        if not isinstance(state, PerRank):
            got = type(state).__name__
            raise wrong("train.step", "state", "a PerRank as model_state, which init returned", got)
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            if x.shape[:1] != (count,):
                expected = f"{count} rows of the model state, one for each rank"
                raise wrong("train.step", "state", expected, spell_array(x), remedy, path=path)

    def first(self, state: PyTree, numbers: jax.Array) -> PyTree:
        """Returns the state before the first step: a copy, or a row for each of the ranks with these numbers."""
        if self.mode != "per_rank":
            return jax.tree_util.tree_map(jnp.copy, state)
        rows = lambda x: jnp.broadcast_to(x, (len(numbers), *x.shape))
        own = lambda x: rows(x) if addable(x) else jax.vmap(fold_keys)(rows(x), numbers)
        return PerRank(jax.tree_util.tree_map(own, state))

    def spec(self, rows: P) -> P:
        """Returns the PartitionSpec of the states that `first` and `of_all` return."""
        return rows if self.mode == "per_rank" else P()

    def of_rank(self, state: PyTree, net: Transport) -> PyTree:
        """Returns the state that a rank's loss function gets. Each rank gets different random keys."""
        if self.mode == "per_rank":
            return without_row(state.rows)
        return jax.tree_util.tree_map(lambda x: x if addable(x) else fold_keys(x, net.rank), state)

    def of_all(self, state: PyTree, new: PyTree, renewed: list[bool], net: Transport) -> PyTree:
        """Returns the state after a step.

        Floats are averaged over the ranks. Integers, flags and keys are the first rank's. Leaves that the loss returned
        unchanged are kept: the mean of equal numbers may be rounded.

        Args:
          state: the state before the step.
          new: the state that the loss function returned.
          renewed: for each leaf, whether the loss function returned another array than it got.
          net: the ranks.
        """
        if self.mode == "per_rank":
            return PerRank(row(new))

        def of_all(x: jax.Array) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return first_of(x, net)
            return mean_of(x.astype(wide(x.dtype)), net).astype(x.dtype)

        leaves, structure = jax.tree_util.tree_flatten(state)
        after = zip(leaves, jax.tree_util.tree_leaves(new), renewed)
        return structure.unflatten([of_all(x) if is_new else was for was, x, is_new in after])


def check_renewed(old: PyTree, new: PyTree) -> tuple[PyTree, list[bool]]:
    """Checks that the new state of a loss function is like the old one.

    Returns (the new state without weak types, which would compile the next step anew; for each leaf whether it is
    another array than before).
    """
    before, structure = jax.tree_util.tree_flatten_with_path(old)
    after, other = jax.tree_util.tree_flatten_with_path(new)
    if structure != other:
        paths = [{jax.tree_util.keystr(path) for path, _ in found} for found in (before, after)]
        changed = [f"without {name}" for name in sorted(paths[0] - paths[1])]
        changed += [f"with {name} more" for name in sorted(paths[1] - paths[0])]
        raise wrong(OP, "loss_fn", f"a new model state like that it gets, {structure}", (changed or [other])[0])
    renewed: list[jax.Array] = []
    for (path, was), (_, now) in zip(before, after):
        if now is not was:
            now = check_array(OP, "loss_fn", now, path)
            if (was.shape, was.dtype) != (now.shape, now.dtype):
                expected = f"a new model state like that it gets, {spell_array(was)}"
                raise wrong(OP, "loss_fn", expected, spell_array(now), path=path)
            now = now.astype(now.dtype) if addable(now) else now
        renewed.append(now)
    return structure.unflatten(renewed), [now is not was for (_, was), now in zip(before, renewed)]


def fold_keys(keys: jax.Array, rank: jax.Array | int) -> jax.Array:
    """Returns random keys for a rank: the keys, an array of any shape, folded with the rank."""
    fold = jax.vmap(lambda key: jax.random.fold_in(key, rank))
    return fold(keys.reshape(-1)).reshape(keys.shape)

"""The state of a model besides its parameters: statistics, counters, random keys. A loss function returns a new one."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_array, check_choice, spell_array, wrong
from jaxcgx.optim.accumulation import OP, addable, wide
from jaxcgx.optim.ranks import Ranks
from jaxcgx.transports.base import Transport


class PerRank(NamedTuple):
    """A model state that differs between ranks: each rank has its own.

    Attributes:
      rows: a tree like the state of one rank, `[ranks, *shape]`, sharded over the ranks.
    """

    rows: Any

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields with arrays per rank, and whether `reshard_state` keeps their sum or their mean over the ranks."""
        return {"rows": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that are trees like the parameters, without a row per rank."""
        return ()


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The handling of a model state in a step. `make_train_step` explains `mode`. None: there is no model state."""

    mode: str | None
    ranks: Ranks

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice(OP, "model_state", self.mode, ("mean", "per_rank"))

    def check_given(self, state: Any) -> None:
        """Checks that `init` got a model state if `make_train_step` got a mode, and none otherwise."""
        if (self.mode is None) == (state is None):
            return
        expected, got = ("none", "one") if self.mode is None else ("the model's state", "none")
        remedy = (
            'pass model_state="mean" or "per_rank" to make_train_step' if self.mode is None else "init(params, state)"
        )
        raise wrong("train.init", "model_state", f"{expected} with model_state={self.mode!r}", got, remedy)

    def check_rows(self, state: Any, count: int | None) -> None:
        """Checks that `step` got a row per rank if each rank has its own state. `count` is as in `first`."""
        if self.mode != "per_rank":
            return
        if not isinstance(state, PerRank):
            got = type(state).__name__
            raise wrong("train.step", "model_state", "a PerRank, which init or the step before returned", got)
        size = count or 1
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            if x.shape[:1] != (size,):
                expected, remedy = f"{size} rows, one for each rank", self.ranks.remedy
                raise wrong("train.step", "model_state", expected, spell_array(x), remedy, path=path)

    def first(self, state: Any, count: int | None) -> Any:
        """Returns the state before the first step, a copy of the caller's state.

        `count` is the number of ranks of a mesh, or None without a mesh.
        """
        if self.mode != "per_rank":
            return jax.tree_util.tree_map(jnp.copy, state)
        numbers = self.ranks.numbers(count)
        rows = lambda x: jnp.broadcast_to(x, (len(numbers), *x.shape))
        own = lambda x: rows(x) if addable(x) else jax.vmap(fold)(rows(x), numbers)
        return PerRank(jax.tree_util.tree_map(own, state))

    @property
    def spec(self) -> P:
        """The PartitionSpec of the states that `first` and `of_all` return."""
        return P(self.ranks.levels) if self.mode == "per_rank" else P()

    def of_rank(self, state: Any) -> Any:
        """Returns the state that a rank's loss function gets. Each rank gets different random keys."""
        if self.mode == "per_rank":
            return jax.tree_util.tree_map(lambda x: x[0], state.rows)
        rank = self.ranks.net().rank
        return jax.tree_util.tree_map(lambda x: x if addable(x) else fold(x, rank), state)

    def shared(self, state: Any) -> bool:
        """Returns whether the ranks share numbers or flags, for which a loss function must be checked."""
        return self.mode == "mean" and any(map(addable, jax.tree_util.tree_leaves(state)))

    def own(self, state: Any) -> list[bool] | None:
        """Returns for each leaf of the state whether it differs between ranks before a step.

        Returns None if each rank has its own state: then all leaves may differ, before and after a step.
        """
        return None if self.mode == "per_rank" else [not addable(x) for x in jax.tree_util.tree_leaves(state)]

    def of_all(self, state: Any, given: Any, new: Any) -> Any:
        """Returns the state after a step.

        Args:
          state: the state before the step.
          given: the state that the loss function got.
          new: the state that the loss function returned. Leaves that it returned unchanged are not averaged, because
            the mean of equal numbers may be rounded.
        """
        if self.mode == "per_rank":
            return PerRank(jax.tree_util.tree_map(lambda x: x[None], new))
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        widened = lambda x: x.astype(wide(x.dtype)) if inexact(x) else x
        changed = jax.tree_util.tree_map(lambda was, now: None if now is was else widened(now), given, new)
        narrow = lambda old, found: old if found is None else found.astype(old.dtype) if inexact(old) else found
        return jax.tree_util.tree_map(narrow, state, agree(changed, self.ranks, averaged=inexact))


def put(state: Any, sharding: Any) -> Any:
    """Returns the state on all devices.

    jax.device_put can't put random keys on devices of other processes. So their words are put there.
    """
    words = jax.tree_util.tree_map(lambda x: x if addable(x) else jax.random.key_data(x), state)
    wrap = lambda x, key: x if addable(key) else jax.random.wrap_key_data(x, impl=jax.random.key_impl(key))
    return jax.tree_util.tree_map(wrap, jax.device_put(words, sharding), state)


def agree(x: Any, ranks: Ranks, averaged: Callable[[jax.Array], bool]) -> Any:
    """Returns one tree for all ranks.

    It has the mean over the ranks for leaves that are `averaged`, and the first rank's values of the other leaves.
    """
    means = ranks.pmean(jax.tree_util.tree_map(lambda leaf: leaf if averaged(leaf) else None, x))
    first = lambda leaf: _first(leaf, ranks.net())
    return jax.tree_util.tree_map(lambda leaf, mean: first(leaf) if mean is None else mean, x, means)


def _first(x: jax.Array, net: Transport) -> jax.Array:
    """Returns the first rank's array on every rank. The array has integers, flags or random keys."""
    if not addable(x):
        return jax.random.wrap_key_data(_first(jax.random.key_data(x), net), impl=jax.random.key_impl(x))
    numbers = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    return net.plain_psum(jnp.where(net.rank == 0, numbers, 0)).astype(x.dtype)


def check_renewed(old: Any, new: Any) -> Any:
    """Returns the new state of a loss function, after a check that it is like the old one.

    Leaves that the loss function left unchanged are the same objects in both.
    """
    before, structure = jax.tree_util.tree_flatten_with_path(old)
    after, other = jax.tree_util.tree_flatten_with_path(new)
    if structure != other:
        paths = [{jax.tree_util.keystr(path) for path, _ in found} for found in (before, after)]
        changed = [f"without {name}" for name in sorted(paths[0] - paths[1])]
        changed += [f"with {name} more" for name in sorted(paths[1] - paths[0])]
        raise wrong(OP, "loss_fn", f"a new model state like that it gets, {structure}", (changed or [other])[0])
    renewed: list[Any] = []
    for (path, was), (_, now) in zip(before, after):
        if now is not was:
            now = check_array(OP, "loss_fn", now, path)
            if (was.shape, was.dtype) != (now.shape, now.dtype):
                expected = f"a new model state like that it gets, {spell_array(was)}"
                raise wrong(OP, "loss_fn", expected, spell_array(now), path=path)
            now = now.astype(now.dtype) if addable(now) else now  # a weak type would compile the next step anew
        renewed.append(now)
    return structure.unflatten(renewed)


def fold(keys: jax.Array, rank: jax.Array) -> jax.Array:
    """Returns random keys for a rank: the keys, an array of any shape, folded with the rank."""
    fold = jax.vmap(lambda key: jax.random.fold_in(key, rank))
    return fold(keys.reshape(-1)).reshape(keys.shape)

"""The state of a model beside its parameters, which a loss function returns anew: statistics, counters, random keys."""

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
    """A model's state of which every rank has its own."""

    rows: Any  # like the state of one rank, [ranks, *shape], sharded over the ranks

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields per rank, and what of each reshard_state preserves over the ranks."""
        return {"rows": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields like the parameters."""
        return ()


@dataclasses.dataclass(frozen=True)
class ModelState:
    """How a model's state goes through a step. `make_train_step` explains `mode`; None: there is no state."""

    mode: str | None
    ranks: Ranks

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice(OP, "model_state", self.mode, ("mean", "per_rank"))

    def check_given(self, state: Any) -> None:
        """Checks that `init` has a state where `make_train_step` was told of one, and only there."""
        if (self.mode is None) == (state is None):
            return
        expected, got = ("none", "one") if self.mode is None else ("the model's state", "none")
        remedy = (
            'pass model_state="mean" or "per_rank" to make_train_step' if self.mode is None else "init(params, state)"
        )
        raise wrong("train.init", "model_state", f"{expected} with model_state={self.mode!r}", got, remedy)

    def check_rows(self, state: Any, count: int | None) -> None:
        """Checks that `step` has a state of every rank where ranks have their own. `count`: as in `first`."""
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
        """The state before the first step, of the caller's. It has copies. `count`: how many ranks a mesh has."""
        if self.mode != "per_rank":
            return jax.tree_util.tree_map(jnp.copy, state)
        numbers = self.ranks.numbers(count)
        rows = lambda x: jnp.broadcast_to(x, (len(numbers), *x.shape))
        own = lambda x: rows(x) if addable(x) else jax.vmap(fold)(rows(x), numbers)
        return PerRank(jax.tree_util.tree_map(own, state))

    @property
    def spec(self) -> P:
        """The PartitionSpec of what `first` and `of_all` return."""
        return P(self.ranks.levels) if self.mode == "per_rank" else P()

    def of_rank(self, state: Any) -> Any:
        """What a rank's loss function gets. Its keys are its own."""
        if self.mode == "per_rank":
            return jax.tree_util.tree_map(lambda x: x[0], state.rows)
        rank = self.ranks.net().rank
        return jax.tree_util.tree_map(lambda x: x if addable(x) else fold(x, rank), state)

    def counts(self, state: Any) -> bool:
        """Whether ranks have integers or flags in common, which they must then agree on."""
        number = lambda x: addable(x) and not jnp.issubdtype(x.dtype, jnp.inexact)
        return self.mode == "mean" and any(map(number, jax.tree_util.tree_leaves(state)))

    def own(self, state: Any) -> list[bool] | None:
        """For each leaf of the state whether a rank has its own before a step; None where it has so after it, too."""
        return None if self.mode == "per_rank" else [not addable(x) for x in jax.tree_util.tree_leaves(state)]

    def of_all(self, state: Any, given: Any, new: Any) -> Any:
        """What a step returns.

        Args:
          state: what it was given.
          given: what the loss function was given of it.
          new: what the loss function returned. What it left as it was is not averaged, because a mean of equal numbers
            may be rounded.
        """
        if self.mode == "per_rank":
            return PerRank(jax.tree_util.tree_map(lambda x: x[None], new))
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        widened = lambda x: x.astype(wide(x.dtype)) if inexact(x) else x
        changed = jax.tree_util.tree_map(lambda was, now: None if now is was else widened(now), given, new)
        narrow = lambda old, found: old if found is None else found.astype(old.dtype) if inexact(old) else found
        return jax.tree_util.tree_map(narrow, state, agree(changed, self.ranks, averaged=inexact))


def put(state: Any, sharding: Any) -> Any:
    """The state on all devices. jax.device_put takes no random keys to those of other processes, but their words."""
    words = jax.tree_util.tree_map(lambda x: x if addable(x) else jax.random.key_data(x), state)
    wrap = lambda x, key: x if addable(key) else jax.random.wrap_key_data(x, impl=jax.random.key_impl(key))
    return jax.tree_util.tree_map(wrap, jax.device_put(words, sharding), state)


def agree(x: Any, ranks: Ranks, averaged: Callable[[jax.Array], bool]) -> Any:
    """Every rank's tree made one: the mean of the leaves that are `averaged`, and the first rank's others."""
    means = ranks.pmean(jax.tree_util.tree_map(lambda leaf: leaf if averaged(leaf) else None, x))
    first = lambda leaf: _first(leaf, ranks.net())
    return jax.tree_util.tree_map(lambda leaf, mean: first(leaf) if mean is None else mean, x, means)


def _first(x: jax.Array, net: Transport) -> jax.Array:
    """An array of integers, flags or random keys of the first rank, on every rank."""
    if not addable(x):
        return jax.random.wrap_key_data(_first(jax.random.key_data(x), net), impl=jax.random.key_impl(x))
    numbers = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    return net.plain_psum(jnp.where(net.rank == 0, numbers, 0)).astype(x.dtype)


def check_renewed(old: Any, new: Any) -> Any:
    """The state that a loss function returned, if it is one like that it got. What it left is the same objects."""
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
    """Random keys, in an array of any shape, for one rank."""
    fold = jax.vmap(lambda key: jax.random.fold_in(key, rank))
    return fold(keys.reshape(-1)).reshape(keys.shape)

"""What a loss returns besides the loss: auxiliary outputs, and the new state of a model."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import as_array, check_choice, spell_array, wrong
from jaxcgx.exchange.reduce import plain_reduce
from jaxcgx.train.batch import OP, axes_of, broadcast, check_spec, dimension
from jaxcgx.train.division import addable, first_of, row, wide, without_row
from jaxcgx.train.state import PerRank
from jaxcgx.transports.base import Transport
from jaxcgx.typing import PyTree, Specs

Batched = list[tuple[jax.Array, int | None]]  # leaves of a batch, each with the dimension of the examples
WAYS = ("mean", "sum", "first", "key")


@dataclasses.dataclass
class Outputs:
    """The auxiliary outputs of a loss. It learns their structure and kinds while the loss is traced."""

    op: str  # the public function that errors name
    # The caller's aux_specs: a prefix of the tree of outputs, of `WAYS` and PartitionSpecs; or None. Or a function that
    # returns these for the outputs.
    specs: Specs | Callable[[PyTree], Specs]
    rows: P  # the PartitionSpec of arrays with the examples of all ranks
    _: dataclasses.KW_ONLY
    guessed: bool = False  # whether it is only a guess which dimension of a batch has the examples
    # The structure of the outputs. None: the loss has none.
    structure: PyTree = dataclasses.field(default=None, init=False)
    # For each output "mean", "sum", "first", "key", or the dimension along which those of ranks and micro-batches are
    # joined.
    kinds: list[str | int] = dataclasses.field(default_factory=list, init=False)

    def learn(
        self, aux: PyTree, again: Callable[[list[jax.Array]], PyTree], batch: Batched, plain: Callable[[], PyTree]
    ) -> list[jax.Array]:
        """Returns the leaves of the outputs of a part of a batch.

        `again` returns the outputs for other leaves of a batch. It is traced only if the first dimension of an output
        is as long as there are examples, for twice as many. `batch` has the leaves of the part.

        `plain` returns the outputs as plain JAX has them, for keys in which no rank is folded. It is traced only for
        outputs that are random keys.
        """
        found, self.structure = jax.tree.flatten_with_path(aux)
        examples = next((x.shape[d] for x, d in batch if d is not None), None)
        leaves = [jnp.asarray(x) for _, x in found]
        said = self.said(aux)
        unsure = [s is None and x.ndim > 0 and x.shape[0] == examples for s, x in zip(said, leaves)]
        twice = self._twice(again, batch) if any(unsure) else None
        joined = [
            doubt and twice is not None and twice[i].shape == (2 * x.shape[0], *x.shape[1:])
            for i, (doubt, x) in enumerate(zip(unsure, leaves))
        ]
        self.kinds = [
            0 if rows else self.kind(path, x, s) for (path, _), x, rows, s in zip(found, leaves, joined, said)
        ]
        if "key" in self.kinds:
            keys = jax.tree.leaves(plain())
            leaves = [key if kind == "key" else x for x, key, kind in zip(leaves, keys, self.kinds)]
        return leaves

    def said(self, aux: PyTree) -> list[str | P | None]:
        expected = f"a tree of {', '.join(map(repr, WAYS))} and PartitionSpecs like the auxiliary outputs"
        specs = self.specs(aux) if callable(self.specs) else self.specs
        return broadcast(self.op, "aux_specs", specs, aux, expected=expected)

    def _twice(self, again: Callable[[list[jax.Array]], PyTree], batch: Batched) -> list[jax.ShapeDtypeStruct] | None:
        larger = lambda: again([x if d is None else jnp.concatenate([x, x], d) for x, d in batch])
        try:
            return jax.tree.leaves(jax.eval_shape(larger))
        except (TypeError, ValueError) as error:
            if self.guessed:  # a wrong guess is no error: the batch may have no examples
                return None
            expected, got = "a function of any number of examples, with has_aux", "one that fails for twice as many"
            remedy = "take sizes from the shapes of the batch, or say in aux_specs what its outputs are"
            raise wrong(self.op, "loss_fn", expected, got, remedy) from error

    def kind(self, path: PyTree, x: jax.Array, said: str | P | None) -> str | int:
        """Returns the kind of an output that doesn't have the examples first, or of which the caller says `said`."""
        if isinstance(said, P):
            check_spec(self.op, "aux_specs", said, x, path=path, among=axes_of(self.rows[0]) if self.rows else None)
            return "first" if (d := dimension(said)) is None else d
        if said in WAYS:
            return said
        if said is not None:
            raise wrong(self.op, "aux_specs", f"{', '.join(map(repr, WAYS))} or a PartitionSpec", repr(said), path=path)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return "mean"
        if not addable(x):
            return "key"
        expected = "auxiliary outputs that are floating point, or have the examples along their first dimension"
        remedy = 'return a mean, as in (prediction == label).mean(), or say in aux_specs that it is "sum" or "first"'
        if spell_array(x) == "uint32[2]":
            remedy = 'if it is a random key, say "key" in aux_specs, or make it with jax.random.key'
        raise wrong(self.op, "loss_fn", expected, spell_array(x), remedy, path=path)

    def weighted(self, leaves: list[jax.Array], weight: jax.Array) -> list[jax.Array]:
        """Returns the outputs of a part, those that are averaged times its weight."""
        # With weight 0, a mean over no examples may be NaN. It must not make the sum NaN.
        times = lambda x: jnp.where(weight == 0, 0, x.astype(wide(x.dtype)) * weight.astype(wide(x.dtype)))
        return [times(x) if kind == "mean" else x for x, kind in zip(leaves, self.kinds)]

    def joined(self, stacked: list[jax.Array], parts: int) -> list[jax.Array]:
        return [_joined(x, kind, parts) for x, kind in zip(stacked, self.kinds)]

    def of_all(self, leaves: list[jax.Array], weight: jax.Array | None, net: Transport) -> dict[str, list[jax.Array]]:
        """Returns the outputs of all ranks in two lists: those that are joined, examples first, and those all share.

        `leaves` are those of a rank, as from `weighted` if there is a weight. `weight` is the mean of all weights.
        """
        found: dict[str, list[jax.Array]] = {"joined": [], "shared": []}
        for x, kind in zip(leaves, self.kinds):
            if isinstance(kind, int):
                found["joined"].append(jnp.moveaxis(x, kind, 0))
            elif kind in ("first", "key"):
                found["shared"].append(first_of(x, net))
            elif kind == "sum":
                found["shared"].append(net.plain_psum(x))
            else:
                mean = plain_reduce(self.op, x, net, mean=True)
                found["shared"].append(mean if weight is None else mean / weight.astype(mean.dtype))
        return found

    @property
    def out_specs(self) -> dict[str, P]:
        return {"joined": self.rows, "shared": P()}

    def tree(self, found: dict[str, list[jax.Array]]) -> PyTree:
        """Returns the tree of outputs from the result of `of_all`. None: the loss has none."""
        if self.structure is None:
            return None
        joined, shared = iter(found["joined"]), iter(found["shared"])
        each = [jnp.moveaxis(next(joined), 0, k) if isinstance(k, int) else next(shared) for k in self.kinds]
        return self.structure.unflatten(each)


def beside_a_state(aux_specs: Specs) -> Callable[[PyTree], Specs]:
    """Returns what returns the specs of (aux, a new state), of which integers and flags are the first rank's."""
    first = lambda x: "first" if addable(x) and not jnp.issubdtype(x.dtype, jnp.inexact) else None
    return lambda found: (aux_specs, jax.tree.map(lambda x: first(jnp.asarray(x)), found[1]))


def _joined(x: jax.Array, kind: str | int, parts: int) -> jax.Array:
    if isinstance(kind, int):
        x = jnp.moveaxis(x, 0, kind)
        return x.reshape(*x.shape[:kind], -1, *x.shape[kind + 2 :])
    if kind in ("first", "key"):
        return x[-1]
    total = added(x)
    return (total / parts if kind == "mean" else total).astype(x.dtype)


def added(x: jax.Array) -> jax.Array:
    """Returns the sum of the rows of [parts, ...] in their order, in a wide type."""
    numbers = x.astype(wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    return jax.lax.scan(lambda total, row: (total + row, None), numbers[0], numbers[1:])[0]


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
        other = 'pass model_state="mean" or "per_rank" to make_train_step'
        remedy = other if self.mode is None else "init(params, state)"
        raise wrong("train.init", "model_state", f"{expected} with model_state={self.mode!r}", got, remedy)

    def check_rows(self, state: PyTree, count: int, remedy: str) -> None:
        """Checks that `step` got `count` rows if each rank has its own state."""
        if self.mode != "per_rank":
            return
        if not isinstance(state, PerRank):
            got = type(state).__name__
            raise wrong("train.step", "state", "a PerRank as model_state, which init returned", got)
        for path, x in jax.tree.leaves_with_path(state):
            if x.shape[:1] != (count,):
                expected = f"{count} rows of the model state, one for each rank"
                raise wrong("train.step", "state", expected, spell_array(x), remedy, path=path)

    def first(self, state: PyTree, numbers: jax.Array) -> PyTree:
        """Returns the state before the first step: a copy, or a row for each of the ranks with these numbers."""
        if self.mode != "per_rank":
            return jax.tree.map(jnp.copy, state)
        rows = lambda x: jnp.broadcast_to(x, (len(numbers), *x.shape))
        own = lambda x: rows(x) if addable(x) else jax.vmap(fold_keys)(rows(x), numbers)
        return PerRank(jax.tree.map(own, state))

    def spec(self, rows: P) -> P:
        return rows if self.mode == "per_rank" else P()

    def of_rank(self, state: PyTree, net: Transport) -> PyTree:
        """Returns the state that a rank's loss function gets. Each rank gets different random keys."""
        if self.mode == "per_rank":
            return without_row(state.rows)
        return jax.tree.map(lambda x: x if addable(x) else fold_keys(x, net.rank), state)

    def keys(self, state: PyTree) -> PyTree:
        """Returns the random keys that are the same on every rank, with None in place of other leaves, or of all."""
        return None if self.mode == "per_rank" else jax.tree.map(lambda x: None if addable(x) else x, state)

    def of_all(self, state: PyTree, new: PyTree, renewed: list[bool], net: Transport) -> PyTree:
        """Returns the state after a step.

        Floats are averaged over the ranks. Integers and flags are the first rank's, and so are keys, which are the same
        on all ranks. Leaves that the loss returned unchanged are kept: the mean of equal numbers may be rounded.

        `renewed` says for each leaf whether the loss function returned another array than it got.
        """
        if self.mode == "per_rank":
            return PerRank(row(new))

        def of_all(x: jax.Array) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return first_of(x, net)
            return plain_reduce(OP, x.astype(wide(x.dtype)), net, mean=True).astype(x.dtype)

        leaves, structure = jax.tree.flatten(state)
        after = zip(leaves, jax.tree.leaves(new), renewed)
        return structure.unflatten([of_all(x) if is_new else was for was, x, is_new in after])


def as_model_state(old: PyTree, new: PyTree) -> tuple[PyTree, list[bool]]:
    """Returns (the checked state, without weak types, which would compile anew; whether each leaf is a new array)."""
    before, structure = jax.tree.flatten_with_path(old)
    after, other = jax.tree.flatten_with_path(new)
    if structure != other:
        paths = [{jax.tree_util.keystr(path) for path, _ in found} for found in (before, after)]
        changed = [f"without {name}" for name in sorted(paths[0] - paths[1])]
        changed += [f"with {name} more" for name in sorted(paths[1] - paths[0])]
        raise wrong(OP, "loss_fn", f"a new model state like that it gets, {structure}", (changed or [other])[0])
    renewed: list[jax.Array] = []
    for (path, was), (_, now) in zip(before, after):
        if now is not was:
            now = as_array(OP, "loss_fn", now, path)
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

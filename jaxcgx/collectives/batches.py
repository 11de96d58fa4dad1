"""The arguments of a call that is left to jit: what is differentiated, what is split over ranks, what is no array."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import spell_array, wrong
from jaxcgx.collectives.splitting import Ranks, check_spans


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How the arguments of a call are split over the ranks."""

    ranks: Ranks
    places: tuple[int, ...]  # of the differentiated arguments
    tree: Any  # the structure of the other arguments
    static: list[Any]  # their leaves that are no arrays; None in place of the others
    is_array: tuple[bool, ...]
    specs: tuple[P, ...]  # of the arrays
    keys: tuple[bool, ...]  # which of them is a single random key
    param_specs: Any  # over the other axes of the mesh

    @classmethod
    def of(cls, ranks: Ranks, places: tuple[int, ...], others: Any, given: list[Any], param_specs: Any) -> "Split":
        """The split of a call.

        Args:
          ranks: the ranks.
          places: the positions of the differentiated arguments.
          others: the other arguments: those by position, those by name, and what isn't differentiated of parameters.
          given: the caller's spec for each leaf of `others`, or None.
          param_specs: how the differentiated arguments are sharded over the other axes.
        """
        found, tree = jax.tree_util.tree_flatten_with_path(others)
        is_array = [isinstance(x, jax.Array | np.ndarray) for _, x in found]
        arrays = [leaf for leaf, array in zip(found, is_array) if array]
        check_spans(ranks.op, ranks.mesh, ranks.names, leaves=arrays)
        leaves: list[tuple[Any, Any, P | None]] = []
        keys: list[bool] = []
        for (path, x), spec in zip(arrays, (spec for spec, array in zip(given, is_array) if array)):
            raw = _is_raw_key(x) and spec is None and not any(ranks.spec_of_batch(x) or ())
            keys.append(raw or (jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not x.ndim))
            leaves.append((path, x, P() if keys[-1] else spec))
        specs = ranks.check_batch(leaves)
        if any(spec and x.shape[0] == 2 for (_, x, _), spec in zip(leaves, specs)):
            for path, x, _ in (leaf for leaf, key in zip(leaves, keys) if key and _is_raw_key(leaf[1])):
                expected, got = "a typed key, or batch_specs", f"{spell_array(x)}, a random key or a batch of 2"
                remedy = f"make keys with jax.random.key, or {ranks.remedy}"
                raise wrong(ranks.op, "batch_specs", expected, got, remedy, path=path)
        return cls(
            ranks=ranks,
            places=places,
            tree=tree,
            static=[None if array else x for (_, x), array in zip(found, is_array)],
            is_array=tuple(is_array),
            specs=tuple(specs),
            keys=tuple(keys),
            param_specs=param_specs,
        )

    def arrays(self, others: Any) -> list[Any]:
        """The arrays among the other arguments."""
        return [x for x, array in zip(jax.tree_util.tree_leaves(others), self.is_array) if array]

    def arguments(self, params: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """What the loss function is called with."""
        each = iter(arrays)
        leaves = [next(each) if array else x for x, array in zip(self.static, self.is_array)]
        args, kwargs, fixed = jax.tree_util.tree_unflatten(self.tree, leaves)
        return insert(args, self.places, params, fixed), kwargs

    def aux_specs(self, call: Callable[..., Any], params: Any, arrays: Any) -> tuple[Any, list[P | None]]:
        """The structure of the auxiliary outputs, and how each is split: as the shapes of the whole batch's say.

        P() is of one that differs between ranks, and None of one that no rank's part of a batch changes.

        Args:
          call: from what a loss is called with to (its value, the auxiliary outputs).
          params: the parameters.
          arrays: the other arrays.
        """

        def aux(params: Any, arrays: Any) -> Any:
            return call(self.arguments(params, arrays))[1]

        ranks = self.ranks
        axes = [(name, ranks.mesh.shape[name]) for name in ranks.names]  # a loss may average statistics over them
        trace = jax.make_jaxpr(aux, axis_env=axes, return_shape=True)
        shapes = lambda tree: jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)
        of_all, whole = trace(shapes(params), shapes(arrays))
        parts = [ranks.local(x, spec) for x, spec in zip(arrays, self.specs)]
        of_part, local = trace(shapes(params), parts)
        of_rank = [False] * len(jax.tree_util.tree_leaves(params))
        of_rank += [key or any(spec) for key, spec in zip(self.keys, self.specs)]
        differ = _affected(of_part, of_rank)
        specs: list[P | None] = []
        found = jax.tree_util.tree_flatten_with_path(whole)[0]
        for (path, _), value, part in zip(found, _constants(of_all), _constants(of_part)):
            if value != part:
                expected = "auxiliary outputs that don't depend on the number of examples"
                raise wrong(ranks.op, "loss_fn", expected, f"{part} of a rank's part, {value} of all", path=path[1:])
        for (path, x), part, differs in zip(found, jax.tree_util.tree_leaves(local), differ):
            cut = [k for k, (n, m) in enumerate(zip(x.shape, part.shape)) if n != m]
            if cut and (len(cut) > 1 or x.shape[cut[0]] != ranks.size * part.shape[cut[0]]):
                expected = f"auxiliary outputs that have the examples along one dimension, or along none ({x.shape})"
                raise wrong(ranks.op, "loss_fn", expected, f"{part.shape} of a rank's part", path=path[1:])
            if differs and not cut and not jnp.issubdtype(x.dtype, jnp.inexact):
                expected = "auxiliary outputs that are means in floating point, or have a row for each example"
                remedy = "return a mean, as in (prediction == label).mean()"
                raise wrong(ranks.op, "loss_fn", expected, f"{x.dtype}{list(x.shape)}", remedy, path=path[1:])
            specs.append(P(*[None] * cut[0], ranks.names) if cut else P() if differs else None)
        return jax.tree_util.tree_structure(whole), specs


def insert(others: list[Any], places: Sequence[int], params: Sequence[Any], fixed: list[Any]) -> list[Any]:
    """All positional arguments: the others, and at their places the two parts of those that are differentiated."""
    whole = jax.tree_util.tree_map(lambda x, y: y if x is None else x, list(params), fixed, is_leaf=is_none)
    args = list(others)
    for i, x in sorted(zip(places, whole), key=lambda pair: pair[0]):
        args.insert(i, x)
    return args


def _affected(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which results of a program may differ between ranks, from which of its inputs do."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # newer versions of JAX have one kind
    literal = lambda x: hasattr(x, "val")
    differ = {x for x, differs in zip(jaxpr.invars, inputs) if differs}
    for eqn in jaxpr.eqns:
        if eqn.effects or any(not literal(x) and x in differ for x in eqn.invars):  # effects: which rank it is
            differ.update(eqn.outvars)
    return [not literal(x) and x in differ for x in jaxpr.outvars]


def _constants(jaxpr: Any) -> list[str | None]:
    """The numbers among the results of a program, in words; None for the others."""
    results = getattr(jaxpr, "jaxpr", jaxpr).outvars
    return [str(np.asarray(x.val)) if hasattr(x, "val") else None for x in results]


def changes(op: str, before: list[tuple[Any, Any]], given: Any) -> dict[int, Any]:
    """The leaves of its arguments that a loss has changed, as modules of NNX do, by their places among `before`.

    Each rank has copies. What it assigns to a list or a dict would be lost.
    """
    after = dict(jax.tree_util.tree_leaves_with_path(given))
    found = {i: after[path] for i, (path, old) in enumerate(before) if path in after and after[path] is not old}
    for i in found:
        path, _ = before[i]
        if not isinstance(path[-1], jax.tree_util.GetAttrKey):
            expected, got = "a function that leaves its arguments as they are", "one that changes them"
            raise wrong(
                op, "loss_fn", expected, got, "return what is new beside the loss, with has_aux=True", path=path
            )
    return found


def assign(tree: Any, path: Sequence[Any], value: Any) -> None:
    """Gives an attribute, somewhere in a tree, a new value."""
    *inner, last = path
    for key in inner:
        is_name = isinstance(key, jax.tree_util.GetAttrKey)
        tree = getattr(tree, key.name) if is_name else tree[key.key if hasattr(key, "key") else key.idx]
    if hasattr(tree, "set_value"):  # a variable of NNX, whose attribute is deprecated
        tree.set_value(value)
    else:
        setattr(tree, last.name, value)


def is_none(x: Any) -> bool:
    return x is None


def part(params: list[Any]) -> tuple[list[Any], list[Any]]:
    """What is differentiated of the parameters, and what isn't: functions, integers. Each has None for the others."""
    differentiated = lambda x: isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)
    take = lambda wanted: jax.tree_util.tree_map(lambda x: x if differentiated(x) == wanted else None, params)
    return take(True), take(False)


def _is_raw_key(x: Any) -> bool:
    """Whether an array is one random key as two words, or looks like it."""
    return x.dtype == np.uint32 and x.shape == (2,)

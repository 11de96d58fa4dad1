"""The dimension along which each leaf is cut into shards, one for each rank, and checks of the specs that say so."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import spell_array, wrong
from jaxcgx.train.batch import OP, Names, axes_of, flatten_specs
from jaxcgx.typing import Params, PyTree, Specs


class Cut(NamedTuple):
    """For each leaf of the parameters, the dimension that is sharded over the ranks, or None."""

    structure: PyTree  # that of the parameters; None: nothing is cut
    dimensions: tuple[int | None, ...]

    @classmethod
    def of(cls, specs: Specs, names: Names) -> "Cut":
        """Returns the cut of a tree of specs over the axes of the ranks, `names`. Without specs, nothing is cut."""
        if specs is None:
            return cls(None, ())
        found, structure = flatten_specs(specs)
        return cls(structure, tuple(_dimension(spec, names) for _, spec in found))

    def __bool__(self) -> bool:
        """Returns whether any leaf is sharded."""
        return any(d is not None for d in self.dimensions)

    def without(self, other: "Cut") -> "Cut":
        """Returns the cut of only the leaves that are sharded here and whole in another cut."""
        alone = [d if there is None else None for d, there in zip(self.dimensions, other.dimensions)]
        return self._replace(dimensions=tuple(alone))

    def masked(self, tree: PyTree) -> list[Any]:
        """Returns the leaves of a tree like the parameters, with None in place of whole leaves."""
        return [None if d is None else x for d, x in zip(self.dimensions, self.structure.flatten_up_to(tree))]

    def pick(self, tree: PyTree) -> PyTree:
        """Returns the tree with None in place of whole leaves."""
        return self.tree(self.masked(tree))

    def tree(self, values: Sequence[Any]) -> PyTree:
        return self.structure.unflatten(values)

    def specs(self, names: Names) -> Specs:
        """Returns the specs of a tree like the parameters, in a shard_map over the axes of the ranks."""
        return self.tree([P() if d is None else P(*[None] * d, names) for d in self.dimensions]) if self else P()

    def check(self, argument: str, params: Params, ranks: int) -> None:
        """Checks that `ranks` divides the sharded dimensions. Errors name `argument`, which has the specs."""
        if not self:
            return
        if jax.tree_util.tree_structure(params) != self.structure:
            expected = f"a tree like the parameters, {jax.tree_util.tree_structure(params)}"
            raise wrong(OP, argument, expected, self.structure)
        for (path, x), d in zip(jax.tree_util.tree_flatten_with_path(params)[0], self.dimensions):
            if d is not None and (d >= x.ndim or x.shape[d] % ranks):
                remedy = "PartitionSpec() leaves it whole, and jaxcgx.shard_specs finds dimensions"
                expected = f"a dimension that {ranks} ranks divide"
                raise wrong(OP, argument, expected, f"dimension {d} of {spell_array(x)}", remedy, path=path)


def named(spec: P) -> Names:
    """Returns the axes of a mesh that a spec names."""
    return tuple(name for part in spec for name in axes_of(part))


def _dimension(spec: P, names: Names) -> int | None:
    """Returns the dimension that exactly these axes shard, or None."""
    return next((d for d, part in enumerate(spec) if axes_of(part) == names), None)


def shortest(spec: P) -> P:
    """Returns the spec without its last dimensions that no axis shards."""
    parts = list(spec)
    while parts and parts[-1] in (None, ()):
        parts.pop()
    return P(*parts)


def beside(spec: P, names: Names) -> P:
    """Returns the spec without the axes of the ranks, `names`: the sharding over the other axes."""
    return shortest(P(*(None if axes_of(part) == names else part for part in spec)))


def check_specs(argument: str, specs: Specs, names: Names) -> None:
    """Checks that each spec has the axes of the ranks for at most one dimension, which no other axis shards."""
    for path, spec in flatten_specs(specs)[0]:
        if not isinstance(spec, P):
            raise wrong(OP, argument, "a jax.sharding.PartitionSpec", repr(spec), path=path, kind=TypeError)
        having = [axes_of(part) for part in spec if set(axes_of(part)) & set(names)]
        if having not in ([], [names]):
            spelled = repr(names[0]) if len(names) == 1 else repr(names)
            raise wrong(OP, argument, f"{spelled} for one dimension at most, and alone there", spec, path=path)


def check_optimizer_specs(specs: Specs, param_specs: Specs, names: Names) -> None:
    """Checks that the optimizer's state is sharded like the parameters.

    Where a parameter is whole on every rank, its state may be sharded over the ranks, too.
    """
    found, tree = flatten_specs(specs)
    params, like = ([((), P())] * len(found), tree) if param_specs is None else flatten_specs(param_specs)
    if like != tree:
        raise wrong(OP, "sharding.optimizer", f"a tree like sharding.params, {like}", tree)
    for (path, spec), (_, param) in zip(found, params):
        if _dimension(param, names) is None:
            fits = beside(spec, names) == shortest(param)
        else:
            fits = shortest(spec) == shortest(param)
        if not fits:
            expected = f"the spec of the parameter, {param}, or where that is whole, the same with {names[0]!r}"
            raise wrong(OP, "sharding.optimizer", expected, spec, path=path)

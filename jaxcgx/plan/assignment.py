"""Gives each leaf its codec: by the plan's rules, unless a guard keeps the leaf raw."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxcgx.checks import check_field, check_flag, check_integer, unexpected, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.plan.by_axis import Codecs, check_codecs, compressing, skips, values
from jaxcgx.plan.leaves import Shaped, spell_path, why_unfit
from jaxcgx.plan.rules import Rule, as_rule

_SHOWN = 5  # the most leaves that an error names


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The part of a `Plan` that chooses codecs. Plan's docstring explains the fields."""

    default: Codecs
    rules: Sequence[Any] = ()
    _: dataclasses.KW_ONLY
    min_size: int = 1024
    skip_1d: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "default", check_codecs("Plan", "default", self.default, skip=True))
        if not isinstance(self.rules, tuple | list):
            raise wrong("Plan", "rules", "a list", repr(self.rules), kind=TypeError)
        object.__setattr__(self, "rules", tuple(map(as_rule, self.rules)))
        check_field(self, "min_size", check_integer, 0)
        check_field(self, "skip_1d", check_flag)

    @property
    def codecs(self) -> list[Codec]:
        """All codecs that a leaf may get."""
        return [codec for given in (self.default, *(rule.codec for rule in self.rules)) for codec in values(given)]

    @property
    def raw(self) -> bool:
        """Whether no leaf is compressed."""
        return all(codec.raw for codec in self.codecs)

    @property
    def stochastic(self) -> bool:
        """Whether any codec that a leaf may get draws noise. Exchanges then need a key."""
        return any(codec.stochastic for codec in self.codecs)

    def assign(
        self, op: str, argument: str, paths: Sequence[Any], leaves: Sequence[Shaped]
    ) -> list[tuple[Codecs, str | None]]:
        """Returns (codec, reason) for each leaf. The codec may be a dict of codecs by axis.

        If no codec can take the leaf, or a guard keeps it raw, the codec is Raw(), and the reason is a text for people.
        Otherwise the reason is None. Leaves with Skip() never have a reason.

        Args:
          op: the function that errors name.
          argument: the argument of that function that errors name.
          paths: the JAX path of each leaf.
          leaves: objects with a shape and a dtype.
        """
        names = [spell_path(path) for path in paths]
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        held = [[rule for rule in self.rules if rule.matches(op, *found)] for found in zip(names, shapes)]
        self._check_rules_hold(op, argument, names=names, held=held)
        return [self._choose(op, argument, *found) for found in zip(names, shapes, held)]

    def skipped(self, op: str, argument: str, tree: Any) -> Any:
        """Returns a tree like `tree` with a bool per leaf: whether the plan skips it.

        Errors name the function `op` and its argument `argument`.
        """
        found, structure = jax.tree_util.tree_flatten_with_path(tree)
        if not found:
            return tree
        paths, leaves = zip(*found)
        return structure.unflatten([skips(codec) for codec, _ in self.assign(op, argument, paths=paths, leaves=leaves)])

    def why_guarded(self, leaf: Shaped) -> str | None:
        """Returns the reason why a guard keeps a leaf raw, or None if no guard does."""
        if leaf.size < self.min_size:
            return f"it has {leaf.size} element{'s' * (leaf.size > 1)}, fewer than the plan's min_size={self.min_size}"
        if self.skip_1d and leaf.ndim < 2:
            return f"it has {'one' if leaf.ndim else 'no'} dimension, and the plan has skip_1d=True"
        return None

    def _check_rules_hold(self, op: str, argument: str, names: list[str], held: list[list[Rule]]) -> None:
        useful = {id(rule) for rules in held for rule in rules}  # by identity: equality would compare field by field
        for rule in self.rules:
            if rule.names and not rule.optional and id(rule) not in useful:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise wrong(
                    op,
                    argument,
                    "a leaf for every rule of the plan",
                    f"none for {rule} among {', '.join(map(repr, names[:_SHOWN])) or 'no leaves'}{more}",
                    "correct the rule, take it out, or make it optional=True",
                )

    def _choose(self, op: str, argument: str, name: str, leaf: Shaped, rules: list[Rule]) -> tuple[Codecs, str | None]:
        rules = [rule for rule in rules if rule.priority == max(r.priority for r in rules)]
        given = [rule.codec for rule in rules] or [self.default]
        why = None if any(map(skips, given)) else why_unfit(leaf) or self.why_guarded(leaf)
        if why:
            named = next((rule for rule in rules if rule.names and compressing(rule.codec)), None)
            return Raw(), f"{why}, though {named} names it" if named else why
        for rule in rules[1:]:
            if rule.codec != rules[0].codec:
                raise unexpected(
                    f"{op}: argument '{argument}', leaf {name!r}",
                    "one codec",
                    f"two: {rules[0]} and {rule} of the plan have the same priority",
                    "give one of them a higher one",
                )
        return given[0], None

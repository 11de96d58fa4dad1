"""Gives each leaf its codec: by the plan's rules, unless a guard keeps the leaf raw."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

from jaxcgx.checks import (
    BOOL,
    check_flag,
    check_hashable,
    check_integer,
    check_pattern,
    check_type,
    set_field,
    unexpected,
    wrong,
)
from jaxcgx.codecs import Codec, Raw
from jaxcgx.codecs.base import spell
from jaxcgx.plan.leaves import Codecs, Route, Shaped, as_codecs, compressing, skips, spell_path, values, why_unfit
from jaxcgx.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Rule:
    """A codec for the leaves that satisfy all of its conditions.

    Args:
      codec: a codec, {axis name: codec}, or Skip() for leaves that are not sent.
      path: a regular expression. re.search looks for it in the leaf's path, such as "a/b/kernel".
      where: a predicate: a function of the path and the leaf (a jax.ShapeDtypeStruct) that returns True or False.
      min_size: the smallest number of elements.
      max_size: the largest number of elements.
      ndim: the number of dimensions.
      priority: if several rules apply to a leaf, only rules with the highest priority count.
      optional: whether the rule may apply to no leaf, for plans that are used on parts of a tree. Other rules with a
        path or a predicate must apply to at least one leaf.
    """

    codec: Codecs
    path: str | None = None
    where: Callable[[str, Any], bool] | None = None
    min_size: int | None = None
    max_size: int | None = None
    ndim: int | None = None
    priority: int = 0
    optional: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", as_codecs("Rule", "codec", self.codec, skip=True))
        check_pattern("Rule", "path", self.path)
        if not (self.where is None or callable(self.where)):
            raise wrong("Rule", "where", "a function of a path and a leaf", repr(self.where), kind=TypeError)
        check_hashable("Rule", "where", self.where, "plans are static under jit")
        for field in ("min_size", "max_size", "ndim"):
            if getattr(self, field) is not None:
                set_field(self, field, check_integer, 0)
        if self.min_size is not None and self.max_size is not None and self.min_size > self.max_size:
            raise wrong("Rule", "max_size", f"at least min_size={self.min_size}", self.max_size)
        set_field(self, "priority", check_integer)
        set_field(self, "optional", check_flag)

    def __str__(self) -> str:
        return re.sub(" at 0x[0-9a-f]+", "", spell(self))  # without a predicate's address: it differs by process

    @property
    def names(self) -> bool:
        """Whether the rule has a path or a predicate, not only sizes and dimensions."""
        return bool(self.path or self.where)

    def matches(self, op: str, path: str, leaf: Shaped) -> bool:
        """Returns whether the rule applies to a leaf at this path. `op` is the function that errors name."""
        conditions = (
            self.path is None or re.search(self.path, path),
            self.min_size is None or leaf.size >= self.min_size,
            self.max_size is None or leaf.size <= self.max_size,
            self.ndim is None or leaf.ndim == self.ndim,
        )
        if self.where is None or not all(conditions):
            return all(conditions)
        answer: Any = self.where(path, leaf)
        if not isinstance(answer, BOOL):
            expected = f"True or False for leaf {path!r}"
            raise unexpected(f"{op}: {self} of the plan", expected, repr(answer), kind=TypeError)
        return bool(answer)


def as_rule(rule: Any) -> Rule:
    """Returns a `Rule` as it is, or makes a rule from a pair (regular expression or predicate, codec)."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not (isinstance(rule[0], str) or callable(rule[0])):
        expected = "jaxcgx.Rule(...) or (regular expression or predicate, codec)"
        raise wrong("Plan", "rules", expected, repr(rule), kind=TypeError)
    condition, codec = rule
    return Rule(codec, path=condition) if isinstance(condition, str) else Rule(codec, where=condition)


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
        object.__setattr__(self, "default", as_codecs("Plan", "default", self.default, skip=True))
        check_type("Plan", "rules", self.rules, tuple | list, "a list")
        object.__setattr__(self, "rules", tuple(map(as_rule, self.rules)))
        set_field(self, "min_size", check_integer, 0)
        set_field(self, "skip_1d", check_flag)

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

    @property
    def loose(self) -> Self:
        """The same for a part of a tree, where a rule may apply to no leaf."""
        return dataclasses.replace(self, rules=[dataclasses.replace(rule, optional=True) for rule in self.rules])

    def routes(self, op: str, argument: str, tree: PyTree) -> list[Route]:
        """Returns the route of each leaf of a `tree`. Errors name the function `op` and its `argument`."""
        # If no codec can take a leaf, or a guard keeps it raw, its codec is Raw().
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        names = [spell_path(path) for path, _ in found]
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in found]
        held = [[rule for rule in self.rules if rule.matches(op, *each)] for each in zip(names, shapes)]
        useful = {id(rule) for rules in held for rule in rules}  # by identity: equality would compare field by field
        for rule in self.rules:
            if rule.names and not rule.optional and id(rule) not in useful:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                got = f"none for {rule} among {', '.join(map(repr, names[:_SHOWN])) or 'no leaves'}{more}"
                remedy = "correct the rule, take it out, or make it optional=True"
                raise wrong(op, argument, "a leaf for every rule of the plan", got, remedy)
        chosen = [self._choose(op, argument, *each) for each in zip(names, shapes, held)]
        return [Route.of(path, leaf, *each) for (path, leaf), each in zip(found, chosen)]

    def why_guarded(self, leaf: Shaped) -> str | None:
        """Returns the reason why a guard keeps a leaf raw, or None if no guard does."""
        if leaf.size < self.min_size:
            return f"it has {leaf.size} element{'s' * (leaf.size > 1)}, fewer than the plan's min_size={self.min_size}"
        if self.skip_1d and leaf.ndim < 2:
            return f"it has {'one' if leaf.ndim else 'no'} dimension, and the plan has skip_1d=True"
        return None

    def _choose(self, op: str, argument: str, name: str, leaf: Shaped, rules: list[Rule]) -> tuple[Codecs, str | None]:
        """Returns the codec of a leaf, and the reason if it is Raw() whatever the rules say."""
        rules = [rule for rule in rules if rule.priority == max(r.priority for r in rules)]
        given = [rule.codec for rule in rules] or [self.default]
        why = None if any(map(skips, given)) else why_unfit(leaf) or self.why_guarded(leaf)
        if why:
            named = next((rule for rule in rules if rule.names and compressing(rule.codec)), None)
            return Raw(), f"{why}, though {named} names it" if named else why
        for rule in rules[1:]:
            if rule.codec != rules[0].codec:
                got = f"two: {rules[0]} and {rule} of the plan have the same priority"
                place = f"{op}: argument '{argument}', leaf {name!r}"
                raise unexpected(place, "one codec", got, "give one of them a higher one")
        return given[0], None

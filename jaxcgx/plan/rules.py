"""Rules, which give a codec to the leaves that satisfy their conditions."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from jaxcgx.checks import BOOL, check_field, check_flag, check_hashable, check_integer, unexpected, wrong
from jaxcgx.codecs.spelling import spell
from jaxcgx.plan.by_axis import Codecs, check_codecs
from jaxcgx.plan.leaves import Shaped


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
        object.__setattr__(self, "codec", check_codecs("Rule", "codec", self.codec, skip=True))
        _check_pattern(self.path)
        if not (self.where is None or callable(self.where)):
            raise wrong("Rule", "where", "a function of a path and a leaf", repr(self.where), kind=TypeError)
        check_hashable("Rule", "where", self.where, "plans are static under jit")
        for field in ("min_size", "max_size", "ndim"):
            if getattr(self, field) is not None:
                check_field(self, field, check_integer, 0)
        if self.min_size is not None and self.max_size is not None and self.min_size > self.max_size:
            raise wrong("Rule", "max_size", f"at least min_size={self.min_size}", self.max_size)
        check_field(self, "priority", check_integer)
        check_field(self, "optional", check_flag)

    def __str__(self) -> str:
        return re.sub(
            " at 0x[0-9a-f]+", "", spell(self)
        )  # removes the address of a predicate, which differs between processes

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


def _check_pattern(path: Any) -> None:
    if path is None:
        return
    if not isinstance(path, str):
        raise wrong("Rule", "path", "a regular expression as a string", repr(path), kind=TypeError)
    try:
        re.compile(path)
    except re.error as error:
        raise wrong("Rule", "path", "a regular expression", f"{path!r}: {error}") from None


def as_rule(rule: Any) -> Rule:
    """Returns a `Rule` as it is, or makes a rule from a pair (regular expression or predicate, codec)."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not (isinstance(rule[0], str) or callable(rule[0])):
        expected = "jaxcgx.Rule(...) or (regular expression or predicate, codec)"
        raise wrong("Plan", "rules", expected, repr(rule), kind=TypeError)
    condition, codec = rule
    return Rule(codec, path=condition) if isinstance(condition, str) else Rule(codec, where=condition)

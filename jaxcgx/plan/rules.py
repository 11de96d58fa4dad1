"""Rules: a codec, and the leaves that it is for."""

import dataclasses
import numbers
import re
from collections.abc import Callable

import numpy as np

from jaxcgx.checks import check_field, check_flag, check_integer
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.checks import check_codec
from jaxcgx.codecs.spelling import spell


class ByAxis(dict):
    """{axis name: ...}, hashable as everything is that jit holds for static, so nobody may change it."""

    def __hash__(self):
        return hash(frozenset(self.items()))

    def __reduce__(self):  # copies and pickles of a dict are filled item by item
        return ByAxis, (dict(self),)

    def _refuse(self, *args, **kwargs):
        raise TypeError(f"a plan's {dict(self)} can't be changed: make another plan, of dict(...) of it")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def check_codecs(name, argument, codec):
    """A codec, or one for each axis."""
    if not isinstance(codec, dict):
        return check_codec(name, codec, argument)
    if not codec:
        raise ValueError(f"{name}: argument '{argument}': expected a codec for each axis, got {{}}")
    return ByAxis((axis, check_codec(name, found, argument)) for axis, found in codec.items())


def compressing(codec):
    """Of a codec, or of one for each axis, those that compress, outermost first."""
    given = codec.values() if isinstance(codec, dict) else [codec]
    return list(dict.fromkeys(one for one in given if not one.raw))


@dataclasses.dataclass(frozen=True)
class Rule:
    """A codec for the leaves that all of its conditions hold for.

    codec: a codec, or {axis name: codec}. path: a regular expression that is searched (re.search) in the leaf's path,
    written
    "a/b/kernel". where: a function of the path and of a jax.ShapeDtypeStruct, the leaf, that returns True or False.
    min_size,
    max_size: elements, at least and at most. ndim: dimensions. priority: of the rules that hold for a leaf those with
    the highest
    count. optional: a rule with a path or a predicate may hold for no leaf at all, as when a plan is used on part of a
    tree.
    """

    codec: Codec | dict
    path: str | None = None
    where: Callable | None = None
    min_size: int | None = None
    max_size: int | None = None
    ndim: int | None = None
    priority: int = 0
    optional: bool = False

    def __post_init__(self):
        object.__setattr__(self, "codec", check_codecs("Rule", "codec", self.codec))
        if self.path is not None:
            if not isinstance(self.path, str):
                raise TypeError(f"Rule: argument 'path': expected a regular expression as a string, got {self.path!r}")
            try:
                re.compile(self.path)
            except re.error as error:
                raise ValueError(
                    f"Rule: argument 'path': expected a regular expression, got {self.path!r}: {error}"
                ) from None
        if not (self.where is None or callable(self.where)):
            raise TypeError(f"Rule: argument 'where': expected a function of a path and a leaf, got {self.where!r}")
        try:
            hash(self.where)
        except TypeError:
            raise TypeError(
                f"Rule: argument 'where': expected something hashable, got {self.where!r}: plans are static under jit"
            ) from None
        for field in ("min_size", "max_size", "ndim"):
            if getattr(self, field) is not None:
                check_field(self, field, check_integer, 0)
        if None not in (self.min_size, self.max_size) and self.min_size > self.max_size:
            raise ValueError(
                f"Rule: argument 'max_size': expected at least min_size={self.min_size}, got {self.max_size}"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, numbers.Integral):
            raise TypeError(f"Rule: argument 'priority': expected an integer, got {self.priority!r}")
        object.__setattr__(self, "priority", int(self.priority))
        check_field(self, "optional", check_flag)

    def __str__(self):
        return re.sub(" at 0x[0-9a-f]+", "", spell(self))  # of a predicate: reasons are the same in every process

    @property
    def names(self) -> bool:
        """Whether it names leaves, and doesn't only say how large they are."""
        return bool(self.path or self.where)

    def matches(self, op, path, leaf) -> bool:
        conditions = (
            self.path is None or re.search(self.path, path),
            self.min_size is None or leaf.size >= self.min_size,
            self.max_size is None or leaf.size <= self.max_size,
            self.ndim is None or leaf.ndim == self.ndim,
        )
        if self.where is None or not all(conditions):
            return all(conditions)
        answer = self.where(path, leaf)
        if not isinstance(answer, (bool, np.bool_)):
            raise TypeError(f"{op}: {self} of the plan: expected True or False for leaf {path!r}, got {answer!r}")
        return bool(answer)


def as_rule(rule):
    """A rule, written as one or as (regular expression or predicate, codec)."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, (tuple, list)) or len(rule) != 2 or not (isinstance(rule[0], str) or callable(rule[0])):
        raise TypeError(
            "Plan: argument 'rules': expected jaxcgx.Rule(...) or (regular expression or predicate, codec), "
            f"got {rule!r}"
        )
    condition, codec = rule
    return Rule(codec, path=condition) if isinstance(condition, str) else Rule(codec, where=condition)

"""Which leaf of a pytree gets which codec, and which leaves share a message."""
import dataclasses
import numbers
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.codecs.base import Codec, check_codec, check_flag, check_integer, spell
from jaxcgx.codecs.raw import Raw
from jaxcgx.native.layout import DTYPES

SCHEDULES = ("auto", "two_shot", "one_shot", "ring")
_SHOWN = 5  # leaves that an error names


class ByAxis(dict):
    """{axis name: ...}, hashable as everything is that jit holds for static. Nobody changes it."""

    def __hash__(self):
        return hash(frozenset(self.items()))


def _codecs(name, argument, codec):
    """A codec, or one for each axis."""
    if not isinstance(codec, dict):
        return check_codec(name, codec, argument)
    if not codec:
        raise ValueError(f"{name}: argument '{argument}': expected a codec for each axis, got {{}}")
    return ByAxis((axis, check_codec(name, found, argument)) for axis, found in codec.items())


@dataclasses.dataclass(frozen=True)
class Rule:
    """A codec for the leaves that all of its conditions hold for.

    codec: a codec, or {axis name: codec}. path: a regular expression that is searched (re.search) in the leaf's path, written
    "a/b/kernel". where: a function of the path and of a jax.ShapeDtypeStruct, the leaf, that returns True or False. min_size,
    max_size: elements, at least and at most. ndim: dimensions. priority: of the rules that hold for a leaf those with the highest
    count.
    """

    codec: Codec | dict
    path: str | None = None
    where: Callable | None = None
    min_size: int | None = None
    max_size: int | None = None
    ndim: int | None = None
    priority: int = 0

    def __post_init__(self):
        object.__setattr__(self, "codec", _codecs("Rule", "codec", self.codec))
        if self.path is not None:
            if not isinstance(self.path, str):
                raise TypeError(f"Rule: argument 'path': expected a regular expression as a string, got {self.path!r}")
            try:
                re.compile(self.path)
            except re.error as error:
                raise ValueError(f"Rule: argument 'path': expected a regular expression, got {self.path!r}: {error}") from None
        if not (self.where is None or callable(self.where)):
            raise TypeError(f"Rule: argument 'where': expected a function of a path and a leaf, got {self.where!r}")
        for field in ("min_size", "max_size", "ndim"):
            if getattr(self, field) is not None:
                check_integer(self, field, 0)
        if None not in (self.min_size, self.max_size) and self.min_size > self.max_size:
            raise ValueError(f"Rule: argument 'max_size': expected at least min_size={self.min_size}, got {self.max_size}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, numbers.Integral):
            raise TypeError(f"Rule: argument 'priority': expected an integer, got {self.priority!r}")

    def __str__(self):
        return spell(self)

    def matches(self, op, path, leaf) -> bool:
        conditions = (self.path is None or re.search(self.path, path), self.min_size is None or leaf.size >= self.min_size,
                      self.max_size is None or leaf.size <= self.max_size, self.ndim is None or leaf.ndim == self.ndim)
        if self.where is None or not all(conditions):
            return all(conditions)
        answer = self.where(path, leaf)
        if not isinstance(answer, (bool, np.bool_)):
            raise TypeError(f"{op}: {self} of the plan: expected True or False for leaf {path!r}, got {answer!r}")
        return bool(answer)


def _rule(rule):
    """A rule, written as one or as (regular expression or predicate, codec)."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, (tuple, list)) or len(rule) != 2 or not (isinstance(rule[0], str) or callable(rule[0])):
        raise TypeError(f"Plan: argument 'rules': expected jaxcgx.Rule(...) or (regular expression or predicate, codec), got {rule!r}")
    condition, codec = rule
    return Rule(codec, path=condition) if isinstance(condition, str) else Rule(codec, where=condition)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaf of a pytree gets which codec. It goes where a codec goes, and is static under jit as a codec is.

    default: the codec of leaves that no rule holds for, or {axis name: codec}.
    rules: `Rule`s, or pairs of a regular expression on the leaf's path ("a/b/kernel") or a predicate and a codec.
    min_size, skip_1d: guards, stronger than every rule: leaves of fewer elements travel raw, and so do those of one dimension or
    none, biases and norms. min_size=0, skip_1d=False turn them off.
    fusion_mb, schedule ({axis name: schedule}, too), leader: what a collective takes whose caller says nothing.

    Of two rules of the same priority that give a leaf different codecs, and of a rule that holds for no leaf at all, a collective
    makes an error.
    """

    default: Codec | dict
    rules: tuple = ()
    min_size: int = 1024
    skip_1d: bool = True
    fusion_mb: float = 64
    schedule: str | dict = "auto"
    leader: bool = False

    def __post_init__(self):
        object.__setattr__(self, "default", _codecs("Plan", "default", self.default))
        if not isinstance(self.rules, (tuple, list)):
            raise TypeError(f"Plan: argument 'rules': expected a list, got {self.rules!r}")
        object.__setattr__(self, "rules", tuple(map(_rule, self.rules)))
        check_integer(self, "min_size", 0)
        check_flag(self, "skip_1d")
        if isinstance(self.fusion_mb, bool) or not isinstance(self.fusion_mb, numbers.Real) or not self.fusion_mb > 0:
            raise ValueError(f"Plan: argument 'fusion_mb': expected a positive number, got {self.fusion_mb!r}")
        if isinstance(self.schedule, dict):
            object.__setattr__(self, "schedule", ByAxis(self.schedule))
        for schedule in self.schedule.values() if isinstance(self.schedule, dict) else [self.schedule]:
            if schedule not in SCHEDULES:
                raise ValueError(f"Plan: argument 'schedule': expected one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}")
        check_flag(self, "leader")

    @property
    def codecs(self):
        """All codecs that a leaf may get."""
        given = [self.default, *(rule.codec for rule in self.rules)]
        return [codec for each in given for codec in (each.values() if isinstance(each, dict) else [each])]

    def assign(self, op, argument, paths, leaves):
        """For each leaf its codec, or codecs by axis, and why it travels raw if a guard says so, else None.

        op, argument: the function and its argument that errors name. paths: JAX's. leaves: whatever has a shape and a dtype."""
        names, leaves = [spell_path(path) for path in paths], [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        held = [[rule for rule in self.rules if rule.matches(op, name, leaf)] for name, leaf in zip(names, leaves)]
        for rule in self.rules:
            if not any(rule in rules for rules in held):
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise ValueError(f"{op}: argument '{argument}': expected a leaf for every rule of the plan, got none for {rule} among "
                                 f"{', '.join(map(repr, names[:_SHOWN])) or 'no leaves'}{more}; correct the rule or take it out")
        return [self._choose(op, argument, *found) for found in zip(names, leaves, held)]

    def _choose(self, op, argument, name, leaf, rules):
        if not why_unfit(leaf) and (why := self._why_guarded(leaf)):
            return Raw(), why
        rules = [rule for rule in rules if rule.priority == max(r.priority for r in rules)]
        for rule in rules[1:]:
            if rule.codec != rules[0].codec:
                raise ValueError(f"{op}: argument '{argument}', leaf {name!r}: expected one codec, got two: {rules[0]} and {rule} of the plan have the "
                                 "same priority; give one of them a higher one")
        return rules[0].codec if rules else self.default, None

    def _why_guarded(self, leaf):
        """Why the plan's guards leave a leaf raw, if they do."""
        if leaf.size < self.min_size:
            return f"it has {leaf.size} element{'s' * (leaf.size > 1)}, fewer than the plan's min_size={self.min_size}"
        if self.skip_1d and leaf.ndim < 2:
            return f"it has {'one' if leaf.ndim else 'no'} dimension, and the plan has skip_1d=True"
        return None


def spell_path(path):
    """A JAX path as rules see it: "a/b/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def why_unfit(leaf):
    """Why no codec can take a leaf."""
    if leaf.dtype not in DTYPES:
        return f"{leaf.dtype} is not float32, bfloat16 or float16"
    return "it has no elements" if leaf.size == 0 else None


def why_raw(leaf, codecs):
    """Why a leaf travels as it is; None where one of the codecs encodes it."""
    return why_unfit(leaf) or ("its codec is Raw()" if all(codec.raw for codec in codecs) else None)


def messages(leaves, limit):
    """Lists of indices into `leaves`, in order, each of leaves of up to `limit` bytes together; a larger leaf travels alone."""
    found, room = [], -1
    for i, leaf in enumerate(leaves):
        size = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if size > room:
            found.append([])
            room = limit
        found[-1].append(i)
        room -= size
    return found

"""The plan: which leaf of a pytree gets which codec."""

import dataclasses
import numbers
import os
import pathlib
import re
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, check_field, check_flag, check_integer
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.bytegrad import ByteGrad
from jaxcgx.codecs.cast import Cast
from jaxcgx.codecs.checks import check_codec
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.spelling import spell
from jaxcgx.codecs.topk import TopK
from jaxcgx.plan import adaptation, environment, file, forecast
from jaxcgx.plan.leaves import spell_path, why_unfit
from jaxcgx.plan.rules import ByAxis, Rule, as_rule, check_codecs, compressing
from jaxcgx.plan.statistics import GradientStatistics
from jaxcgx.transports.axes import axis_names

SCHEDULES = ("auto", "two_shot", "one_shot", "ring")
_SHOWN = 5  # leaves that an error names


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaf of a pytree gets which codec. It goes where a codec goes, and is static under jit as a codec is.

    default: the codec of leaves that no rule holds for, or {axis name: codec}.
    rules: `Rule`s, or pairs of a regular expression on the leaf's path ("a/b/kernel") or a predicate and a codec.
    min_size, skip_1d: guards, stronger than every rule: leaves of fewer elements travel raw, and so do those of one
    dimension or
    none, biases and norms. min_size=0, skip_1d=False turn them off.
    fusion_mb, schedule ({axis name: schedule}, too), leader: what a collective takes whose caller says nothing.

    Of two rules of the same priority that give a leaf different codecs, and of a rule with a path or a predicate that
    holds for
    no leaf at all and isn't optional, a collective makes an error.
    """

    default: Codec | dict
    rules: tuple = ()
    min_size: int = 1024
    skip_1d: bool = True
    fusion_mb: float = 64
    schedule: str | dict = "auto"
    leader: bool = False

    def __post_init__(self):
        object.__setattr__(self, "default", check_codecs("Plan", "default", self.default))
        if not isinstance(self.rules, (tuple, list)):
            raise TypeError(f"Plan: argument 'rules': expected a list, got {self.rules!r}")
        object.__setattr__(self, "rules", tuple(map(as_rule, self.rules)))
        check_field(self, "min_size", check_integer, 0)
        check_field(self, "skip_1d", check_flag)
        if isinstance(self.fusion_mb, bool) or not isinstance(self.fusion_mb, numbers.Real) or not self.fusion_mb > 0:
            raise ValueError(f"Plan: argument 'fusion_mb': expected a positive number, got {self.fusion_mb!r}")
        plain = int if isinstance(self.fusion_mb, numbers.Integral) else float  # not NumPy's, which no file could hold
        object.__setattr__(self, "fusion_mb", plain(self.fusion_mb))
        if isinstance(self.schedule, dict):
            if not self.schedule:
                raise ValueError("Plan: argument 'schedule': expected a schedule for each axis, got {}")
            object.__setattr__(self, "schedule", ByAxis(self.schedule))
        for schedule in self.schedule.values() if isinstance(self.schedule, dict) else [self.schedule]:
            if schedule not in SCHEDULES:
                raise ValueError(
                    f"Plan: argument 'schedule': expected one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}"
                )
        check_field(self, "leader", check_flag)

    @classmethod
    def cgx(cls, bits=4, bucket_size=1024, rounding="nearest"):
        """What CGX's hook for layers does: MaxMin for everything but leaves of fewer than 1024 elements, biases and
        norms.

        The bucket is the hook's; CGX's variables have one of 512 (`from_env`), as MaxMin has.
        """
        return cls(MaxMin(bits, bucket_size, rounding))

    @classmethod
    def bytegrad(cls, axis_name=None):
        """What Bagua's ByteGrad does: 8 bits for everything, and of a tuple of axes the inner ones as they are."""
        return cls(by_axis(_axes("bytegrad", axis_name), ByteGrad(), Raw()), min_size=0, skip_1d=False)

    @classmethod
    def fp16(cls):
        """What GeoMX's FP16 does: everything travels as float16."""
        return cls(Cast("float16"), min_size=0, skip_1d=False)

    @classmethod
    def mixed_precision(cls, codec=MaxMin(), size_bound=200_000, axis_name=None):
        """What GeoMX's mixed-precision quantization does, with a dense codec: leaves of up to `size_bound` elements
        travel as
        float16 over all axes; larger ones in the codec's bytes, but over the inner axes of a tuple as they are."""
        op, names, half = "Plan.mixed_precision", _axes("mixed_precision", axis_name), Cast("float16")
        check_codec(op, codec)
        tiny = Rule(by_axis(names, half, half), max_size=_size_bound(op, size_bound))
        return cls(by_axis(names, codec, Raw()), [tiny], min_size=0, skip_1d=False)

    @classmethod
    def bsc(cls, threshold=0.01, size_bound=200_000, axis_name=None, pull="all", select="sampled"):
        """What GeoMX's bidirectional sparsification does: of leaves of more than `size_bound` elements the largest
        `threshold` travel,
        over the inner axes of a tuple everything as it is; smaller leaves travel raw.

        pull, select: as in TopK. `jaxcgx.bsc` is the transformation with its momentum.
        """
        codec = TopK(threshold, select=select, pull=pull)
        return cls(
            by_axis(_axes("bsc", axis_name), codec, Raw()),
            min_size=_size_bound("Plan.bsc", size_bound) + 1,
            skip_1d=False,
        )

    @classmethod
    def from_env(cls, axis_name=None, environ=os.environ):
        """What CGX would do under these environment variables; docs/plans.md has the table.

        axis_name: a tuple of axes, outermost first, is a hierarchy: nodes, and ranks within a node. None or one name:
        there is
        one network, and what CGX's variables say of two doesn't count, but for CGX_INNER_REDUCTION_TYPE.
        """
        names, env = _axes("from_env", axis_name), environment.read(environ)
        hierarchy = len(names) > 1
        codec = (
            Raw()
            if env.bits == 32 or env.dummy
            else MaxMin(env.bits, env.bucket_size, skip_incomplete=env.skip_incomplete)
        )
        inner, cross = ("one_shot", "one_shot") if env.all_to_all else (env.inner_reduction, env.cross_reduction)
        return cls(
            by_axis(names, codec, codec if env.intra_compress else Raw()),
            min_size=max(env.minimal_size, 16) + 1,  # up to that many elements CGX sends as they are
            skip_1d=False,
            fusion_mb=env.fusion_mb,
            schedule=by_axis(names, cross if hierarchy else inner, inner),
            leader=hierarchy and env.intra_broadcast,
        )

    @property
    def codecs(self):
        """All codecs that a leaf may get."""
        given = [self.default, *(rule.codec for rule in self.rules)]
        return [codec for each in given for codec in (each.values() if isinstance(each, dict) else [each])]

    def assign(self, op, argument, paths, leaves):
        """For each leaf its codec, or codecs by axis, and why it travels raw if no codec can take it or a guard says
        so, else None.

        op, argument: the function and its argument that errors name. paths: JAX's. leaves: whatever has a shape and a
        dtype."""
        names = [spell_path(path) for path in paths]
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        held = [
            [i for i, rule in enumerate(self.rules) if rule.matches(op, name, leaf)]
            for name, leaf in zip(names, leaves)
        ]
        useful = set().union(*held)
        for i, rule in enumerate(self.rules):
            if rule.names and not rule.optional and i not in useful:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise ValueError(
                    f"{op}: argument '{argument}': expected a leaf for every rule of the plan, got none for {rule} "
                    "among "
                    f"{', '.join(map(repr, names[:_SHOWN])) or 'no leaves'}{more}; correct the rule, take it out, or "
                    "make it "
                    "optional=True"
                )
        return [
            self._choose(op, argument, name, leaf, [self.rules[i] for i in ids])
            for name, leaf, ids in zip(names, leaves, held)
        ]

    def explain(self, tree, axis_size):
        """What becomes of every leaf: codec, message, bytes, and why it travels raw if it does. str() of the result is
        a table.

        tree: of arrays or jax.ShapeDtypeStruct. axis_size: the number of ranks, or {axis name: ranks}, outermost first.

        Bytes are those of the leaf in its message, and the same elements uncompressed. "two_shot" and "ring" send
        2 (W - 1) / W of them, as lax.psum does of the uncompressed ones (sums of TopK are longer than messages);
        `jaxcgx.explain` of a
        step says what that step sends.
        """
        return forecast.forecast(self, tree, axis_size)

    def adapt(self, statistics, *, method="lgreco", alpha=1.0, reference=None):
        """The plan with another codec for each leaf that gets its default now, by what gradients lose
        (`gradient_statistics`).

        method: "lgreco" takes of the statistics' codecs those with which all leaves together send the fewest bytes, the
        sum of
        squared errors being at most `alpha` times that of `reference` everywhere. "kmeans" puts leaves into three
        clusters by
        size and by the norm of their 100 largest magnitudes, and gives those of the lowest norm 2 bits in buckets of
        128, the middle
        ones 3 bits in buckets of 256, the others 4 bits in the reference's.
        reference: the uniform choice; by default the plan's default codec, of those by axis the one that is not Raw().

        What guards or rules decide stays as it is; the new rules are optional. Every rank that has the same statistics
        makes the
        same plan.
        """
        op = "Plan.adapt"
        if not isinstance(statistics, GradientStatistics):
            raise TypeError(
                f"{op}: argument 'statistics': expected what jaxcgx.gradient_statistics returns, got {statistics!r}"
            )
        if method not in adaptation.METHODS:
            raise ValueError(
                f"{op}: argument 'method': expected one of {', '.join(map(repr, adaptation.METHODS))}, got {method!r}"
            )
        found = compressing(self.default)
        if not found:
            raise ValueError(f"{op}: expected a plan whose default codec compresses, got {spell(self.default)}")
        if reference is None and len(found) > 1:
            raise ValueError(
                f"{op}: argument 'reference': expected a codec, as the plan's default {spell(self.default)} has "
                "several, "
                "got None"
            )
        reference = found[0] if reference is None else check_codec(op, reference, "reference")
        leaves = [jax.ShapeDtypeStruct(*found) for found in zip(statistics.shapes, map(jnp.dtype, statistics.dtypes))]
        ids = [
            i
            for i, (path, leaf) in enumerate(zip(statistics.paths, leaves))
            if not self._why_guarded(leaf) and not any(rule.matches(op, path, leaf) for rule in self.rules)
        ]
        if not ids:
            raise ValueError(
                f"{op}: argument 'statistics': expected a leaf that gets the plan's default codec, got none: guards and "
                "rules decide them all; adapt the plan without the rules of an earlier adaptation"
            )
        chosen = adaptation.METHODS[method](op, statistics, ids, reference, alpha)
        rules = []
        for codec in dict.fromkeys(chosen):
            paths = "|".join(re.escape(statistics.paths[i]) for i, found in zip(ids, chosen) if found == codec)
            if isinstance(self.default, dict):
                codec = {axis: old if old.raw else codec for axis, old in self.default.items()}
            rules.append(Rule(codec, path=f"^({paths})$", optional=True))
        return dataclasses.replace(self, rules=(*self.rules, *rules))

    def save(self, path):
        """Writes the plan to a TOML file. Predicates and codecs of your own can't be saved."""
        pathlib.Path(path).write_text(file.write(self), encoding="utf-8")

    @classmethod
    def load(cls, path):
        """The plan of a file that `save` wrote, or somebody who read docs/plans.md."""
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
            return cls(**file.read(text, [field.name for field in dataclasses.fields(cls)]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"Plan.load: {path}: {error}") from None

    def _choose(self, op, argument, name, leaf, rules):
        rules = [rule for rule in rules if rule.priority == max(r.priority for r in rules)]
        if why := why_unfit(leaf) or self._why_guarded(leaf):
            named = next((rule for rule in rules if rule.names and compressing(rule.codec)), None)
            return Raw(), f"{why}, though {named} names it" if named else why
        for rule in rules[1:]:
            if rule.codec != rules[0].codec:
                raise ValueError(
                    f"{op}: argument '{argument}', leaf {name!r}: expected one codec, got two: {rules[0]} and {rule} of "
                    "the "
                    "plan have the same priority; give one of them a higher one"
                )
        return rules[0].codec if rules else self.default, None

    def _why_guarded(self, leaf):
        """Why the plan's guards leave a leaf raw, if they do."""
        if leaf.size < self.min_size:
            return f"it has {leaf.size} element{'s' * (leaf.size > 1)}, fewer than the plan's min_size={self.min_size}"
        if self.skip_1d and leaf.ndim < 2:
            return f"it has {'one' if leaf.ndim else 'no'} dimension, and the plan has skip_1d=True"
        return None


def _axes(method, axis_name):
    names = axis_names(axis_name)
    single = axis_name is None or all(
        isinstance(name, Hashable) and not isinstance(name, (int, tuple, type(None))) for name in names
    )
    if not names or not single or len(set(names)) < len(names):
        raise ValueError(
            f"Plan.{method}: argument 'axis_name': expected a name or a tuple of different names, got {axis_name!r}"
        )
    return names


def _size_bound(op, size_bound):
    if isinstance(size_bound, bool) or not isinstance(size_bound, numbers.Integral) or not 0 <= size_bound < MOST:
        raise ValueError(
            f"{op}: argument 'size_bound': expected an integer of at least 0 (and less than 2^40), got {size_bound!r}"
        )
    return size_bound


def by_axis(names, outer, inner):
    """Of several axes, outermost first, `outer` for the first and `inner` for the others."""
    return {name: outer if name == names[0] else inner for name in names} if len(names) > 1 else outer

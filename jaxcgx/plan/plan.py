"""The plan: which leaf gets which codec, and how the messages travel."""

import dataclasses
import numbers
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self

from jaxcgx.checks import MOST, check_choice, check_field, check_flag, check_integer, check_positive, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.bytegrad import ByteGrad
from jaxcgx.codecs.cast import Cast
from jaxcgx.codecs.checks import check_codec
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.topk import Sampled
from jaxcgx.plan import adapt, environment, file, forecast
from jaxcgx.plan.assignment import Assignment
from jaxcgx.plan.by_axis import ByAxis, by_axis, values
from jaxcgx.plan.rules import Rule
from jaxcgx.plan.sparsification import sparsification
from jaxcgx.plan.statistics import GradientStatistics
from jaxcgx.transports.axes import check_axis_names
from jaxcgx.transports.network import Network
from jaxcgx.typing import AxisName

SCHEDULES = ("auto", "two_shot", "one_shot", "ring", "tree")


@dataclasses.dataclass(frozen=True)
class Plan(Assignment):
    """Which leaf of a pytree gets which codec.

    A plan is passed where a codec is, and is static under jit as a codec is. A collective raises an error if two rules
    of the same priority give a leaf different codecs, and if a rule with a path or a predicate holds for no leaf and
    isn't optional.

    Args:
      default: the codec of leaves that no rule holds for, {axis name: codec}, or Skip(): these leaves are not sent.
      rules: each a `Rule`, or a pair of a codec and, before it, a regular expression on the leaf's path ("a/b/kernel")
        or a predicate.
      min_size: a guard, stronger than every rule except those with Skip(): leaves of fewer elements travel raw. 0
        turns it off.
      skip_1d: a guard, too: leaves of one dimension or none, biases and norms, travel raw. False turns it off.
      fusion_mb: the largest message, for collectives whose caller gives no size.
      schedule: the schedule, or {axis name: schedule}, for collectives whose caller gives none.
      leader: whether leaders exchange for their nodes, for collectives whose caller doesn't say.
      prefer: what the schedule "auto" saves, "time" or "bytes". A small message over many ranks takes the least time
        by "one_shot", which may send more bytes than lax.psum.
      network: what the schedule "auto" knows of links and kernels, a `Network`. None: it assumes 1 Gbit/s. All ranks
        need the same plan. `jaxcgx.advise` returns one with what it measured.
    """

    fusion_mb: float = 64
    schedule: str | dict[Any, str] = "auto"
    leader: bool = False
    prefer: str = "time"
    network: Network | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "fusion_mb", check_positive)
        plain = int if isinstance(self.fusion_mb, numbers.Integral) else float  # a file can't hold NumPy's numbers
        object.__setattr__(self, "fusion_mb", plain(self.fusion_mb))
        if isinstance(self.schedule, dict):
            if not self.schedule:
                raise wrong("Plan", "schedule", "a schedule for each axis", "{}")
            object.__setattr__(self, "schedule", ByAxis(self.schedule))
        for schedule in values(self.schedule):
            check_choice("Plan", "schedule", schedule, SCHEDULES)
        check_field(self, "leader", check_flag)
        check_field(self, "prefer", check_choice, ("time", "bytes"))
        # not every caller is typed
        if not isinstance(self.network, Network | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong("Plan", "network", "a jaxcgx.Network", repr(self.network), kind=TypeError)

    @classmethod
    def cgx(cls, bits: int = 4, bucket_size: int = 1024, rounding: str = "nearest") -> Self:
        """The plan of CGX's hook for layers.

        It has MaxMin for everything except leaves of fewer than 1024 elements, biases and norms. The bucket size is the
        hook's. CGX's variables have 512 (`from_env`), as MaxMin has.

        Args:
          bits: MaxMin's.
          bucket_size: MaxMin's.
          rounding: MaxMin's.
        """
        return cls(MaxMin(bits, bucket_size, rounding))

    @classmethod
    def bytegrad(cls, axis_name: AxisName = None) -> Self:
        """The plan of Bagua's ByteGrad: 8 bits for everything.

        Args:
          axis_name: in a tuple of axes, outermost first, only the outermost is compressed.
        """
        names = check_axis_names("Plan.bytegrad", axis_name, optional=True)
        return cls(by_axis(names, ByteGrad(), Raw()), min_size=0, skip_1d=False)

    @classmethod
    def fp16(cls, axis_name: AxisName = None) -> Self:
        """The plan of GeoMX's FP16: everything travels as float16.

        Args:
          axis_name: a tuple of axes, outermost first, is a hierarchy, in which each axis has an exchange of its own.
        """
        names, half = check_axis_names("Plan.fp16", axis_name, optional=True), Cast("float16")
        return cls(by_axis(names, half, half), min_size=0, skip_1d=False, prefer="bytes")

    @classmethod
    def mixed_precision(cls, codec: Codec = MaxMin(), size_bound: int = 200_000, axis_name: AxisName = None) -> Self:
        """The plan of GeoMX's mixed-precision quantization, with a dense codec.

        Args:
          codec: the codec of large leaves.
          size_bound: leaves of up to that many elements travel as float16, over all axes.
          axis_name: in a tuple of axes, outermost first, large leaves travel raw over all except the outermost.
        """
        op, half = "Plan.mixed_precision", Cast("float16")
        names = check_axis_names(op, axis_name, optional=True)
        check_codec(op, codec)
        tiny = Rule(by_axis(names, half, half), max_size=check_integer(op, "size_bound", size_bound, 0, MOST))
        return cls(by_axis(names, codec, Raw()), [tiny], min_size=0, skip_1d=False, prefer="bytes")

    @classmethod
    def bsc(
        cls,
        threshold: float = 0.01,
        size_bound: int = 200_000,
        axis_name: AxisName = None,
        pull: str = "all",
        select: str | Sampled = "sampled",
    ) -> Self:
        """The plan of GeoMX's bidirectional sparsification. `jaxcgx.bsc` is the transformation with its momentum.

        Args:
          threshold: the share of elements, the largest ones, that travels; above 0.
          size_bound: leaves of up to that many elements travel raw.
          axis_name: in a tuple of axes, outermost first, everything travels raw over all except the outermost. Each
            axis has an exchange of its own.
          pull: as in TopK.
          select: as in TopK.
        """
        return cls(**sparsification("Plan.bsc", threshold, size_bound, axis_name=axis_name, pull=pull, select=select))

    @classmethod
    def from_env(
        cls,
        axis_name: AxisName = None,
        environ: Mapping[str, str] = os.environ,
        *,
        bits: int | None = None,
        bucket_size: int | None = None,
        min_size: int | None = None,
        skip_1d: bool = False,
    ) -> Self:
        """CGX's behaviour under these environment variables. docs/plans.md has the table.

        What CGX's program says in its CGXState comes before the variables, and so do these arguments.

        Args:
          axis_name: a tuple of axes, outermost first, is a hierarchy: nodes, and ranks within a node. None or one name
            is a single network, where variables about two networks don't count, except CGX_INNER_REDUCTION_TYPE.
          environ: the variables.
          bits: the bits per element, 1 to 8; 32: everything travels raw.
          bucket_size: the elements of a bucket.
          min_size: leaves of fewer elements travel raw (`layer_min_size`), and those of up to 16 always.
          skip_1d: whether leaves of one dimension or none travel raw, as with CGX's hook for layers.
        """
        op = "Plan.from_env"
        names, env = check_axis_names(op, axis_name, optional=True), environment.read(environ)
        hierarchy = len(names) > 1
        bits = env.bits if bits is None else _check_bits(op, bits)
        size = env.bucket_size if bucket_size is None else check_integer(op, "bucket_size", bucket_size, 1, MOST)
        least = env.minimal_size + 1 if min_size is None else check_integer(op, "min_size", min_size, 0)
        codec = MaxMin(bits, size, skip_incomplete=env.skip_incomplete) if bits < 32 else Raw()
        codec = Raw() if env.dummy else codec
        inner, cross = ("one_shot", "one_shot") if env.all_to_all else (env.inner_reduction, env.cross_reduction)
        return cls(
            by_axis(names, codec, codec if env.intra_compress else Raw()),
            min_size=max(least, 17),  # up to 16 elements CGX always sends as they are
            skip_1d=check_flag(op, "skip_1d", skip_1d),
            fusion_mb=env.fusion_mb,
            schedule=by_axis(names, cross if hierarchy else inner, inner),
            leader=hierarchy and env.intra_broadcast,
        )

    def explain(self, tree: Any, axis_size: int | dict[Any, int]) -> forecast.Forecast:
        """The codec, message and bytes of every leaf, and why it travels raw if it does.

        str() of the result is a table. Bytes are the leaf's in its message, and the same elements uncompressed.
        "two_shot" and "ring" send 2 (W - 1) / W of them, as lax.psum does of the uncompressed ones (sums of TopK are
        longer than messages). `jaxcgx.explain` of a step says what that step sends.

        Args:
          tree: a pytree of arrays or jax.ShapeDtypeStruct.
          axis_size: the number of ranks, or {axis name: ranks}, outermost first.
        """
        return forecast.forecast(
            self, tree, axis_size, fusion_mb=self.fusion_mb, schedule=self.schedule, leader=self.leader
        )

    def adapt(
        self,
        statistics: GradientStatistics,
        *,
        method: str = "lgreco",
        budget: str = "error",
        alpha: float = 1.0,
        reference: Codec | None = None,
    ) -> Self:
        """The plan with another codec for each leaf that gets its default now.

        The choice is by what gradients lose (`gradient_statistics`). Guards and rules decide as before. The new rules
        are optional. Ranks with the same statistics make the same plan.

        Args:
          statistics: the sum of `gradient_statistics` over some steps.
          method: "lgreco" chooses among the statistics' codecs. "kmeans" puts leaves into three clusters by size and by
            the norm of their 100 largest magnitudes. The cluster of the lowest norm gets 2 bits in buckets of 128, the
            middle one 3 bits in buckets of 256, the other 4 bits in the reference's.
          budget: what "lgreco" keeps to. "error": all leaves together send the fewest bytes, while the sum of squared
            errors is at most `alpha` times that of `reference` everywhere. "bytes": that sum is the least, with at most
            `alpha` times the bytes.
          alpha: the factor of the budget.
          reference: the uniform choice. By default it is the plan's default codec; if that has one for each axis, the
            one that compresses.
        """
        rules = adapt.adapt(self, statistics=statistics, method=method, budget=budget, alpha=alpha, reference=reference)
        return dataclasses.replace(self, rules=(*self.rules, *rules))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a TOML file. Predicates and codecs of your own can't be saved."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        pathlib.Path(path).write_text(file.write(fields), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The plan in a file that `save` wrote, or that was written by hand after docs/plans.md."""
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
            return cls(**file.read(text, [field.name for field in dataclasses.fields(cls)]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"Plan.load: {path}: {error}") from None


def _check_bits(op: str, bits: Any) -> int:
    """CGX's number of bits, 32 without compression."""
    number = check_integer(op, "bits", bits)
    if number not in (*range(1, 9), 32):
        raise wrong(op, "bits", "an integer from 1 to 8, or 32 for no compression", number)
    return number

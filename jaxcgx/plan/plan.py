"""The plan, which gives each leaf its codec and says how messages travel, and schedules of plans by step."""

import dataclasses
import numbers
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxcgx.checks import (
    MOST,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_positive,
    check_type,
    is_integer,
    set_field,
    wrong,
)
from jaxcgx.codecs import ByteGrad, Cast, Codec, MaxMin, Raw, Sampled, TopK
from jaxcgx.codecs.checks import check_codec
from jaxcgx.codecs.topk import as_select, check_pull
from jaxcgx.plan import adapt, environment, file, forecast
from jaxcgx.plan.adapt import GradientStatistics
from jaxcgx.plan.assignment import Assignment, Rule
from jaxcgx.plan.leaves import ByAxis, Codecs, as_codecs, by_axis, values
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.axes import as_axis_names
from jaxcgx.transports.network import Network
from jaxcgx.typing import AxisName, PyTree

SCHEDULES = ("auto", "two_shot", "one_shot", "ring", "gather", "tree")


@dataclasses.dataclass(frozen=True)
class Sending:
    """The part of a `Plan` that says how messages travel. Exchanges that make their plans have these fields, too.

    Args:
      schedule, own, leader, strict, fusion_mb, prefer, network: as in `Plan`.
    """

    _: dataclasses.KW_ONLY
    schedule: str | Overlay | dict[Any, Any] = "auto"
    own: str = "raw"
    leader: bool = False
    strict: bool = False
    fusion_mb: float | None = None
    prefer: str = "time"
    network: Network | None = None


@dataclasses.dataclass(frozen=True)
class Plan(Sending, Assignment):
    """Gives each leaf of a pytree its codec.

    A plan is passed in place of a codec. Like a codec, it is static under jit. A collective raises an error if two
    rules of the same priority give a leaf different codecs. It also raises an error if a rule with a path or a
    predicate applies to no leaf, unless the rule is optional.

    Args:
      default: the codec of leaves to which no rule applies. It may also be {axis name: codec}, or Skip() for leaves
        that are not sent.
      rules: a list whose items are a `Rule` or a pair (condition, codec). The condition is a regular expression on the
        leaf's path ("a/b/kernel") or a predicate.
      min_size: a guard: leaves with fewer elements travel raw. Guards take precedence over every codec except Skip().
        0 turns this guard off.
      skip_1d: another guard: leaves of one dimension or none, such as biases and norms, travel raw. False turns this
        guard off.
      schedule: how the bytes of a message travel: "two_shot", "one_shot", "ring", "gather", "tree", an `Overlay`,
        or "auto", which jaxcgx/exchange/costs.py explains; or {axis name: schedule}. "gather" adds uncompressed
        numbers, and compresses only the sums, which ranks then gather. Where each rank gets only its slice of a sum
        (`compressed_psum_scatter`), every slice goes straight to its owner unless the schedule is "ring", and there are
        no trees. Gathers and all-to-alls have one schedule, whatever the plan says.
      own: how a rank adds its own part to a sum that it computes for all. "raw" adds the part itself, which loses less.
        "encoded" adds the part as the other ranks decode it. The same key then gives the same bits for any division
        into messages (except for `ByteGrad`, `Micro("nvfp4")` and `TopK`).
      leader: whether only rank 0 of the inner axes takes part in the exchange over the outermost axis, and passes the
        result on. This needs fewer messages between nodes, but uses only one network card per node.
      strict: whether a leaf that can't be compressed is an error.
      fusion_mb: the largest size of a message in MiB. All leaves with the same codecs share messages. None: 64, or what
        the caller's way of training needs.
      prefer: the quantity that the schedule "auto" minimizes, "time" or "bytes". For a small message over many ranks,
        "one_shot" takes the least time, but may send more bytes than lax.psum.
      network: the speeds of links and kernels for the schedule "auto", a `Network`. None: a link of 1 Gbit/s. All ranks
        need the same plan. A plan that `jaxcgx.advise` returns has the speeds that `advise` was given and measured.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion_mb is not None:
            set_field(self, "fusion_mb", check_positive)
            plain = int if isinstance(self.fusion_mb, numbers.Integral) else float  # a file can't hold NumPy's numbers
            object.__setattr__(self, "fusion_mb", plain(self.fusion_mb))
        if isinstance(self.schedule, dict):
            if not self.schedule:
                raise wrong("Plan", "schedule", "a schedule for each axis", "{}")
            object.__setattr__(self, "schedule", ByAxis(self.schedule))
        for i, schedule in enumerate(values(self.schedule)):
            if i and (schedule == "tree" or isinstance(schedule, Overlay)):
                expected, remedy = "a tree or an overlay over the outermost axis alone", 'write "auto" for inner axes'
                raise wrong("Plan", "schedule", expected, self.schedule, remedy)
            if not isinstance(schedule, Overlay):
                check_choice("Plan", "schedule", schedule, SCHEDULES)
        set_field(self, "own", check_choice, ("raw", "encoded"))
        if self.own == "encoded" and any(each in ("ring", "gather") for each in values(self.schedule)):
            expected = '"raw" with the schedules "ring" and "gather", which add every rank\'s part as it is'
            raise wrong("Plan", "own", expected, '"encoded"', 'write own="raw"')
        set_field(self, "leader", check_flag)
        set_field(self, "strict", check_flag)
        set_field(self, "prefer", check_choice, ("time", "bytes"))
        set_field(self, "network", check_type, Network | None, "a jaxcgx.Network")

    @property
    def message_bytes(self) -> float:
        """The most bytes of a message."""
        return (64 if self.fusion_mb is None else self.fusion_mb) * 2**20

    @classmethod
    def every(cls, codec: Codecs, **fields: Any) -> Self:
        """Returns the plan that gives every leaf a codec, without guards: what the codec alone means.

        Args:
          codec: a codec, or {axis name: codec}.
          **fields: other fields of a plan, such as `schedule`.
        """
        guards: dict[str, Any] = dict(min_size=0, skip_1d=False)
        return cls(codec, **(guards | fields))

    @classmethod
    def cgx(cls, bits: int = 4, bucket_size: int = 1024, rounding: str = "nearest") -> Self:
        """Returns the plan of CGX's hook for layers.

        MaxMin encodes all leaves except those with fewer than 1024 elements, biases and norms. The default bucket size
        is the hook's. The default of CGX's variables (`from_env`) and of MaxMin is 512.

        Args:
          bits, bucket_size, rounding: as in MaxMin.
        """
        return cls(MaxMin(bits, bucket_size, rounding))

    @classmethod
    def bytegrad(cls, axis_name: AxisName = None) -> Self:
        """Returns the plan of Bagua's ByteGrad: 8 bits for all leaves.

        Args:
          axis_name: a name, or a tuple of names, outermost first. With a tuple, leaves are compressed only over the
            outermost axis.
        """
        names = as_axis_names("Plan.bytegrad", axis_name, optional=True)
        return cls.every(by_axis(names, ByteGrad(), Raw()))

    @classmethod
    def fp16(cls, axis_name: AxisName = None) -> Self:
        """Returns the plan of GeoMX's FP16: all leaves travel as float16.

        Args:
          axis_name: a name, or a tuple of names, outermost first. A tuple is a hierarchy: leaves are exchanged over one
            axis after another.
        """
        names, half = as_axis_names("Plan.fp16", axis_name, optional=True), Cast("float16")
        return cls.every(by_axis(names, half, half), prefer="bytes")

    @classmethod
    def mixed_precision(
        cls, codec: Codec = TopK(0.01, select="sampled"), size_bound: int = 200_000, axis_name: AxisName = None
    ) -> Self:
        """Returns the plan of GeoMX's mixed-precision quantization: large leaves are sparse, in float32.

        `jaxcgx.MPQ` is the exchange with this plan and GeoMX's momentum.

        Args:
          codec: the codec of large leaves.
          size_bound: the most elements of leaves that travel as float16, over all axes.
          axis_name: a name, or a tuple of names, outermost first. With a tuple, large leaves travel raw over all axes
            except the outermost.
        """
        op = "Plan.mixed_precision"
        return cls(**_by_size(op, size_bound, axis_name, large=check_codec(op, codec), tiny=Cast("float16")))

    @classmethod
    def bsc(
        cls,
        threshold: float = 0.01,
        size_bound: int = 200_000,
        axis_name: AxisName = None,
        pull: str = "all",
        select: str | Sampled = "sampled",
    ) -> Self:
        """Returns the plan of GeoMX's bidirectional sparsification.

        `jaxcgx.BSC` is the exchange with this plan and GeoMX's momentum.

        Args:
          threshold: the fraction of elements that is sent, above 0. The largest elements are sent.
          size_bound: the most elements of leaves that travel raw.
          axis_name: a name, or a tuple of names, outermost first. A tuple is a hierarchy: leaves are exchanged over one
            axis after another, and travel raw over all axes except the outermost.
          pull, select: as in TopK.
        """
        return cls(**sparsification("Plan.bsc", threshold, size_bound, axis_name=axis_name, pull=pull, select=select))

    @classmethod
    def from_env(
        cls,
        axis_name: AxisName = None,
        environ: Mapping[str, str] | None = None,
        *,
        bits: int | None = None,
        bucket_size: int | None = None,
        min_size: int | None = None,
        skip_1d: bool = False,
    ) -> Self:
        """Returns the plan that CGX's environment variables describe. docs/plans.md has a table of the variables.

        In CGX, the arguments of CGXState take precedence over the variables, except for the smallest size, where the
        larger one counts. Here, the arguments of this function do.

        Args:
          axis_name: a name, or a tuple of names, outermost first. A tuple is a hierarchy: nodes, and ranks within a
            node. None or one name is a single network. Variables about two networks then have no effect, except
            CGX_INNER_REDUCTION_TYPE.
          environ: the environment variables; None: those of this process.
          bits: the bits per element, 1 to 8; or 32: everything travels raw. None: from the variables.
          bucket_size: the elements of a bucket. None: from the variables.
          min_size: leaves with fewer elements travel raw, as with CGX's `layer_min_size`; so do leaves that are too
            small for the variables, and leaves with up to 16 elements.
          skip_1d: whether leaves of one dimension or none travel raw, as with CGX's hook for layers.
        """
        op = "Plan.from_env"
        names, env = as_axis_names(op, axis_name, optional=True), environment.read(environ)
        if names[:2] == ("inner", "cross"):  # jaxcgx.mpi.hierarchy() has these two
            raise wrong(op, "axis_name", "the outermost axis first", names, 'write ("cross", "inner")')
        hierarchy = len(names) > 1
        bits = env.bits if bits is None else check_integer(op, "bits", bits)
        if bits not in (*range(1, 9), 32):
            raise wrong(op, "bits", "an integer from 1 to 8, or 32 for no compression", bits)
        size = env.bucket_size if bucket_size is None else check_integer(op, "bucket_size", bucket_size, 1, MOST)
        least = 0 if min_size is None else check_integer(op, "min_size", min_size, 0)
        codec = MaxMin(bits, size, skip_incomplete=env.skip_incomplete) if bits < 32 else Raw()
        codec = Raw() if env.dummy else codec
        inner, cross = ("one_shot", "one_shot") if env.all_to_all else (env.inner_reduction, env.cross_reduction)
        return cls(
            by_axis(names, codec, codec if env.intra_compress else Raw()),
            min_size=max(least, env.minimal_size + 1, 17),  # CGX never compresses leaves of up to 16 elements
            skip_1d=check_flag(op, "skip_1d", skip_1d),
            fusion_mb=env.fusion_mb,
            schedule=by_axis(names, cross if hierarchy else inner, inner),
            leader=hierarchy and env.intra_broadcast,
        )

    def explain(self, tree: PyTree, axis_size: int | dict[Any, int]) -> forecast.Forecast:
        """Returns the codec, the message and the bytes of every leaf, and the reasons why leaves travel raw.

        str() of the result is a table. It has the bytes of each leaf in its message, and the bytes of the same elements
        uncompressed. With W ranks, "two_shot" and "ring" send 2 (W - 1) / W times the bytes of a message, and lax.psum
        sends 2 (W - 1) / W times the uncompressed bytes. "gather" sends about half of both, the first in float32.
        Sums of TopK are longer than messages. `jaxcgx.explain` finds the bytes that a compiled step sends.

        Args:
          tree: a pytree of arrays or jax.ShapeDtypeStruct.
          axis_size: the number of ranks, or {axis name: number of ranks}, outermost first.
        """
        fields = dict[str, Any](limit=self.message_bytes, schedule=self.schedule, leader=self.leader)
        return forecast.forecast(self, tree, axis_size, **fields)

    def adapt(
        self,
        statistics: GradientStatistics,
        *,
        method: str = "lgreco",
        budget: str = "error",
        alpha: float = 1.0,
        reference: Codec | None = None,
    ) -> Self:
        """Returns the plan with a new codec for each leaf that gets the plan's default.

        The choice depends on the errors that `gradient_statistics` measured. Leaves with a guard or a rule stay
        unchanged. The new rules are optional. Ranks with the same statistics get the same plan.

        Args:
          statistics: the sum of `gradient_statistics` over some steps.
          method: "lgreco" chooses among the codecs of the statistics. "kmeans" groups leaves into three clusters, by
            size and by the norm of their 100 largest magnitudes. In increasing order of that norm, clusters get 2 bits
            in buckets of 128, 3 bits in buckets of 256, and 4 bits in buckets of the reference's size.
          budget: the limit for "lgreco". "error": all leaves together send the fewest bytes, and the sum of squared
            errors is at most `alpha` times the sum with `reference` for all leaves. "bytes": the sum of squared errors
            is the smallest, and the bytes are at most `alpha` times the bytes with `reference` for all leaves.
          alpha: the factor of the budget.
          reference: the codec with which the budget is compared. None: the plan's default codec. If the default has a
            codec for each axis, it is the codec that compresses.
        """
        rules = adapt.adapt(self, statistics=statistics, method=method, budget=budget, alpha=alpha, reference=reference)
        return dataclasses.replace(self, rules=(*self.rules, *rules))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to the TOML file `path`. Predicates and user-defined codecs can't be saved."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        pathlib.Path(path).write_text(file.write(fields), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Returns the plan in the TOML file `path`, which `save` or a person has written (docs/plans.md)."""
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
            return cls(**file.read(text, [field.name for field in dataclasses.fields(cls)]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"Plan.load: {path}: {error}") from None


class Phase(NamedTuple):
    """A phase of a schedule. Its plan is used from step `start` on, until the next phase starts."""

    start: int
    plan: Plan


def as_phases(function: str, plan: Any, argument: str = "plan") -> tuple[Phase, ...]:
    """Returns the phases in order: one for a plan, or one for each entry of {first step: plan}."""
    plans = {0: plan}
    if isinstance(plan, dict) and any(map(is_integer, plan)):
        if 0 not in plan or not all(is_integer(step) and step >= 0 for step in plan):
            expected = "a schedule {first step: plan} that begins with step 0"
            raise wrong(function, argument, expected, f"steps {list(plan)}")
        plans = plan
    return tuple(Phase(start, as_plan(function, plans[start], argument)) for start in sorted(plans))


def as_plan(function: str, plan: Any, argument: str = "plan") -> Plan:
    """Returns a plan. A codec, or {axis: codec}, becomes a plan without guards."""
    return plan if isinstance(plan, Plan) else Plan.every(as_codecs(function, argument, plan))


def switch(phases: Sequence[Phase], count: jax.Array, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Calls the branch of the phase to which step `count` belongs. `branches` has one function for each phase."""
    if len(branches) == 1:
        return branches[0](*operands)
    now = sum((count >= phase.start).astype(jnp.int32) for phase in phases[1:])
    return jax.lax.switch(now, branches, *operands)


def sparsification(
    function: str,
    threshold: float,
    size_bound: int,
    axis_name: AxisName,
    *,
    pull: str,
    select: str | Sampled,
    tiny: Codec = Raw(),
) -> dict[str, Any]:
    """Returns the fields of the plan `Plan.bsc`, but with the codec `tiny` for small leaves. Errors name `function`."""
    remedy = "with 0, large leaves would never be sent; 0.01 is GeoMX's, and 1 sends every element"
    check_number(function, "threshold", threshold, lambda x: 0 < x <= 1, "a number above 0 and up to 1", remedy)
    select, pull = as_select(function, "select", select), check_pull(function, "pull", pull)
    # If every element is sent, momentum must not be masked. Raw() masks nothing.
    codec = Raw() if threshold == 1 else TopK(threshold, select=select, pull=pull)
    return _by_size(function, size_bound, axis_name, large=codec, tiny=tiny)


def _by_size(function: str, size_bound: int, axis_name: AxisName, *, large: Codec, tiny: Codec) -> dict[str, Any]:
    """Returns the fields of GeoMX's plans. Leaves with up to `size_bound` elements are `tiny`, over all axes."""
    names = as_axis_names(function, axis_name, optional=True)
    rule = Rule(by_axis(names, tiny, tiny), max_size=check_integer(function, "size_bound", size_bound, 0, MOST))
    return dict(default=by_axis(names, large, Raw()), rules=[rule], min_size=0, skip_1d=False, prefer="bytes")

"""advise: predicts the time and the error of every codec and schedule, and recommends a plan. It needs no program.

exchange/costs.py predicts the times of exchanges, and exchange/errors.py the errors. docs/planner.md has the formulas.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_integer, check_number, check_positive, check_type, set_field, wrong
from jaxcgx.codecs import Cast, Codec, Eden, Lossless, MaxMin, Micro, PowerSGD, Raw, Sign, TopK
from jaxcgx.codecs.base import spell
from jaxcgx.codecs.checks import check_codec
from jaxcgx.exchange import costs
from jaxcgx.exchange.errors import Losses, drawn
from jaxcgx.exchange.routes import Routes
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan, messages
from jaxcgx.plan.leaves import Route, Shaped
from jaxcgx.report import machine
from jaxcgx.report.cluster import Cluster
from jaxcgx.text import spell_rate, spell_sizes, table
from jaxcgx.transports.network import PAYLOAD, Network

_FEW_BITS = Micro("nvfp4"), MaxMin(4), MaxMin(2), Eden(4), Eden(2), Sign()
CODECS = (Cast("bfloat16"), MaxMin(8), *_FEW_BITS, TopK(0.01), PowerSGD(4), Lossless())
SPREAD = 0.25  # 85 % of measured exchange times (benchmarks/results/prediction.json) are within this of predictions
SHOWN = 5  # the rows beside lax.psum that are shown
GAIN = 0.95  # compression pays if a step takes less than this fraction of its time without compression
BACKWARD = 2 / 3  # the fraction of the computation; it has two matrix products for each one of the forward pass
AXES = "node", "local"  # the axes of a plan for a hierarchy
_SIDE = 2**8  # the rows, and the columns, of the matrix of each rank's assumed gradients
_OP = "advise"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to exchange gradients, with its predicted times and error.

    Attributes:
      codec: the codec of the leaves that can be compressed.
      schedule: the schedule.
      mover: who moves the bytes: "gloo", "tcp" or "duplex".
      bytes: the bytes that a rank sends in a step; in a hierarchy, only those to other nodes.
      exchange: the seconds of all messages, without computation at the same time.
      step: the seconds of a step.
      exposed: the seconds of the exchange that the step waits for.
      error: vNMSE of one exchange, without feedback.
      auto: whether schedule="auto" chooses this schedule.
      off: by which fraction the time of the exchange may be off: `SPREAD`, and what two measurements of its kernels
        differ by.
    """

    codec: Codec
    schedule: str
    mover: str
    bytes: int
    exchange: float
    step: float
    exposed: float
    error: float
    auto: bool
    off: float

    @property
    def candidate(self) -> bool:
        """Whether the planner may recommend it. A ring allows no feedback, and "auto" knows the best of the others."""
        return self.auto or self.schedule == "gather"


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run, whose hours and cost `Advice.spell` adds.

    Args:
      steps: the number of its steps.
      price: of an hour of all hosts together, in any currency. None: without costs.
    """

    steps: int
    price: float | None = None

    def __post_init__(self) -> None:
        set_field(self, "steps", check_integer, 1)
        if self.price is not None:
            set_field(self, "price", check_positive)

    def of(self, row: Choice) -> dict[str, float]:
        """Returns the hours and the cost with the exchange of a `row`."""
        hours = self.steps * row.step / 3600
        return {"hours": hours} if self.price is None else {"hours": hours, "cost": hours * self.price}


@dataclasses.dataclass(frozen=True)
class Advice:
    """The result of `advise`. str() is a table and a recommendation.

    Attributes:
      rows: a `Choice` for each codec, schedule and mover; the first one is lax.psum.
      best: the recommended one.
      plan: its plan. None: don't compress.
      break_even: the link rate in bit/s below which the best codec shortens steps, or the fastest one if all candidates
        have too large an error; 0: never, infinite: always.
      sure: whether the recommendation stays the same if exchange times are off by the `off` of their rows. False if all
        candidates have too large an error.
      max_error: the largest error of a recommended plan.
      constants: the (name, value, source) of every number that the prediction assumes.
      measured: when the kernels were measured, and within what two measurements agree.
      notes: what is odd about the rows, as sentences.
    """

    rows: tuple[Choice, ...]
    best: Choice
    plan: Plan | None
    break_even: float
    sure: bool
    max_error: float
    constants: tuple[tuple[str, str, str], ...]
    measured: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Advice: {'no compression' if self.plan is None else spell(self.best.codec)}>"

    def __str__(self) -> str:
        return self.spell()

    def spell(self, every: bool = False, run: Run | None = None) -> str:
        """Returns the recommendation, the rows of the fastest exchanges or `every` row, and the constants.

        Those with too large an error come last. With a `run`, rows have its hours and cost.
        """
        raw, *others = self.rows
        head = "codec", "schedule", "over", "bytes", "exchange ms", "exposed ms", "step ms", "speed-up", "error"
        of_run = run.of if run else lambda _: dict[str, float]()
        rank = lambda row: (row is not self.best, row.error > self.max_error, row.step)
        shown = others if every else sorted(others, key=rank)[:SHOWN]
        rows = [
            (
                "none" if row is raw else spell(row.codec),
                row.schedule,
                row.mover,
                spell_sizes(row.bytes, raw.bytes)[0],
                f"{row.exchange * 1e3:.2f}",
                f"{row.exposed * 1e3:.2f}",
                f"{row.step * 1e3:.2f}",
                f"{raw.step / row.step:.2f}" if row.step else "",
                f"{row.error:.2g}",
                *(f"{value:,.2f}" for value in of_run(row).values()),
                "best" if row is self.best else "auto" if row.auto else "",
            )
            for row in (raw, *shown)
        ]
        notes = [*self.notes]
        if run and raw.step == raw.exposed:
            notes.append("Hours and costs are those of the exchanges alone: the time of the computation isn't given.")
        ways = table((*head, *of_run(raw), ""), rows)
        return "\n\n".join([self.verdict, *notes, ways, table(("constant", "value", "source"), self.constants)])

    def as_json(self, run: Run | None = None) -> dict[str, Any]:
        """Returns what JSON can hold of the result. Codecs are spelled; a number that isn't finite is None.

        With a `run`, rows have its hours and cost.
        """
        finite = lambda x: None if isinstance(x, float) and not math.isfinite(x) else x
        of_run = run.of if run else lambda _: dict[str, float]()
        values = lambda each: vars(each) | of_run(each) | dict(codec=spell(each.codec))
        row = lambda each: {name: finite(value) for name, value in values(each).items()}
        names = "sure", "max_error", "measured", "notes", "constants"
        return dict(
            verdict=self.verdict,
            best=None if self.plan is None else row(self.best),
            break_even=finite(self.break_even),
            **{name: getattr(self, name) for name in names},
            rows=[row(each) for each in self.rows],
        )

    @property
    def verdict(self) -> str:
        """The recommendation as a sentence."""
        raw = self.rows[0]
        best = next((row for row in self.rows[1:] if row is self.best), None)
        sure = f"{'sure' if self.sure else 'not sure'}; {self.measured}"
        low, high = ((1 + sign * self.best.off) * self.best.exposed for sign in (-1, 1))
        step = self.best.step - self.best.exposed
        spell_ms = lambda seconds: f"{seconds * 1e3:.4g}" if seconds < 9.9995 else f"{seconds * 1e3:,.0f}"
        interval = f"a step of {spell_ms(step + low)} to {spell_ms(step + high)} ms"
        words = {0.0: "Compression gains nothing at any rate.", math.inf: "It gains at every rate."}.get(
            self.break_even, f"Compression gains below {spell_rate(float(f'{self.break_even:.3g}'))}."
        )
        if self.plan is None or best is None:
            least = min((row for row in self.rows if row.candidate), key=lambda row: row.error)
            if least.error > self.max_error:
                words = (
                    f"No candidate has an error of at most max_error={self.max_error:g}; the smallest is "
                    f"{least.error:.2g}, of {spell(least.codec)}. "
                    "With error feedback, training tolerates larger errors."
                )
            return f"Don't compress: {interval} ({sure}). {words}"
        where = f"{spell(best.codec)} by {best.schedule} over {best.mover}"
        return f"Compress with {where}: {interval} against {spell_ms(raw.step)} ms ({sure}). {words}"


def advise(
    tree: Any,
    cluster: Cluster,
    *,
    compute_ms: float = 0.0,
    overlap_mb: float | None = None,
    codecs: Sequence[Codec] = CODECS,
    max_error: float = 0.1,
    gradients: Any = None,
) -> Advice:
    """Predicts the time and the error of each codec and schedule, and recommends a plan or no compression.

    This machine's kernels are measured in the first call, which takes a few seconds per codec. All other numbers are
    arguments or assumptions. str() of the result lists them. docs/planner.md compares predictions with measurements.

    Args:
      tree: the gradients, as a pytree of arrays or jax.ShapeDtypeStruct.
      cluster: the ranks and their links.
      compute_ms: the milliseconds of a forward and backward pass; 0 gives the largest possible gain.
      overlap_mb: the largest size in MiB of messages that are sent during the backward pass. None: messages of up to 64
        MiB are sent after it.
      codecs: the candidates.
      max_error: the largest vNMSE of a recommended plan. With error feedback, training tolerates larger errors.
      gradients: a list of trees like `tree`, the gradients of at least two ranks, on which errors are measured. None:
        normally distributed numbers. Errors on other distributions are larger.
    """
    compute = check_number(_OP, "compute_ms", compute_ms, lambda x: x >= 0, "a number of at least 0") / 1e3
    if overlap_mb is not None:
        check_positive(_OP, "overlap_mb", overlap_mb)
    check_number(_OP, "max_error", max_error, lambda x: x >= 0, "a number of at least 0")
    check_type(_OP, "cluster", cluster, Cluster, "a jaxcgx.Cluster")
    if not isinstance(codecs, Sequence) or not codecs:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong(_OP, "codecs", "a list of at least one codec", repr(codecs), kind=TypeError)
    for codec in codecs:
        check_codec(_OP, codec, "codecs")
    case = Case(
        tree=tree,
        nodes=cluster.hosts,
        each=cluster.each,
        compute=compute,
        overlap=overlap_mb is not None,
        fusion_mb=64 if overlap_mb is None else overlap_mb,
        inner=cluster.inside(),
    )
    rows = [case.choice(Raw(), "psum", network=cluster.between(cluster.movers[0]), error=0.0)]
    networks: dict[Choice, Network] = {}
    speeds = {codec: machine.kernels(codec) for codec in codecs}
    for codec, speed in speeds.items():
        losses = Losses(_sample(gradients, codec.low_rank), codec, cut=case.nodes)
        for mover in cluster.movers:
            links = dataclasses.replace(cluster.between(mover), decode=speed.decode, reduce=speed.reduce)
            for schedule in costs.schedules(codec, mover):
                encode = speed.encode if schedule == "ring" else speed.encode_fed  # a ring allows no feedback
                network = dataclasses.replace(links, encode=encode)
                error = losses.error(schedule, case.nodes, each=case.each)
                rows.append(case.choice(codec, schedule, network=network, error=error, spread=speed.spread))
                networks[rows[-1]] = network
    constants = _constants(cluster, case, assumed=gradients is None)
    measured = _measured(speeds.values())
    return _advice(case, rows, networks, max_error=max_error, constants=constants, measured=measured)


@dataclasses.dataclass(frozen=True)
class Case:
    """The gradients, ranks and training step that a prediction is for."""

    tree: Any
    nodes: int
    each: int  # the number of ranks of a node
    compute: float  # the seconds of the forward and the backward pass
    overlap: bool
    fusion_mb: float
    inner: Network  # the network inside a node
    _known: dict[Codec, list[tuple[Codec, list[Route]]]] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.tree)[0]:
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                expected = "an array or a jax.ShapeDtypeStruct"
                raise wrong(_OP, "tree", expected, repr(leaf), path=path, kind=TypeError)

    def choice(self, codec: Codec, schedule: str, network: Network, error: float, spread: float = 0.0) -> Choice:
        """Returns the row for a codec and a schedule. `spread` is that of its kernels' times."""
        found = self.times(codec, schedule, network=network)
        step = step_seconds(self.compute, found, overlap=self.overlap)
        exchange = sum(time.total for _, time in found)
        kernels = sum(time.kernels for _, time in found)
        return Choice(
            codec=codec,
            schedule=schedule,
            mover=network.mover or "",
            bytes=self.sent(codec, schedule, mover=network.mover),
            exchange=exchange,
            step=step,
            exposed=step - self.compute,
            error=error,
            auto=self._auto(codec, network) == schedule,
            off=SPREAD + (spread * kernels / exchange if exchange else 0.0),
        )

    def _messages(self, codec: Codec) -> list[tuple[Codec, list[Route]]]:
        """Returns (codec, leaves) of each message, last leaves first, as the backward pass computes their gradients."""
        if codec not in self._known:
            leaves = Routes.of(_OP, Plan(codec), self.tree).leaves
            found = list[tuple[Codec, list[int]]]()
            for encoded, of_kind in (True, codec), (False, Raw()):
                ids = [i for i, leaf in enumerate(leaves) if leaf.encoded is encoded]
                groups = messages([leaves[i] for i in ids], self.fusion_mb * 2**20)
                found += [(of_kind, [ids[k] for k in group]) for group in groups]
            found.sort(key=lambda message: -message[1][-1])
            self._known[codec] = [(of_kind, [leaves[i] for i in ids]) for of_kind, ids in found]
        return self._known[codec]

    def _shares(self, codec: Codec, leaves: Sequence[Route]) -> Sequence[Shaped]:
        """Returns the shares of leaves that a rank exchanges with other nodes. Low-rank codecs use whole leaves."""
        if self.each == 1 or codec.low_rank:
            return leaves
        return [jax.ShapeDtypeStruct((-(-x.size // self.each),), jnp.float32) for x in leaves]

    def sent(self, codec: Codec, schedule: str, mover: str | None) -> int:
        found = 0.0
        for each, whole in self._messages(codec):
            leaves = self._shares(each, whole)
            exact = costs.wire(each, leaves) if each.makes_codes else 0
            part = costs.wire(each, leaves, mover) / exact if exact else 1.0  # TopK(0): no bytes
            found += part * costs.sent(schedule, each, leaves, self.nodes, mover=mover)
        return round(found)

    def _load(self, codec: Codec, leaves: Sequence[Route], mover: str | None) -> costs.Load:
        shares = self._shares(codec, leaves)
        if codec.low_rank:
            return costs.Load.of_factors(codec, shares, self.nodes)
        return costs.Load.of(codec, shares, raw=4 * sum(x.size for x in shares), ranks=self.nodes, mover=mover)

    def _auto(self, codec: Codec, network: Network) -> str:
        """Returns the schedule that "auto" chooses. It is the same for all messages (exchange/costs.py)."""
        if len(possible := costs.schedules(codec, network.mover)) == 1:
            return possible[0]
        leaves = [leaf for each, group in self._messages(codec) for leaf in group if not each.raw]
        return costs.choose(self._load(codec, leaves, network.mover), network)

    def inside(self, size: int) -> float:
        """Returns the seconds in which a node's ranks add up `size` raw numbers, and gather the sums."""
        others = (self.each - 1) / self.each * 4 * size
        return 2 * self.inner.wire(others, self.each - 1)

    def times(self, codec: Codec, schedule: str, network: Network) -> list[tuple[float, costs.Time]]:
        """Returns (its fraction of all gradients, its time) of each message, in the order in which they are sent."""
        sizes = [sum(leaf.size for leaf in leaves) for _, leaves in self._messages(codec)]
        # Whether Tcp adds up raw leaves
        own = network.mover == "tcp" and not codec.raw and schedule not in ("ring", "gather")
        auto = own and self._auto(codec, network) == schedule
        found: list[tuple[float, costs.Time]] = []
        for size, (each, leaves) in zip(sizes, self._messages(codec)):
            if each.raw:
                raw = sum(x.size * x.dtype.itemsize for x in self._shares(each, leaves))
                load = costs.Load(self.nodes, 0, raw)
                known = own and all(x.dtype in DTYPES for x in leaves)
                by = "psum" if not known else costs.choose(load, network) if auto else schedule
                time = costs.seconds(by, load, network)
            elif each.low_rank:
                load = self._load(each, leaves, None)._replace(raw=0)  # two sums of raw factors, and products
                wire = 2 * costs.seconds(schedule, load, network).wire
                time = costs.Time(4 * size / network.encode * network.sharing, wire)
            else:
                time = costs.seconds(schedule, self._load(each, leaves, network.mover), network)
            if self.each > 1:
                time = time._replace(wire=time.wire + self.inside(size))
            found.append((size / max(sum(sizes), 1), time))
        return found


def step_seconds(compute: float, messages: Sequence[tuple[float, costs.Time]], overlap: bool) -> float:
    """Returns the seconds of a step, `compute` of which are those of the forward and the backward pass."""
    # `messages` are in the order in which they are sent: (the fraction of the backward pass that computes it, its time)
    # of each. With `overlap`, they are sent during the backward pass, but kernels still take turns with it.
    if not overlap:
        return compute + sum(each.total for _, each in messages)
    computed, received = (1 - BACKWARD) * compute, 0.0
    for part, each in messages:
        ready = computed + BACKWARD * compute * part
        received = max(received + each.wire, ready + each.total)
        computed = ready + each.kernels
    return max(computed, received)


def _sample(gradients: Any, matrix: bool) -> Any:
    """Returns the sample on which errors are measured: [ranks, ...], all numbers of each rank or its largest matrix."""
    if gradients is None:
        return drawn("normal", 8, _SIDE**2).reshape(8, *((_SIDE, _SIDE) if matrix else (-1,)))
    flat: list[Any] = []
    for tree in gradients:
        leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
        largest = max((x for x in leaves if x.ndim > 1), key=np.size, default=None)
        flat.append(largest if matrix and largest is not None else np.concatenate([x.reshape(-1) for x in leaves]))
    if len(flat) < 2 or len({x.shape for x in flat}) > 1:
        raise wrong(_OP, "gradients", "a list of the gradients of at least two ranks, all alike", f"{len(flat)} trees")
    return np.stack(flat)


def _advice(
    case: Case, rows: list[Choice], networks: dict[Choice, Network], max_error: float, constants: Any, measured: str
) -> Advice:
    raw, candidates = rows[0], [row for row in rows if row.candidate]
    able = [row for row in candidates if row.error <= max_error]
    fastest = min(able or candidates, key=lambda row: row.step)
    # Among the rows that are nearly as fast as the fastest, take the one with the smallest error.
    best = min((row for row in able if row.step <= fastest.step / GAIN), key=lambda row: row.error, default=fastest)
    even = _break_even(case, best, networks[best])
    pays = bool(able) and best.step < GAIN * raw.step
    sign = 1 if pays else -1  # the direction of prediction errors that could make the answer wrong
    steps = [case.compute + (1 + d * sign * row.off) * row.exposed for d, row in ((1, best), (-1, raw))]
    sure = bool(able) and pays == (steps[0] < GAIN * steps[1])
    plan = None
    if pays:
        codec = best.codec if case.each == 1 else dict(zip(AXES, (best.codec, Raw())))
        network = dataclasses.replace(networks[best], mover=None)  # None: the transport of the exchange
        schedule = "auto" if best.auto else best.schedule
        plan = Plan(codec, schedule=schedule, fusion_mb=case.fusion_mb, network=network)
    best = best if pays else raw
    return Advice(
        rows=tuple(rows),
        best=best,
        plan=plan,
        break_even=even,
        sure=sure,
        max_error=max_error,
        constants=constants,
        measured=measured,
        notes=tuple(_odd(rows[1:])),
    )


def _measured(speeds: Iterable[machine.Kernels]) -> str:
    spread, busy = (max(values) for values in zip(*((each.spread, each.busy) for each in speeds)))
    others = f" while other programs took {busy:.0%} of the processors" if busy >= machine.QUIET else ""
    dates = sorted({each.date[:10] for each in speeds})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"kernels measured {when}{others}, twice within {spread:.0%}"


def _odd(rows: Sequence[Choice]) -> Iterator[str]:
    """Yields a sentence for each codec that takes longer than the same with more bits."""
    bits = lambda row: getattr(row.codec, "bits", None)

    def alike(a: Choice, b: Choice) -> bool:
        if (type(a.codec), a.mover, a.schedule) != (type(b.codec), b.mover, b.schedule) or bits(a) is None:
            return False
        return dataclasses.replace(cast(Any, a.codec), bits=bits(b)) == b.codec

    pairs = [
        (short.codec, long.codec)
        for short, long in itertools.permutations(rows, 2)
        if alike(short, long) and short.bytes < long.bytes and short.exchange > long.exchange
    ]
    for short, long in dict.fromkeys(pairs):
        yield (
            f"{spell(short)} is predicted to take longer than {spell(long)}, though it sends fewer bytes: its kernels "
            "were measured to be slower. Measure them again on an idle machine: --remeasure."
        )


def _break_even(case: Case, best: Choice, network: Network) -> float:
    """Returns the bit/s at which compression breaks even: infinity if it gains at every rate, 0 if it gains at none."""
    able = [each for each in costs.schedules(best.codec, best.mover) if each in (best.schedule, "gather")]

    def gain(rate: float) -> float:
        scale = rate * PAYLOAD / case.each / min(network.up, network.down or network.up)
        links = dataclasses.replace(network, up=network.up * scale, down=(network.down or network.up) * scale)
        plain = case.times(Raw(), "psum", network=links)
        each = [case.times(best.codec, schedule, network=links) for schedule in able]
        chosen = min(step_seconds(case.compute, times, case.overlap) for times in each)
        return step_seconds(case.compute, plain, case.overlap) - chosen

    low, high = 4.0, 14.0  # exponents of ten
    if gain(10**high) > 0:
        return math.inf
    if gain(10**low) <= 0:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if gain(10**middle) > 0 else (low, middle)
    return 10**low


def _constants(cluster: Cluster, case: Case, assumed: bool) -> tuple[tuple[str, str, str], ...]:
    network = cluster.between(cluster.movers[0])
    rate = f"{network.up * case.each / PAYLOAD / 1e6:,.0f} Mbit/s up, {PAYLOAD * 8} of it payload"
    latency = "given" if cluster.latency else "assumed, and the measured delay" if cluster.measured else "assumed"
    size = sum(leaf.size for leaf in jax.tree.leaves(case.tree))
    inner = f"{cluster.inner_link} for each rank, {case.inside(size) * 1e3:.3g} ms of raw numbers in a step"
    inside = [("link inside a host", inner, "argument inner_link; PCIe is slower than NVLink")] * (case.each > 1)
    return (
        ("link", rate, "measured from this host" if cluster.measured else "given"),
        *inside,
        ("latency of a step", f"{network.step * 1e6:.0f} us", latency),
        ("half-duplex of Gloo", "1.06 to 1.83 times", "measured between 2 and 4 hosts"),
        ("kernels", "encode with feedback, decode and sum of each codec", "measured on this machine"),
        ("computation", f"{case.compute * 1e3:g} ms", "given" if case.compute else "assumed, for the largest gain"),
        ("backward pass", f"{BACKWARD:.0%} of the computation", "assumed"),
        ("gradients", "normally distributed" if assumed else "the sample", "assumed" if assumed else "given"),
        ("error of exchange times", f"{SPREAD:.0%}", "measured between 2, 4 and 8 hosts"),
    )

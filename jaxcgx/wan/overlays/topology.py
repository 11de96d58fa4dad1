"""Topology: measures links while training goes on, and finds the best overlay for them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_choice, check_integer, check_number, check_type, wrong
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.native import connections
from jaxcgx.plan.overlay import Overlay, Tree
from jaxcgx.train.step import TrainStep
from jaxcgx.transports.axes import Tcp
from jaxcgx.typing import ArrayLike, PyTree
from jaxcgx.wan.overlays.search import SHAPES, Rates, seconds

BETTER = 1.15  # another overlay must be faster by this factor, because every overlay compiles another program
ALIKE = 3  # rates are rounded to this many steps per factor of 2, because measurements vary a little
ENOUGH = 2**16  # the fewest bytes of a transfer that gives an estimate of the rate
SHARED = 0.5  # a transfer shares a line if its rate is at least this part of the fastest transfer's rate
CHANGED = 2.0  # a link has changed if its rate is higher or lower than its estimate by more than this factor


class LinkRates:
    """Estimates of the rates of links in bytes per second, from the transfers of the ranks.

    An estimate is a moving average. If a link has changed, other links may have changed too. Then the estimates of all
    other links are kept, but these links count as unknown until they are measured again.

    Args:
      ranks: the number of ranks.
      decay: the weight of the old estimate when a new measurement comes, from 0 to below 1.

    Attributes:
      rates: [ranks, ranks]: the estimates; NaN for links that were never measured.
      known: [ranks, ranks]: whether a link was measured since the last change.
    """

    def __init__(self, ranks: int, decay: float) -> None:
        self.rates: Rates = np.full((ranks, ranks), np.nan)
        self.known: Rates = np.eye(ranks, dtype=bool)
        self.decay = decay

    def note(self, sent: Rates, busy: Rates) -> None:
        """Updates the estimates with a measurement.

        A rank's line carries all of its transfers. Transfers at the same time share the line equally, so the line's
        rate is the sum of their bytes divided by the time of the longest one. A transfer that is much slower than
        another one on the same line is limited by its link or by the other rank's line. It doesn't get the line's rate.

        Args:
          sent: the bytes that each rank (row) sent to each other rank.
          busy: the seconds that these transfers took.
        """
        measured = (sent >= ENOUGH) & (busy > 0)
        if not measured.any():
            return
        busy = np.where(measured, busy, 0)
        rate = np.where(measured, sent / np.where(measured, busy, 1), 0)

        def of_line(axis: int) -> Rates:
            through = np.where(measured, sent, 0).sum(axis, keepdims=True)
            through = through / np.maximum(busy.max(axis, keepdims=True), 1e-9)
            return np.where(rate >= SHARED * rate.max(axis, keepdims=True), through, 0)

        rate = np.maximum(rate, np.maximum(of_line(0), of_line(1)))
        ratio = rate / self.rates
        changed = measured & self.known & ((ratio > CHANGED) | (ratio < 1 / CHANGED))
        if changed.any():
            self.known = np.eye(len(rate), dtype=bool)
        decay = np.where(changed | ~np.isfinite(self.rates), 0, self.decay)
        self.rates = np.where(measured, decay * np.nan_to_num(self.rates) + (1 - decay) * rate, self.rates)
        self.known |= measured

    @property
    def estimates(self) -> Rates:
        """The rates. Links that were never measured have the rate of the fastest link, so that they are tried."""
        fastest = np.nanmax(self.rates) if np.isfinite(self.rates).any() else 1.0
        return np.where(np.isfinite(self.rates), self.rates, fastest)

    def greedy(self, greed: float) -> float:
        """Returns the probability to rely on the estimates: the fraction of links that are known, at most `greed`."""
        links = len(self.known) * (len(self.known) - 1)
        known = int(self.known.sum()) - len(self.known)
        return min(known / links, greed)

    def pairs(self, random: np.random.Generator) -> list[tuple[int, int]]:
        """Returns pairs of ranks to probe, in random order with unknown links first.

        No rank is in two pairs, so that each pair has the lines of its ranks to itself.
        """
        ranks = len(self.known)
        every = [(i, j) for i in range(ranks) for j in range(i + 1, ranks)]
        every = [every[k] for k in random.permutation(len(every))]
        every.sort(key=lambda pair: bool(self.known[pair] and self.known[pair[::-1]]))
        found: list[tuple[int, int]] = []
        for pair in every:
            if all(rank not in other for rank in pair for other in found):
                found.append(pair)
        return found


class Topology:
    """Measures the links between the ranks of an axis over `Tcp`, and finds the best overlay for them.

    The kernel of each host measures the traffic of training. Links without traffic are probed now and then. Rank 0
    decides, and all ranks take the same overlay from the same step on:

        topology = cgx.wan.Topology(mesh, cgx.Tcp("dc"))
        train = topology.steps(lambda overlay: cgx.make_train_step(..., cgx.Plan.every(codec, schedule=overlay), ...))

    Args:
      mesh: a mesh with one device of each process.
      axis: the `Tcp` of the axis whose links are measured.
      shape: the shape of the overlay. "trees": several trees, each with a share of the bytes. "ring": the ring whose
        slowest link is fastest. "owners": owners, with larger parts for ranks with faster links.
      greed: the highest probability that an update relies on the estimates. Otherwise it probes some links at random.
      decay: the weight of the old estimate when a link is measured again.
      probe_bytes: the number of bytes that a probe sends over a link in each direction.
      rates: initial estimates in bytes per second: [ranks, ranks], from a rank (row) to another rank. None: no
        estimates.

    Attributes:
      overlay: the overlay of the next step, to be passed as `schedule`.
      version: the number of changes of the overlay so far.
      probes: the number of probes so far.
      links: the estimates of the rates of all links.
    """

    overlay: Overlay
    version: int
    probes: int

    def __init__(
        self,
        mesh: Mesh,
        axis: Tcp,
        *,
        shape: str = "trees",
        greed: float = 0.9,
        decay: float = 0.3,
        probe_bytes: int = 2**19,
        rates: ArrayLike | None = None,
    ) -> None:
        self._mesh, self._axis = _check_mesh(mesh, axis), axis
        self._build = SHAPES[check_choice("Topology", "shape", shape, SHAPES)]
        self._greed = check_number("Topology", "greed", greed, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        decay = check_number("Topology", "decay", decay, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        self._probe_bytes = check_integer("Topology", "probe_bytes", probe_bytes, 2**16)
        self._random = np.random.default_rng(0)
        ranks = mesh.shape[axis.name]
        self.links: LinkRates = LinkRates(ranks, decay)
        if rates is not None:
            self.links.rates = _as_rates(rates, ranks)
            self.links.known[:] = True
        self._found: dict[bytes, Overlay] = {}  # the best overlay for the latest rates
        self.overlay = self._best()
        self.version = self.probes = 0
        self._processes = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
        self._before: Rates | float = 0.0  # the kernel's counters at the last measurement
        self._programs = functools.cache(self._program)
        # XLA's own collectives would wait for JAX's heartbeat timeout if a link ends, and name no rank.
        every, line = dataclasses.replace(axis, name="every"), Mesh(mesh.devices.reshape(-1), "every")
        self._every = NamedSharding(line, P("every"))
        gather = lambda row: transport_over_axes("Topology", every).all_gather(row[0])
        self._gather = jax.jit(jax.shard_map(gather, mesh=line, in_specs=P("every"), out_specs=P(), check_vma=False))

    def update(self) -> bool:
        """Takes the measurements since the last call, may probe links, and decides on an overlay.

        All processes call it between the same steps. It returns whether the overlay has changed.
        """
        self._measure()
        probes = jax.process_index() == 0 and self._random.random() >= self.links.greedy(self._greed)
        pairs = self._same(self.links.pairs(self._random) if probes else []).reshape(-1, 2)
        if len(pairs):
            self._probe([(int(i), int(j)) for i, j in pairs])
            self._measure()
        overlay = _overlay(self._same(_words(self._decide()) if jax.process_index() == 0 else []))
        changed = overlay != self.overlay
        self.overlay, self.version = overlay, self.version + changed
        return changed

    def steps(self, make: Callable[[Overlay], Any], every: int = 10) -> TrainStep:
        """Returns `init`, `step` and `finish` of a training loop. Each step uses the overlay that is best at the time.

        Every overlay has its own compiled program. All programs are kept.

        Args:
          make: a function of an overlay that returns an object with `init`, `step` and `finish`, as make_train_step
            does.
          every: the number of steps from one `update` to the next.
        """
        every = check_integer("Topology.steps", "every", every, 1)
        made = functools.cache(make)
        count = 0

        def check(*args: PyTree, **kwargs: PyTree) -> None:
            """Traces a step with a deep overlay, so that a codec that refuses deep overlays is an error at once."""
            deep = Overlay.ring(range(len(self.links.rates)))
            if self._build is not SHAPES["owners"] and deep.depth > 1:
                trace = getattr(make(deep).step, "eval_shape", None)
                if trace is not None:
                    trace(*args, **kwargs)

        def step(*args: PyTree, **kwargs: PyTree) -> PyTree:
            nonlocal count
            if not count:
                check(*args, **kwargs)
            elif count % every == 0:
                jax.block_until_ready((args, kwargs))
                self.update()
            count += 1
            return made(self.overlay).step(*args, **kwargs)

        init = lambda *args, **kwargs: made(self.overlay).init(*args, **kwargs)
        chosen: Any = step  # TrainStep has the type of its own
        return TrainStep(init, chosen, lambda state: made(self.overlay).finish(state))

    def __repr__(self) -> str:
        return f"Topology(version {self.version}, {len(self.overlay.trees)} trees, depth {self.overlay.depth})"

    # The decisions. Only those of rank 0 count.

    def _best(self) -> Overlay:
        rates = 2 ** (np.round(np.log2(self.links.estimates) * ALIKE) / ALIKE)
        key = rates.tobytes()
        if key not in self._found:
            self._found = {key: self._build(rates)}
        return self._found[key]

    def _decide(self) -> Overlay:
        rates, found = self.links.estimates, self._best()
        better = seconds(self.overlay, rates) > BETTER * seconds(found, rates)
        return found if better else self.overlay

    # The measurements. All ranks call these methods together.

    def _measure(self) -> None:
        """Gathers the traffic between all processes since the last measurement, and updates the estimates."""
        now = np.array(connections.sent() or [(0.0, 0.0)] * jax.process_count())
        all_sent = self._gathered(np.asarray(now - self._before, np.float32))
        self._before = now
        ranks, axis = len(self.links.rates), self._mesh.axis_names.index(self._axis.name)
        sent, busy = np.zeros((2, ranks, ranks))
        for group in np.moveaxis(self._processes, axis, -1).reshape(-1, ranks):  # the processes along the axis
            along = all_sent[np.ix_(group, group)]
            sent += along[..., 0]
            busy = np.maximum(busy, along[..., 1])
        self.links.note(sent, busy)

    def _gathered(self, row: Rates) -> Rates:
        rows = self._gather(jax.make_array_from_process_local_data(self._every, row[None]))
        return np.asarray(rows.addressable_data(0))[np.argsort(self._processes, axis=None)]

    def _same(self, words: list[Any] | Rates) -> Rates:
        """Returns process 0's integers, on all processes."""
        count = self._gathered(np.array(np.size(words), np.int32))[0]
        words = np.asarray(words, np.int32) if jax.process_index() == 0 else np.zeros(count, np.int32)
        return self._gathered(words.reshape(count))[0]

    def _probe(self, pairs: list[tuple[int, int]]) -> None:
        self._programs(*sorted(pairs))()
        self.probes += 1

    def _program(self, *pairs: tuple[int, int]) -> Callable[[], jax.Array]:
        def body(row: jax.Array) -> jax.Array:
            net: Any = transport_over_axes("Topology", self._axis)
            return net.permute(row, [*pairs, *[(j, i) for i, j in pairs]])

        spec = P(tuple(self._mesh.axis_names))
        sharding = NamedSharding(self._mesh, spec)
        part = np.ones(self._probe_bytes, np.uint8)
        ones = jax.make_array_from_callback((self._mesh.size * part.size,), sharding, lambda _: part)
        run = jax.jit(jax.shard_map(body, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False))
        return lambda: jax.block_until_ready(run(ones))


def _check_mesh(mesh: Any, axis: Any) -> Mesh:
    check_type("Topology", "mesh", mesh, Mesh, "a jax.sharding.Mesh")
    if not isinstance(axis, Tcp):
        remedy = f"pass jaxcgx.Tcp({axis!r})"
        raise wrong("Topology", "axis", "a jaxcgx.Tcp, whose connections are measured", repr(axis), remedy)
    if axis.name not in mesh.shape:
        raise wrong("Topology", "axis", f"one of the axes {', '.join(map(repr, mesh.axis_names))}", repr(axis.name))
    if 1 < jax.process_count() != mesh.size:
        expected = f"one device of each of {jax.process_count()} processes"
        raise wrong("Topology", "mesh", expected, f"{mesh.size} devices")
    if mesh.shape[axis.name] < 2:
        raise wrong("Topology", "mesh", f"two or more ranks along {axis.name!r}", f"{mesh.shape[axis.name]}")
    return mesh


def _as_rates(rates: ArrayLike, ranks: int) -> Rates:
    given = np.array(rates, float)
    expected = f"a positive number of bytes a second from each of {ranks} ranks to each other one"
    if given.shape != (ranks, ranks):
        raise wrong("Topology", "rates", expected, f"an array of shape {given.shape}")
    np.fill_diagonal(given, np.nan)
    off = given[~np.eye(ranks, dtype=bool)]
    if not (np.isfinite(off) & (off > 0)).all():
        raise wrong("Topology", "rates", expected, rates)
    return given


def _words(overlay: Overlay) -> list[int]:
    return [overlay.ranks, *(word for tree in overlay.trees for word in (tree.share, *tree.parents))]


def _overlay(words: Rates) -> Overlay:
    ranks, *rest = map(int, words)
    each = [rest[i : i + ranks + 1] for i in range(0, len(rest), ranks + 1)]
    return Overlay(tuple(Tree(tuple(parents), share) for share, *parents in each))

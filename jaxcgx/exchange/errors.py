"""The error of a compressed sum, for each schedule and any number of ranks.

An encoding turns x into g x + noise, which is orthogonal to x and has the power w |x|^2. Both are measured on a sample:
g = <y, x> / |x|^2 and w = |y - g x|^2 / |x|^2, where y is the decoded x. So this works for any codec. Sums are
distributed differently than the numbers of one rank, so their gain and noise are measured separately. The correlation
of two ranks' noise is measured, too.

The result is the vNMSE: the expected |result - sum|^2 / |sum|^2, where `sum` is the exact sum. docs/error-bounds.md has
the model, and compares it with measured sums.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.codecs.base import Codec
from jaxcgx.exchange.message import fold
from jaxcgx.plan.overlay import Overlay, Tree

_GROUPS = 8  # the most groups of ranks for a measurement; the sum of each group is encoded

Array = np.ndarray[Any, Any]


class Encoding(NamedTuple):
    """An encoding of x: gain * x + noise."""

    gain: float = 1
    noise: float = 0  # the power of the noise, relative to the power of x
    alike: float = 0  # the correlation of two ranks' noise; for correlated rounding, times the number of ranks


class State(NamedTuple):
    """An estimate of a sum: gain * sum + noise."""

    gain: float = 1
    noise: float = 0  # the power of the noise, relative to the power of one rank's numbers


@functools.partial(jax.jit, static_argnums=0)
def _decoded(codec: Codec, rows: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the rows after encoding and decoding. The key is two words, and an offset for correlated rounding."""
    keys = jax.vmap(lambda row: fold(key, row))(jnp.arange(len(rows)))
    return jax.vmap(codec.approximate)(rows, keys if codec.stochastic else None)


class Losses:
    """The losses of a codec on the numbers of some ranks, and on their sums.

    Args:
      sample: [ranks, ...], different draws of the numbers of at least two ranks. A sum over more ranks is assumed to be
        distributed like the sum over all ranks of the sample.
      codec: the codec.
      cut: the number of parts into which the numbers are cut. It matters only for codecs whose bucket is a whole part.
    """

    def __init__(self, sample: Array, codec: Codec, cut: int = 1) -> None:
        self.sample: Array = np.asarray(sample, np.float32)
        self.codec: Codec = codec
        if codec.whole:  # the parts are rows
            flat = self.sample.reshape(len(sample), -1)
            self.sample = flat[:, : flat.shape[1] // cut * cut].reshape(len(sample), cut, -1)
        powers = np.square(self.sample, dtype=np.float64).sum(axis=tuple(range(1, self.sample.ndim)))
        pairs = len(self.sample) * (len(self.sample) - 1)
        total = np.square(self.sample.sum(0, dtype=np.float64)).sum()
        # <x, y> / |x|^2 for the numbers x and y of two ranks
        self.common: float = float((total - powers.sum()) / pairs / powers.mean())
        self.known: dict[tuple[int, float], Encoding] = {}

    def power(self, ranks: int) -> float:
        """Returns the power of a sum over some ranks, relative to the power of one rank's numbers."""
        return float(ranks + ranks * (ranks - 1) * max(self.common, 0.0))

    def of(self, ranks: int, noise: float = 0) -> Encoding:
        """Returns the gain and the noise of encoding a sum over some ranks.

        They are measured for powers of two and for all ranks of the sample, and interpolated for other numbers of
        ranks.

        Args:
          ranks: the number of ranks.
          noise: the power of the noise that is in the sum already, relative to the power of the sum.
        """
        low = 1 << min(ranks, len(self.sample)).bit_length() - 1
        high = min(2 * low, len(self.sample))
        if ranks <= low or high <= low:
            return self._measured(low, noise)
        part = min((ranks - low) / (high - low), 1)
        pairs = zip(self._measured(low, noise), self._measured(high, noise))
        return Encoding(*((1 - part) * a + part * b for a, b in pairs))

    def encoded(self, state: State, ranks: int) -> State:
        power = self.power(ranks)
        by = self.of(ranks, round(state.noise / (state.gain**2 * power), 3))
        noise = by.gain**2 * state.noise + by.noise * (state.gain**2 * power + state.noise)
        return State(by.gain * state.gain, noise)

    def _measured(self, ranks: int, noise: float) -> Encoding:
        if (ranks, noise) not in self.known:
            found: list[tuple[float, float, Array]] = []
            groups = min(_GROUPS, len(self.sample) // ranks)
            for i in range(groups):
                x = self.sample[ranks * i : ranks * (i + 1)].sum(0)
                if noise:  # like rounding noise: 0 where all gradients are 0
                    more = np.where(x == 0, 0, np.random.default_rng(i).uniform(-1, 1, x.shape))
                    scale = np.sqrt(noise * np.square(x).sum() / max(np.square(more).sum(), 1e-300))
                    x = x + np.asarray(scale * more, np.float32)
                found.append(self._encoded(x, i, 2**16 * i // groups))
            gains, powers, noises = zip(*found)
            each = [np.square(lost).sum() for lost in noises]
            others = len(noises) * (len(noises) - 1)
            alike = 0.0
            if others and all(each):
                unit = sum(lost / np.sqrt(size) for lost, size in zip(noises, each))
                alike = float((np.square(unit).sum() - len(noises)) / others)
            alike = min(groups * alike, 0.0) if self.codec.correlated else max(alike, 0.0)
            weighted = float(np.average(gains, weights=powers))
            self.known[ranks, noise] = Encoding(weighted, float(sum(each) / sum(powers)), alike)
        return self.known[ranks, noise]

    def _encoded(self, x: Array, rank: int, offset: int) -> tuple[float, float, Array]:
        """Returns (gain, power of x, noise) of an encoding by a rank. If it is correlated, `offset` names the rank."""
        rows = jnp.asarray(x if self.codec.whole else x[None])
        key = jnp.asarray([0, 0, offset] if self.codec.correlated else [0, rank], jnp.uint32)
        y = np.asarray(_decoded(self.codec, rows, key), np.float64).reshape(x.shape)
        power = np.square(x, dtype=np.float64).sum()
        gain = float((y * x).sum() / power)
        return gain, float(power), y - gain * x

    # Schedules

    def error(self, schedule: str | Overlay, ranks: int, each: int = 1) -> float:
        """Returns the vNMSE of a sum over all ranks.

        Args:
          schedule: "one_shot", "two_shot", "ring", "gather", "tree" or an `Overlay`. Low-rank codecs ignore it.
          ranks: the number of ranks that exchange.
          each: in a hierarchy, the number of ranks in each inner sum. Inner sums are assumed to lose nothing.
        """
        codec, total = self.codec, ranks * each
        if schedule == "tree" and not codec.low_rank:
            schedule = Overlay.tree(ranks)
        if codec.low_rank or schedule == "gather":
            state = self.encoded(State(), total)
        elif isinstance(schedule, Overlay):
            states = [self._below(tree, tree.root, each) for tree in schedule.trees]
            found = [state if codec.sums_grow else self.encoded(state, total) for state, _ in states]
            errors = [(1 - state.gain) ** 2 + state.noise / self.power(total) for state in found]
            return float(np.average(errors, weights=schedule.shares))
        elif schedule == "ring":
            state = self._ring(ranks, each)
        else:
            everybody = schedule == "one_shot" or codec.sums_grow
            state = self._first(ranks, ranks if everybody else ranks - 1, each, among=ranks)
            if codec.trims_sums or (schedule == "two_shot" and not codec.sums_grow):
                state = self.encoded(state, total)
        return float((1 - state.gain) ** 2 + state.noise / self.power(total))

    def _first(self, ranks: int, encoded: int, each: int, among: int) -> State:
        """Returns the sum over `ranks` ranks, if `encoded` of them encode their numbers. `among` ranks exchange."""
        by = self.of(each)
        alike = by.alike / among if self.codec.correlated else by.alike
        noise = encoded * by.noise * self.power(each) * (1 + (encoded - 1) * alike)
        return State(1 - encoded / ranks * (1 - by.gain), noise)

    def _below(self, tree: Tree, rank: int, each: int) -> tuple[State, int]:
        """Returns (the sum at a rank of a tree before this sum is encoded, the number of ranks in the sum)."""
        children = tree.children(rank)
        leaves = [child for child in children if not tree.children(child)]
        summed, first = 1 + len(leaves), len(leaves) + self.codec.sums_grow
        state = self._first(summed, first, each, among=len(tree.parents))
        gain, noise = state.gain * summed, state.noise
        for child in children:
            if child not in leaves:
                below, ranks = self._below(tree, child, each)
                below = self.encoded(below, ranks * each)
                gain, noise, summed = gain + below.gain * ranks, noise + below.noise, summed + ranks
        return State(gain / summed, noise), summed

    def _ring(self, ranks: int, each: int) -> State:
        state = State()
        for summed in range(1, ranks + 1):  # a rank adds its own part, and encodes the sum
            state = self.encoded(State(state.gain + (1 - state.gain) / summed, state.noise), summed * each)
        return state


def drawn(distribution: str, ranks: int, size: int, seed: int = 0) -> Array:
    """Returns [ranks, size] independent numbers: "normal", "laplace" or "student" (3 degrees of freedom)."""
    rng = np.random.default_rng(seed)
    draw = dict(normal=rng.standard_normal, laplace=rng.laplace, student=functools.partial(rng.standard_t, 3))
    shape: Any = dict(size=(ranks, size))
    return np.asarray(draw[distribution](**shape), np.float32)

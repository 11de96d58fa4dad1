"""Decaying estimates of the rates of the links between ranks."""

from typing import Any

import numpy as np

ENOUGH = 2**16  # the fewest bytes of a transfer that gives an estimate of the rate
SHARED = 0.5  # a transfer shares a line if its rate is at least this part of the fastest transfer's rate
CHANGED = 2.0  # a link has changed if its rate is higher or lower than its estimate by more than this factor

Array = np.ndarray[Any, Any]


class Links:
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

    rates: Array
    known: Array

    def __init__(self, ranks: int, decay: float) -> None:
        self.rates = np.full((ranks, ranks), np.nan)
        self.known = np.eye(ranks, dtype=bool)
        self.decay = decay

    def note(self, sent: Array, busy: Array) -> None:
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

        def of_line(axis: int) -> Array:
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
    def estimates(self) -> Array:
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

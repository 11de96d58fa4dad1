"""What is known about the links between ranks: decaying estimates of their rates."""

from typing import Any

import numpy as np

ENOUGH = 2**16  # bytes, below which a transfer says nothing about a rate
SHARED = 0.5  # transfers share a line if one gets at least that much of what another gets
CHANGED = 2.0  # a link has changed if it is that much faster or slower than it was

Array = np.ndarray[Any, Any]


class Links:
    """Estimates of the rates of links, in bytes a second, from what ranks have sent.

    An estimate is a moving average. If a link has changed, the others may have changed, too: what is known about them
    is kept as an estimate, but they count as unknown until they are measured again.

    Args:
      ranks: how many.
      decay: what remains of an estimate when a new measurement comes, from 0 to below 1.
    """

    rates: Array  # [ranks, ranks]; nan where nothing was ever measured
    known: Array  # [ranks, ranks], whether an estimate is from after the last change

    def __init__(self, ranks: int, decay: float) -> None:
        self.rates = np.full((ranks, ranks), np.nan)
        self.known = np.eye(ranks, dtype=bool)
        self.decay = decay

    def note(self, sent: Array, busy: Array) -> None:
        """Takes a measurement: the bytes that each rank (row) sent to each other one, and the seconds that it took.

        Transfers at the same time share a line, of which each gets a like part. What they all sent in the time of the
        longest is what the line passes. One that is much slower than another on the same line is held up by its link,
        or by the other rank's line.
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
        """The rates, with that of the fastest link where nothing is known: what is unknown is worth a try."""
        fastest = np.nanmax(self.rates) if np.isfinite(self.rates).any() else 1.0
        return np.where(np.isfinite(self.rates), self.rates, fastest)

    def greedy(self, greed: float) -> float:
        """The probability to rely on what is known: the part of the links that is known, and `greed` at most."""
        links = len(self.known) * (len(self.known) - 1)
        known = int(self.known.sum()) - len(self.known)
        return min(known / links, greed)

    def pairs(self, random: np.random.Generator) -> list[tuple[int, int]]:
        """Pairs of ranks to probe, at random, unknown ones first. No rank is in two, so that each has its line."""
        ranks = len(self.known)
        every = [(i, j) for i in range(ranks) for j in range(i + 1, ranks)]
        every = [every[k] for k in random.permutation(len(every))]
        every.sort(key=lambda pair: bool(self.known[pair] and self.known[pair[::-1]]))
        found: list[tuple[int, int]] = []
        for pair in every:
            if all(rank not in other for rank in pair for other in found):
                found.append(pair)
        return found

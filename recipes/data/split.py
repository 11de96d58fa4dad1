"""The examples of a data set, or of a part of it, and batches of them."""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

NUMBERS = 5  # random numbers of an example, for its augmentation
AHEAD = 2  # batches that are made while the program trains


class Split(Protocol):
    """Examples by number."""

    def __len__(self) -> int: ...

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels) of these examples.

        Args:
          chosen: the examples' numbers.
          random: float32[examples, NUMBERS] from 0 to 1, which change the examples; None: they stay as they are.
        """
        ...


def trained(
    split: Split, batch_size: int, share: slice, *, seed: int, start: int, stop: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches of the steps `start` to `stop`, of which this process makes a share.

    A batch depends on the seed and the step alone, whatever the number of processes, and wherever training began.

    Args:
      split: the examples. Each epoch has all of them in an order of its own, up to the last whole batch.
      batch_size: of all processes together.
      share: the examples of a batch that are this process's.
      seed: of the orders and of the augmentation.
      start: the first step.
      stop: the last step and 1.
    """
    each = len(split) // batch_size
    order = -1, np.empty(0, int)

    def make(epoch: int, order: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        i = step % each
        random = np.random.default_rng((seed, epoch, i)).random((batch_size, NUMBERS), np.float32)
        return split.batch(order[i * batch_size : (i + 1) * batch_size][share], random[share])

    with ThreadPoolExecutor(1) as thread:
        waiting: list[Future[Any]] = []
        for step in range(start, stop):
            epoch = step // each
            if order[0] != epoch:
                order = epoch, np.random.default_rng((seed, epoch)).permutation(len(split))
            waiting.append(thread.submit(make, epoch, order[1], step))
            if len(waiting) > AHEAD:
                yield waiting.pop(0).result()
        for batch in waiting:
            yield batch.result()


def tested(
    split: Split, batch_size: int, share: slice, *, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(inputs, labels, weights) of this process's share of the first `most` examples (0: all).

    The last batch is filled up with examples of weight 0.
    """
    size = min(most or len(split), len(split))
    for i in range(math.ceil(size / batch_size)):
        numbers = np.arange(i * batch_size, (i + 1) * batch_size)[share]
        inputs, labels = split.batch(np.minimum(numbers, size - 1), None)
        yield inputs, labels, (numbers < size).astype(np.float32)

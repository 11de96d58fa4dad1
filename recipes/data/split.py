"""The training or test split of a data set, and the batches of a split."""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

NUMBERS = 5  # random numbers per example, for augmentation
AHEAD = 2  # batches that are made in advance, while the program trains


class Split(Protocol):
    """Examples that are chosen by number."""

    def __len__(self) -> int: ...

    def checksum(self) -> int:
        """Returns a number that depends on the examples."""
        ...

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (inputs, labels) of the chosen examples.

        Args:
          chosen: the numbers of the examples.
          random: float32[examples, NUMBERS] from 0 to 1, for the augmentation. None: no augmentation.
        """
        ...


def trained(
    split: Split, batch_size: int, share: slice, *, seed: int, start: int, stop: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields this process's share of the batches of the steps from `start` to `stop` - 1.

    A batch depends only on the seed and the step. It does not depend on the number of processes or on the first step.

    Args:
      split: the examples. Each epoch shuffles all examples anew, and leaves out those after the last full batch.
      batch_size: the examples of a batch, of all processes together.
      share: the part of each batch that belongs to this process.
      seed: the seed for the order of the examples and for the augmentation.
      start: the first step.
      stop: the last step + 1.
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
    """Yields (inputs, labels, weights) of this process's share of the first `most` examples (0: all).

    Weights are 1, except for the examples of weight 0 that fill up the last batch.
    """
    size = min(most or len(split), len(split))
    for i in range(math.ceil(size / batch_size)):
        numbers = np.arange(i * batch_size, (i + 1) * batch_size)[share]
        inputs, labels = split.batch(np.minimum(numbers, size - 1), None)
        yield inputs, labels, (numbers < size).astype(np.float32)

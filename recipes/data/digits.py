"""The handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
from checks import Wrong

from data.images import count, splits, synthetic
from data.split import Split

TEST = 450  # examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    """The digits, in a fixed random order. In scikit-learn's order, the digits of each writer are together."""

    classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, ...]] = 8, 8, 1

    def load(self) -> tuple[Split, Split]:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise Wrong("config.data.name: digits come with scikit-learn; pip install scikit-learn") from None
        found: Any = load_digits()
        order = np.random.default_rng(0).permutation(len(found.target))
        images = (found.images[order, :, :, None] * 15.9375).astype(np.uint8)  # scales 16 to 255
        labels = found.target[order]
        train = lambda chosen: (images[TEST + chosen], labels[TEST + chosen])
        test = lambda chosen: (images[chosen], labels[chosen])
        return splits((train, len(labels) - TEST), (test, TEST), count(images[TEST:]), augment=False)

    def stand_in(self) -> tuple[Split, Split]:
        return synthetic(self.shape, self.classes, (1797 - TEST, TEST))

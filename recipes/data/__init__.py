"""The data sets.

Each data set is a class whose arguments are options of a config's section `data`. `load` reads its files, and
`stand_in` makes synthetic data of the same shapes.
"""

from typing import Any, NamedTuple

from checks import call, choose

from data import cifar, digits, fashion_mnist, imagenet, squad, text
from data.split import Split

SETS = {
    "cifar10": cifar.Cifar10,
    "cifar100": cifar.Cifar100,
    "digits": digits.Digits,
    "fashion_mnist": fashion_mnist.FashionMnist,
    "imagenet": imagenet.ImageNet,
    "squad": squad.Squad,
    "text": text.Text,
}


class Dataset(NamedTuple):
    """The training examples and the test examples of a data set."""

    name: str  # for logs and plots, such as "synthetic cifar10"
    shape: tuple[int, ...]  # of an input
    classes: int
    train: Split
    test: Split

    def content(self) -> dict[str, int]:
        """Returns the number of examples of each split, and a checksum that an int32 can have."""
        found = {}
        for name, split in (("train", self.train), ("test", self.test)):
            found |= {f"{name}.examples": len(split), f"{name}.checksum": split.checksum() >> 1}
        return found


def load(*, name: str, synthetic: bool, **section: Any) -> Dataset:
    """Returns the data set of a config's section `data`.

    Args:
      name: one of `SETS`.
      synthetic: whether random numbers of the same shapes replace the data.
      **section: the options of the data set.
    """
    chosen = call(choose(SETS, name, "config.data.name"), "config.data", **section)
    train, test = chosen.stand_in() if synthetic else chosen.load()
    return Dataset(f"synthetic {name}" if synthetic else name, chosen.shape, chosen.classes, train, test)

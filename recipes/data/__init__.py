"""The data sets. Each is a class with the options of its config, `load` for its files and `stand_in` without them."""

from typing import Any, NamedTuple

from checks import call, choose

from data import cifar, digits, fashion_mnist, imagenet, text
from data.split import Split

SETS = {
    "cifar10": cifar.Cifar10,
    "cifar100": cifar.Cifar100,
    "digits": digits.Digits,
    "fashion_mnist": fashion_mnist.FashionMnist,
    "imagenet": imagenet.ImageNet,
    "text": text.Text,
}


class Dataset(NamedTuple):
    """Examples to learn from and examples to test with."""

    name: str  # as logs and plots have it: synthetic data is called so
    shape: tuple[int, ...]  # of an input
    classes: int
    train: Split
    test: Split


def load(*, name: str, synthetic: bool, **section: Any) -> Dataset:
    """The data set of a config's section `data`.

    Args:
      name: one of `SETS`.
      synthetic: take random numbers of the same shapes in place of the data.
      **section: the options of the data set.
    """
    chosen = call(choose(SETS, name, "config.data.name"), "config.data", **section)
    train, test = chosen.stand_in() if synthetic else chosen.load()
    return Dataset(f"synthetic {name}" if synthetic else name, chosen.shape, chosen.classes, train, test)

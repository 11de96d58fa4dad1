"""Images that are read when a batch needs them, and synthetic images."""

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

from data.split import Split

PAD = 4  # the largest shift of an image, in pixels


Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Images:
    """Images with labels, augmented as in "Deeply-Supervised Nets"."""

    read: Read  # from numbers of examples to images, uint8[examples, height, width, channels], and labels
    size: int
    mean: np.ndarray  # of each channel of the training images, from 0 to 255
    std: np.ndarray
    counts: np.ndarray  # of the training images
    augment: bool = False  # shift images by up to 4 pixels, and mirror half of them

    def __len__(self) -> int:
        return self.size

    def checksum(self) -> int:
        return zlib.crc32(self.counts.tobytes())

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self.read(chosen)
        found = (images - self.mean) / self.std
        if self.augment and random is not None:
            found = shifted(found, random)
        return found.astype(np.float32), labels.astype(np.int32)


def shifted(images: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Returns the images, each shifted and maybe mirrored. `random` has a row of random numbers for each image."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    moves = (random[:, :2] * (2 * PAD + 1)).astype(int)
    found = [image[y : y + height, x : x + width] for image, (y, x) in zip(padded, moves)]
    return np.stack([image[:, ::-1] if mirror < 0.5 else image for image, mirror in zip(found, random[:, 2])])


def count(images: np.ndarray) -> np.ndarray:
    """Returns how many pixels have each value, int64[channels, 256]."""
    channels = np.moveaxis(images, -1, 0)
    return np.stack([np.bincount(channel.ravel(), minlength=256) for channel in channels])


def splits(train: tuple[Read, int], test: tuple[Read, int], counts: np.ndarray, augment: bool) -> tuple[Split, Split]:
    """Returns (training split, test split) of functions that read images, and the numbers of images.

    Both splits are scaled such that the training images have mean 0 and standard deviation 1 in each channel.

    Args:
      counts: `count` of the training images.
    """
    values, pixels = np.arange(256), counts.sum(1)
    mean = counts @ values / pixels
    std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(1) / pixels)
    scale = mean.astype(np.float32), np.maximum(std, 1e-3).astype(np.float32)
    return Images(*train, *scale, counts, augment), Images(*test, *scale, counts)


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Synthetic images: a pattern for each class, plus noise."""

    shape: tuple[int, ...]
    classes: int
    size: int
    noise: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        pixels = int(np.prod(self.shape))
        few = rng.standard_normal(4096, np.float32)
        object.__setattr__(self, "noise", np.resize(few, 2 * pixels + 4096))

    def __len__(self) -> int:
        return self.size

    def checksum(self) -> int:
        return 0  # they depend on the config alone

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        labels = (chosen * 7919 % self.classes).astype(np.int32)
        pixels = int(np.prod(self.shape))
        piece = lambda start: self.noise[start : start + pixels]
        images = [0.5 * piece(label * 37 % 4096) + piece(i * 104729 % 4096) for i, label in zip(chosen, labels)]
        return np.stack(images).reshape(-1, *self.shape), labels


def synthetic(shape: tuple[int, ...], classes: int, sizes: tuple[int, int]) -> tuple[Split, Split]:
    """Returns synthetic splits with images of this shape. sizes: (training examples, test examples)."""
    return Synthetic(shape, classes, sizes[0]), Synthetic(shape, classes, sizes[1])

"""Images in memory, and synthetic images."""

import dataclasses

import numpy as np

from data.split import Split

PAD = 4  # the largest shift of an image, in pixels


@dataclasses.dataclass(frozen=True)
class Images:
    """Images uint8[n, height, width, channels] with labels, augmented as in "Deeply-Supervised Nets"."""

    images: np.ndarray
    labels: np.ndarray
    mean: np.ndarray  # of each channel of the training images, from 0 to 255
    std: np.ndarray
    augment: bool = False  # shift images by up to 4 pixels, and mirror half of them

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        found = (self.images[chosen] - self.mean) / self.std
        if self.augment and random is not None:
            found = shifted(found, random)
        return found.astype(np.float32), self.labels[chosen].astype(np.int32)


def shifted(images: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Returns the images, each shifted and maybe mirrored. `random` has a row of random numbers for each image."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    moves = (random[:, :2] * (2 * PAD + 1)).astype(int)
    found = [image[y : y + height, x : x + width] for image, (y, x) in zip(padded, moves)]
    return np.stack([image[:, ::-1] if mirror < 0.5 else image for image, mirror in zip(found, random[:, 2])])


def splits(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], augment: bool
) -> tuple[Split, Split]:
    """Returns (training split, test split) of images and labels.

    Both splits are scaled such that the training images have mean 0 and standard deviation 1 in each channel.
    """
    images = train[0]
    mean, std = images.mean((0, 1, 2), dtype=np.float64), images.std((0, 1, 2), dtype=np.float64)
    scale = mean.astype(np.float32), np.maximum(std, 1e-3).astype(np.float32)
    return Images(*train, *scale, augment), Images(*test, *scale)


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

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        labels = (chosen * 7919 % self.classes).astype(np.int32)
        pixels = int(np.prod(self.shape))
        piece = lambda start: self.noise[start : start + pixels]
        images = [0.5 * piece(label * 37 % 4096) + piece(i * 104729 % 4096) for i, label in zip(chosen, labels)]
        return np.stack(images).reshape(-1, *self.shape), labels


def synthetic(shape: tuple[int, ...], classes: int, sizes: tuple[int, int]) -> tuple[Split, Split]:
    """Returns synthetic splits with images of this shape. sizes: (training examples, test examples)."""
    return Synthetic(shape, classes, sizes[0]), Synthetic(shape, classes, sizes[1])

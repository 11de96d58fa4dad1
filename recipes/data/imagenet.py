"""ImageNet from folders of JPEG files, which are read during training."""

import dataclasses
import math
import os
import pathlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
from checks import Wrong, check_least
from PIL import Image, UnidentifiedImageError

from data.images import synthetic
from data.split import Split

MEAN = np.array([123.675, 116.28, 103.53], np.float32)
STD = np.array([58.395, 57.12, 57.375], np.float32)


@dataclasses.dataclass(frozen=True)
class Files:
    """Image files with labels. Threads read and decode them."""

    paths: list[pathlib.Path]
    labels: np.ndarray
    size: int  # pixels of each side of an image
    threads: ThreadPoolExecutor

    def __len__(self) -> int:
        return len(self.paths)

    def checksum(self) -> int:
        # Names and labels: to read more than a million files, or their sizes, would take long.
        names = "\n".join(f"{path.parent.name}/{path.name}" for path in self.paths)
        return zlib.crc32(self.labels.tobytes(), zlib.crc32(os.fsencode(names)))

    def batch(self, chosen: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        rows = [None] * len(chosen) if random is None else random
        images = self.threads.map(self._read, (self.paths[i] for i in chosen), rows)
        return np.stack(list(images)), self.labels[chosen]

    def _read(self, path: pathlib.Path, random: np.ndarray | None) -> np.ndarray:
        try:
            with Image.open(path) as file:
                box = middle(*file.size) if random is None else part(*file.size, random)
                image = file.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        except (OSError, UnidentifiedImageError) as error:
            raise Wrong(f"config.data.folder: {path} can't be read: {error}") from None
        pixels = (np.asarray(image, np.float32) - MEAN) / STD
        return pixels[:, ::-1] if random is not None and random[4] < 0.5 else pixels


def middle(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns the box of the middle square of an image, with 7/8 of its shorter side: 224 of 256 pixels."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def part(width: int, height: int, random: np.ndarray) -> tuple[float, float, float, float]:
    """Returns the box of a random part of an image, with 8 to 100 % of its area and sides of 3:4 to 4:3.

    This augmentation is from "Going Deeper with Convolutions". `random` has the random numbers of the example.
    """
    area = width * height * (0.08 + 0.92 * float(random[0]))
    ratio = math.exp((2 * float(random[1]) - 1) * math.log(4 / 3))
    wide, high = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = (width - wide) * float(random[2]), (height - high) * float(random[3])
    return left, top, left + wide, top + high


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageNet:
    """ImageNet, or any images in folders train/CLASS/ and val/CLASS/.

    Args:
      folder: the folder of train/ and val/.
      size: the pixels of each side of the images that the model gets.
      threads: the number of threads that read and decode files.
    """

    folder: str
    size: int
    threads: int

    classes: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_least(1, size=self.size, threads=self.threads)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size, self.size, 3

    def load(self) -> tuple[Split, Split]:
        train, test = pathlib.Path(self.folder, "train"), pathlib.Path(self.folder, "val")
        names = {folder: [path.name for path in _folders(folder)] for folder in (train, test)}
        if names[train] != names[test]:
            odd = sorted(set(names[train]) ^ set(names[test]))[0]
            raise Wrong(f"config.data.folder: expected the same classes in {train} and {test}, got {odd} in one alone")
        if len(names[train]) > self.classes:
            raise Wrong(
                f"config.data.folder: expected up to {self.classes} classes, got {len(names[train])} in {train}"
            )
        threads = ThreadPoolExecutor(self.threads)
        return self._files(train, threads), self._files(test, threads)

    def stand_in(self) -> tuple[Split, Split]:
        return synthetic(self.shape, self.classes, (1_281_167, 50_000))

    def _files(self, folder: pathlib.Path, threads: ThreadPoolExecutor) -> Files:
        found = [(path, label) for label, each in enumerate(_folders(folder)) for path in sorted(each.iterdir())]
        if not found:
            raise Wrong(f"config.data.folder: there are no images in {folder}")
        paths, labels = zip(*found)
        return Files(list(paths), np.array(labels, np.int32), self.size, threads)


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of the classes, sorted by name."""
    if not folder.is_dir():
        get = f"import torchvision; torchvision.datasets.ImageNet({str(folder.parent)!r}, {folder.name!r})"
        raise Wrong(
            f"config.data.folder: there is no folder {folder}; with image-net.org's archives in {folder.parent}, "
            f'`python -c "{get}"` makes it; or name the folder of train/CLASS/*.JPEG and val/CLASS/*.JPEG by '
            "--config.data.folder=..., or try --config.data=synthetic"
        )
    return sorted(path for path in folder.iterdir() if path.is_dir())

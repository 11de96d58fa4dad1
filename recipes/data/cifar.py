"""CIFAR-10 and CIFAR-100, from the archives of their binary versions."""

import dataclasses
import hashlib
import pathlib
import tarfile
from typing import ClassVar

import numpy as np
from checks import Wrong

from data.images import splits, synthetic
from data.split import Split

SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cifar10:
    """CIFAR-10.

    Args:
      folder: the folder of the archive.
      augment: whether training images are randomly shifted and mirrored.
    """

    folder: str
    augment: bool

    archive: ClassVar[str] = "cifar-10-binary.tar.gz"
    md5: ClassVar[str] = "c32a1d4ab5d03f1284b67883e8d87530"
    train: ClassVar[tuple[str, ...]] = tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6))
    test: ClassVar[tuple[str, ...]] = ("cifar-10-batches-bin/test_batch.bin",)
    labels: ClassVar[int] = 1  # label bytes before the pixels of a record; the last one is the class
    classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, ...]] = 32, 32, 3

    def load(self) -> tuple[Split, Split]:
        path = pathlib.Path(self.folder, self.archive)
        if not path.is_file():
            raise Wrong(
                f"config.data.folder: there is no {path}; get {self.archive} from {SOURCE}, name its folder by "
                "--config.data.folder=..., or try --config.data=synthetic"
            )
        content = path.read_bytes()
        if (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != self.md5:
            raise Wrong(f"config.data.folder: {path} is damaged: expected the MD5 sum {self.md5}, got {found}")
        with tarfile.open(path) as archive:
            return splits(self._read(archive, self.train), self._read(archive, self.test), self.augment)

    def stand_in(self) -> tuple[Split, Split]:
        return synthetic(self.shape, self.classes, (50_000, 10_000))

    def _read(self, archive: tarfile.TarFile, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        files = [archive.extractfile(name) for name in names]
        records = np.frombuffer(b"".join(file.read() for file in files if file), np.uint8)
        records = records.reshape(-1, self.labels + 32 * 32 * 3)
        images = records[:, self.labels :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), records[:, self.labels - 1]


class Cifar100(Cifar10):
    """CIFAR-100, with its 100 fine classes."""

    archive = "cifar-100-binary.tar.gz"
    md5 = "03b5dce01913d631647c71ecec9e9cb8"
    train = ("cifar-100-binary/train.bin",)
    test = ("cifar-100-binary/test.bin",)
    labels = 2
    classes = 100

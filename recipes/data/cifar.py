"""CIFAR-10 and CIFAR-100, from their binary versions: archives, or the folders that these contain."""

import dataclasses
import pathlib
import tarfile
import zlib
from typing import ClassVar

import numpy as np
from checks import Wrong

from data.content import Content
from data.images import Read, count, splits, synthetic
from data.split import Split

SOURCE = "https://www.cs.toronto.edu/~kriz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cifar10:
    """CIFAR-10.

    Args:
      folder: the folder of the archive, or of the folder that the archive contains, or that folder itself.
      augment: whether training images are randomly shifted and mirrored.
    """

    folder: str
    augment: bool

    archive: ClassVar[str] = "cifar-10-binary.tar.gz"
    inside: ClassVar[str] = "cifar-10-batches-bin"
    train: ClassVar[dict[str, str]] = {  # the files and their SHA-1 sums
        "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    }
    test: ClassVar[dict[str, str]] = {"test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c"}
    labels: ClassVar[int] = 1  # label bytes before the pixels of a record; the last one is the class
    classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, ...]] = 32, 32, 3

    def load(self) -> tuple[Split, Split]:
        files, counts = self._files(), np.zeros((3, 256), np.int64)
        for name, sha1 in (self.train | self.test).items():  # each file is read once, and not kept
            whole = files[name].checked(f"{name} in {self.folder}", "sha1", sha1)
            if name in self.train:
                counts += count(self._records(np.frombuffer(whole, np.uint8))[0])
        part = lambda names: self._part(Content([part for name in names for part in files[name].parts]))
        return splits(part(self.train), part(self.test), counts, self.augment)

    def stand_in(self) -> tuple[Split, Split]:
        return synthetic(self.shape, self.classes, (50_000, 10_000))

    def _files(self) -> dict[str, Content]:
        """Returns the files, of which those from the archive are in memory."""
        folder = pathlib.Path(self.folder)
        archive, names = folder / self.archive, [*self.train, *self.test]
        try:
            for place in (folder / self.inside, folder):
                there = [(place / name).is_file() for name in names]
                if all(there) or (any(there) and not archive.is_file()):
                    return {name: Content([place / name]) for name in names}
            if archive.is_file():
                with tarfile.open(archive) as tar:
                    files = {name: tar.extractfile(f"{self.inside}/{name}") for name in names}
                    return {name: Content([file.read() if file else b""]) for name, file in files.items()}
        except (EOFError, KeyError, OSError, tarfile.TarError, zlib.error) as error:
            raise Wrong(f"config.data.folder: the files in {folder} can't be read: {error}") from None
        raise Wrong(
            f"config.data.folder: there is no {archive}; get it: `curl -L --create-dirs -o {archive} "
            f"{SOURCE}/{self.archive}`, name its folder, or the folder that it contains, by --config.data.folder=..., "
            "or try --config.data=synthetic"
        )

    def _part(self, content: Content) -> tuple[Read, int]:
        """Returns (a function that reads examples, the number of examples)."""
        size = self.labels + 32 * 32 * 3
        return lambda chosen: self._records(content.rows(chosen * size, size)), len(content) // size

    def _records(self, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (images, labels)."""
        records = content.reshape(-1, self.labels + 32 * 32 * 3)
        return records[:, self.labels :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, self.labels - 1]


class Cifar100(Cifar10):
    """CIFAR-100, with its 100 fine classes."""

    archive = "cifar-100-binary.tar.gz"
    inside = "cifar-100-binary"
    train: ClassVar[dict[str, str]] = {"train.bin": "e207cd2e05b73b1393c74c7f5e7bea451d63e08e"}
    test: ClassVar[dict[str, str]] = {"test.bin": "8fb6623e830365ff53cf14adec797474f5478006"}
    labels = 2
    classes = 100

"""Fashion-MNIST, from its four files, which may be unpacked."""

import dataclasses
import gzip
import math
import pathlib
import zlib
from typing import ClassVar

import numpy as np
from checks import Wrong

from data.content import Content
from data.images import Read, count, splits, synthetic
from data.split import Split

# The MD5 sums of the uncompressed contents, because distributors compress the files again.
FILES = {
    "train-images-idx3-ubyte.gz": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte.gz": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte.gz": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte.gz": "15d484375f8d13e6eb1aabb0c3f46965",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FashionMnist:
    """Fashion-MNIST.

    Args:
      folder: the folder of the files.
      augment: whether training images are randomly shifted and mirrored.
    """

    folder: str
    augment: bool

    classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, ...]] = 28, 28, 1

    def load(self) -> tuple[Split, Split]:
        (images, whole), (labels, _), *test = (self._file(name, md5) for name, md5 in FILES.items())
        pixels = np.frombuffer(whole, np.uint8)[16:].reshape(-1, *self.shape)
        return splits(self._part(images, labels), self._part(*(file for file, _ in test)), count(pixels), self.augment)

    def stand_in(self) -> tuple[Split, Split]:
        return synthetic(self.shape, self.classes, (60_000, 10_000))

    def _part(self, images: Content, labels: Content) -> tuple[Read, int]:
        """Returns (a function that reads examples, the number of examples)."""
        size = math.prod(self.shape)

        def read(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return images.rows(16 + size * chosen, size).reshape(-1, *self.shape), labels.rows(8 + chosen, 1)[:, 0]

        return read, len(labels) - 8

    def _file(self, name: str, md5: str) -> tuple[Content, bytes]:
        """Returns a file, and all its bytes, which are read once, to check them."""
        packed = pathlib.Path(self.folder, name)
        path = packed.with_suffix("") if packed.with_suffix("").is_file() else packed
        if not path.is_file():
            raise Wrong(
                f"config.data.folder: there is no {path}; `apt-get install dataset-fashion-mnist`, or name the "
                "folder of the files by --config.data.folder=..., or try --config.data=synthetic"
            )
        try:
            content = Content([gzip.decompress(path.read_bytes()) if path is packed else path])
            return content, content.checked(str(path), "md5", md5)
        except (EOFError, OSError, zlib.error) as error:
            raise Wrong(f"config.data.folder: {path} is damaged: {error}") from None

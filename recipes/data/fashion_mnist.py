"""Fashion-MNIST, from its four files."""

import dataclasses
import gzip
import hashlib
import pathlib
import zlib
from typing import ClassVar

import numpy as np
from checks import Wrong

from data.images import splits, synthetic
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
        images, labels, test_images, test_labels = (self._read(name, md5) for name, md5 in FILES.items())
        pixels = lambda flat: flat[16:].reshape(-1, *self.shape)
        return splits((pixels(images), labels[8:]), (pixels(test_images), test_labels[8:]), self.augment)

    def stand_in(self) -> tuple[Split, Split]:
        return synthetic(self.shape, self.classes, (60_000, 10_000))

    def _read(self, name: str, md5: str) -> np.ndarray:
        path = pathlib.Path(self.folder, name)
        if not path.is_file():
            raise Wrong(
                f"config.data.folder: there is no {path}; install Debian's package dataset-fashion-mnist, or name the "
                "folder of the files by --config.data.folder=..., or try --config.data=synthetic"
            )
        try:
            content = gzip.decompress(path.read_bytes())
        except (EOFError, OSError, zlib.error) as error:
            raise Wrong(f"config.data.folder: {path} is damaged: {error}") from None
        if (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
            raise Wrong(
                f"config.data.folder: {path} is damaged: expected the MD5 sum {md5} of its content, got {found}"
            )
        return np.frombuffer(content, np.uint8)

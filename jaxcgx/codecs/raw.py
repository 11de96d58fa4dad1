"""Raw: no compression."""
import dataclasses

from jaxcgx.codecs.base import Codec, native_codec


@dataclasses.dataclass(frozen=True)
class Raw(Codec):
    """Every element as it is."""

    raw = True

    @property
    def native(self):
        return native_codec(0)

    def code_bytes(self, n, dtype):
        return n * dtype.itemsize

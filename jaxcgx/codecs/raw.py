"""Raw: no compression."""

import dataclasses

from jaxcgx.codecs.base import Codec, Kind, native_codec


@dataclasses.dataclass(frozen=True)
class Raw(Codec):
    """Every element as it is."""

    raw = True

    @property
    def native(self):
        return native_codec(Kind.RAW)

    def code_bytes(self, n, dtype):
        return n * dtype.itemsize

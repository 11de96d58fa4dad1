"""Codecs as text."""

import dataclasses
from typing import Any

from jaxcgx.codecs.base import Codec


def spell(value: Any) -> str:
    """Returns a codec, or a value that contains codecs, as a user would write it.

    The first field is always written, other fields only if they differ from their default.
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {spell(v)}' for key, v in value.items())}}}"
    if not isinstance(value, Codec) and not dataclasses.is_dataclass(value):
        return repr(value)
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    said = [f for i, f in enumerate(fields) if i == 0 or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={spell(getattr(value, f.name))}' for f in said)})"

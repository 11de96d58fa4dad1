"""Parses and formats rates and times as people write them: 110mbit, 40ms."""

import re
from collections.abc import Mapping
from typing import Any

from jaxcgx.checks import unexpected

RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # bit/s
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # seconds


def _parse(place: str, text: Any, units: Mapping[str, float]) -> float:
    found = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(units)})", text) if isinstance(text, str) else None
    if not found:
        example = "110mbit" if units is RATES else "40ms"
        kind = ValueError if isinstance(text, str) else TypeError
        raise unexpected(place, f'a number and one of {", ".join(units)}, as in "{example}"', repr(text), kind=kind)
    return float(found[1]) * units[found[2]]


def parse_rate(place: str, text: Any, most: int = 10**11) -> int:
    """Returns a rate such as "110mbit" in bit/s, at most `most`. Errors name the text's `place`."""
    rate = round(_parse(place, text, RATES))
    if not 8_000 <= rate <= most:
        raise unexpected(place, f"a rate from 8kbit to {spell_rate(most)}", repr(text))
    return rate


def parse_time(place: str, text: Any) -> float:
    """Returns a time such as "40ms" in seconds. Errors name the text's `place`."""
    return _parse(place, text, TIMES)


def spell_rate(rate: float) -> str:
    """Returns a rate in bit/s as a text that parse_rate reads."""
    unit = next(unit for unit in reversed(RATES) if rate >= RATES[unit] or unit == "bit")
    return f"{rate / RATES[unit]:.10g}{unit}"

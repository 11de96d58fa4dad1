"""Tests rates and times as people write them."""

import pytest
from errors import names

from jaxcgx.text import parse_rate, parse_time, spell_rate


@pytest.mark.parametrize("text, rate", [("110mbit", 1.1e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("8kbit", 8e3)])
def test_rates(text, rate):
    assert parse_rate("lab: argument '--rate'", text) == rate
    assert spell_rate(rate) == text


@pytest.mark.parametrize("text, seconds", [("40ms", 0.04), ("2s", 2), ("0s", 0), ("1.5s", 1.5), ("250us", 0.00025)])
def test_times(text, seconds):
    assert parse_time("lab: argument '--delay'", text) == pytest.approx(seconds)


def test_what_is_no_rate_or_time():
    for text in "1", "gbit", "1 gbit", "1GBIT", "-1gbit", "1gbps", "1e3mbit", "", "1gbit1gbit":
        with names(ValueError, f"lab --rate {text!r}"):
            parse_rate("lab: argument '--rate'", text)
    for text in "1kbit", "101gbit":
        with names(ValueError, f"lab --up from 8kbit to 100gbit {text!r}"):
            parse_rate("lab: argument '--up'", text)
    with names(TypeError, "lab --delay 40"):
        parse_time("lab: argument '--delay'", 40)

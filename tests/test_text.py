"""Tests rates and times as people write them."""

import pytest
from errors import names

from jaxcgx.text import parse_rate, parse_time, spell_rate


@pytest.mark.parametrize(
    "text, rate", [("110mbit", 110_000_000), ("1gbit", 10**9), ("2.5gbit", 2_500_000_000), ("8kbit", 8000)]
)
def test_rates(text, rate):
    assert parse_rate("lab: argument '--rate'", text) == rate
    assert spell_rate(rate) == text


@pytest.mark.parametrize("text, seconds", [("40ms", 0.04), ("2s", 2), ("0s", 0), ("1.5s", 1.5), ("250us", 0.00025)])
def test_times(text, seconds):
    assert parse_time("lab: argument '--delay'", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["1", "gbit", "1 gbit", "1GBIT", "-1gbit", "1gbps", "1e3mbit", "", "1gbit1gbit"])
def test_what_is_no_rate(text):
    with names(ValueError, f"lab --rate {text!r}"):
        parse_rate("lab: argument '--rate'", text)


@pytest.mark.parametrize("text", ["1kbit", "101gbit"])
def test_rates_that_no_link_has(text):
    with names(ValueError, f"lab --up from 8kbit to 100gbit {text!r}"):
        parse_rate("lab: argument '--up'", text)


def test_a_number_is_no_time():
    with names(TypeError, "lab --delay 40"):
        parse_time("lab: argument '--delay'", 40)

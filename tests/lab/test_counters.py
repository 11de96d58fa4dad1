"""Tests the figures that are computed from the kernel's counters."""

import pytest

from jaxcgx.lab.counters import LinkTraffic, busiest


def test_the_payload_is_without_headers():
    full, acknowledgements = LinkTraffic(1514 * 100, 100), LinkTraffic(66 * 50, 50)
    assert full.payload == 1448 * 100 and acknowledgements.payload == 0


@pytest.mark.parametrize(
    "times, counts, most",
    [
        ([0, 0.5, 1, 1.5, 2], [0, 0, 100, 200, 200], 200),  # the second in the middle counts
        ([0, 1, 2, 3], [0, 10, 40, 45], 30),
        ([0, 0.25, 0.5], [0, 10, 20], 20),  # a run of less than a second counts as one second
        ([0, 4], [0, 20], 5),
        ([0], [7], 0),
    ],
)
def test_the_busiest_second(times, counts, most):
    assert busiest(times, counts) == most

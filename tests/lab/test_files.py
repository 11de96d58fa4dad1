"""Tests the files of links and of their changes."""

import pytest

from jaxcgx.lab import Link, files

LINK = Link(10**9, 10**9)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "lab.toml"
    return lambda text: path.write_text(text) and path


def test_links_of_single_hosts(written):
    path = written('[host1]\nup = "110mbit"\ndelay = "40ms"\n[host2]\nrate = "10mbit"\ndown = "20mbit"\n')
    assert files.read_links(path, 4, LINK) == [LINK, Link(110_000_000, 10**9, 0.04), Link(10**7, 2 * 10**7), LINK]


def test_changes_come_in_the_order_of_their_times(written):
    path = written(
        '[[change]]\nat = "5s"\nhosts = [1]\ncut = false\n'
        '[[change]]\nat = "500ms"\nup = "50mbit"\n'
        '[[change]]\nat = "2s"\nhosts = [0, 1]\nrate = "1mbit"\ncut = true\n'
    )
    assert files.read_schedule(path, 2) == [
        files.Change(0.5, (0, 1), {"up": 50_000_000}, None),
        files.Change(2, (0, 1), {"up": 10**6, "down": 10**6}, True),
        files.Change(5, (1,), {}, False),
    ]


def test_what_a_change_does():
    class Lab:
        def __init__(self):
            self.links, self.done = [LINK, LINK], []

        change = lambda self, *what: self.done.append(what)
        cut = lambda self, host: self.change(host, "cut")
        mend = lambda self, host: self.change(host, "mend")

    lab = Lab()
    files.Change(0, (0, 1), {"up": 5}, None).apply(lab)
    files.Change(0, (1,), {}, True).apply(lab)
    files.Change(0, (1,), {}, False).apply(lab)
    assert lab.done == [(0, Link(5, 10**9)), (1, Link(5, 10**9)), (1, "cut"), (1, "mend")]


WRONG_LINKS = {
    "[host2]\n": "lab.toml: expected keys out of host0, host1, got 'host2'",
    "host0 = 3\n": "lab.toml, table host0: expected a table, got 3",
    '[host0]\nleft = "1gbit"\n': "table host0: expected keys out of rate, up, down, delay, got 'left'",
    "[host0]\nup = 3\n": "table host0, key 'up': expected a number and one of",
    "[host0\n": "lab.toml: expected TOML, got",
}
WRONG_SCHEDULES = {
    "[host0]\n": "lab.toml: expected keys out of change, got 'host0'",
    "change = 3\n": "key 'change': expected tables, [[change]], got 3",
    "[[change]]\ncut = true\n": "change 1, key 'at': expected a number and one of us, ms, s",
    '[[change]]\nat = "1s"\n': "change 1: expected one of rate, up, down, cut, got at",
    '[[change]]\nat = "1s"\ncut = 1\n': "change 1, key 'cut': expected true or false, got 1",
    '[[change]]\nat = "1s"\ncut = true\nhosts = [2]\n': "'hosts': expected a list of numbers from 0 to 1, got [2]",
    '[[change]]\nat = "1s"\ncut = true\nhosts = []\n': "'hosts': expected a list of numbers from 0 to 1, got []",
    '[[change]]\nat = "1s"\ndelay = "1s"\n': "expected keys out of at, hosts, rate, up, down, cut, got 'delay'",
}


@pytest.mark.parametrize(("text", "words"), (WRONG_LINKS | WRONG_SCHEDULES).items())
def test_what_is_wrong_with_a_file(written, text, words):
    with pytest.raises((TypeError, ValueError)) as error:
        files.read_links(written(text), 2, LINK) if text in WRONG_LINKS else files.read_schedule(written(text), 2)
    assert words in str(error.value)

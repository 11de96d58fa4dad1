"""Reads the two TOML files of a lab: the links of single hosts, and the changes of links while the lab runs."""

import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from jaxcgx.checks import is_integer, unexpected
from jaxcgx.lab.network import Lab, Link
from jaxcgx.text import parse_rate, parse_time

Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Change:
    at: float  # the seconds after the start of the commands
    hosts: tuple[int, ...]  # the hosts whose links change
    rates: Mapping[str, int]  # the new rates, {"up": bit/s, "down": bit/s}, or only one of them
    cut: bool | None  # True takes the links down, False takes them up again. None: neither

    def apply(self, lab: Lab) -> None:
        for host in self.hosts:
            if self.rates:
                lab.change(host, dataclasses.replace(lab.links[host], **self.rates))
            if self.cut is not None:
                (lab.cut if self.cut else lab.mend)(host)


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(pathlib.Path(path).read_text())
    except tomllib.TOMLDecodeError as error:
        raise unexpected(str(path), "TOML", str(error)) from None


def _check_keys(place: str, table: Any, known: Collection[str]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise unexpected(place, "a table", repr(table), kind=TypeError)
    for key in table:
        if key not in known:
            raise unexpected(place, f"keys out of {', '.join(known)}", repr(key))
    return table


def _rates(place: str, table: Mapping[str, Any]) -> dict[str, int]:
    """Returns the rates that a table gives with "rate", "up" and "down". "rate" is for both directions."""
    found = {key: parse_rate(f"{place}, key {key!r}", table[key]) for key in ("rate", "up", "down") if key in table}
    if "rate" in found:
        found = {"up": found["rate"], "down": found["rate"]} | found
        del found["rate"]
    return found


def read_links(path: Path, hosts: int, link: Link) -> list[Link]:
    """Returns the link of every host: `link`, with the changes that the file has in tables such as [host1]."""
    names = [f"host{i}" for i in range(hosts)]
    links: list[Link] = []
    tables = _check_keys(str(path), _load(path), names)
    for name in names:
        place = f"{path}, table {name}"
        table = _check_keys(place, tables.get(name, {}), ("rate", "up", "down", "delay"))
        delay = {"delay": parse_time(f"{place}, key 'delay'", table["delay"])} if "delay" in table else {}
        links.append(dataclasses.replace(link, **_rates(place, table), **delay))
    return links


def read_schedule(path: Path, hosts: int) -> list[Change]:
    """Returns the changes in the [[change]] tables of a file, in the order of their times."""
    changes: list[Change] = []
    tables = _check_keys(str(path), _load(path), ("change",)).get("change", [])
    if not isinstance(tables, list):
        raise unexpected(f"{path}, key 'change'", "tables, [[change]]", repr(tables), kind=TypeError)
    for number, table in enumerate(tables, 1):
        place = f"{path}, change {number}"
        table = _check_keys(place, table, ("at", "hosts", "rate", "up", "down", "cut"))
        named = table.get("hosts", list(range(hosts)))
        if not (named and isinstance(named, list)) or not all(is_integer(host) and 0 <= host < hosts for host in named):
            raise unexpected(f"{place}, key 'hosts'", f"a list of numbers from 0 to {hosts - 1}", repr(named))
        cut = table.get("cut")
        if cut is not None and not isinstance(cut, bool):
            raise unexpected(f"{place}, key 'cut'", "true or false", repr(cut), kind=TypeError)
        rates = _rates(place, table)
        if cut is None and not rates:
            raise unexpected(place, "one of rate, up, down, cut", f"{', '.join(table) or 'none'}")
        at = parse_time(f"{place}, key 'at'", table.get("at"))
        changes.append(Change(at, tuple(named), rates, cut))
    return sorted(changes, key=lambda change: change.at)

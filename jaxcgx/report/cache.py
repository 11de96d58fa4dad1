"""Measurements of this machine that are made once and kept: JSON files in ~/.cache/jaxcgx ($XDG_CACHE_HOME)."""

import fcntl
import json
import os
import pathlib
from typing import Any


def path(name: str) -> pathlib.Path:
    """Returns the path of a file of measurements."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "jaxcgx" / f"{name}.json"


def load(name: str, place: str) -> dict[str, dict[str, Any]]:
    """Returns {key: measurement} of a place in a file. A missing or damaged file has none."""
    return _read(name).get(place, {})


def save(name: str, place: str, key: str, found: dict[str, Any]) -> None:
    """Adds a measurement to a file, or replaces the one with this key."""
    file = path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process or thread may be saving to the file
        known = _read(name)
        known.setdefault(place, {})[key] = found
        fresh = file.with_suffix(".new")  # another process may be reading the file
        fresh.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        fresh.replace(file)
    finally:
        os.close(lock)


def _read(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        return json.loads(path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}

"""The format of results, which every measurement writes and `python -m jaxcgx report` reads.

A file is a JSON object. Its origin has the keys `command`, which makes the file again, `date`, `cpu`, `threads`,
`versions` and `native`. `charts` says which tables are drawn, and how. Every other list of objects is a table, whose
rows have the same keys. The key of a number ends in its unit (UNITS). A list of numbers has the repetitions of one
measurement.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxcgx.checks import unexpected
from jaxcgx.native import registration

Data = dict[str, Any]
ORIGIN = ("command", "date", "cpu", "threads", "versions", "native")
UNITS = {
    "bytes": "bytes",
    "mib": "MiB",
    "seconds": "seconds",
    "ms": "ms",
    "us": "µs",
    "bits": "bits",
    "mbit": "Mbit/s",
    "gbs": "GB/s",
    "percent": "%",
}


def origin(command: str) -> Data:
    """Returns the origin of results: the machine, the date, and the command that makes them again."""
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    versions = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "jaxcgx")}
    return dict(
        command=command,
        date=datetime.date.today().isoformat(),
        cpu=found[1] if found else platform.machine(),
        # XLA's thread pool has one thread for each processor that this process may use.
        threads=len(os.sched_getaffinity(0)),
        versions={"python": platform.python_version()} | versions,
        native=registration.MODULE and registration.MODULE.build_info(),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
    return round(float(low), 4), round(float(middle), 4), round(float(high), 4)


def write(path: pathlib.Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def read(path: str | os.PathLike[str]) -> Data:
    """Returns the data of a file, after a check that it has an origin."""
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except ValueError as error:
        raise unexpected(str(path), "JSON", str(error)) from None
    missing = [key for key in ORIGIN if not isinstance(data, dict) or key not in data]
    if missing:
        raise unexpected(str(path), f"results of a measurement, with {', '.join(ORIGIN)}", f"no {missing[0]}")
    return data


def tables(data: Data) -> dict[str, list[Data]]:
    """Returns the tables of a file: its lists of objects, except `charts`, and its objects of objects."""
    found: dict[str, list[Data]] = {}
    for key, value in data.items():
        if isinstance(value, dict) and all(isinstance(row, dict) for row in value.values()):
            value = [{"name": name} | row for name, row in value.items()]
        if key != "charts" and isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            found[key] = value
    return found


def flat(row: Mapping[str, Any]) -> Data:
    """Returns {name: cell} of a row without nested objects: {"ms": {"psum": 3}} becomes {"ms psum": 3}."""
    cells: Data = {}
    for key, value in row.items():
        inner = flat(value) if isinstance(value, dict) else {"": value}
        cells |= {f"{key} {name}".rstrip(): cell for name, cell in inner.items()}
    return cells


def _split(name: str) -> tuple[str, str]:
    """Returns (words of a cell's name, its unit or "")."""
    found, unit = list[str](), ""
    for i, part in enumerate(name.split(" ")):
        words = part.split("_")
        if units := [word for word in words if word in UNITS]:
            unit = units[-1]
            words.remove(unit)
        found += words if units or not i else [part]  # names in nested objects keep their underscores
    return " ".join(found), UNITS.get(unit, "")


def unit(name: str) -> str:
    return _split(name)[1]


def spell_name(name: str) -> str:
    """Returns the name of a cell for the head of a table, such as "psum (ms)"."""
    words, unit = _split(name)
    return f"{words} ({unit})" if words and unit else words or unit

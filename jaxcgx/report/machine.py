"""Measurements of this machine that are made once and kept: JSON files in ~/.cache/jaxcgx ($XDG_CACHE_HOME).

One file has the speed of the kernels for each codec, which is measured here. link.py keeps links in another one.
"""

import dataclasses
import fcntl
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx.codecs.base import Codec, spell
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import layout_of

SIZE = 2**22  # elements; they have 16 MiB, more than most caches
_MESSAGES, _ITERATIONS, _TURNS = 4, 4, 5


def path(name: str) -> pathlib.Path:
    """Returns the path of a file of measurements."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "jaxcgx" / f"{name}.json"


def load(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns {place: {key: measurement}} of a file. A missing or damaged file has none."""
    try:
        return json.loads(path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def save(name: str, place: str, key: str, found: dict[str, Any]) -> None:
    """Adds a measurement to a file, or replaces the one with this key."""
    file = path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process or thread may be saving to the file
        known = load(name)
        known.setdefault(place, {})[key] = found
        fresh = file.with_suffix(".new")  # another process may be reading the file
        fresh.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        fresh.replace(file)
    finally:
        os.close(lock)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The speed of a codec's kernels on all processors, in bytes of float32 per second.

    For sparse codecs, `decode` and `reduce` are in compressed bytes per second, which exchange/costs.py counts.
    `spread` is (slowest - fastest) / median of the turns of the kernel that varied most, and `date` when it ran.
    """

    encode: float
    encode_fed: float  # with feedback
    decode: float
    reduce: float  # the bytes of all summed messages count
    spread: float = 0.0
    date: str = ""


def kernels(codec: Codec) -> Kernels:
    """Returns the speeds that the file has for this machine and version. If it has none, measures and saves them."""
    place, name = _place(), spell(codec)
    known = load("kernels").get(place, {}).get(name, {})
    if known.keys() == {field.name for field in dataclasses.fields(Kernels)}:  # and not of another version
        return Kernels(**known)
    found = _measure(codec)
    save("kernels", place, name, dataclasses.asdict(found))
    return found


def _place() -> str:
    """Returns the file's key for this machine, its processors, and the versions of jaxcgx and JAX."""
    built = registration.MODULE.build_info() if registration.MODULE else {}
    device = jax.devices()[0]
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = built.get("kernels"), built.get("version"), jax.__version__
    return ", ".join(map(str, (platform.node(), device.device_kind, processors, *versions)))


def _measure(codec: Codec) -> Kernels:
    size, spreads = 4 * SIZE, list[float]()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2048, SIZE // 2048), np.float32))
    key = jnp.zeros(2, jnp.uint32) if codec.stochastic else None
    none = jnp.zeros_like(x)

    def speed(size: int, step: Callable[..., tuple[Any, Any]], *carry: Any) -> float:
        seconds, spread = _time(step, carry)
        spreads.append(spread)
        return size / seconds

    if codec.low_rank:  # two products with the matrix, and one that makes the result
        encode = decode = reduce = speed(size, lambda x, _: (x, codec.approximate(x, key)), x, x)
        encode_fed = speed(size, lambda x, lost: (x, x + lost - codec.approximate(x + lost, key)), x, none)
    else:
        layout = layout_of(codec, x.shape, x.dtype)
        payload = ops.encode(layout, [x], key)
        rows = jnp.tile(payload, (_MESSAGES, 1))
        decoded = payload.nbytes if codec.sparse else size
        encode = speed(size, lambda x, _: (x, ops.encode(layout, [x], key)), x, payload)
        encode_fed = speed(size, lambda x, kept: (x, ops.encode_fed(layout, [x], kept[1], key)), x, (payload, [none]))
        decode = speed(decoded, lambda payload, _: (payload, ops.decode(layout, payload)[0]), payload, x)
        reduce = speed(_MESSAGES * decoded, lambda rows, _: (rows, ops.reduce(layout, rows)[0]), rows, x)
    date = time.strftime("%Y-%m-%d %H:%M")
    return Kernels(encode, encode_fed, decode, reduce, spread=max(spreads), date=date)


def _time(step: Callable[..., tuple[Any, Any]], carry: tuple[Any, Any]) -> tuple[float, float]:
    """Returns (seconds, spread) of a step in a compiled loop, whose iterations all write to the same pages."""

    def body(_: Any, carry: Any) -> Any:
        return lax.optimization_barrier(step(*lax.optimization_barrier(carry)))

    program = jax.jit(lambda carry: lax.fori_loop(0, _ITERATIONS, body, carry))
    times: list[float] = []
    for _ in range(_TURNS + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(carry))
        times.append(time.perf_counter() - start)
    times = times[1:]
    median = statistics.median(times)
    return median / _ITERATIONS, (max(times) - min(times)) / median

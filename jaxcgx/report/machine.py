"""Measurements of this machine that are made once and kept: JSON files in ~/.cache/jaxcgx ($XDG_CACHE_HOME).

One file has the speed of the kernels for each codec, which is measured here. link.py keeps links in another one.
"""

import dataclasses
import fcntl
import inspect
import itertools
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.codecs.base import Codec, spell
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import layout_of

SIZE = 2**22  # elements; they have 16 MiB, more than most caches
T = TypeVar("T")
QUIET = 0.1  # the share of the processors that other programs may take on a quiet machine
RUNS, AGREE = 5, 0.1  # runs are repeated until two differ by at most a tenth
_MESSAGES, _ITERATIONS, _TURNS = 4, 4, 5


def path(name: str) -> pathlib.Path:
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "jaxcgx" / f"{name}.json"


def load(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns {place: {key: measurement}} of a file. A missing or damaged file has none."""
    try:
        return json.loads(path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def known(name: str, place: str, kind: Callable[..., T]) -> dict[str, T]:
    """Returns {key: measurement} of a place in a file, without those of versions with other fields."""
    fields = inspect.signature(kind).parameters.keys()
    return {key: kind(**found) for key, found in load(name).get(place, {}).items() if found.keys() == fields}


def save(name: str, place: str, key: str, found: dict[str, Any]) -> None:
    """Adds a measurement to a file, or replaces the one with this key."""
    file = path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process or thread may be saving to the file
        every = load(name)
        every.setdefault(place, {})[key] = found
        fresh = file.with_suffix(".new")  # another process may be reading the file
        fresh.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
        fresh.replace(file)
    finally:
        os.close(lock)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The speed of a codec's kernels on all processors, in bytes of float32 per second."""

    # For sparse codecs, `decode` and `reduce` are in compressed bytes per second, which exchange/costs.py counts.
    # `spread` is by how much the two runs that agree best differ, `busy` the share of the processors that other
    # programs took meanwhile, and `date` when that was.
    encode: float
    encode_fed: float  # with feedback
    decode: float
    reduce: float  # the bytes of all summed messages count
    spread: float = 0.0
    busy: float = 0.0
    date: str = ""

    @property
    def speeds(self) -> tuple[float, ...]:
        return self.encode, self.encode_fed, self.decode, self.reduce


def kernels(codec: Codec, again: bool = False) -> Kernels:
    """Returns the speeds that the file has for this machine and version. If it has none, measures and saves them."""
    # With `again`, they are measured anyway. What was measured on a quiet machine is kept if the machine is busy now.
    place, name = _place(), spell(codec)
    old = known("kernels", place, Kernels).get(name)
    if old and not again:
        return old
    programs = _programs(codec)
    runs = [_measure(programs), _measure(programs)]
    while len(runs) < RUNS and _agreeing(runs).spread > AGREE:
        runs.append(_measure(programs))
    found = _agreeing(runs)
    if old and old.busy < QUIET <= found.busy:
        return old
    save("kernels", place, name, dataclasses.asdict(found))
    return found


def _agreeing(runs: Sequence[Kernels]) -> Kernels:
    """Returns the later one of the two runs that agree best, with their spread."""

    def spread(pair: tuple[Kernels, Kernels]) -> float:
        return max(abs(x - y) / max(x, y) for x, y in zip(pair[0].speeds, pair[1].speeds))

    best = min(itertools.combinations(runs, 2), key=spread)
    return dataclasses.replace(best[1], spread=spread(best))


def _place() -> str:
    """Returns the file's key for this machine, its processors, and the versions of jaxcgx and JAX."""
    built = registration.MODULE.build_info() if registration.MODULE else {}
    device = jax.devices()[0]
    versions = built.get("kernels"), built.get("version"), jax.__version__
    return ", ".join(map(str, (platform.node(), device.device_kind, _processors(), *versions)))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _programs(codec: Codec) -> list[tuple[int, Callable[[], Any]]]:
    """Returns (bytes, a compiled program) of each kernel, in the order of `Kernels`."""
    size = 4 * SIZE
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2048, SIZE // 2048), np.float32))
    key = jnp.zeros(2, jnp.uint32) if codec.stochastic else None
    none = jnp.zeros_like(x)
    if codec.low_rank:  # two products with the matrix, and one that makes the result
        plain = size, _loop(lambda x, _: (x, codec.approximate(x, key)), x, x)
        fed = size, _loop(lambda x, lost: (x, x + lost - codec.approximate(x + lost, key)), x, none)
        return [plain, fed, plain, plain]
    layout = layout_of(codec, x.shape, x.dtype)
    payload = ops.encode(layout, [x], key)
    rows = jnp.tile(payload, (_MESSAGES, 1))
    decoded = payload.nbytes if codec.sparse else size
    return [
        (size, _loop(lambda x, _: (x, ops.encode(layout, [x], key)), x, payload)),
        (size, _loop(lambda x, kept: (x, ops.encode_fed(layout, [x], kept[1], key)), x, (payload, [none]))),
        (decoded, _loop(lambda payload, _: (payload, ops.decode(layout, payload)[0]), payload, x)),
        (_MESSAGES * decoded, _loop(lambda rows, _: (rows, ops.reduce(layout, rows)[0]), rows, x)),
    ]


def _loop(step: Callable[..., tuple[Any, Any]], *carry: Any) -> Callable[[], Any]:
    """Returns a compiled loop of a step, whose iterations all write to the same pages."""

    def body(_: Any, carry: Any) -> Any:
        return jax.lax.optimization_barrier(step(*jax.lax.optimization_barrier(carry)))

    program = jax.jit(lambda carry: jax.lax.fori_loop(0, _ITERATIONS, body, carry))
    jax.block_until_ready(program(carry))
    return lambda: jax.block_until_ready(program(carry))


def _measure(programs: Sequence[tuple[int, Callable[[], Any]]]) -> Kernels:
    before = _taken()
    seconds = [_time(program) for _, program in programs]
    others, passed = (now - then for now, then in zip(_taken(), before))
    busy = max(others / passed, 0.0) if passed else 0.0
    # On a busy machine, a kernel on processors waits for them. Its processor time is what it needs by itself.
    which = int(busy >= QUIET and jax.default_backend() == "cpu")
    speeds = [size / each[which] for (size, _), each in zip(programs, seconds)]
    return Kernels(*speeds, busy=round(busy, 3), date=time.strftime("%Y-%m-%d %H:%M"))


def _taken() -> tuple[float, float]:
    """Returns the seconds of all processors that other programs have taken, and all that have passed."""
    try:
        ticks = [int(n) for n in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:  # not Linux
        return 0.0, 1.0
    idle, second = ticks[3] + ticks[4], os.sysconf("SC_CLK_TCK")  # the fourth and the fifth: idle, waiting for disks
    return (sum(ticks) - idle) / second - time.process_time(), sum(ticks) / second


def _time(program: Callable[[], Any]) -> tuple[float, float]:
    """Returns the least seconds of an iteration: those that pass, and those of the processors over their number."""
    times = list[tuple[float, float]]()
    for _ in range(_TURNS):
        start = time.perf_counter(), time.process_time()
        program()
        passed, used = time.perf_counter() - start[0], time.process_time() - start[1]
        times.append((passed / _ITERATIONS, used / _ITERATIONS / _processors()))
    return min(passed for passed, _ in times), min(used for _, used in times)

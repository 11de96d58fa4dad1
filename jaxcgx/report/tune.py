"""python -m jaxcgx tune: adapts a plan to saved gradients."""

import dataclasses
import functools
import math
import operator
import os
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcgx.checks import unexpected
from jaxcgx.codecs import Codec, Raw, Skip
from jaxcgx.codecs.base import spell
from jaxcgx.collectives.statistics import gradient_statistics
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import GradientStatistics, Plan
from jaxcgx.plan.leaves import compressing, skips, spell_path
from jaxcgx.text import spell_sizes, table

Path = str | os.PathLike[str]
Step = dict[str, np.ndarray[Any, Any]]  # {leaf's path: gradient}
Assigned = list[tuple[Codec, str | None]]  # for each leaf: its codec, and the reason if it travels raw, else None


def tune(gradients: Path, plan: Path | None, bits: Sequence[int] | None, **options: Any) -> tuple[Plan, str]:
    """Returns (plan adapted to the gradients in an .npz file, text that describes it)."""
    # `plan` is a TOML file with the plan to adapt. None: Plan.cgx(). `bits` are candidates, in addition to the plan's
    # own. None: those from 2 to 8 that the plan's codec can have. `options` are those of Plan.adapt.
    base = Plan.cgx() if plan is None else Plan.load(plan)
    found: list[Any] = compressing(base.default)
    if len(found) != 1 or not hasattr(found[0], "bits"):
        expected = "a plan whose default has one codec that compresses, and that one bits"
        raise unexpected("argument '--plan'", expected, spell(base.default))
    steps = read(gradients)
    before = _assign(base, steps[0])  # before the measurement, to report errors in the rules at once
    if bits is None:
        bits = [n for n in range(2, 9) if _can_have(found[0], n)]
    candidates: list[Codec] = [dataclasses.replace(found[0], bits=n) for n in sorted({*bits, found[0].bits})]
    measured = statistics(steps, candidates)
    adapted = base.adapt(measured, **options)
    return adapted, describe(steps, measured, {"before": before, "adapted": _assign(adapted, steps[0])})


def _can_have(codec: Any, bits: int) -> bool:
    try:
        dataclasses.replace(codec, bits=bits)
    except ValueError:
        return False
    return True


def read(path: Path) -> list[Step]:
    found: dict[int, Step] = {}
    for key, leaf in _load(path).items():
        name, step = re.findall(r"\A(.*?)(?:@([0-9]+))?\Z", key, re.DOTALL)[0]
        arrays = found.setdefault(int(step or 0), {})
        place = f"{path}, array {key!r}"
        if name in arrays:
            got = f"another of {name!r} in step {int(step or 0)}"
            raise unexpected(place, "one array of a path in a step", got)
        if leaf.dtype not in DTYPES and leaf.dtype.kind not in "biuc":
            raise unexpected(place, "float32 or float16, or integers", leaf.dtype, "save it as .astype(numpy.float32)")
        arrays[name] = leaf
    steps = [found[n] for n in sorted(found)]
    if not steps:
        raise unexpected(str(path), "gradients", "none")
    types = [{name: (leaf.shape, leaf.dtype) for name, leaf in step.items()} for step in steps]
    for n, step in zip(sorted(found), types):
        if other := sorted(name for name, _ in step.items() ^ types[0].items()):
            got = f"another {other[0]!r} in step {n} than in step {min(found)}"
            raise unexpected(str(path), "the same arrays in every step", got)
    return steps


def _load(path: Path) -> Step:
    try:
        with open(path, "rb") as stream, np.load(stream) as file:  # because NumPy leaves a broken file open
            return {key: np.asarray(file[key]) for key in file}
    except (EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error):  # TypeError: an .npy file
        expected = "an .npz file of numbers, as numpy.savez writes it"
        raise unexpected(str(path), expected, "another or a part of one") from None


def statistics(steps: Sequence[Step], codecs: Sequence[Codec]) -> GradientStatistics:
    measure = jax.jit(functools.partial(gradient_statistics, codecs=tuple(codecs)))
    keys = (jax.random.fold_in(jax.random.key(0), i) for i in range(len(steps)))
    return functools.reduce(operator.add, (measure(step, key=key) for step, key in zip(steps, keys)))


def _assign(plan: Plan, step: Step) -> Assigned:
    """Returns the codec of each leaf under a plan. For codecs by axis, it is the codec that compresses."""
    routes = plan.routes("tune", "gradients", step)
    codecs = [Skip() if route.skipped else next(iter(compressing(route.codec)), Raw()) for route in routes]
    return [(codec, route.why_raw) for codec, route in zip(codecs, routes)]


def describe(steps: Sequence[Step], measured: GradientStatistics, plans: Mapping[str, Assigned]) -> str:
    """Returns two tables as text: every leaf under the last of the plans, and the sum over all leaves for each plan."""
    found = jax.tree_util.tree_flatten_with_path(steps[0])[0]
    names, leaves = [spell_path(path) for path, _ in found], [leaf for _, leaf in found]
    codecs = list(measured.codecs)
    errors, norms = np.asarray(measured.errors, np.float64), np.asarray(measured.norms, np.float64)
    used = dict.fromkeys(codec for plan in plans.values() for codec, why in plan if not (why or skips(codec)))
    if more := [codec for codec in used if codec not in codecs]:
        codecs, errors = codecs + more, np.hstack([errors, np.asarray(statistics(steps, more).errors, np.float64)])

    def numbers(i: int, codec: Codec, why: str | None) -> tuple[int, int, float, float]:
        """Returns (bytes, uncompressed bytes, squared error, squared norm) of leaf i."""
        leaf = leaves[i]
        if skips(codec):
            return 0, 0, 0.0, 0.0
        if why:
            return leaf.nbytes, leaf.nbytes, 0.0, 0.0
        row = measured.paths.index(names[i])
        return codec.wire_bytes(leaf.shape, leaf.dtype), leaf.nbytes, errors[row, codecs.index(codec)], norms[row]

    def spelled(sent: int, raw: int, error: float, norm: float) -> tuple[str, ...]:
        return *spell_sizes(sent, raw), f"{math.sqrt(error / norm) if norm else 0:.4f}"

    *_, last = plans.values()
    rows = [
        (
            names[i],
            "x".join(map(str, leaves[i].shape)) or "scalar",
            "Raw()" if why else spell(codec),
            *spelled(*numbers(i, codec, why)),
            why or "",
        )
        for i, (codec, why) in enumerate(last)
    ]
    totals = [
        (name, *spelled(*map(sum, zip(*(numbers(i, *found) for i, found in enumerate(plan))))))
        for name, plan in plans.items()
    ]
    return "\n\n".join(
        [
            table(("leaf", "shape", "codec", "bytes", "uncompressed", "ratio", "error", "raw because"), rows),
            table(("plan", "bytes", "uncompressed", "ratio", "error"), totals),
            "error: of one encoding, the root of its square over that of the gradient's, over all steps",
        ]
    )

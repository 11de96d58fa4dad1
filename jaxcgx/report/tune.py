"""A plan from saved gradients: python -m jaxcgx tune."""

import dataclasses
import functools
import math
import operator
import re
import zipfile
import zlib

import jax
import numpy as np

from jaxcgx.adaptive import gradient_statistics
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.spelling import spell
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan, why_raw
from jaxcgx.plan.leaves import spell_path
from jaxcgx.plan.rules import compressing
from jaxcgx.text import spell_sizes, table

_KEY = jax.random.key(0)


def tune(gradients, plan, method, alpha, bits):
    """(the plan adapted to the gradients of an .npz file, what to say about it). plan: the file of the one to adapt."""
    base = Plan.cgx() if plan is None else Plan.load(plan)
    found = compressing(base.default)
    if len(found) != 1 or not hasattr(found[0], "bits"):
        raise ValueError(
            f"argument '--plan': expected a plan whose default has one codec that compresses, and that one bits, got "
            f"{spell(base.default)}"
        )
    steps = read(gradients)
    before = _assign(base, steps[0])  # what is wrong with the rules is said before anything is measured
    candidates = [dataclasses.replace(found[0], bits=n) for n in sorted({*bits, found[0].bits})]
    measured = statistics(steps, candidates)
    adapted = base.adapt(measured, method=method, alpha=alpha)
    return adapted, describe(steps, measured, {"before": before, "adapted": _assign(adapted, steps[0])})


def read(path):
    """The steps of an .npz file, {leaf's path: gradient} each."""
    found = {}
    for key, leaf in _load(path).items():
        name, step = re.fullmatch("(.*?)(?:@([0-9]+))?", key, re.DOTALL).groups()
        arrays = found.setdefault(int(step or 0), {})
        if name in arrays:
            raise ValueError(
                f"{path}, array {key!r}: expected one array of a path in a step, got another of {name!r} in step "
                f"{int(step or 0)}"
            )
        if leaf.dtype not in DTYPES and leaf.dtype.kind not in "biuc":
            raise ValueError(
                f"{path}, array {key!r}: expected float32 or float16, or integers, got {leaf.dtype}; save it as "
                ".astype(numpy.float32)"
            )
        arrays[name] = leaf
    steps = [found[n] for n in sorted(found)]
    if not steps:
        raise ValueError(f"{path}: expected gradients, got none")
    types = [{name: (leaf.shape, leaf.dtype) for name, leaf in step.items()} for step in steps]
    for n, step in zip(sorted(found), types):
        if other := sorted(name for name, _ in step.items() ^ types[0].items()):
            raise ValueError(
                f"{path}: expected the same arrays in every step, but {other[0]!r} of step {n} is not as in step "
                f"{min(found)}"
            )
    return steps


def _load(path):
    try:
        with open(path, "rb") as stream, np.load(stream) as file:  # NumPy would leave a broken file open
            return {key: np.asarray(file[key]) for key in file}
    except (
        EOFError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ):  # TypeError: of a lone .npy np.load makes an array
        raise ValueError(
            f"{path}: expected an .npz file of numbers, as numpy.savez writes it, got another or a part of one"
        ) from None


def statistics(steps, codecs):
    measure = jax.jit(functools.partial(gradient_statistics, codecs=tuple(codecs)))
    return functools.reduce(
        operator.add, (measure(step, key=jax.random.fold_in(_KEY, i)) for i, step in enumerate(steps))
    )


def _assign(plan, step):
    """[(codec, of several by axis the one that compresses; why the leaf travels raw)]."""
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(step)[0])
    codecs, reasons = zip(*plan.assign("tune", "gradients", paths, leaves))
    codecs = [next(iter(compressing(codec)), Raw()) for codec in codecs]
    return [(codec, why or why_raw(leaf, [codec])) for codec, why, leaf in zip(codecs, reasons, leaves)]


def describe(steps, measured, plans):
    """Tables: what becomes of every leaf under the last of the plans, and of all of them under each. measured:
    statistics."""
    found = jax.tree_util.tree_flatten_with_path(steps[0])[0]
    names, leaves = [spell_path(path) for path, _ in found], [leaf for _, leaf in found]
    codecs, errors, norms = (
        list(measured.codecs),
        np.asarray(measured.errors, np.float64),
        np.asarray(measured.norms, np.float64),
    )
    used = dict.fromkeys(codec for plan in plans.values() for codec, why in plan if not why)
    if more := [codec for codec in used if codec not in codecs]:
        codecs, errors = codecs + more, np.hstack([errors, np.asarray(statistics(steps, more).errors, np.float64)])

    def numbers(i, codec, why):
        """(bytes, bytes uncompressed, squared error, squared norm)."""
        leaf = leaves[i]
        if why:
            return leaf.nbytes, leaf.nbytes, 0.0, 0.0
        row = measured.paths.index(names[i])
        return codec.wire_bytes(leaf.shape, leaf.dtype), leaf.nbytes, errors[row, codecs.index(codec)], norms[row]

    def spelled(sent, raw, error, norm):
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

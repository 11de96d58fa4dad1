"""A plan from saved gradients: python -m jaxcgx tune."""
import dataclasses
import functools
import math
import operator
import re

import jax
import numpy as np

from jaxcgx.adaptive import gradient_statistics
from jaxcgx.codecs.base import spell
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan, why_raw
from jaxcgx.plan.leaves import spell_path
from jaxcgx.table import table

_KEY = jax.random.key(0)


def tune(gradients, plan, method, alpha, bits):
    """(the plan adapted to the gradients of an .npz file, what to say about it). plan: the file of the one to adapt."""
    base = Plan.cgx() if plan is None else Plan.load(plan)
    uniform = _one(base.default)
    if not hasattr(uniform, "bits"):
        raise ValueError(f"argument 'plan': expected one whose default codec has bits, got {spell(uniform)}")
    steps = read(gradients)
    candidates = [dataclasses.replace(uniform, bits=n) for n in sorted({*bits, uniform.bits})]
    adapted = base.adapt(statistics(steps, candidates), method=method, alpha=alpha)
    return adapted, describe(base, adapted, steps)


def read(path):
    """The steps of an .npz file, {leaf's path: gradient} each."""
    found = {}
    with np.load(path) as arrays:
        for key in arrays:
            name, step = re.fullmatch("(.*?)(?:@([0-9]+))?", key, re.DOTALL).groups()
            found.setdefault(int(step or 0), {})[name] = leaf = arrays[key]
            if leaf.dtype.kind in "fV" and leaf.dtype not in DTYPES:  # V: what NumPy makes of bfloat16
                raise ValueError(f"{path}, array {key!r}: expected float32 or float16, got {leaf.dtype}; save it as "
                                 ".astype(numpy.float32)")
    steps = [found[n] for n in sorted(found)]
    if not steps:
        raise ValueError(f"{path}: expected gradients, got none")
    types = [{name: (leaf.shape, leaf.dtype) for name, leaf in step.items()} for step in steps]
    for n, step in zip(sorted(found), types):
        if other := sorted(name for name, _ in step.items() ^ types[0].items()):
            raise ValueError(f"{path}: expected the same arrays in every step, but {other[0]!r} of step {n} is not as in step "
                             f"{min(found)}")
    return steps


def statistics(steps, codecs):
    measure = jax.jit(functools.partial(gradient_statistics, codecs=tuple(codecs)))
    return functools.reduce(operator.add, (measure(step, key=jax.random.fold_in(_KEY, i)) for i, step in enumerate(steps)))


def describe(base, adapted, steps):
    """Tables: what becomes of every leaf, and of all of them, before and after."""
    found = jax.tree_util.tree_flatten_with_path(steps[0])[0]
    paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
    plans = {name: plan.assign("tune", "gradients", paths, leaves) for name, plan in (("before", base), ("adapted", adapted))}
    plans = {name: [(_one(codec), why or why_raw(leaf, [_one(codec)])) for (codec, why), leaf in zip(assigned, leaves)]
             for name, assigned in plans.items()}
    codecs = list(dict.fromkeys(codec for assigned in plans.values() for codec, why in assigned if not why))
    lost = statistics(steps, codecs)
    errors, norms = np.asarray(lost.errors, np.float64), np.asarray(lost.norms, np.float64)

    def numbers(i, codec, why):
        """(bytes, bytes uncompressed, squared error, squared norm)."""
        leaf = leaves[i]
        if why:
            return leaf.nbytes, leaf.nbytes, 0.0, 0.0
        row = lost.paths.index(spell_path(paths[i]))
        return codec.wire_bytes(leaf.shape, leaf.dtype), leaf.nbytes, errors[row, codecs.index(codec)], norms[row]

    def spelled(sent, raw, error, norm):
        return f"{sent:,}", f"{raw:,}", f"{raw / sent if sent else 1:.2f}", f"{math.sqrt(error / norm) if norm else 0:.4f}"

    rows = [(spell_path(paths[i]), "x".join(map(str, leaves[i].shape)) or "scalar", "Raw()" if why else spell(codec),
             *spelled(*numbers(i, codec, why)), why or "") for i, (codec, why) in enumerate(plans["adapted"])]
    totals = [(name, *spelled(*map(sum, zip(*(numbers(i, *found) for i, found in enumerate(assigned))))))
              for name, assigned in plans.items()]
    return "\n\n".join([table(("leaf", "shape", "codec", "bytes", "uncompressed", "ratio", "error", "raw because"), rows),
                         table(("plan", "bytes", "uncompressed", "ratio", "error"), totals),
                         "error: of one encoding, the root of its square over that of the gradient's, over all steps"])


def _one(codec):
    """Of codecs by axis the one that compresses."""
    return next((c for c in codec.values() if not c.raw), next(iter(codec.values()))) if isinstance(codec, dict) else codec

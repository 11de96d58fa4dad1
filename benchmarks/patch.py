"""Measures the lengths of patches of simulated training in bfloat16, and how fast they are made and applied.

    python benchmarks/patch.py [--out DIR]

Adam trains 2^24 float32 weights with random gradients. After each step the weights are rounded to bfloat16, and a patch
has what changed.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from kernels import ITERATIONS, Memcpy, measure
from report import RESULTS, Report, header, line, mark, median, rounded

import jaxcgx as cgx

SIZE, SCALE = 2**24, 0.02
GOALS = {1e-6: 90, 3e-6: 40, 1e-5: 17, 1e-4: 3.5}  # learning rate: how many times shorter than all weights
STEPS, COUNTED, REPEATS = 30, 3, 15
SHARE_GOAL = 0.3
BETA1, BETA2 = 0.9, 0.999
NOTES = f"""\
- Weights are normal with a deviation of {SCALE}, gradients are normal and independent. Adam has decays of {BETA1} and
  {BETA2}. Lengths are means over the last {COUNTED} of {STEPS} steps.
- changed: the share of the elements that a step changes. of these ±1: by one unit in the last place.
- shorter: the bytes of all weights over those of the patch.
- share: the time of a memcpy of all weights over that of the operation. The memcpy has a thread for each processor. It
  writes to memory that was used before. It is measured again in every repetition, right before the operation.
- Encode reads two trees. Apply makes a new one, on fresh pages, which the system must clear. In place, it reads its
  tree once more, before it changes anything. All compute the checksums of the old and of the new tree.
- copy: a memcpy to fresh pages, which is the least that an apply has to do.
"""


@functools.partial(jax.jit, donate_argnums=0)
def step(state, key):
    """Returns Adam's new state and update, for a rate of 1."""
    m, v, t = state
    gradient = jax.random.normal(key, (SIZE,))
    m, v, t = BETA1 * m + (1 - BETA1) * gradient, BETA2 * v + (1 - BETA2) * gradient**2, t + 1
    return (m, v, t), m / (1 - BETA1**t) / jnp.sqrt(v / (1 - BETA2**t))


def train(rates):
    """Yields {rate: (bfloat16 weights before a step, those after it)} of each step that counts."""
    first = jax.random.normal(jax.random.key(0), (SIZE,)) * SCALE
    weights, state = dict.fromkeys(rates, first), (jnp.zeros(SIZE), jnp.zeros(SIZE), jnp.zeros(()))
    published = lambda: {rate: np.asarray(w.astype(jnp.bfloat16)) for rate, w in weights.items()}
    for number in range(STEPS):
        before = published() if number >= STEPS - COUNTED else {}
        state, update = step(state, jax.random.fold_in(jax.random.key(1), number))
        weights = {rate: w - rate * update for rate, w in weights.items()}
        if before:
            after = published()
            yield {rate: (before[rate], after[rate]) for rate in rates}


def length(old, new):
    """Returns (how many times shorter a patch is, percent of the elements that changed, percent of these by ±1)."""
    patch = cgx.patch.encode(old, new)
    steps = np.abs(np.int32(new.view(np.int16)) - old.view(np.int16))
    changed = np.count_nonzero(steps)
    return new.nbytes / patch.nbytes, 100 * changed / SIZE, 100 * np.count_nonzero(steps == 1) / changed


def copied(old, memcpy):
    """Returns a copy on fresh pages, made by the threads of the memcpy."""
    new, threads = np.empty_like(old), len(memcpy.parts)
    parts = zip(np.array_split(new, threads), np.array_split(old, threads))
    list(memcpy.pool.map(lambda part: np.copyto(*part), parts))
    return new


def speeds(old, new, memcpy):
    """Yields (operation, its row) for the patch from one tree to another."""
    there, back, tree = cgx.patch.encode(old, new), cgx.patch.encode(new, old), old.copy()
    repeated = lambda function, *args: lambda: [function(*args) for _ in range(ITERATIONS)]
    operations = {
        "encode": repeated(cgx.patch.encode, old, new),
        "apply": repeated(cgx.patch.apply, old, there),
        "apply in place": lambda: [
            cgx.patch.apply(tree, back if number % 2 else there, donate=True) for number in range(ITERATIONS)
        ],
        "checksum": repeated(cgx.patch.checksum, old),
        "copy": repeated(copied, old, memcpy),
    }
    for name, operation in operations.items():
        times = measure([memcpy, operation], ITERATIONS, REPEATS)
        yield (
            name,
            dict(
                ms=median(times[:, 1]),
                share=median(times[:, 0] / times[:, 1]),
                ms_of_repetitions=rounded(times[:, 1]),
                memcpy_ms_of_repetitions=rounded(times[:, 0]),
            ),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the tables")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    report = Report("make bench-patch", REPEATS, elements=SIZE, lengths=[], speeds=[])
    found = {rate: [] for rate in GOALS}
    for trees in train(GOALS):
        for rate, (old, new) in trees.items():
            found[rate].append(length(old, new))
    report.show("", *header("rate", "changed (%)", "of these ±1 (%)", "shorter", "goal", ""))
    for rate, goal in GOALS.items():
        shorter, changed, ones = map(float, np.mean(found[rate], 0).round(2))
        row = dict(rate=f"{rate:g}", changed_percent=changed, ones_percent=ones, shorter=shorter, goal=goal)
        report.data["lengths"].append(row)
        report.show(line([row["rate"], f"{changed:.2f}", f"{ones:.1f}", f"{shorter:.1f}", goal, mark(shorter >= goal)]))
    memcpy = Memcpy(2 * SIZE, report.data["threads"])
    report.show("", *header("rate, operation", "ms", "memcpy (ms)", "share", "goal", ""))
    for rate, (old, new) in trees.items():
        for name, row in speeds(old, new, memcpy):
            goal = None if name in ("checksum", "copy") else SHARE_GOAL
            report.data["speeds"].append(dict(name=f"{rate:g}, {name}", **row, share_goal=goal))
            goals = ["", ""] if goal is None else [goal, mark(row["share"] >= goal)]
            of_memcpy = median(row["memcpy_ms_of_repetitions"])
            report.show(
                line([f"{rate:g}, {name}", f"{row['ms']:.1f}", f"{of_memcpy:.1f}", f"{row['share']:.2f}", *goals])
            )
    report.show("", *NOTES.splitlines())
    report.write(args.out, "patch")


if __name__ == "__main__":
    main()

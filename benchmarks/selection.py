"""Measures TopK on the CPU: encode with each selection, against jax.lax.top_k and against reading the numbers once.

    python benchmarks/selection.py [--repeats 9] [--size 64] [--out DIR]

Operations take turns in every repetition. Ratios are formed within a repetition, and the report has their medians.
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from report import RESULTS, Report, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

RATIOS = 0.001, 0.01
OVER_TOP_K, OF_READ = {("encode exact", 0.001): 20.0}, {("encode sampled", 0.001): 0.5, ("encode sampled", 0.01): 0.5}
CHARTS = [dict(table="rows", title="Of the elements", x="operation", y=["all_ms"], panel="ratio", log=True)]
NOTES = """\
- read: jnp.sum of the numbers under jit, which reads them once. It is the bound of an encode. The bound of an encode
  with feedback is three times that, because it reads two arrays and writes one. share: the bound over the time.
- top_k: jax.lax.top_k(jnp.abs(x), k) under jit, once for each ratio. It gives values and indices and encodes nothing.
- decode, reduce: they have no bound here. They write every element (reduce encoded: to a temporary array).
"""


def timed(run, *args):
    """Returns the seconds of a call, and its results."""
    start = time.perf_counter()
    results = jax.block_until_ready(run(*args))
    return time.perf_counter() - start, results


def operations(x, ratio, key):
    """Returns {name: seconds of a call}."""
    made = {}
    for select in ("exact", "sampled", "fitted"):
        codec = cgx.TopK(ratio, select=select)
        layout, drawn = Layout.of(codec, [x]), key if codec.stochastic else None
        plain = jax.jit(lambda x, layout=layout, drawn=drawn: ops.encode(layout, [x], drawn))
        fused = jax.jit(
            lambda x, r, layout=layout, drawn=drawn: ops.encode_fed(layout, [x], [r], drawn), donate_argnums=1
        )
        made[f"encode {select}"] = lambda plain=plain: timed(plain, x)[0]
        state = [jnp.zeros_like(x)]

        def with_feedback(fused=fused, state=state):
            seconds, (_, (state[0],)) = timed(fused, x, state[0])
            return seconds

        made[f"encode {select}, feedback"] = with_feedback
    layout = Layout.of(cgx.TopK(ratio), [x])
    payloads = jnp.concatenate([ops.encode(layout, [jnp.roll(x, 77 * r)]) for r in range(8)])
    decode = jax.jit(lambda payload: ops.decode(layout, payload))
    made["decode"] = lambda: timed(decode, payloads[:1])[0]
    for ranks in (2, 8):
        for name, reduce in (("", ops.reduce), (", encoded", ops.reduce_encoded)):
            run = jax.jit(functools.partial(reduce, layout))
            made[f"reduce {ranks}{name}"] = lambda run=run, ranks=ranks: timed(run, payloads[:ranks])[0]
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--size", type=int, default=64, help="MiB of float32")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    x = jnp.asarray(np.random.default_rng(0).standard_normal(args.size * 2**18, np.float32))
    key = jnp.array([1, 2], jnp.uint32)
    read = jax.jit(jnp.sum)
    report = Report("make bench-selection", repeats=args.repeats, size=args.size, rows=[], charts=CHARTS)
    report.show(
        "",
        f"{args.size} MiB of float32, normally distributed.",
        "",
        *header("operation", "sent", "ms", "x top_k", "goal", "", "share", "goal", ""),
    )
    for ratio in RATIOS:
        made = operations(x, ratio, key)
        k = cgx.TopK(ratio).capacity(x.size)
        top_k = jax.jit(lambda x, k=k: lax.top_k(jnp.abs(x), k))
        made = {"read": lambda: timed(read, x)[0], "top_k": lambda top_k=top_k: timed(top_k, x)[0], **made}
        times = {name: [] for name in made}
        for _ in range(args.repeats + 1):
            for name, run in made.items():
                run()  # Not timed: it sets memory and caches to the same state for all operations.
                times[name].append(1e3 * run())
        times = {name: ms[1:] for name, ms in times.items()}  # without the first call, which compiles
        for name, ms in times.items():
            row = dict(operation=name, ratio=ratio, ms=median(ms), all_ms=rounded(ms))
            cells = ["", "", "", "", "", ""]
            if name.startswith("encode"):
                reads = 3 if "feedback" in name else 1
                row["over_top_k"] = median(t / m for t, m in zip(times["top_k"], ms))
                row["share"] = median(reads * r / m for r, m in zip(times["read"], ms))
                goals = OVER_TOP_K.get((name, ratio)), OF_READ.get((name, ratio))
                cells = []
                for figure, goal in zip((row["over_top_k"], row["share"]), goals):
                    cells += [f"{figure:.2f}", *((f"{goal:g}", mark(figure >= goal)) if goal else ("", ""))]
            report.data["rows"].append(row)
            report.show(line([name, f"{ratio:.1%}", f"{row['ms']:.2f}", *cells]))
    report.show("", *NOTES.splitlines())
    report.write(args.out, "selection")


if __name__ == "__main__":
    main()

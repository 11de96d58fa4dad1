"""Measures the native operations on the CPU against the time that moving their bytes takes.

The bound of an operation is the time to read its inputs once and to write its outputs once, at the bandwidth of a
memcpy with as many threads, measured next to it. The share is the bound over the time of the operation. MaxMin is also
measured against the same arithmetic in plain jnp. Two more tables compare many small leaves with a large one, and show
the temporaries that XLA allocates.

    python benchmarks/kernels.py [--rows REGEX] [--repeats 9] [--size 64] [--kernels avx2] [--out DIR]
"""

import argparse
import concurrent.futures
import dataclasses
import math
import os
import pathlib
import re
import shlex
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from report import RESULTS, Report, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import Layout

BUCKET = 512
RANKS = 8
LEAVES, LEAF = 1_000, 10_000
SPEEDUP = 5.0  # goal: at least this much faster than jnp
LEAVES_RATIO = 1.5  # goal: many small leaves take at most this many times as long as a large one
ITERATIONS, LEAVES_ITERATIONS = 10, 200  # in one program (see Loop and LeavesLoop)

CODECS = {
    **{f"MaxMin {bits}": cgx.MaxMin(bits, BUCKET) for bits in range(1, 9)},
    "AbsMax 4": cgx.AbsMax(4, BUCKET),
    "AbsMax 8": cgx.AbsMax(8, BUCKET),
    "Float8 e4m3": cgx.Float8("e4m3", BUCKET),
    "Float8 e5m2": cgx.Float8("e5m2", BUCKET),
    **{f"Micro {name}": cgx.Micro(name) for name in ("nvfp4", "mxfp4", "mxfp8")},
    "Eden 2": cgx.Eden(2),
    "Eden 4": cgx.Eden(4),
    "MaxMin 4 rotated": cgx.MaxMin(4, BUCKET, rotate=True),
    "Cast bfloat16": cgx.Cast("bfloat16"),
    "Cast float16": cgx.Cast("float16"),
    "Sign": cgx.Sign(BUCKET),
    "ByteGrad": cgx.ByteGrad(),
    "Raw": cgx.Raw(),
}
STOCHASTIC = {  # they decode like the codecs of the same name above
    "MaxMin 4 stochastic": cgx.MaxMin(4, BUCKET, "stochastic"),
    "MaxMin 8 stochastic": cgx.MaxMin(8, BUCKET, "stochastic"),
    "Cast bfloat16 stochastic": cgx.Cast("bfloat16", "stochastic"),
}
ENCODE_GOALS = {
    **{name: 0.6 for name in CODECS if name not in ("Sign", "ByteGrad", "Micro nvfp4", "Raw", "MaxMin 4 rotated")},
    **dict.fromkeys(("MaxMin 2", "MaxMin 4", "MaxMin 8"), 0.85),
    **dict.fromkeys(("MaxMin 4 stochastic", "MaxMin 8 stochastic", "Eden 2", "Eden 4"), 0.5),
}
DECODE_GOAL, REDUCE_GOAL, FEEDBACK_GOAL, LOSSLESS_GOAL = 0.8, 0.35, 0.75, 0.4

CHARTS = [dict(table="rows", title="Share of the bound", x="name", y=["share"])]

NOTES = f"""\
- share: the bound over the time. The bound is the time to read every input once and to write every output once, at the
  bandwidth of a memcpy with as many threads. The memcpy is measured again in every repetition, right before the
  operation. Share and speed-up are formed within each repetition, and the table has their medians. An empty goal means
  that none was set.
- reduce: the sum of {RANKS} payloads, encoded again in the same pass. It is bound by arithmetic, not by memory: for 16
  values it does {RANKS} decodes of about 4 vector instructions each and one encode, on no more bytes than {RANKS + 1}
  payloads.
- encode and reduce with feedback: they read the residual and overwrite it in place.
- decode: AbsMax of other widths reads its codes as MaxMin does.
- A bucket of more than 2,048 elements is read twice, once for its range. ByteGrad's bucket is a whole leaf. The bound
  counts one reading.
- jnp: the same arithmetic in plain jnp, compiled by XLA, in the same loop, to and from one array of bytes. Decode of 8
  bits is one pass over memory in jnp, too, and memory bounds it there as well. So no kernel can be 5 times as fast.
"""


# Operations. Each returns a step from carry to carry, its first carry, and the bytes that it must move.


KEY = np.array([1, 2], np.uint32)  # of NumPy, because ranks that import this file set up their devices later


def encode(codec, leaves):
    layout = Layout.of(codec, leaves)
    carry = leaves, jnp.zeros((1, layout.chunk_bytes), jnp.uint8)
    return lambda leaves, _: (leaves, ops.encode(layout, leaves, KEY)), carry, nbytes(carry)


def decode(codec, leaves):
    layout = Layout.of(codec, leaves)
    carry = ops.encode(layout, leaves, KEY), leaves
    return lambda payload, _: (payload, ops.decode(layout, payload)), carry, nbytes(carry)


def reduce(codec, leaves):
    layout = Layout.of(codec, leaves)
    payload = ops.encode(layout, leaves, KEY)
    carry = jnp.tile(payload, (RANKS, 1)), payload[0]
    return lambda payloads, _: (payloads, ops.reduce_encoded(layout, payloads, key=KEY)), carry, nbytes(carry)


def feedback(codec, leaves):
    layout = Layout.of(codec, leaves)
    residuals = [jnp.zeros_like(x) for x in leaves]

    def step(leaves, residuals, _):
        payload, residuals = ops.encode_fed(layout, leaves, residuals, KEY)
        return leaves, residuals, payload

    carry = leaves, residuals, jnp.zeros((1, layout.chunk_bytes), jnp.uint8)
    return step, carry, nbytes(carry) + nbytes(residuals)  # residuals are read and written


def reduce_feedback(codec, leaves):
    layout = Layout.of(codec, leaves)
    payload = ops.encode(layout, leaves, KEY)
    residuals = [jnp.zeros_like(x) for x in leaves]

    def step(payloads, residuals, _):
        summed, residuals = ops.reduce_fed(layout, payloads, residuals, key=KEY)
        return payloads, residuals, summed

    carry = jnp.tile(payload, (RANKS, 1)), residuals, payload[0]
    return step, carry, nbytes(carry) + nbytes(residuals)  # residuals are read and written


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


# The same in plain jnp, for 1, 2, 4 or 8 bits, in the form that XLA compiles best among those that were tried. It packs
# codes by parts of a bucket, and ignores NaN and denormals. The result is one array of bytes, because one array must
# travel.


def plain_encode(x, bits):
    x = x.reshape(-1, BUCKET)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    unit = (high - low) / (2**bits - 1)
    codes = jnp.round((x - low) * jnp.where(unit > 0, 1 / unit, 0)).astype(jnp.uint8)
    parts = jnp.split(codes, 8 // bits, axis=1)
    packed = parts[0]
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (i * bits)
    metadata = [lax.bitcast_convert_type(m, jnp.uint8).reshape(-1) for m in (low, unit)]
    return jnp.concatenate([*metadata, packed.reshape(-1)])


def plain_decode(payload, bits):
    buckets = payload.size // (8 + BUCKET * bits // 8)
    low, unit = lax.bitcast_convert_type(payload[: 8 * buckets].reshape(2, buckets, 1, 4), jnp.float32)
    packed = payload[8 * buckets :].reshape(buckets, -1)
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return (low + unit * jnp.concatenate(parts, axis=1)).reshape(-1)


def plain_step(operation, bits, x):
    """Returns a step in jnp, and its first carry."""
    payload = jax.jit(plain_encode, static_argnums=1)(x, bits)
    if operation is encode:
        return lambda x, _: (x, plain_encode(x, bits)), (x, payload)
    if operation is decode:
        return lambda payload, _: (payload, plain_decode(payload, bits)), (payload, x)
    if operation is reduce:

        def step(payloads, _):
            total = sum(plain_decode(payloads[rank], bits) for rank in range(RANKS))
            return payloads, plain_encode(total, bits)

        return step, (jnp.stack([payload] * RANKS), payload)

    def step(x, residual, _):
        x_and_residual = x + residual
        payload = plain_encode(x_and_residual, bits)
        return x, x_and_residual - plain_decode(payload, bits), payload

    return step, (x, jnp.zeros_like(x), payload)


# Measuring


def repeat(step, carry, iterations):
    """Runs the step `iterations` times. The barriers hide from XLA that iterations repeat each other."""

    def body(_, carry):
        return lax.optimization_barrier(step(*lax.optimization_barrier(carry)))

    return lax.fori_loop(0, iterations, body, carry)


class Loop:
    """A step, many times in one compiled program.

    A single jitted call would mostly measure how the operating system provides the pages of a fresh output of 64 MiB.
    In a loop with donated carries every iteration writes to the same pages, as training does.
    """

    def __init__(self, step, carry, iterations=ITERATIONS):
        program = jax.jit(lambda carry: repeat(step, carry, iterations), donate_argnums=0)
        self.carry = jax.tree.map(jnp.array, carry)  # copies: a donated array must have no other user
        self.compiled = program.lower(self.carry).compile()

    def __call__(self):
        self.carry = jax.block_until_ready(self.compiled(self.carry))


class LeavesLoop:
    """An operation, LEAVES_ITERATIONS times, on leaves that the program makes itself, as it makes gradients.

    If leaves were arguments, the result would depend on where they were allocated, and JAX would handle each of them in
    every call.
    """

    def __init__(self, operation, codec, leaves):
        source = Layout.of(cgx.Raw(), leaves)

        def program(payload):
            step, carry, _ = operation(codec, ops.decode(source, payload))
            return jax.tree.leaves(repeat(step, carry, LEAVES_ITERATIONS))[-1].ravel()[
                0
            ]  # only one number leaves the program

        self.payload = ops.encode(source, leaves)
        self.compiled = jax.jit(program).lower(self.payload).compile()

    def __call__(self):
        jax.block_until_ready(self.compiled(self.payload))


def check_copies(loop):
    """Returns the loop. It is an error if XLA copies its carries, because the copies would be measured, too."""
    # Copies before the loop are made only once, so they don't matter.
    inside, _ = loop.compiled.as_text().split("\nENTRY ")
    for shape in re.findall(r" = \w+\[([\d,]+)\]\S* copy\(", inside):
        if math.prod(map(int, shape.split(","))) >= LEAF:
            raise RuntimeError(f"XLA copies an array of shape [{shape}] in the loop that is measured")
    return loop


class Memcpy:
    """Copies `size` bytes ITERATIONS times. Each thread copies its part."""

    def __init__(self, size, threads):
        source = np.ones(size, np.uint8)
        self.parts = list(zip(np.array_split(np.zeros_like(source) + 1, threads), np.array_split(source, threads)))
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)

    def __call__(self):
        for _ in range(ITERATIONS):
            list(self.pool.map(lambda part: np.copyto(*part), self.parts))


def measure(functions, iterations, repeats):
    """Returns the milliseconds of an iteration, [repetition, function].

    Functions take turns, because machines drift.
    """
    for function in functions:
        function()
    times = np.empty((repeats, len(functions)))
    for row in times:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            row[i] = (time.perf_counter() - start) / iterations * 1e3
    return times


# The tables


@dataclasses.dataclass
class Row:
    operation: callable
    name: str
    codec: cgx.Codec
    goal: float | None
    plain: bool = False
    dtype: str = "float32"

    def run(self, size, memcpy, repeats):
        x = jnp.asarray(np.random.default_rng(0).standard_normal(size // 4, np.float32), self.dtype)
        step, carry, moved = self.operation(self.codec, [x])
        functions = [memcpy, check_copies(Loop(step, carry))]
        if self.plain:
            functions.append(Loop(*plain_step(self.operation, self.codec.bits, x)))
        times = measure(functions, ITERATIONS, repeats)
        bound = moved / (2 * size) * times[:, 0]  # a memcpy reads `size` and writes `size`
        result = dict(
            name=self.name,
            bytes=moved,
            ms=median(times[:, 1]),
            memcpy_gb_per_s=median(2 * size / times[:, 0] / 1e6),
            bound_ms=median(bound),
            share=median(bound / times[:, 1]),
            share_goal=self.goal,
            ms_of_repetitions=rounded(times[:, 1]),
            memcpy_ms_of_repetitions=rounded(times[:, 0]),
        )
        if self.plain:
            result |= dict(
                jnp_ms=median(times[:, 2]),
                speedup=median(times[:, 2] / times[:, 1]),
                speedup_goal=SPEEDUP,
                jnp_ms_of_repetitions=rounded(times[:, 2]),
            )
        return result


def all_rows():
    plain = "MaxMin 2", "MaxMin 4", "MaxMin 8"
    rows = [
        Row(encode, f"encode {name}", codec, ENCODE_GOALS.get(name), name in plain)
        for name, codec in (CODECS | STOCHASTIC).items()
    ]
    rows += [Row(encode, "encode MaxMin 8 of bfloat16", CODECS["MaxMin 8"], None, dtype="bfloat16")]
    rows += [Row(decode, f"decode {name}", codec, DECODE_GOAL, name in plain) for name, codec in CODECS.items()]
    rows += [Row(decode, "decode MaxMin 8 to bfloat16", CODECS["MaxMin 8"], DECODE_GOAL, dtype="bfloat16")]
    rows += [
        Row(reduce, f"reduce {name}", CODECS[name], REDUCE_GOAL, name in plain) for name in (*plain, "Float8 e4m3")
    ]
    rows += [
        Row(operation, f"{operation.__name__} Lossless of {dtype}", cgx.Lossless(), goal, dtype=dtype)
        for operation, goal in ((encode, LOSSLESS_GOAL), (decode, LOSSLESS_GOAL), (reduce, None))
        for dtype in ("float32", "bfloat16")
    ]
    rows += [Row(reduce_feedback, "reduce with feedback MaxMin 4", CODECS["MaxMin 4"], None)]
    rows += [Row(feedback, f"encode with feedback {name}", CODECS[name], FEEDBACK_GOAL, True) for name in plain]
    for name in ("Eden 4", "MaxMin 4 rotated", "Micro nvfp4", "Micro mxfp4", "Micro mxfp8"):
        rows += [Row(reduce, f"reduce {name}", CODECS[name], None)]
        rows += [Row(feedback, f"encode with feedback {name}", CODECS[name], None)]
    return rows


def run_leaves(name, operation, repeats):
    """Measures many small leaves in one call against one leaf with as many elements."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(LEAVES * LEAF, np.float32))
    loops = [
        check_copies(LeavesLoop(operation, CODECS["MaxMin 4"], leaves))
        for leaves in ([x], list(x.reshape(LEAVES, LEAF)))
    ]
    times = measure(loops, LEAVES_ITERATIONS, repeats)
    return dict(
        name=name,
        one_ms=median(times[:, 0]),
        many_ms=median(times[:, 1]),
        ratio=median(times[:, 1] / times[:, 0]),
        ratio_goal=LEAVES_RATIO,
        one_ms_of_repetitions=rounded(times[:, 0]),
        many_ms_of_repetitions=rounded(times[:, 1]),
    )


def run_temporaries(name, operation, size):
    """Returns the bytes that XLA allocates besides arguments and results, if the operation is a separate program."""
    x = jax.ShapeDtypeStruct((size // 4,), jnp.float32)
    layout = Layout.of(CODECS["MaxMin 4"], [x])
    payload = jax.ShapeDtypeStruct((1, layout.chunk_bytes), jnp.uint8)
    payloads = jax.ShapeDtypeStruct((RANKS, layout.chunk_bytes), jnp.uint8)
    program = {
        encode: lambda: jax.jit(lambda x: ops.encode(layout, [x])).lower(x),
        decode: lambda: jax.jit(lambda payload: ops.decode(layout, payload)).lower(payload),
        reduce: lambda: jax.jit(lambda payloads: ops.reduce_encoded(layout, payloads, key=KEY)).lower(payloads),
        feedback: lambda: jax.jit(lambda x, r: ops.encode_fed(layout, [x], [r]), donate_argnums=1).lower(x, x),
    }[operation]()
    return dict(
        name=name,
        temporary_bytes=program.compile().memory_analysis().temp_size_in_bytes,
        payload_bytes=layout.chunk_bytes,
    )


def row_line(r):
    goal = ("", "") if r["share_goal"] is None else (f"{r['share_goal']:.2f}", mark(r["share"] >= r["share_goal"]))
    plain = (
        (f"{r['jnp_ms']:.2f}", f"{r['speedup']:.1f}", mark(r["speedup"] >= SPEEDUP)) if "speedup" in r else ("",) * 3
    )
    return line(
        [
            r["name"],
            f"{r['memcpy_gb_per_s']:.1f}",
            f"{r['bound_ms']:.2f}",
            f"{r['ms']:.2f}",
            f"{r['share']:.3f}",
            *goal,
            *plain,
        ]
    )


def leaves_line(r):
    return line(
        [
            r["name"],
            f"{r['one_ms']:.2f}",
            f"{r['many_ms']:.2f}",
            f"{r['ratio']:.2f}",
            f"{LEAVES_RATIO}",
            mark(r["ratio"] <= LEAVES_RATIO),
        ]
    )


def temporaries_line(r):
    return line(
        [
            r["name"],
            str(r["temporary_bytes"]),
            str(r["payload_bytes"]),
            mark(r["temporary_bytes"] <= r["payload_bytes"]),
        ]
    )


def parse():
    parser = argparse.ArgumentParser(description="Native operations against the time that moving their bytes takes.")
    parser.add_argument("--rows", metavar="REGEX", help="only the rows whose names match")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="repetitions of each row (default: 9)")
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="float32 input in MiB (default: 64)")
    parser.add_argument(
        "--kernels", metavar="NAME", help="avx512, avx2 or portable (default: the best the processor runs)"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results, but nowhere when other options are given)",
    )
    args = parser.parse_args()
    if args.repeats < 1 or args.size < 1:
        parser.error("--repeats and --size: expected at least 1")
    if registration.REFERENCE:
        parser.error("JAXCGX_REFERENCE is set: there are no kernels to measure")
    if args.kernels:
        try:
            registration.MODULE.select_kernels(args.kernels)
        except ValueError as error:
            parser.error(f"--kernels: {error}")
    # The path of --out doesn't matter to a reader of the results.
    given = [
        f"--{name}={value}" for name, value in vars(args).items() if name != "out" and value != parser.get_default(name)
    ]
    args.command = shlex.join(["python", "benchmarks/kernels.py", *given]) if given else "make bench"
    args.out = args.out or (None if given else RESULTS)
    return args


def main():
    args = parse()
    jax.config.update("jax_platforms", "cpu")
    wanted = re.compile(args.rows or "")
    size = args.size << 20
    report = Report(
        args.command,
        args.repeats,
        size_bytes=size,
        bucket_size=BUCKET,
        ranks=RANKS,
        iterations=ITERATIONS,
        leaves_iterations=LEAVES_ITERATIONS,
        charts=CHARTS,
    )
    data = report.data
    data.update(rows=[], leaves=[], temporaries=[])

    def table(title, key, head, to_line, jobs):
        jobs = [(name, job) for name, job in jobs if wanted.search(name)]
        if not jobs:
            return
        report.show("", title, "", *header(*head))
        for _, job in jobs:
            data[key].append(job())
            report.show(to_line(data[key][-1]))

    memcpy = Memcpy(size, len(os.sched_getaffinity(0)))
    table(
        f"{args.size} MiB of float32, buckets of {BUCKET}; reduce: {RANKS} payloads of it.",
        "rows",
        ("operation", "memcpy GB/s", "bound ms", "ms", "share", "goal", "", "jnp ms", "speed-up", f"goal {SPEEDUP:g}"),
        row_line,
        [(row.name, lambda row=row: row.run(size, memcpy, args.repeats)) for row in all_rows()],
    )
    if data["rows"]:
        report.show("", *NOTES.splitlines())
    table(
        f"{LEAVES:,} leaves of {LEAF:,} elements in one call against one leaf of {LEAVES * LEAF:,}, MaxMin 4.",
        "leaves",
        ("operation", "one ms", f"{LEAVES:,} ms", "ratio", "at most", ""),
        leaves_line,
        [
            (name, lambda name=name, operation=operation: run_leaves(name, operation, args.repeats))
            for name, operation in (
                ("leaves: encode", encode),
                ("leaves: decode", decode),
                ("leaves: encode with feedback", feedback),
            )
        ],
    )
    table(
        "Bytes that XLA allocates besides arguments and results, MaxMin 4: no more than the wire.",
        "temporaries",
        ("operation", "bytes", "payload", ""),
        temporaries_line,
        [
            (name, lambda name=name, operation=operation: run_temporaries(name, operation, size))
            for name, operation in (
                ("temporaries: encode", encode),
                ("temporaries: decode", decode),
                ("temporaries: reduce", reduce),
                ("temporaries: encode with feedback", feedback),
            )
        ],
    )
    if not (data["rows"] or data["leaves"] or data["temporaries"]):
        sys.exit(f"kernels.py: no row matches {args.rows!r}")
    if args.out:
        report.write(args.out, f"cpu-kernels-{data['native']['kernels']}")


if __name__ == "__main__":
    main()

"""Measures the native operations on a GPU against the time that a device-to-device copy needs to move their bytes.

The method is the same as on the CPU (kernels.py): compiled loops, copy and operation in turns, and the share formed
within each turn. An input is far larger than the L2 cache. Small leaves come in several sets, which take turns and
together are also larger. Other quantizers are measured if their packages are installed, with the bytes that their own
formats must move. The file that --out names is written after every row, and a run that was interrupted continues there.

    python benchmarks/gpu_kernels.py [--rows REGEX] [--repeats 9] [--size 1024] [--out FILE.json]
"""

import os

# All calls in a loop's body become one CUDA graph. Otherwise, with a thousand leaves, the time of the host would count.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"

import argparse
import ctypes
import functools
import json
import pathlib
import re
import shlex
import sys

import jax
import jax.numpy as jnp
import kernels
import numpy as np
from kernels import BUCKET, RANKS, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import Layout
from jaxcgx.report import results

ITERATIONS = 50
LEAVES, LEAF = 1_000, 16_384  # 64 MiB of float32
PART = 2**24  # elements, 64 MiB: the smaller input of TopK
SETS = 4  # sets of leaves: 256 MiB

NOTES = f"""\
- share: the time to move the bytes (every input read once, every output written once) at the bandwidth of a
  device-to-device copy measured in the same turn, over the time. Medians of the turns.
- reduce: the sum of {RANKS} payloads, encoded again in the same pass. It is bound by arithmetic.
- TopK: {PART:,} elements where the row says 16 M. Exact selection reads its input twice. Sampled selection reads it
  twice with feedback only. The share counts one reading. reduce: the largest elements of the sum are selected again.
- leaves: {LEAVES:,} leaves of {LEAF:,} elements in one launch, {SETS} sets of them in turn.
- The other quantizers write formats of their own. Their share uses the bytes that these formats must move.
"""


class Copy:
    """Copies `size` bytes ITERATIONS times from device to device by the driver, as cudaMemcpy does."""

    def __init__(self, size):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.arrays = jax.block_until_ready([jnp.full(size, i, jnp.uint8) for i in range(2)])
        self.pointers = [ctypes.c_uint64(a.unsafe_buffer_pointer()) for a in self.arrays]
        self.size = ctypes.c_size_t(size)
        context, device = ctypes.c_void_p(), ctypes.c_int(self.arrays[0].device.local_hardware_id)
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # XLA's context
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *args):
        if error := getattr(self.driver, name)(*args):
            raise RuntimeError(f"{name} failed with CUDA error {error}")

    def __call__(self):
        for _ in range(ITERATIONS):
            self.call("cuMemcpyDtoDAsync_v2", *self.pointers, self.size, ctypes.c_void_p())
        self.call("cuCtxSynchronize")


def loop(operation, codec, x):
    step, carry, moved = operation(codec, [x])
    return kernels.check_copies(kernels.Loop(step, carry, ITERATIONS)), moved, 1


def part_loop(operation, codec, x):
    return loop(operation, codec, x[:PART])


def leaves_loop(operation, codec, _):
    """The operation on each of SETS sets of leaves, in one program that makes the sets (see kernels.LeavesLoop)."""
    source = Layout(cgx.Raw(), ((LEAF,),) * LEAVES, ("float32",) * LEAVES)
    coded = Layout(codec, source.shapes, source.dtypes)
    sets = [
        jnp.asarray(np.random.default_rng(i).integers(0, 2**30, source.chunk_bytes // 4, np.uint32))
        for i in range(SETS)
    ]

    def program(sets):
        steps, carries = [], []
        for words in sets:
            payload = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(1, -1)
            step, carry, _ = operation(codec, ops.decode(source, payload))
            steps.append(step)
            carries.append(carry)
        each = lambda *carries: tuple(jax.lax.optimization_barrier(step(*carry)) for step, carry in zip(steps, carries))
        # The result takes a number of each set. Without it, XLA would drop the set.
        return [jax.tree.leaves(carry)[-1].ravel()[0] for carry in kernels.repeat(each, tuple(carries), ITERATIONS)]

    compiled = jax.jit(program).lower(sets).compile()
    return lambda: jax.block_until_ready(compiled(sets)), source.chunk_bytes + coded.chunk_bytes, SETS


def rows():
    """Returns {name: (function that makes a loop, operation, codec, dtype, goal, the same in jnp)}."""
    maxmin = {bits: cgx.MaxMin(bits, BUCKET) for bits in (2, 4, 8)}
    table = {}
    for bits, codec in maxmin.items():
        name, goal = f"MaxMin {bits}", bits != 2
        stochastic = cgx.MaxMin(bits, BUCKET, "stochastic")
        table[f"encode {name}"] = loop, kernels.encode, codec, "float32", 0.9 if goal else None
        table[f"encode {name} stochastic"] = loop, kernels.encode, stochastic, "float32", 0.8 if goal else None
        table[f"encode with feedback {name}"] = loop, kernels.feedback, codec, "float32", 0.9
        table[f"decode {name}"] = loop, kernels.decode, codec, "float32", 0.9
        table[f"reduce {name}"] = loop, kernels.reduce, codec, "float32", 0.6
    table["encode MaxMin 8 of bfloat16"] = loop, kernels.encode, maxmin[8], "bfloat16", 0.85
    table["decode MaxMin 8 to bfloat16"] = loop, kernels.decode, maxmin[8], "bfloat16", 0.9
    for name in ("AbsMax 8", "Float8 e4m3", "Cast bfloat16", "Sign", "ByteGrad"):
        table[f"encode {name}"] = loop, kernels.encode, kernels.CODECS[name], "float32", None
        table[f"decode {name}"] = loop, kernels.decode, kernels.CODECS[name], "float32", 0.9
    micro = "Micro nvfp4", "Micro mxfp4", "Micro mxfp8"
    others = {name: kernels.CODECS[name] for name in ("Eden 4", "MaxMin 4 rotated", *micro)}
    for name, codec in (others | {"Lossless": cgx.Lossless()}).items():
        for operation in (kernels.encode, kernels.decode):
            table[f"{operation.__name__} {name}"] = loop, operation, codec, "float32", None
    for ratio in (0.01, 0.001):
        for select, goal in (("exact", 0.35), ("sampled", 0.7), ("fitted", None)):
            codec = cgx.TopK(ratio, select=select)
            table[f"encode TopK {ratio} {select}"] = loop, kernels.encode, codec, "float32", None
            table[f"16 M: encode TopK {ratio} {select}"] = part_loop, kernels.encode, codec, "float32", goal
        top = cgx.TopK(ratio, pull="top")
        for name, operation in (
            ("encode with feedback", kernels.feedback),
            ("decode", kernels.decode),
            ("reduce", kernels.reduce),
        ):
            table[f"{name} TopK {ratio}"] = loop, operation, top, "float32", None
    table["leaves: encode TopK 0.01 sampled"] = (
        leaves_loop,
        kernels.encode,
        cgx.TopK(0.01, select="sampled"),
        "float32",
        None,
    )
    table["leaves: encode MaxMin 4"] = leaves_loop, kernels.encode, maxmin[4], "float32", 0.6
    table["leaves: decode MaxMin 4"] = leaves_loop, kernels.decode, maxmin[4], "float32", 0.6
    return table


# Other quantizers. Each function takes the number of float32 elements. It returns a function that quantizes once, and
# the bytes that it must move.


def torch_input(n):
    import torch

    return torch, torch.randn(n, device="cuda")


def bitsandbytes_8(n):
    _, x = torch_input(n)
    from bitsandbytes import functional

    return lambda: functional.quantize_blockwise(x, blocksize=BUCKET), 5 * n + 4 * n // BUCKET


def bitsandbytes_4(n):
    _, x = torch_input(n)
    from bitsandbytes import functional

    return lambda: functional.quantize_4bit(x, blocksize=BUCKET, quant_type="fp4"), 4.5 * n + 4 * n // BUCKET


def torchao_fp8(n):
    torch, x = torch_input(n)
    try:
        from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant as quantize
    except ImportError:
        from torchao.prototype.blockwise_fp8_inference.blockwise_quantization import fp8_blockwise_act_quant as quantize
    x = x.reshape(-1, 4096).to(torch.bfloat16)
    return lambda: quantize(x, 128), 3 * n + 4 * n // 128


def transformer_engine_fp8(n):
    torch, x = torch_input(n)
    import transformer_engine.pytorch  # noqa: F401  (loads transformer_engine_torch)
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1)
    x = x.reshape(-1, 4096).to(torch.bfloat16)
    return lambda: quantizer(x), 3 * n + 4 * n // 128


def triton_maxmin_4(n):
    """The obvious kernel: one program per bucket, which packs the bucket's halves into nibbles."""
    torch, x = torch_input(n)
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, codes, meta, HALF: tl.constexpr):
        bucket = tl.program_id(0)
        at = tl.arange(0, HALF)
        a, b = tl.load(x + bucket * 2 * HALF + at), tl.load(x + bucket * 2 * HALF + HALF + at)
        low = tl.minimum(tl.min(a, 0), tl.min(b, 0))
        unit = (tl.maximum(tl.max(a, 0), tl.max(b, 0)) - low) / 15
        inverse = tl.where(unit > 0, 1 / unit, 0)
        first, second = ((a - low) * inverse + 0.5).to(tl.uint8), ((b - low) * inverse + 0.5).to(tl.uint8)
        tl.store(codes + bucket * HALF + at, first | (second << 4))
        tl.store(meta + bucket * 2, low)
        tl.store(meta + bucket * 2 + 1, unit)

    codes = torch.empty(n // 2, dtype=torch.uint8, device="cuda")
    meta = torch.empty(n // BUCKET * 2, device="cuda")
    return lambda: kernel[(n // BUCKET,)](x, codes, meta, HALF=BUCKET // 2), 4.5 * n + 8 * n // BUCKET


def torch_loop(make, n):
    import torch

    once, moved = make(n)

    def run():
        for _ in range(ITERATIONS):
            once()
        torch.cuda.synchronize()

    run()
    return run, moved


def jnp_loop(operation, bits, n):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(n, np.float32))
    return kernels.Loop(*kernels.plain_step(operation, bits, x), ITERATIONS), operation(cgx.MaxMin(bits, BUCKET), [x])[
        2
    ]


def rivals():
    table = {
        "bitsandbytes: 8 bits, blocks of 512": functools.partial(torch_loop, bitsandbytes_8),
        "bitsandbytes: fp4, blocks of 512": functools.partial(torch_loop, bitsandbytes_4),
        "torchao: bf16 to fp8, blocks of 128": functools.partial(torch_loop, torchao_fp8),
        "TransformerEngine: bf16 to fp8, blocks of 128": functools.partial(torch_loop, transformer_engine_fp8),
        "Triton: encode MaxMin 4": functools.partial(torch_loop, triton_maxmin_4),
    }
    for operation in (kernels.encode, kernels.decode, kernels.reduce, kernels.feedback):
        for bits in (4, 8):
            name = {"feedback": "encode with feedback"}.get(operation.__name__, operation.__name__)
            table[f"jnp: {name} MaxMin {bits}"] = functools.partial(jnp_loop, operation, bits)
    return table


# Measuring and showing


def measured(copy, copied, run, moved, sets, repeats):
    """Returns the figures of `run`.

    `run` moves `moved` bytes `sets` times per iteration. A copy moves `copied` bytes.
    """
    times = kernels.measure([copy, run], ITERATIONS, repeats)
    ms = times[:, 1] / sets
    return dict(
        bytes=int(moved),
        ms=median(ms),
        copy_gb_per_s=median(2 * copied / times[:, 0] / 1e6),
        share=median(moved / (2 * copied) * times[:, 0] / ms),
        ms_of_repetitions=rounded(ms),
        copy_ms_of_repetitions=rounded(times[:, 0]),
    )


def lines(data):
    """Returns the tables of the measured data."""
    out = [*kernels.header("operation", "copy GB/s", "ms", "GB/s", "share", "goal", "")] if data["rows"] else []
    missing = lambda r, cells: f"| {r['name']} | not measured: {r['why_not']} |" + " |" * cells
    for r in data["rows"]:
        if "why_not" in r:
            out.append(missing(r, 5))
            continue
        goal = ("", "") if r["goal"] is None else (f"{r['goal']:.2f}", mark(r["share"] >= r["goal"]))
        out.append(
            kernels.line(
                [
                    r["name"],
                    f"{r['copy_gb_per_s']:.0f}",
                    f"{r['ms']:.4f}",
                    f"{r['bytes'] / r['ms'] / 1e6:.0f}",
                    f"{r['share']:.3f}",
                    *goal,
                ]
            )
        )
    if data["rivals"]:
        out += [""] * bool(out) + kernels.header("other quantizers", "copy GB/s", "ms", "GB/s", "share")
    for r in data["rivals"]:
        if "why_not" in r:
            out.append(missing(r, 3))
        else:
            out.append(
                kernels.line(
                    [
                        r["name"],
                        f"{r['copy_gb_per_s']:.0f}",
                        f"{r['ms']:.4f}",
                        f"{r['bytes'] / r['ms'] / 1e6:.0f}",
                        f"{r['share']:.3f}",
                    ]
                )
            )
    return out


def reason(error):
    """Returns the reason why something was not measured, in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}".replace("|", "/")


def attempt(row, run):
    """Returns `row` with the figures that `run` returns, or with the reason why there are none."""
    try:
        return row | run()
    except Exception as error:  # a row that can't run says why, and the next ones run
        return row | dict(why_not=reason(error))


def begin(out, new):
    """Returns the data to continue with.

    That is the data of the file, if it was measured with the same settings on the same device.
    """
    data = json.loads(out.read_text()) if out and out.exists() else {}
    alike = all(data.get(key) == value for key, value in new.items() if key not in ("command", "date"))
    return data | new | ({} if alike else dict(rows=[], rivals=[]))


def measure(data, jobs, write):
    """Measures the jobs that the data lacks, and writes the data before and after each job.

    A job is (rows or rivals, row, function). `now` is the row to keep if the process dies, and `left` has the names of
    the jobs that are left.
    """
    done = {row["name"] for row in data["rows"] + data["rivals"]}
    left = [job for job in jobs if job[1]["name"] not in done]
    while left:
        kind, row, run = left[0]
        data["left"] = [row["name"] for _, row, _ in left]
        data["now"] = dict(kind=kind, row=row | dict(why_not="it did not end"))
        write()
        data[kind].append(attempt(row, run))
        print(row["name"], data[kind][-1].get("share", "was not measured"), flush=True)
        left.pop(0)
    data |= dict(left=[], now=None)
    write()


def parse():
    parser = argparse.ArgumentParser(
        description="Native operations on a GPU against the time that copying their bytes takes."
    )
    parser.add_argument("--rows", metavar="REGEX", default="", help="only the rows whose names match")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="repetitions of each row (default: 9)")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="float32 input in MiB (default: 1024)")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="where the data is written (default: nowhere)")
    args = parser.parse_args()
    if args.repeats < 1 or args.size < 1:
        parser.error("--repeats and --size: expected at least 1")
    return args


def main():
    args = parse()
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        sys.exit(f"gpu_kernels.py: no GPU: {error}")
    if not (registration.MODULE and registration.MODULE.build_info()["cuda"]):
        sys.exit("gpu_kernels.py: this build of jaxcgx has no CUDA half: see `python -m jaxcgx doctor`")
    size = args.size << 20
    data = results.origin(shlex.join(["python", "benchmarks/gpu_kernels.py", *sys.argv[1:]])) | dict(
        device=device.device_kind,
        size_bytes=size,
        repeats=args.repeats,
        iterations=ITERATIONS,
        bucket_size=BUCKET,
        notes=[
            f"{args.size} MiB of float32 (half of it for bfloat16), buckets of {BUCKET}. Medians of {args.repeats} "
            "repetitions.",
            "",
            *NOTES.splitlines(),
        ],
    )
    data = begin(args.out, data)
    copy = Copy(size)

    @functools.cache  # making it takes seconds
    def x(dtype):
        return jnp.asarray(np.random.default_rng(0).standard_normal(size // 4, np.float32), dtype)

    def own(make, operation, codec, dtype):
        return measured(copy, size, *make(operation, codec, x(dtype)), args.repeats)

    def rival(make):
        return measured(copy, size, *make(size // 4), 1, args.repeats)

    def write():
        data["table"] = lines(data)
        if args.out:
            results.write(new := args.out.with_suffix(".new"), data)
            new.replace(args.out)

    jobs = [
        *(
            ("rows", dict(name=name, goal=goal), functools.partial(own, *what))
            for name, (*what, goal) in rows().items()
        ),
        *(("rivals", dict(name=name), functools.partial(rival, make)) for name, make in rivals().items()),
    ]
    measure(data, [job for job in jobs if re.search(args.rows, job[1]["name"])], write)
    print("", *data["table"], "", *data["notes"], sep="\n")
    if missing := [r["name"] for r in data["rows"] if "why_not" in r]:
        sys.exit(f"gpu_kernels.py: not measured: {', '.join(missing)}")


if __name__ == "__main__":
    main()

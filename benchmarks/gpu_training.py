"""Measures training steps of two processes on one GPU, whose links are slow: over NCCL and over Tcp.

    python benchmarks/gpu_training.py [--small] [--models REGEX] [--methods REGEX] [--rates MBIT ...] [--repeats 3]
        [--out DIR]

The processes are in the hosts of a lab (jaxcgx.lab), which need root. Where there can be none, jaxcgx paces its own
connections, and what goes over NCCL is not run. Every row is written when it is measured, and the same command
continues with the rows that are left. --small trains small models on CPU devices, where Gloo is in NCCL's place.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training_speed as speed
import training_speed_jax as training
from flax import nnx
from host import serve
from hosts import Hosts
from jax.sharding import AxisType
from report import RESULTS, Growing, header, line, median, rounded
from training_speed_jax import by_hand, ours

import jaxcgx as cgx
from jaxcgx.lab import Lab, signals_raise, why_not
from jaxcgx.report import figures

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "recipes"))
from models.gpt import Gpt
from models.resnet import ResNet, ResNet50

BUILD = RESULTS.parents[1] / "build/gpu-training"
RATES = 1000, 10_000, 25_000  # Mbit/s
STEPS = 3  # of a turn
LIMIT = 300  # seconds for a method, with its compilation
ALONE, FLOAT32, BFLOAT16, PLAIN = "no exchange", "psum, float32", "psum, bfloat16", "4 bits, Tcp"
OVERLAPS = "4 bits, Tcp, backward", "4 bits, Tcp, priority"
CHARTS = [dict(table="rows", title="A step", x="mbit", y=["ms"], by="method", panel="model", log=True)]

NOTES = f"""\
- Two processes, each in a host (jaxcgx.lab) whose link has the rate, share one GPU: they compute in turns, so a step
  takes about twice as long as on a GPU of its own. NCCL takes them for two hosts, and moves bytes through sockets.
- Weights and optimizer are float32, computation is bfloat16. Batches are random numbers. ResNet-50's norms use the
  batch of a process. Adam trains GPT, SGD with momentum ResNet. DGC has its own momentum.
- step ms: of the slower process, the median of the turns of {STEPS} steps, and of {speed.SPAN} for priority and DiLoCo,
  whose exchanges cross steps. exposed: the time of a step minus that without exchange at the same rate. MB sent: by a
  process in a step, from the kernel's counters, with headers. wire ms: these bytes over the rate. hidden: the part of
  the exposed time of "{PLAIN}" that a step with overlap hides. "psum" is one of each array; XLA joins them. Rows
  without Tcp are XLA's collectives. jaxcgx has feedback.
- to float32, to bfloat16: how many times as fast a step is as with psum. "not run": not measured.
"""
PACED = """\
- There are no virtual hosts here ({why}), so the processes of one host pace their own connections, and only what goes
  over Tcp is run. MB sent: half of what the kernel counted on the loopback device.
"""


class Model(NamedTuple):
    make: Any  # from the form of the data and random keys to a module
    shape: tuple[int, ...]  # of an example
    classes: int
    batch: int  # examples of a process and step
    rate: float  # learning rate

    def module(self):
        """Returns a module with float32 weights, all of whose layers compute in bfloat16."""
        made = self.make(self, nnx.Rngs(0))
        for _, layer in nnx.iter_modules(made):
            if hasattr(layer, "dtype"):
                layer.dtype = jnp.bfloat16
        return made


def gpt(layers, width):
    return functools.partial(Gpt, layers=layers, width=width, heads=width // 64, dropout=0.0)


MODELS = {
    "GPT-2 small": Model(gpt(12, 768), (1024,), 50_257, batch=8, rate=1e-4),
    "ResNet-50": Model(ResNet50, (224, 224, 3), 1000, batch=64, rate=0.02),
}
SMALL = {
    "GPT, 1 layer": Model(gpt(1, 64), (16,), 64, batch=2, rate=1e-4),
    "ResNet-8": Model(functools.partial(ResNet, depth=8), (8, 8, 3), 10, batch=2, rate=0.02),
}


def methods(tcp):
    """Returns {kind: {method: a function of a Run that returns a TrainStep}}, the most important first."""
    bits = cgx.MaxMin(4)
    return {
        "alone": {ALONE: by_hand(training.nothing)},
        "plain": {FLOAT32: by_hand(training.psum), BFLOAT16: by_hand(training.psum_bfloat16)},
        "jaxcgx": {
            "4 bits": ours(bits),
            PLAIN: ours(bits, tcp),
            OVERLAPS[0]: ours(bits, tcp, overlap="backward"),
            OVERLAPS[1]: ours(bits, tcp, overlap=cgx.Priority()),
            "DGC, 1 %, Tcp": ours(cgx.DGC(0.01), tcp, momentum=False),
            "DiLoCo, 4 bits, Tcp": ours(cgx.wan.Diloco(bits, every=speed.SPAN, outer="sgd"), tcp),
        },
    }


NAMES = [name for given in methods(cgx.Tcp("data")).values() for name in given]


class Run(training.Run):
    """A run of one of MODELS or SMALL."""

    @functools.cached_property
    def _split(self):
        """Returns (names of the weights, their tree, the weights, a function from that tree to the module)."""
        setting = (MODELS | SMALL)[self.model]
        graph, params, rest = nnx.split(setting.module(), nnx.Param, ...)
        named, tree = jax.tree_util.tree_flatten_with_path(params)
        names, weights = zip(*((jax.tree_util.keystr(path), w) for path, w in named))
        return names, tree, weights, lambda params: nnx.merge(graph, params, rest, copy=True)

    @property
    def weights(self):
        """{name: array} of the first weights."""
        return dict(zip(self._split[0], self._split[2]))

    def loss(self):
        names, tree, _, module = self._split

        def loss(w, batch):
            inputs, targets = batch
            params = jax.tree_util.tree_unflatten(tree, [w[name] for name in names])
            logits = module(params)(inputs).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        return loss


class Data:
    """As host.Data, but every batch has the same random numbers."""

    def __init__(self, run, rank):
        setting, rng = (MODELS | SMALL)[run.model], np.random.default_rng(rank)
        self.weights = run.weights
        shape = setting.batch, *setting.shape
        if len(setting.shape) == 1:  # tokens, each of which has a next one
            self._batch = [rng.integers(0, setting.classes, shape, np.int32) for _ in range(2)]
        else:
            images = rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
            self._batch = [images, rng.integers(0, setting.classes, setting.batch, np.int32)]

    def batch(self, step):
        return self._batch


def run_rank(address, rank, ranks, model, small, pace):
    if small:
        jax.config.update("jax_num_cpu_devices", 1)
        # JAX 0.10.2 ends with a segmentation fault when it writes these programs for CPUs to its cache.
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        # With another NCCL_HOSTID, a rank counts as another host, so two may share a GPU. The kernels of both must be
        # on the GPU at once, so they have few blocks.
        os.environ |= dict(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="eth0", NCCL_IB_DISABLE="1", NCCL_NET="Socket")
        os.environ |= dict(NCCL_MAX_CTAS="4", XLA_PYTHON_CLIENT_PREALLOCATE="false")
        jax.config.update("jax_platforms", "cuda,cpu")
        # A run that was cut off doesn't compile again, nor do processes with another pace.
        jax.config.update("jax_compilation_cache_dir", str(BUILD / "compiled"))
    jax.distributed.initialize(address, ranks, rank, local_device_ids=None if small else [0])
    run = Run(model, (MODELS | SMALL)[model].rate, jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,)))
    make = functools.partial(functools.partial, training.Program, run, Data(run, rank))
    found = methods(cgx.Tcp("data", pace=pace))
    device = "lo" if pace else "eth0"
    serve({kind: {name: make(method) for name, method in given.items()} for kind, given in found.items()}, device)


class Loopback:
    """Stands in for a Lab of two hosts where there can be none: processes of this machine."""

    hosts = 2

    def __init__(self):
        self.running = []

    def address(self, host):
        return "127.0.0.1"

    def start(self, host, command, **options):
        self.running.append(subprocess.Popen(list(map(str, command)), **options))
        return self.running[-1]

    def change(self, host, link):
        """The processes have their own pace."""


def measure(model, method, rates, args):
    """Yields the row of a method for each rate. It is compiled once. With their own pace, processes have one rate."""
    turn = speed.SPAN if re.search(speed.ACROSS, method) else STEPS
    with contextlib.ExitStack() as stack:
        lab = Loopback() if args.paced else stack.enter_context(Lab(2, speed.link(rates[0])))
        late = threading.Timer(LIMIT, lambda: [process.kill() for process in lab.running])
        late.start()
        stack.callback(late.cancel)
        settings = dict(model=model, small=args.small, pace=f"{rates[0]}mbit" if args.paced else None)
        command = [sys.executable, pathlib.Path(__file__).resolve(), "--rank"]
        hosts = Hosts(stack, lab, {"jaxcgx": command}, settings, methods=f"^{re.escape(method)}$")
        hosts.ask(method, turn)
        for rate in rates:
            hosts.limit(speed.link(rate))
            told = [hosts.ask(method, turn) for _ in range(args.repeats)]
            ms = [max(each["ms"]) for each in told]
            sent = median(max(each["sent"]) for each in told) / (2 if args.paced else 1)
            yield dict(mbit=rate, ms=median(ms), sent_bytes=round(sent), ms_of_turns=rounded(ms))


def measure_all(report, models, args):
    report.data["rows"] = [row for row in report.data["rows"] if "why_not" not in row]
    for model in models:
        for method in args.methods:
            for rates in [[rate] for rate in args.rates] if args.paced else [args.rates]:
                where = dict(model=model, method=method)
                left = [rate for rate in rates if not report.has("rows", **where, mbit=rate)]
                try:
                    for row in measure(model, method, left, args) if left else ():
                        report.add("rows", where | row)
                except RuntimeError as error:
                    late = [rate for rate in left if not report.has("rows", **where, mbit=rate)]
                    report.add("rows", *(where | dict(mbit=rate, why_not=str(error)) for rate in late))


def cells(rows, method, mbit):
    """Returns the cells of a row of a table. rows: {method: row}."""
    ms = {name: row["ms"] for name, row in rows.items() if "ms" in row}
    if method not in ms:
        return [method, rows.get(method, {}).get("why_not", "not run"), *[""] * 6]
    exposed = {name: value - ms[ALONE] for name, value in ms.items() if ALONE in ms}
    hidden = 1 - exposed[method] / exposed[PLAIN] if method in OVERLAPS and PLAIN in exposed else None
    faster = [ms[other] / ms[method] if other in ms else None for other in (FLOAT32, BFLOAT16)]
    sent = rows[method]["sent_bytes"]
    numbers = [f"{sent / 1e6:.3f}", f"{sent * 8e-3 / mbit:.1f}", f"{ms[method]:.1f}"]
    shares = [speed.cell(x, ".2f") for x in (hidden, *faster)]
    return [method, *numbers, speed.cell(exposed.get(method), ".1f"), *shares]


def show(report, models, args):
    for name, model in models.items():
        for rate in args.rates:
            rows = {r["method"]: r for r in report.data["rows"] if (r["model"], r["mbit"]) == (name, rate)}
            report.show("", f"{name}, {model.batch} examples a process, {rate} Mbit/s.", "")
            columns = "MB sent", "wire ms", "step ms", "exposed ms", "hidden", "to float32", "to bfloat16"
            report.show(*header("method", *columns, width=22))
            report.show(*(line(cells(rows, method, rate), 22) for method in NAMES))
    report.show("", *(NOTES + PACED.format(why=args.paced) * bool(args.paced)).splitlines())


def gpu():
    """Returns the GPU, its driver and NCCL's version."""
    query = "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    found = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which(query[0]) else ""
    nccl = [d for d in importlib.metadata.distributions() if (d.name or "").startswith("nvidia-nccl-")]
    return f"{(found.splitlines() or ['?'])[0]}, NCCL {nccl[0].version if nccl else '?'}"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small models, on CPU devices")
    parser.add_argument("--models", default="", metavar="REGEX", help="only matching ones of " + ", ".join(MODELS))
    parser.add_argument(
        "--methods", default="", metavar="REGEX", help="only matching methods, and that without exchange"
    )
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, metavar="MBIT", help="Mbit/s of the links")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns (default: 3)")
    parser.add_argument("--paced", action="store_true", help="pace jaxcgx's connections, without virtual hosts")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results; with other options, build/gpu-training)",
    )
    args = parser.parse_args()
    given = sys.argv[1:]
    args.command = shlex.join(["python", "benchmarks/gpu_training.py", *given]) if given else "make bench-gpu-training"
    args.out = args.out or (BUILD if given else RESULTS)
    args.paced = "--paced" if args.paced else why_not()
    runs = lambda name: name == ALONE or (re.search(args.methods, name) and ("Tcp" in name or not args.paced))
    args.methods = list(filter(runs, NAMES))
    return args


def main():
    if sys.argv[1:2] == ["--rank"]:
        run_rank(**json.loads(sys.argv[2]))
        return
    args = parse()
    if not args.small and not any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        sys.exit("gpu_training.py: not measured, this machine has no NVIDIA GPU; --small runs on CPU devices")
    models = {name: model for name, model in (SMALL if args.small else MODELS).items() if re.search(args.models, name)}
    device = "CPU devices, small models" if args.small else gpu()
    report = Growing(args.command, args.out / "gpu-training.json", ["rows"], device=device, charts=CHARTS)
    report.show("", f"{device}.")
    try:
        measure_all(report, models, args)
    finally:  # a run that is cut off leaves what it has measured
        show(report, models, args)
        report.write(args.out, "gpu-training")
        with contextlib.suppress(ImportError):  # matplotlib is optional
            for png in list(figures.plots(report.data).values())[:1]:
                (args.out / "gpu-training.png").write_bytes(png)
    if failed := [row["method"] for row in report.data["rows"] if "why_not" in row]:
        sys.exit(f"gpu_training.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    with signals_raise():
        main()

"""Measures PowerSGD of one large gradient between hosts: compressed_pmean, PyTorch's DDP hook, and no compression.

    python benchmarks/powersgd.py [--torch PYTHON] [--repeats 9] [--out DIR]

The hosts (jaxcgx.lab) need root. --torch names a Python that has torch, if the one that runs jaxcgx has none.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from collectives import Mesh
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from powersgd_torch import SIZE, gradient, relative_error, serve, start
from report import RESULTS, Report, free_port, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.lab import Lab, signals_raise, why_not

PROCESSES = 2
RANKS = 1, 4
NETWORKS = {1000: 10, 100: 3}  # Mbit/s: steps of a program in a turn
STEPS = 12  # steps over which the error is measured

CHARTS = [
    dict(table="rows", title="A step by rank, at Mbit/s", x="rank", y=["jaxcgx_ms", "torch_ms"], panel="mbit", log=True)
]

NOTES = f"""\
- ms: the time of a step on the slower of the {PROCESSES} hosts. All programs take turns, those of PyTorch too, and the
  processes of a program wait while another one runs. Ratios are formed within each turn, and the table has their
  medians. Warm start and error feedback are on everywhere. Both hosts share the processors of one machine.
- PyTorch: one parameter under DistributedDataParallel over Gloo. Its backward pass is one elementwise product.
  The time of that pass alone is subtracted: "ahead" is (PyTorch - its backward pass) / jaxcgx. Goal: above 1.
- rank none: no hook, and lax.pmean.
- error: the error of the sum of the results of {STEPS} steps, relative to the sum of the true means, |result - exact| /
  |exact|. Both use the same gradients and the same first Q. The gradients are {SIZE} x {SIZE}, with falling singular
  values and separate noise for every host and step. Goal: at most 1% above PyTorch's error.
"""


# In a process


def run_rank(address, port, rank, processes, ranks, steps):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"{address}:{port}", processes, rank)
    mesh = Mesh(processes)
    everywhere = NamedSharding(mesh.mesh, PartitionSpec())

    class Step:
        """The exchange of a training step. It reuses the memory of the old mean and of the state."""

        def __init__(self, low_rank):
            self.state = [mesh.array(np.zeros((1, SIZE, SIZE), np.float32))]
            if low_rank:
                codec = cgx.PowerSGD(low_rank)
                factors = jax.make_array_from_process_local_data(everywhere, np.ascontiguousarray(start(low_rank).T))
                self.state += [mesh.array(np.zeros((1, SIZE, SIZE), np.float32)), factors]

            def step(x, state):
                if not low_rank:
                    return [lax.pmean(x, "data")]
                carry = cgx.Carry(residuals=state[1][0], factors=state[2])
                mean, carry = cgx.compressed_pmean(x[0], "data", codec, carry=carry)
                return [mean[None], carry.residuals[None], carry.factors]

            specs = [PartitionSpec("data"), PartitionSpec("data"), PartitionSpec()][: len(self.state)]
            mapped = jax.shard_map(
                step, mesh=mesh.mesh, in_specs=(PartitionSpec("data"), specs), out_specs=specs, check_vma=False
            )
            self.program = jax.jit(mapped, donate_argnums=1, keep_unused=True).lower(given, self.state).compile()

        def __call__(self, x=None):
            self.state = jax.block_until_ready(self.program(given if x is None else x, self.state))
            return self.state[0].addressable_data(0)[0]

    def local(t):
        return mesh.array(gradient(rank, t)[None])

    def error(step):
        return relative_error(lambda t: np.asarray(step(local(t))), processes, steps)

    given = local(0)
    programs = {str(n): Step(n) for n in (0, *ranks)}
    serve({str(n): error(programs[str(n)]) for n in ranks}, programs)


# In the process that starts the other ones


def launch(stack, lab, command):
    """Starts a process in every host: `command`, with its settings as the last argument."""
    port, running = free_port(), []
    for rank in range(PROCESSES):
        worker = dict(address=lab.address(0), port=port, rank=rank, processes=PROCESSES, ranks=RANKS, steps=STEPS)
        running.append(
            lab.start(
                rank,
                [*command, json.dumps(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
        )
        stack.callback(running[-1].wait)
        stack.callback(running[-1].kill)
    return running


def hear(running, word):
    """Returns what each process prints after a word."""
    found = []
    for process in running:
        said = next((text for text in process.stdout if text.startswith(word + " ")), None)
        if said is None:
            raise RuntimeError(f"powersgd.py: a process ended: {shlex.join(process.args[-3:-1])}")
        found.append(json.loads(said.removeprefix(word + " ")))
    return found


def measure(mbit, torch, repeats):
    """Returns {framework: {"errors": {rank: error}, "ms": {program: ms of every turn}}}."""
    here = pathlib.Path(__file__).resolve()
    commands = {"jaxcgx": [sys.executable, str(here), "--rank"]}
    if torch:
        commands["torch"] = [torch, str(here.with_name("powersgd_torch.py"))]
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(PROCESSES, f"{mbit}mbit"))
        running, results = {}, {}
        for name, command in commands.items():
            running[name] = launch(stack, lab, command)
            results[name] = dict(errors=hear(running[name], "READY")[0], ms={})
        programs = [
            (name, program)
            for program in ["0", *map(str, RANKS), "alone"]
            for name in commands
            if program != "alone" or name == "torch"
        ]
        for turn in range(repeats + 1):
            for name, program in programs:
                for process in running[name]:
                    process.stdin.write(f"{program} {NETWORKS[mbit]}\n")
                    process.stdin.flush()
                ms = max(hear(running[name], "MS"))
                if turn:
                    results[name]["ms"].setdefault(program, []).append(ms)
        return results


def rows(mbit, results):
    for n in (0, *RANKS):
        found = dict(
            mbit=mbit, rank=n, wire_bytes=cgx.PowerSGD(n).wire_bytes((SIZE, SIZE), jnp.float32) if n else 4 * SIZE**2
        )
        for name, data in results.items():
            found[f"{name}_ms"] = median(data["ms"][str(n)])
            if n:
                found[f"{name}_error"] = data["errors"][str(n)]
        if "torch" in results:
            theirs = np.subtract(results["torch"]["ms"][str(n)], results["torch"]["ms"]["alone"])
            found["backward_ms"] = median(results["torch"]["ms"]["alone"])
            found["ahead"] = median(theirs / np.array(results["jaxcgx"]["ms"][str(n)]))
            if n:
                found["reached"] = found["ahead"] > 1 and found["jaxcgx_error"] <= 1.01 * found["torch_error"]
        yield found | dict(ms_of_repetitions={name: rounded(data["ms"][str(n)]) for name, data in results.items()})


def row_line(r):
    figure = lambda name, form: format(r[name], form) if name in r else ""
    return line(
        [
            str(r["rank"] or "none"),
            f"{r['wire_bytes']:,}",
            figure("jaxcgx_ms", ".2f"),
            figure("torch_ms", ".2f"),
            figure("backward_ms", ".2f"),
            figure("ahead", ".2f"),
            figure("jaxcgx_error", ".5f"),
            figure("torch_error", ".5f"),
            mark(r["reached"]) if "reached" in r else "",
        ],
        6,
    )


HEAD = ("rank", "bytes", "jaxcgx ms", "PyTorch ms", "its backward", "ahead", "our error", "its error", "goal")


def version(torch):
    """Returns the version of torch in this Python, or None."""
    found = subprocess.run([torch, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    return found.stdout.strip() or None


def parse():
    parser = argparse.ArgumentParser(description="PowerSGD of one gradient between hosts, against PyTorch's hook.")
    parser.add_argument(
        "--torch", default=sys.executable, metavar="PYTHON", help="a Python that has torch (default: this one)"
    )
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="turns (default: 9)")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results, but nowhere with another --repeats)",
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats: expected a positive number")
    usual = args.repeats == parser.get_default("repeats")
    other = args.torch != sys.executable
    args.command = (
        "make bench-powersgd" + " TORCH=PYTHON" * other
        if usual
        else f"python benchmarks/powersgd.py --repeats {args.repeats}"
    )
    args.out = args.out or (RESULTS if usual else None)
    return args


def main():
    args = parse()
    if args.rank:
        run_rank(**json.loads(args.rank))
        return
    if why := why_not():
        sys.exit(f"powersgd.py: not measured, {why}")
    torch = version(args.torch)
    report = Report(args.command, args.repeats, torch=torch, rows=[], charts=CHARTS)
    if not torch:
        report.show("", f"PyTorch: not measured, {args.torch} has no torch; name a Python that has: --torch PYTHON.")
    for mbit in NETWORKS:
        report.show(
            "",
            f"{mbit} Mbit/s, {PROCESSES} hosts, {SIZE} x {SIZE} float32" + (f", torch {torch}." if torch else "."),
            "",
            *header(*HEAD, width=6),
        )
        for row in rows(mbit, measure(mbit, args.torch if torch else None, args.repeats)):
            report.data["rows"].append(row)
            report.show(row_line(row))
    report.show("", *NOTES.splitlines())
    if args.out:
        report.write(args.out, "powersgd")


if __name__ == "__main__":
    with signals_raise():
        main()

"""Measures training with few exchanges (cgx.wan.Diloco): final losses, bytes, and the time of a step between hosts.

    python benchmarks/diloco.py [--parts losses times picture] [--runs REGEX] [--seeds 3] [--steps 3000] [--centers 2]
        [--hosts 2 4] [--methods REGEX] [--torch PYTHON] [--out DIR]

The times need root (jaxcgx.lab). --torch names a Python that has torch. Rows that the same command has already written
to the result file are not measured again, so a run that was interrupted continues. Remove the file to measure all of
them. With --methods, the times of these methods are measured again, and other methods keep their rows.
"""

import argparse
import contextlib
import os
import pathlib
import re
import sys
import tempfile
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import overlap
import timeline
import training_speed as speed
import training_speed_data as data
from hosts import Hosts
from jax.sharding import AxisType
from report import RESULTS, Growing, header, line, mark
from training_speed_models import make_loss

import jaxcgx as cgx
from jaxcgx.lab import Lab, signals_raise, why_not
from jaxcgx.report import results

BATCH = 4  # windows per center and step
BEGUN = 4000  # steps in float32 that made the first weights of a seed
RATE = 0.001  # the largest inner learning rate
FIRST = RESULTS.parents[1] / "build" / "diloco"  # these weights, kept for the other runs
EVALUATE = 16  # the loss on held-out text is measured after each of these parts of a run
HELD_OUT = 256  # windows
WORSE = 0.02  # goal: the largest allowed increase over the dense run's final loss
MBIT = 100
SLOW = 30  # Mbit/s in the picture
METHODS = r"psum, float32|MaxMin\(4\), Tcp|DiLoCo|PyTorch, PowerSGD"
TARGET = 2.45  # the loss until which the times count
BUSY = 0.9  # goal of streaming; plain data parallelism reaches less than a tenth


PARTS = "losses", "times", "picture"
WHOLE = cgx.MaxMin(2, 2**18)  # the largest parameter has 2**18 elements, so each is one bucket


class Run(NamedTuple):
    """A row of the first table. Without `form` it is data parallelism, with an exchange in every step."""

    form: Any = None  # makes a Diloco
    fewer: float | None = None  # goal: bytes of a step with float32 over bytes of a step
    close: bool | None = None  # goal: whether the final loss is within WORSE of the dense run's; None means no goal


def four_bits(every, outer="sgd", **options):
    return lambda: cgx.wan.Diloco(cgx.MaxMin(4), every, outer=outer, **options)


RUNS = {
    "float32, every step": Run(),
    "4 bits, H 20": Run(four_bits(20), 100, True),
    "4 bits, H 100, SGD 1.5": Run(four_bits(100, optax.sgd(1.5)), 500, True),
    "4 bits, H 20, streaming": Run(four_bits(20, fragments=4, overlap=2, alpha=0.5), 100, True),
    "4 bits, H 20, Nesterov 0.9": Run(four_bits(20, "nesterov", telemetry=True)),
    "SparseLoCo, 1 %, 2 bits, H 15": Run(lambda: cgx.wan.SparseLoCo(every=15), 100, True),
    "SparseLoCo, no feedback": Run(lambda: cgx.wan.SparseLoCo(every=15, decay=1.0, keep=False), None, False),
    "2 bits, H 20": Run(lambda: cgx.wan.MuLoCo(every=20, outer="sgd")),
    "2 bits, H 20, no feedback": Run(lambda: cgx.wan.MuLoCo(every=20, outer="sgd", keep=False), None, False),
    "2 bits, H 20, large buckets, no feedback": Run(
        lambda: cgx.wan.MuLoCo(WHOLE, every=20, outer="sgd", keep=False), None, False
    ),
}
CHARTS = [
    dict(table="rows", title="Final loss", x="run", y=["loss"]),
    dict(table="curves", title="Loss by step", x="steps", y=["loss"], by="run"),
    dict(table="times", title="A step", x="method", y=["ms"], panel="hosts", log=True),
]
MODEL = "- A byte-level transformer of 3.3 million parameters learns the documentation that Python ships.\n"
NOTES = f"""\
- Adam with a cosine rate of at most {RATE} inside. All runs of a seed begin with the same weights, and see the same
  batches. {BEGUN:,} steps in float32 have made these weights: DiLoCo is for training that is under way. A network
  learns so much in its first steps that exchanges after 100 steps come too late for it. loss: of the outer parameters
  on held-out text, after the last step. With streaming, they lack the last exchange of one fragment. More: how much
  more than the dense run of the same seed, the mean over seeds. A run without all seeds isn't complete.
- bytes: what a center sends in a step on average, as jaxcgx.explain finds it in the compiled program. Fewer: the bytes
  of float32 in every step over these bytes.
- Goals: at most {WORSE:.0%} more than the dense run, with the named factor fewer bytes. Without feedback, the loss must
  be higher than that. Buckets have 512 elements, large buckets a whole parameter.
"""
OF_PICTURE = f"""\
- [diloco.png](diloco.png): two periods of streaming on the first of two hosts at {SLOW} Mbit/s. An exchange is drawn
  from its beginning until its result is applied.
"""
OF_TIMES = f"""\
- Between hosts at {MBIT} Mbit/s: busy is the time of a step without any exchange over that of the step, the median over
  turns. Turns have {speed.SPAN} steps, and begin and end when no exchange is in flight. Goal: at least {BUSY} for
  streaming. seconds: the time to the loss {TARGET}, which is measured every {speed.SPAN} steps, as in
  training_speed.py. There is one seed.
"""


def curve(run, weights, seed, steps, centers):
    """Returns the [(steps, loss)] of a run from these weights, the bytes of a step, and its telemetry."""
    mesh = jax.make_mesh((centers,), ("dc",), axis_types=(AxisType.Auto,), devices=jax.devices()[:centers])
    batches, held_out = data.text(np.random.default_rng(seed), (steps, centers * BATCH), HELD_OUT)
    inner = optax.adam(optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20, steps))
    exchange = run.form() if run.form else cgx.Raw()
    loss = make_loss("transformer")
    train = cgx.make_train_step(loss, inner, mesh, exchange, sharding=cgx.Sharding("dc"))
    state = train.init(weights)
    evaluate, found, sent, metrics = jax.jit(loss), [], None, None
    for t in range(steps):
        batch = tuple(jnp.asarray(each[t]) for each in batches)
        if sent is None:
            # `explain` counts every branch of a conditional. Together they are one exchange of everything.
            sent = cgx.explain(train.step, state, batch, show=False).bytes / (exchange.every if run.form else 1)
        state, metrics = jax.block_until_ready(train.step(state, batch))
        if (t + 1) % max(steps // EVALUATE, 1) == 0 or t + 1 == steps:
            found.append((t + 1, round(float(evaluate(state.params, held_out)), 4)))
    outer = getattr(metrics.telemetry, "outer", None)
    telemetry = {"gain": round(float(outer[0].gain), 3), "rho": round(float(outer[0].rho), 3)} if outer else {}
    return found, round(sent), telemetry


def first_weights(seed, centers):
    """Returns the weights that all runs of a seed begin with."""
    path = FIRST / f"{seed}-{BEGUN}.npz"
    if not path.exists():
        rng = np.random.default_rng(1000 + seed)
        weights = data.transformer_weights(rng)
        weights = data.begun(weights, "transformer", data.text(rng, (BEGUN, centers * BATCH), 1)[0])
        FIRST.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"{path.stem}.{os.getpid()}.npz")  # other runs may look for the file at the same time
        np.savez(half, **weights)
        half.replace(path)
    with np.load(path) as file:
        return dict(file)


def losses(report, args):
    jax.config.update("jax_num_cpu_devices", args.centers)
    chosen = {name: run for name, run in RUNS.items() if re.search(args.runs, name)}
    for seed in range(args.seeds if chosen else 0):
        weights = first_weights(seed, args.centers)
        first = f"{zlib.crc32(b''.join(array.tobytes() for array in weights.values())):08x}"
        if any(row["seed"] == seed and row["first"] != first for row in report.data["rows"]):
            for table in ("rows", "curves"):  # another machine's runs, which this machine's can't be compared with
                report.data[table] = [row for row in report.data[table] if row["seed"] != seed]
        for name, run in chosen.items():
            if not report.has("rows", run=name, seed=seed):
                found, sent, telemetry = curve(run, weights, seed, args.steps, args.centers)
                report.data["curves"] += [dict(run=name, seed=seed, steps=t, loss=loss) for t, loss in found]
                row = dict(run=name, seed=seed, first=first, loss=found[-1][1], sent_bytes=sent, **telemetry)
                report.add("rows", row)


def times(report, args):
    """Measures times as training_speed.py does, in turns that have as many steps as there are between two exchanges."""
    model = data.MODELS["transformer"]
    for count in args.hosts:
        if not args.methods and report.has("times", hosts=count):
            continue
        with contextlib.ExitStack() as stack:
            path = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "data.npz")
            data.write(path, "transformer", count)
            lab = stack.enter_context(Lab(count, speed.link(speed.UNLIMITED)))
            settings = dict(model="transformer", rate=model.rate, data=str(path))
            hosts = Hosts(stack, lab, speed.commands(args.torch), settings, methods=args.methods or METHODS)
            curves = speed.curves(hosts, TARGET, args.most or model.most, every=speed.SPAN)
            steps = {method: [speed.steps_to(values, TARGET, every=speed.SPAN)] for method, values in curves.items()}
            hosts.limit(speed.link(MBIT))
            found = speed.figures(speed.turns(hosts, speed.SPAN, args.repeats), steps)
            rows = {(count, name): dict(hosts=count, method=name) | r for name, r in found.items()}
            kept = [rows.pop((row["hosts"], row["method"]), row) for row in report.data["times"]]
            report.data["times"] = [*kept, *rows.values()]
            results.write(report.file, report.data)


def picture(out):
    """Draws two periods of streaming on a host, with a link on which an exchange takes longer than a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "data.npz")
        data.write(path, "transformer", 2)
        found = timeline.of_rank_0([speed.HERE / "diloco_trace.py"], speed.link(SLOW), overlap.LIMIT, path=str(path))
    title = f"Streaming at {SLOW} Mbit/s: an exchange goes on while later steps run"
    timeline.draw(out / "diloco.png", found, title)


def show(report):
    """Shows the tables of all rows in the report."""
    rows = report.data["rows"]
    mean = lambda name, key: np.mean([row[key] for row in rows if row["run"] == name])
    dense = {row["seed"]: row for row in rows if row["run"] == next(iter(RUNS))}
    if rows:
        report.show("", *header("run", "loss", "of seeds", "more", "bytes", "fewer", "gain", "rho", "goals"))
    for name, run in RUNS.items():
        mine = [row for row in rows if row["run"] == name and row["seed"] in dense]
        if not mine:
            continue
        more = float(np.mean([row["loss"] / dense[row["seed"]]["loss"] - 1 for row in mine]))
        fewer = dense[mine[0]["seed"]]["sent_bytes"] / mine[0]["sent_bytes"]
        goals = [] if run.fewer is None else [fewer >= run.fewer]
        goals += [] if run.close is None else [(more <= WORSE) == run.close]
        report.show(
            line(
                [
                    name,
                    f"{mean(name, 'loss'):.3f}",
                    " ".join(f"{row['loss']:.3f}" for row in mine),
                    f"{more:+.2%}",
                    f"{mine[0]['sent_bytes']:,}",
                    f"{fewer:,.0f}",
                    *(f"{mean(name, key):.2f}" if key in mine[0] else "" for key in ("gain", "rho")),
                    " ".join(map(mark, goals)),
                ]
            )
        )
    if report.data["times"]:
        report.show("", *header("between hosts", "hosts", "step ms", "busy", "MB sent", "steps", "seconds", "goal"))
    for row in report.data["times"]:
        goal = mark(row["busy"] >= BUSY) if "streaming" in row["method"] else ""
        cells = [row["method"], str(row["hosts"]), f"{row['ms']:.1f}", f"{row['busy']:.2f}"]
        cells += [f"{row['sent_bytes'] / 1e6:.3f}", speed.cell(row["steps"], ".0f"), speed.cell(row["seconds"], ".1f")]
        report.show(line([*cells, goal]))
    notes = [MODEL] + [NOTES] * bool(rows)
    notes += [OF_PICTURE] * report.file.with_suffix(".png").exists() + [OF_TIMES] * bool(report.data["times"])
    report.show("", *"".join(notes).splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", default="", metavar="REGEX", help="only matching rows of the first table")
    parser.add_argument(
        "--methods", metavar="REGEX", help="measure matching methods between hosts again, and keep the rows of others"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of the first table (default: 3)")
    parser.add_argument("--steps", type=int, default=3000, metavar="N", help="steps of its runs (default: 3000)")
    parser.add_argument("--centers", type=int, default=2, metavar="N", help="centers of its runs (default: 2)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of hosts")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch (default: PyTorch isn't measured)")
    parser.add_argument("--most", type=int, metavar="N", help="the most steps of a training run between hosts")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="counted turns (default: 5)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, metavar="DIR", help="the folder of the results")
    args = parser.parse_args()
    chosen = {
        name: value
        for name in ("seeds", "steps", "centers")
        if (value := getattr(args, name)) != parser.get_default(name)
    }
    command = " ".join(["make bench-diloco", *(f"--{name} {value}" for name, value in chosen.items())])
    if chosen and args.out == RESULTS:
        parser.error("with other seeds, steps or centers than the committed results' pass --out")
    tables = "rows", "curves", "times"
    report = Growing(command, args.out / "diloco.json", tables, goal=WORSE, charts=CHARTS)
    if "losses" in args.parts:
        losses(report, args)
    if "times" in args.parts:
        if why := why_not():
            print(f"diloco.py: times not measured, {why}", file=sys.stderr)
        else:
            times(report, args)
    if "picture" in args.parts and not why_not():
        picture(args.out)
    show(report)
    report.write(args.out, "diloco")


if __name__ == "__main__":
    with signals_raise():
        main()

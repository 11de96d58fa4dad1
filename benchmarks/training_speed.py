"""Measures whole training runs between hosts: the time of a step, and the time to a loss, by method and by link.

    python benchmarks/training_speed.py [--torch PYTHON] [--models REGEX] [--methods REGEX] [--hosts N ...]
        [--rates MBIT ...] [--most STEPS] [--repeats 5] [--out DIR]

The hosts (jaxcgx.lab) need root. --torch names a Python that has torch. Results are kept, so a run that was interrupted
continues.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import numpy as np
import training_speed_data as data
from hosts import Hosts
from report import RESULTS, Report, congestion, header, line, median, rounded
from training_speed_jax import STREAMING

from jaxcgx.lab import Lab, Link, signals_raise, why_not

HERE = pathlib.Path(__file__).resolve().parent
KEPT = HERE.parent / "build" / "training-speed"
HOSTS = 2, 4
RATES = {100: 4, 1000: 10, 10_000: 10}  # {Mbit/s: steps of a turn}
UNLIMITED = 100_000  # Mbit/s for runs in which only the losses count
EVERY = 10  # steps between two losses
SEEDS = 0, 1, 2  # of the batches of training runs
AGREE = 1e-3  # the largest relative difference between the first losses of all methods
ACROSS, SPAN = "priority|DiLoCo", STREAMING["every"]  # methods whose exchanges cross steps, the steps of their turns
ROUND, PARTS = "DiLoCo, 4 bits, H 20", "DiLoCo, 4 bits, H 20, streaming"  # both send the same in a whole round
SAME = 0.02  # the largest relative difference between the bytes that these two send
SMOOTH = 3  # losses that are averaged, because a single loss is noisy
BASELINES = "psum, float32", "by hand, bfloat16"
BYTEGRAD, POWERSGD = "ByteGrad, Tcp", ("PowerSGD(4), Gloo", "PyTorch, PowerSGD(4)")  # methods of Bagua's claim

CHARTS = [
    dict(table="rows", title="Seconds to the loss", x="mbit", y=["seconds"], by="method", panel="network", log=True),
    dict(table="losses", title="Loss by step", x="steps", y=["loss"], by="method", panel="network"),
]

NOTES = f"""\
- Every host is a network namespace, with its own processors if there are enough. Both frameworks use the same
  processors, and SCHED_BATCH (chrt --batch): benchmarks/notes/collectives.md, "Slow and quick days". All methods take
  turns, and the processes of a framework wait while the other one runs. A turn has {RATES[100]} steps at 100 Mbit/s and
  {RATES[1000]} on faster links, after a step that doesn't count. Methods whose exchanges cross steps have turns of
  {SPAN} steps, which all count, and which begin and end when no exchange is in flight. These steps are a whole round of
  DiLoCo.
- step ms: on the slowest host. exposed: the time of a step minus that of the same framework without any exchange,
  within each turn. The arithmetic of compression counts as exposed, too. MB sent: by a host in a step, from the
  kernel's counters of its device, with acknowledgements. They count the headers of a large segment once.
- steps: until the loss on held-out data reaches the target, on a straight line between two losses. The loss is measured
  every {EVERY} steps. The mean of {SMOOTH} losses in a row counts as the loss at the step of the middle one. It doesn't
  depend on the link, so every method is trained with {len(SEEDS)} seeds for each number of hosts, and the median of the
  steps counts. The JSON file has the steps of each seed. seconds: steps x the median time of a step. "-": most seeds
  don't reach it.
- The steps of close methods differ by chance. The transformer starts from weights after
  {data.MODELS["transformer"].begun} steps of one process. Before that, the loss is on a plateau, where the model knows
  only the frequencies of bytes. When it leaves this plateau is a matter of chance (60 to 110 steps of float32 with
  three orders of the same batches).
- to float32, to bfloat16: how many times as soon the method reaches the loss as "psum, float32" and "by hand,
  bfloat16". Below 1 it is later.
- All methods have the same first weights and batches, and their first losses agree to {AGREE:g}. Adam trains the
  transformer, SGD with momentum ResNet-20. DGC has its own momentum, so Adam after it has none (b1=0), and it has no
  warm-up, as runs are short. ResNet-20 has group norms: statistics of batches would differ between hosts.
- psum: as a user writes it, an array at a time. "one array": gradients are joined first, in float32. On CPUs XLA sums
  bfloat16 in float32, which sends the bytes of float32. by hand: with feedback, all_to_all, a sum, all_gather; 8 and 4
  bits are buckets of 512 elements in jnp. jaxcgx: make_train_step, with feedback. PyTorch: DistributedDataParallel over
  Gloo; with PowerSGD all gradients are one bucket, as its hooks of several buckets don't agree on an order over Gloo.
  The batched form of this hook isn't here: in torch 2.14 it ends with an AssertionError of its own.
- Bagua's documentation says that ByteGrad is 50% faster than PowerSGD and other compression.
"""


def link(mbit):
    return Link(up=mbit * 10**6, down=mbit * 10**6)


def commands(torch):
    """Returns {framework: the command of a host}, with PyTorch if a Python that has torch is given."""
    found = {"jaxcgx": [sys.executable, HERE / "training_speed_jax.py"]}
    return found | ({"PyTorch": [torch, HERE / "training_speed_torch.py"]} if torch else {})


def curve(hosts, method, target, most, every, batch):
    """Returns the losses on held-out data after every `every` steps, until the target or `most` steps are reached."""
    losses = [np.mean(hosts.ask(method, 0, batch)["loss"])]
    while smooth(losses)[-1] > target and every * len(losses) <= most:
        hosts.ask(method, every)
        losses.append(np.mean(hosts.ask(method, 0)["loss"]))
    return rounded(losses)


def smooth(losses):
    """Returns the mean of the last SMOOTH losses at each loss."""
    return [np.mean(losses[max(0, i - SMOOTH) : i]) for i in range(1, len(losses) + 1)]


def curves(hosts, target, most, every=EVERY, batch=0):
    """Returns {method: losses} of all methods that exchange, from a batch on. Their first losses must agree."""
    found = {}
    for method, (_, kind) in hosts.methods.items():
        if kind != "alone":
            found[method] = curve(hosts, method, target, most, every=every, batch=batch)
            print(f"{method}: {len(found[method]) - 1} x {every} steps, loss {found[method][-1]:.3f}", file=sys.stderr)
    first = [losses[0] for losses in found.values()]
    if max(first) - min(first) > AGREE:
        raise RuntimeError(f"training_speed.py: the first losses differ: {dict(zip(found, first))}")
    return found


def steps_to(losses, target, every=EVERY):
    """Returns the steps to the target, on a straight line between two means of losses, or None if it is not reached.

    A mean of losses is taken for the loss after the mean of their steps.
    """
    means, steps = smooth(losses), smooth([every * i for i in range(len(losses))])
    if means[-1] > target:
        return None
    part = (means[-2] - target) / (means[-2] - means[-1])
    return round(steps[-2] + part * (steps[-1] - steps[-2]), 1)


def turns(hosts, steps, repeats):
    """Measures the turns of all methods.

    Turns of methods whose exchanges cross steps begin after a multiple of SPAN / STREAMING["fragments"] steps.

    Returns {method: {"framework", "kind", "ms": of each turn, on the slowest host, "sent": bytes of a step, by the host
    that sends most}}.
    """
    found = {m: dict(framework=f, kind=kind, ms=[], sent=[]) for m, (f, kind) in hosts.methods.items()}
    for turn in range(repeats + 1):  # the first turn doesn't count
        for method in hosts.methods:
            across = re.search(ACROSS, method)
            if not across:  # a step that doesn't count, because other methods have run since the last turn
                hosts.ask(method, 1)
            # The last step of a round begins an exchange. Turns of streaming end when its result has been applied.
            late = STREAMING["overlap"] * (method == PARTS and turn == 0)
            told = hosts.ask(method, (SPAN if across else steps) + late)
            for what in "ms", "sent":
                found[method][what] += [max(told[what])] * (turn > 0)
    if PARTS in hosts.methods:
        hosts.ask(PARTS, SPAN - STREAMING["overlap"])  # to where the next turns may begin
    return found


def middle(steps):
    """Returns the median of the seeds' steps, or None if most seeds don't reach the loss."""
    return sorted(steps, key=lambda taken: (taken is None, taken))[len(steps) // 2] if steps else None


def figures(found, steps):
    """Returns {method: its figures} on one link, from its turns and its steps to the loss with each seed."""
    alone = {turn["framework"]: np.array(turn["ms"]) for turn in found.values() if turn["kind"] == "alone"}
    rows = {}
    for method, turn in found.items():
        ms, without, taken = np.array(turn["ms"]), alone[turn["framework"]], middle(steps.get(method, []))
        rows[method] = dict(
            kind=turn["kind"],
            ms=median(ms),
            quartiles=rounded(np.percentile(ms, [25, 75])),
            exposed_ms=median(ms - without),
            busy=median(without / ms),
            sent_bytes=round(median(turn["sent"])),
            steps=taken,
            steps_of_seeds=steps.get(method),
            seconds=taken and round(taken * median(ms) / 1e3, 3),
            ms_of_turns=rounded(ms),
        )
    for r in rows.values():
        r["sooner"] = {plain: sooner(r, rows.get(plain)) for plain in BASELINES}
    if ROUND in rows and PARTS in rows:
        whole, parts = rows[ROUND]["sent_bytes"], rows[PARTS]["sent_bytes"]
        if abs(parts / whole - 1) > SAME:
            raise RuntimeError(f"training_speed.py: {PARTS} sends {parts:,} bytes in a step, {ROUND} {whole:,}")
    return rows


def sooner(mine, other):
    """Returns how many times as soon it reaches the loss, or None if one of them is missing or doesn't reach it."""
    return (
        round(other["seconds"] / mine["seconds"], 2)
        if mine and other and mine["seconds"] and other["seconds"]
        else None
    )


def cell(value, form):
    return "-" if value is None else format(value, form)


def show(report, rows):
    names = "method", "MB sent", "step ms", "quartiles", "exposed ms", "steps", "seconds", "to float32", "to bfloat16"
    report.show(*header(*names, width=20))
    for method, r in rows.items():
        cells = [
            method,
            f"{r['sent_bytes'] / 1e6:.3f}",
            f"{r['ms']:.1f}",
            "{:.0f} to {:.0f}".format(*r["quartiles"]),
            f"{r['exposed_ms']:.1f}",
            cell(r["steps"], ".0f"),
            cell(r["seconds"], ".2f"),
            *(cell(value, ".2f") for value in r["sooner"].values()),
        ]
        report.show(line(cells, 20))


def best(rows, kind):
    """Returns the name of the method of a kind that reaches the loss first, or None."""
    found = [name for name, r in rows.items() if r["kind"] == kind and r["seconds"]]
    return min(found, key=lambda name: rows[name]["seconds"], default=None)


def compare(networks):
    """Compares the best method of each kind on each network.

    The figures say how many times as soon jaxcgx's best method reaches the loss.
    """
    yield from header(
        "network", "jaxcgx's best", "seconds", "PyTorch's", "ahead", "plain psum", "ahead", "by hand", "ahead"
    )
    for network, rows in networks.items():
        ours = rows.get(best(rows, "jaxcgx"))
        cells = [network, cell(best(rows, "jaxcgx"), ""), cell(ours and ours["seconds"], ".2f")]
        for kind in "PyTorch", "plain", "by hand":
            cells += [cell(best(rows, kind), ""), cell(sooner(ours, rows.get(best(rows, kind))), ".2f")]
        yield line(cells)


def losing(networks):
    """Describes where compression by jaxcgx doesn't pay."""
    for network, rows in networks.items():
        plain = best(rows, "plain")
        late = [
            f"{name} ({cell(sooner(r, rows[plain]), '.2f')})"
            for name, r in rows.items()
            if plain and r["kind"] == "jaxcgx" and (sooner(r, rows[plain]) or 0) < 1
        ]
        if late:
            yield f"- {network}: later than {plain}, or not at the loss: {', '.join(late)}."


def claim(networks):
    """Compares ByteGrad with PowerSGD."""
    yield from header("network", *(f"{other}: {what}" for other in POWERSGD for what in ("a step", "the loss")))
    for network, rows in networks.items():
        if BYTEGRAD in rows:
            mine, cells = rows[BYTEGRAD], [network]
            for theirs in map(rows.get, POWERSGD):
                cells += [cell(theirs and theirs["ms"] / mine["ms"], ".2f"), cell(sooner(mine, theirs), ".2f")]
            yield line(cells)


def version(torch):
    """Returns the version of torch in this Python, or None."""
    found = subprocess.run([torch, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    return found.stdout.strip() or None


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch (default: PyTorch isn't measured)")
    parser.add_argument("--models", metavar="REGEX", help="only matching ones of " + ", ".join(data.MODELS))
    parser.add_argument("--methods", metavar="REGEX", help="only matching methods, and those without exchange")
    parser.add_argument("--hosts", type=int, nargs="+", metavar="N", help="numbers of hosts (default: 2 4)")
    parser.add_argument(
        "--rates", type=int, nargs="+", choices=RATES, metavar="MBIT", help="Mbit/s (default: 100 1000 10000)"
    )
    parser.add_argument("--most", type=int, metavar="N", help="the most steps of a training run")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="counted turns (default: 5)")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where the results are written (default: benchmarks/results, but nowhere when other options are given)",
    )
    args = parser.parse_args()
    batches = min(model.most for model in data.MODELS.values())
    if args.most and args.most > batches:
        parser.error(f"--most: a seed has {batches} batches")
    chosen = any(
        getattr(args, name) != parser.get_default(name)
        for name in ("models", "methods", "hosts", "rates", "most", "repeats")
    )
    args.command = "make bench-training-speed"
    if chosen or not args.torch:
        args.command = shlex.join(["python", "benchmarks/training_speed.py", *sys.argv[1:]])
    args.out = args.out or (None if chosen or not args.torch else RESULTS)
    return args


def ending(args):
    """Returns how the names of the files end that keep the results of a command with today's scripts."""
    told = args.command + "".join((HERE / f"training_speed{name}.py").read_text() for name in ("", "_data", "_jax"))
    return f"-{hashlib.sha256(told.encode()).hexdigest()[:8]}.json"


def forget(args):
    """Removes what an interrupted run of this command would have continued with."""
    for path in KEPT.glob(f"*{ending(args)}"):
        path.unlink()


def kept(name, args, find):
    """Returns the result of find(), or the result of an earlier run of the same command that was interrupted."""
    path = KEPT / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}{ending(args)}"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(find()))
    return json.loads(path.read_text())


@contextlib.contextmanager
def hosts_of(model, count, args):
    """Yields a function that returns the hosts of a network, and starts them when it is first called.

    All have the same first weights, and the batches of all seeds.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def hosts():
            path = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()), "data.npz")
            data.write(path, model, count, SEEDS)
            lab = stack.enter_context(Lab(count, link(UNLIMITED)))
            settings = dict(model=model, rate=data.MODELS[model].rate, data=str(path))
            return Hosts(stack, lab, commands(args.torch), settings, methods=args.methods)

        yield hosts


def speeds(hosts, network, args):
    """Returns {Mbit/s: the turns of all methods}, and keeps each of them."""

    def of_rate(mbit):
        hosts().limit(link(mbit))
        return turns(hosts(), RATES[mbit], args.repeats)

    return {
        mbit: kept(f"{network}, {mbit} Mbit/s", args, functools.partial(of_rate, mbit)) for mbit in args.rates or RATES
    }


def trainings(hosts, network, model, args):
    """Returns {method: the losses of a training run} of each seed, and keeps each of them."""
    setting = data.MODELS[model]

    def of_batches(first):
        hosts().limit(link(UNLIMITED))
        return curves(hosts(), setting.target, args.most or setting.most, batch=first)

    return [
        kept(f"{network}, seed {seed}", args, functools.partial(of_batches, i * setting.most))
        for i, seed in enumerate(SEEDS)
    ]


def measure(report, model, count, args):
    """Returns {network: rows} of a model on a number of hosts."""
    setting, found, network = data.MODELS[model], {}, f"{model}, {count} hosts"
    with hosts_of(model, count, args) as hosts:
        taken, trained = speeds(hosts, network, args), trainings(hosts, network, model, args)
    where = dict(network=network)
    for method, values in trained[0].items():
        points = [dict(method=method, steps=EVERY * i, loss=value) for i, value in enumerate(values)]
        report.data["losses"] += [where | point for point in points]
    steps = {method: [steps_to(losses[method], setting.target) for losses in trained] for method in trained[0]}
    for mbit, turns_of_rate in taken.items():
        rows = found[f"{network}, {mbit} Mbit/s"] = figures(turns_of_rate, steps)
        report.data["rows"] += [where | dict(mbit=mbit, method=method) | r for method, r in rows.items()]
        examples = f"{setting.batch} examples a host and step, to a loss of {setting.target:g}"
        report.show("", f"{network}, {mbit} Mbit/s, {examples}.", "")
        show(report, rows)
    return found


def report_on(model, args, torch):
    """Measures a model on every number of hosts, and writes its results."""
    inputs = data.MODELS[model].inputs
    settings = dict(torch=torch, inputs=inputs, congestion=congestion())
    report = Report(args.command, args.repeats, **settings, rows=[], losses=[], charts=CHARTS)
    torch = torch or "not measured; name a Python that has it: --torch PYTHON"
    report.show("", f"PyTorch: {torch}. Data: {inputs}. TCP of the hosts: {settings['congestion']}.")
    networks = {}
    for count in args.hosts or HOSTS:
        networks |= measure(report, model, count, args)
    report.show("", "The method of each kind that reaches the loss first.", "", *compare(networks))
    report.show("", "Where compression doesn't pay: how many times as soon it is there as the best psum.", "")
    report.show(*losing(networks))
    report.show("", "ByteGrad against PowerSGD: how many times as fast a step, how many times as soon the loss.", "")
    report.show(*claim(networks), "", *NOTES.splitlines())
    if args.out:
        report.write(args.out, data.results_of(model))


def main():
    args = parse()
    if why := why_not():
        sys.exit(f"training_speed.py: not measured, {why}")
    torch = args.torch and version(args.torch)
    if args.torch and not torch:
        sys.exit(f"training_speed.py: {args.torch} has no torch")
    for model in data.MODELS:
        if re.search(args.models or "", model):
            report_on(model, args, torch)
    if args.out:
        forget(args)


if __name__ == "__main__":
    with signals_raise():
        main()

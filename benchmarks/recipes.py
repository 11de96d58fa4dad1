"""Runs the recipes as users do, and reports what compression costs: accuracy or loss, bytes and hours.

    python benchmarks/recipes.py [--runs REGEX] [--folder DIR] [--out DIR]

Each row is a command with its own folder in DIR (build/bench-recipes). A run that was interrupted continues, and what
is already in the result file is not run again. Remove the file to run all.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

from report import RESULTS, Growing, header, line

from jaxcgx.report import figures

ROOT = pathlib.Path(__file__).resolve().parent.parent
RANKS = 4


class Task(NamedTuple):
    """A named config, the changes to it, and the words for --compression."""

    config: str
    changes: dict
    words: dict  # {word: further changes}
    published: dict  # {word: figures of its authors}
    measure: str = "accuracy"  # or "perplexity", "F1"


IMAGES = {
    "dgc": "DGC, CIFAR-10, ResNet-110: 93.75 to 93.87",
    "cgx4": "CGX, ImageNet, ResNet-50: 75.8 to 75.9; VGG-16: 69.1 to 68.9",
}
WARM = {"compression.warmup_epochs": 1}
ALL = ["none", "cgx4", "eden4", "bytegrad", "fp16", "powersgd", "dgc", "dgc-wm0", "dgc-fp16", "bsc", "mpq", "diloco"]
WORDS = {word: WARM if word in ("dgc", "dgc-fp16") else {} for word in ALL}  # for a few epochs
TASKS = {
    "ResNet-20 on digits": Task("digits/resnet20", {"train.num_epochs": 12}, {word: {} for word in ALL}, IMAGES),
    "transformer on Python's documentation": Task(
        "text/gpt",
        {"model.layers": 2, "model.width": 128, "train.num_epochs": 6},
        WORDS,
        {
            "dgc": "DGC, Penn Treebank, LSTM: 72.30 to 72.24",
            "cgx4": "CGX, GPT-2: 14.1 to 13.9; Transformer-XL: 22.81 to 22.9",
        },
        measure="perplexity",
    ),
    "ResNet-20 on Fashion-MNIST": Task("fashion_mnist/resnet20", {"train.num_epochs": 2}, WORDS, IMAGES),
}
FEW = {"none": {}, "cgx4": {}, "dgc": {"compression.ratio": 0.01} | WARM}
TRANSFORMERS = {
    "Transformer-XL on Python's documentation": Task(
        "text/transformer_xl",
        {
            "data.context": 128,
            "data.tokens": 512,
            "model.layers": 3,
            "model.width": 64,
            "model.heads": 4,
            "model.inner": 256,
            "model.segment": 64,
            "model.dropout": 0.0,
            "schedule.rate": 1e-3,
            "train.batch_size": 32,
            "train.num_epochs": 24,
        },
        FEW,
        {"cgx4": "22.81 to 22.9"},
        measure="perplexity",
    ),
    "BERT on words that sentences lack": Task(
        "qa/bert",
        {
            "data.length": 64,
            "data.tokens": 512,
            "model.layers": 2,
            "model.width": 64,
            "model.heads": 4,
            "model.dropout": 0.1,
            "schedule.rate": 3e-3,
            "train.batch_size": 64,
            "train.num_epochs": 12,
        },
        FEW,
        {"cgx4": "93.12 to 93.06"},
        measure="F1",
    ),
}
EACH = f"""\
- Each row is `python recipes/train.py --config=recipes/configs/CONFIG.py --compression=WORD` with the changes that its
  table names, on {RANKS} virtual devices of one process. There is one seed, and differences of a point are within the
  spread of seeds ([training.md](training.md) has several seeds).
- bytes: what a rank sends in a step after any warm-up, as jaxcgx.explain finds it in the compiled step, and how many
  times fewer than uncompressed. They include the loss and the statistics of batch norm, which travel uncompressed.
- hours: the time of the steps, without compiling, tests and checkpoints. Other programs ran on the same cores. So hours
  show the size of a run, and don't compare methods.
  Where a run paused, they include the pause, which is named.
"""
NOTES = f"""\
{EACH}\
- Text is trained from random weights, for only a thousand steps. In so short a training, compression errors show as
  slower learning. [accuracy.md](accuracy.md) compares codecs after a thousand steps of float32.
- lost: points of accuracy against `none`; for text, the increase of the perplexity (per byte) in %.
- published: from float32 to compressed, in the papers of DGC and CGX, as accuracy in % or perplexity. They differ from
  these rows in the data, in the networks (all have more parameters), the epochs (about 90 to 164 on images) and the
  ranks (4 to 64 GPUs). DGC sends 277 times fewer bytes with ResNet-50 and 462 times with the LSTM, whose matrices are
  larger; CGX's 4 bits are 8 times fewer.
- CIFAR-10 is not among the data, because it must be downloaded first (`--config=recipes/configs/cifar/resnet20.py`).
  Images of digits have 8 x 8 pixels, those of Fashion-MNIST 28 x 28.
- dgc: 5 of the 12 epochs on digits, and 1 of 2 or 6 epochs elsewhere, are its warm-up, in which more elements are sent.
  Two epochs are short for DGC and DiLoCo."""
OF_TRANSFORMERS = f"""\
{EACH}\
- The networks are small: Transformer-XL has 3 layers of width 64 in place of 16 of width 410, and BERT 2 layers of
  width 64 in place of 12 of width 768. Their text is the documentation of the Python language, 0.76 MB: neither
  WikiText-103 nor SQuAD was there.
- The curves have the loss of every 20th batch, and the loss of the test after each epoch. The perplexity is that
  of a token, which is a sequence of bytes. F1, in %, compares tokens, and "accuracy" in the data is the share of
  answers that match exactly. All weights begin at random, and the questions are few, so F1 is low with float32,
  too.
- lost: points of F1 against `none`; for text, the increase of the perplexity in %.
- published: from float32 to compressed, in CGX's paper, with the whole networks on WikiText-103 and SQuAD.
- dgc: 1 % of the elements, after a warm-up of one epoch. It applies Adam's momentum before the exchange.\
"""
REPORTS = {"recipes": (TASKS, NOTES), "recipes-transformers": (TRANSFORMERS, OF_TRANSFORMERS)}
SCALES = {"accuracy": 100, "F1": 100, "perplexity": 1}
CURVES = dict(x="step", y=["loss", "test_loss"], by="compression")


def folder_name(task, word):
    return f"{task.config.replace('/', '-')}-{word}-bench"


def train(task, word, folder):
    """Runs a row, or the missing part of it."""
    changes = {"train.save_every": 100} | task.changes | task.words[word]
    subprocess.run(
        [sys.executable, ROOT / "recipes/train.py", f"--config={ROOT}/recipes/configs/{task.config}.py"]
        + [f"--compression={word}", "--suffix=bench", f"--runs={folder}", f"--devices={RANKS}", "--launch=local"]
        + [f"--config.{key}={value}" for key, value in changes.items()],
        check=True,
    )


def title(task, word):
    """Returns the changes of a row, formatted to follow its word."""
    return " ".join([word, *(f"{key.partition('.')[2]}={value}" for key, value in task.words[word].items())])


def metrics(task, word, folder):
    """Returns the lines of a row's metrics.jsonl."""
    path = folder / folder_name(task, word) / "metrics.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()]


def result(task, word, folder):
    """Returns the figures of a row that has ended."""
    config = json.loads((folder / folder_name(task, word) / "config.json").read_text())
    batch = config["train"]["batch_size"]
    found, seconds, before = {}, 0.0, 0
    for each in metrics(task, word, folder):
        if "examples_per_second" in each:
            seconds += (each["step"] - before) * batch / each["examples_per_second"]
            before = each["step"]
        found |= each
    value = SCALES[task.measure] * found[f"test_{task.measure.lower()}"]
    names = "test_loss", "test_accuracy", "bytes", "raw_bytes"
    figures = dict(steps=found["step"], epochs=found["epoch"], seconds=round(seconds, 1), value=round(value, 4))
    return {name: found[name] for name in names} | figures


def curve(task, word, folder):
    """Returns {step: its losses} of a row."""
    found = {}
    for each in metrics(task, word, folder):
        names = {"loss", "test_loss", "test_accuracy", "test_f1"} & each.keys()
        found.setdefault(each["step"], {}).update({name: round(each[name], 4) for name in sorted(names)})
    return {step: losses for step, losses in found.items() if losses}


def table(report, name, task):
    changed = ", ".join(f"{key}={value}" for key, value in task.changes.items()) or "nothing"
    text = task.measure == "perplexity"
    report.show("", f"{name}: `{task.config}`, changed: {changed}.", "")
    lost = "lost in %" if text else "lost"
    report.show(*header("compression", "epochs", task.measure, lost, "bytes", "fewer", "hours", "published"))
    rows = {row["compression"]: row for row in report.data["rows"] if row["task"] == name}
    float32 = rows["none"]["value"] if "none" in rows else None
    for word in task.words:
        row, published = rows.get(title(task, word)), task.published.get(word, "")
        if row is None:
            report.show(line([title(task, word), *["not run"] * 6, published]))
            continue
        value, less = row["value"], ""
        if float32 is not None:
            less = f"{100 * (value / float32 - 1) if text else float32 - value:.2f}"
        cells = [title(task, word), f"{row['epochs']:.0f}", f"{value:.3f}" if text else f"{value:.2f}", less]
        pause = f", pause {row['pause_seconds'] / 3600:.2f}" if "pause_seconds" in row else ""
        hours = f"{row['seconds'] / 3600:.3f}{pause}"
        cells += [f"{row['bytes']:,.0f}", f"{row['raw_bytes'] / row['bytes']:.1f}", hours]
        report.show(line([*cells, published]))


def curves(report, name, task, picture):
    """Shows the test losses of a task by step, and draws them with the training losses."""
    rows = [row for row in report.data["curves"] if row["task"] == name]
    if not rows:
        return
    words = [title(task, word) for word in task.words]
    tested = {(row["step"], row["compression"]): row["test_loss"] for row in rows if "test_loss" in row}
    report.show("", f"The test loss by step ([picture]({picture.name})):", "", *header("step", *words))
    for step in sorted({step for step, _ in tested}):
        cells = (tested.get((step, word)) for word in words)
        report.show(line([step, *("" if x is None else f"{x:.3f}" for x in cells)]))
    picture.write_bytes(figures.draw(CURVES, rows, name))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", default="", help="a regular expression: only rows whose 'CONFIG WORD' has it are run")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build/bench-recipes")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    for file, (tasks, notes) in REPORTS.items():
        wanted = [(name, word) for name, task in tasks.items() for word in task.words]
        wanted = {(name, word) for name, word in wanted if re.search(args.runs, f"{tasks[name].config} {word}")}
        if wanted:
            write(file, tasks, notes, wanted, args)


def write(file, tasks, notes, wanted, args):
    """Runs the rows of a report that are wanted and missing, and writes the report."""
    charts = [dict(table="rows", title="Accuracy or F1 in %, perplexity", x="compression", y=["value"], panel="task")]
    tables = ["rows", "curves"]
    report = Growing("make bench-recipes", args.out / f"{file}.json", tables, ranks=RANKS, charts=charts)
    for number, (name, task) in enumerate(tasks.items()):
        for word in task.words:
            row = dict(task=name, compression=title(task, word))
            if (name, word) in wanted and not report.has("rows", **row):
                train(task, word, args.folder)
                steps = curve(task, word, args.folder).items()
                report.data["curves"] += [row | dict(step=step) | losses for step, losses in steps]
                report.add("rows", row | result(task, word, args.folder))
        table(report, name, task)
        curves(report, name, task, args.out / f"{file}_{number}.png")
    report.show("", notes)
    report.write(args.out, file)


if __name__ == "__main__":
    sys.exit(main())

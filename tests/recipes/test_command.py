"""The command itself, in a process of its own."""

import pathlib
import subprocess
import sys

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"


def command(*arguments):
    line = [sys.executable, RECIPES / "train.py", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_a_first_run(train, tmp_path):
    """It ends with accuracy, bytes, a plot and the next command."""
    config = f"--config={RECIPES}/configs/digits/mlp.py"
    done = command(config, "--compression=dgc", "--config.train.steps=20", f"--runs={tmp_path}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "digits-mlp-dgc: digits, 33,738 parameters, 4 ranks, 20 steps"
    accuracy, sent, raw = (
        float(word.rstrip("%,").replace(",", ""))
        for line, i in ((lines[1], 5), (lines[2], 3), (lines[2], 8))
        for word in [line.split()[i]]
    )
    assert accuracy > 60 and raw > 50 * sent
    assert (tmp_path / "digits-mlp-dgc/plot.png").exists() and "plot.png" in lines[3]
    assert lines[4] == f"next: python recipes/train.py {config} --compression=none"


def test_errors_are_one_line(train, tmp_path):
    done = command(f"--config={RECIPES}/configs/cifar/resnet20.py", f"--config.data.folder={tmp_path}")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: config.data.folder: there is no ")

"""The command itself, in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"


def test_a_first_run(train, tmp_path):
    """It ends with accuracy, bytes, a plot and the next command."""
    config = f"--config={RECIPES}/configs/digits/mlp.py"
    arguments = config, "--compression=dgc-wm0", "--config.train.steps=20", f"--runs={tmp_path}"
    line = [sys.executable, RECIPES / "train.py", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, accuracy, sent, files, following = done.stdout.splitlines()
    assert first == "digits-mlp-dgc-wm0: digits, 33,738 parameters, 4 ranks, 20 steps"
    assert float(accuracy.split()[5].rstrip("%,")) > 60
    numbers = [int(word.replace(",", "")) for word in sent.split() if word[0].isdigit()]
    assert numbers[1] > 50 * numbers[0]
    plot = tmp_path / "digits-mlp-dgc-wm0/plot.png"
    assert plot.read_bytes().startswith(b"\x89PNG") and str(plot) in files
    assert following == f"next: python recipes/train.py {config} --compression=none"


def test_errors_are_one_line(train, tmp_path):
    config = f"--config={RECIPES}/configs/digits/mlp.py"
    for arguments, starts in (
        ([config, "--config.train.stepz=1"], "train.py: config.train.stepz: there is no such key"),
        ([config, f"--config={tmp_path}/none.py"], "train.py: --config: there is no file"),
    ):
        with pytest.raises(SystemExit) as ended:
            train.main(arguments)
        assert ended.value.code.startswith(starts) and "\n" not in ended.value.code

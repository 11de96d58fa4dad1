"""Tests recipes/ray_train.py on this machine: `make test-ray`."""

import json
import pathlib
import sys

import numpy as np
import pytest
from helpers import run

pytestmark = pytest.mark.timeout(1800)

HERE = pathlib.Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("signal, what", [("SIGKILL", "died"), ("SIGTERM", "was interrupted")])
def test_a_worker_dies(tmp_path, signal, what):
    """One of 4 workers is killed or interrupted. 3 workers continue from the last checkpoint, and later 4 again."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    changes = {"compression": "cgx4", "model.hidden": (32,), "train.save_every": 25, "train.log_every": 25}
    changes |= {"train.num_epochs": 15, "train.test_every": 100, "compression.keep": True}
    changes = [f"--config.{key}={value}" for key, value in changes.items()]
    config = f"--config={RECIPES}/configs/digits/mlp.py"
    line = [sys.executable, HERE / "ray_probe.py", tmp_path, signal, "--workers=4", config, f"--runs={tmp_path}"]
    (tmp_path / "train.py").write_text("raise RuntimeError('not that of recipes')")
    done = run(*line, *changes, cwd=tmp_path, timeout=1500)
    worlds = [text.partition(" workers: ")[0] for text in done.stdout.splitlines() if " workers: processes " in text]
    assert worlds == ["4", "3", "4"], done.stdout
    assert f"a worker {what}" in done.stdout and "room for 4 workers" in done.stdout

    events = lines(tmp_path / "probe.jsonl")
    assert all(event["agree"] for event in events)
    restored = [event for event in events if event["event"] == "restore"]
    assert [event["ranks"] for event in restored] == [4, 3, 4]
    assert 0 == restored[0]["step"] < restored[1]["step"] < restored[2]["step"]
    for event in restored[1:]:  # the sums of residuals are those that another number of ranks saved
        before = events[: events.index(event)]
        saved = [each for each in before if (each["event"], each["step"]) == ("save", event["step"])][-1]
        assert event["ranks"] != saved["ranks"]
        largest = np.abs(saved["sums"]).max()
        assert largest > 0
        np.testing.assert_allclose(event["sums"], saved["sums"], rtol=0, atol=1e-5 * largest)

    metrics = lines(tmp_path / "digits-mlp-cgx4/metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in metrics if "loss" in line}
    assert list(losses) == [*range(25, 315, 25), 315]
    for event in restored[1:]:  # the loss continues and doesn't start again
        assert losses[min(step for step in losses if step > event["step"])] < 0.7 * losses[25]
    assert metrics[-1]["test_accuracy"] > 0.9


def test_errors_are_one_line(tmp_path):
    """They are errors of workers that any number of workers would have."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    config = f"--config={RECIPES}/configs/fashion_mnist/mlp.py"
    line = [sys.executable, RECIPES / "ray_train.py", "--workers=2", config, f"--config.data.folder={tmp_path}"]
    done = run(*line, f"--runs={tmp_path}", status=1, timeout=1500)
    assert done.stderr.splitlines()[-1].startswith(f"ray_train.py: config.data.folder: there is no {tmp_path}")

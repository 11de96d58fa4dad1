"""Tests parts of benchmarks, and that they set up devices only after they have imported one another."""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT
from helpers import FULL, load_script, run

BENCHMARKS = ROOT / "benchmarks"
IMPORT = """
import importlib, sys
from jax._src import xla_bridge
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
    assert not xla_bridge.backends_are_initialized(), f"importing {name} sets up devices"
"""


def test_importing_them_sets_up_no_device():
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.endswith("_torch"))
    assert {"collectives", "lab", "training_speed"} <= set(names)
    run(sys.executable, "-P", "-c", IMPORT, BENCHMARKS, *names)


def test_bandwidths_are_those_of_nccl_tests(monkeypatch):
    assert load_script(BENCHMARKS / "collectives.py", monkeypatch).bandwidths(4, 2e9, 1) == (2, 3)


def test_first_run(tmp_path, monkeypatch, capfd):
    """It is in a fresh clone of the last commit, and an error ends it."""
    script = load_script(BENCHMARKS / "first_run.py", monkeypatch)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for name in "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL":
        monkeypatch.setenv(name, "tests")
    monkeypatch.setenv("MAKEFLAGS", "n")  # as if another make had started it; it would run nothing
    makefile = "recipe:\n\t@touch built; echo in $$PWD\n\t@test -f built && : recipes/train.py\n"
    (tmp_path / "Makefile").write_text(makefile)
    git = lambda *words: subprocess.run(["git", *words], cwd=tmp_path, check=True, env=os.environ)
    for words in ["init", "-q"], ["add", "Makefile"], ["commit", "-qm", "tests"]:
        git(*words)
    (tmp_path / "Makefile").write_text("recipe:\n\t@false\n")
    installing, command = script.first_run("recipe", "recipes/train.py")
    assert 0 <= installing < 300 and 0 <= command < 300
    assert f"in {tmp_path}\n" not in capfd.readouterr().err and not (tmp_path / "built").exists()
    git("commit", "-qam", "tests")
    with pytest.raises(subprocess.CalledProcessError):
        script.first_run("recipe", "recipes/train.py")


@pytest.fixture
def scripts(monkeypatch):
    """Lets a test import training_speed.py and the scripts next to it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])


@pytest.mark.parametrize(
    "model, size, inputs, logits",
    [("transformer", 3_307_008, (2, 64), (2, 64, 256)), ("ResNet-20", 269_434, (2, 28, 28, 1), (2, 10))],
)
def test_models_have_their_size(scripts, model, size, inputs, logits):
    from training_speed_data import MAKERS
    from training_speed_models import PREDICT

    weights = MAKERS[model][0](np.random.default_rng(0))
    assert sum(w.size for w in weights.values()) == size
    dtype = jnp.int32 if model == "transformer" else jnp.float32
    assert jax.eval_shape(PREDICT[model], weights, jax.ShapeDtypeStruct(inputs, dtype)).shape == logits


@pytest.mark.parametrize("bits", [4, 8])
def test_the_quantization_by_hand_is_within_its_bound(scripts, bits):
    from training_speed_jax import BUCKET, compressed_mean, quantize

    ranks, sizes = 4, {"a": (30, 70), "b": (517,)}
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal((ranks, *size)).astype(np.float32) for name, size in sizes.items()}
    lost = rng.standard_normal((ranks, 30 * 70 + 517)).astype(np.float32) * 0.1
    exchange = functools.partial(compressed_mean, encode=functools.partial(quantize, bits=bits))
    means, left = jax.jit(jax.vmap(exchange, axis_name="data"))(grads, lost)
    sums = np.concatenate([grads["a"].reshape(ranks, -1), grads["b"]], 1) + lost
    got = np.concatenate([np.asarray(means["a"]).reshape(ranks, -1), means["b"]], 1)
    assert (got == got[0]).all()
    rows = np.pad(sums, ((0, 0), (0, -sums.shape[1] % (ranks * BUCKET)))).reshape(ranks, -1, BUCKET)
    half = np.repeat(np.ptp(rows, axis=2), BUCKET, 1)[:, : sums.shape[1]] / (2**bits - 1) / 2
    assert (np.abs(left) <= 1.001 * half).all()
    # Ranges of means are no larger, except for rounding.
    assert (np.abs(got[0] - sums.mean(0)) <= 2.2 * half.mean(0)).all()
    np.testing.assert_allclose(got[0], (sums - left).mean(0), atol=1.1 * half.mean(0).max())


@pytest.mark.parametrize("count", [3, 8])
def test_the_steps_to_a_loss_have_no_lag(scripts, count):
    from training_speed import steps_to

    losses = 5.0 - np.arange(count)  # the loss after `every` * i steps
    target = float(losses[-2]) + 0.25
    assert steps_to(losses, target, every=10) == pytest.approx(10 * (count - 2.25), abs=0.1)
    assert steps_to(losses, losses[-2] - 0.01, every=10) is None


@pytest.mark.skipif(not FULL, reason="runs in the full tests")
def test_steps_of_two_processes_in_the_small_size(tmp_path):
    """gpu_training.py on CPU devices, without virtual hosts."""
    options = ["--small", "--paced", "--models", "GPT", "--rates", "1000", "--repeats", "1"]
    run(sys.executable, BENCHMARKS / "gpu_training.py", *options, "--methods", "^4 bits, Tcp$", "--out", tmp_path)
    rows = json.loads((tmp_path / "gpu-training.json").read_text())["rows"]
    assert [(row["method"], row["mbit"]) for row in rows] == [("no exchange", 1000), ("4 bits, Tcp", 1000)]
    assert all(row["ms"] > 0 for row in rows) and rows[1]["sent_bytes"] > 10_000 > rows[0]["sent_bytes"]
    table = (tmp_path / "gpu-training.md").read_text()
    assert re.search(r"^\| psum, float32 +\| +not run \|", table, re.MULTILINE) and "(--paced)" in table
    assert (tmp_path / "gpu-training.png").exists()


@pytest.mark.parametrize("model, size", [("GPT-2 small", 124_439_808), ("ResNet-50", 25_557_032)])
def test_models_on_gpus_have_their_size(scripts, model, size):
    """And they compute in bfloat16."""
    from flax import nnx
    from gpu_training import MODELS

    setting = MODELS[model]
    made = nnx.eval_shape(setting.module)
    assert sum(x.size for x in jax.tree.leaves(nnx.state(made, nnx.Param))) == size
    tokens = len(setting.shape) == 1
    inputs = jax.ShapeDtypeStruct((2, *setting.shape), jnp.int32 if tokens else jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        logits = nnx.eval_shape(lambda module, x: module(x), made, inputs)
    assert logits.dtype == jnp.bfloat16 and logits.shape[-1] == setting.classes

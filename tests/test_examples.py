"""Runs the examples for a short time."""

import asyncio
import functools
import itertools
import re
import runpy
import shutil
import sys
import types

import jax
import numpy as np
import pytest
from commands import ROOT
from helpers import FULL, assert_same_trees, load_script, run
from jax.sharding import AxisType
from started import free_port
from training import NESTED

import jaxcgx as cgx

pytest.importorskip("sklearn", reason="needs the extra `examples`")
pytestmark = pytest.mark.usefixtures("promotion")  # of users
EXAMPLES = ROOT / "examples"


@pytest.fixture
def devices(monkeypatch):
    """Lets scripts use this process's devices. Returns {option of JAX: the value that a script gave it}."""
    said = {}

    def update(name, value):
        getattr(jax.config, name)  # an error if there is no such option
        said[name] = value

    monkeypatch.setattr(jax.config, "update", update)
    monkeypatch.setattr(cgx, "keep_pages", lambda: None)
    return said


def run_script(monkeypatch, path, *words):
    monkeypatch.setattr(sys, "argv", [path.name, *words])
    runpy.run_path(str(path), run_name="__main__")


def test_digits(tmp_path):
    plot = tmp_path / "curves.png"
    words = "--steps", "2", "--rate", "1gbit", "--plot", plot
    # XLA crashes if it has to keep a program of several processes.
    result = run(sys.executable, EXAMPLES / "digits.py", *words, env={"JAX_ENABLE_COMPILATION_CACHE": "false"})
    sent = [float(x) for x in re.findall(r" (\d\.\d{3}) ", result.stdout)]
    assert len(sent) == 4 and sent == sorted(sent, reverse=True), result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_fsdp(devices, monkeypatch, capsys):
    run_script(monkeypatch, EXAMPLES / "fsdp.py", "--steps", "2", "--devices", "2")
    assert devices["jax_num_cpu_devices"] == 2
    raw, compressed = (int(line.split()[-5].replace(",", "")) for line in capsys.readouterr().out.splitlines())
    assert raw > 4 * compressed


def test_tunix_weights_after_the_trainer_restarts(monkeypatch):
    """With stand-ins for Tunix's classes. Versions count from 1 again, and a sampler gets the new weights."""
    names = "TensorMetadata", "TransferResult", "WorkUnitId", "WorkUnitMetadata"
    module = types.SimpleNamespace(WeightSyncHandler=object, **dict.fromkeys(names, lambda *_, **fields: fields))
    monkeypatch.setitem(sys.modules, "tunix.experimental.orchestrator.weight_sync", module)
    tunix = load_script(EXAMPLES / "tunix_weights.py", monkeypatch)
    address, sampler = f"127.0.0.1:{free_port()}", tunix.PatchDestination("sampler", {"w": np.zeros(4, np.float32)})
    for weights in {"w": np.ones(4, np.float32)}, {"w": np.full(4, 2, np.float32)}:
        trainer = tunix.PatchSource(address, lambda weights=weights: weights)
        (found,) = asyncio.run(trainer.prepare_weight_sync())
        request = types.SimpleNamespace(source_metadata=[types.SimpleNamespace(**found)])
        assert_same_trees(asyncio.run(sampler.fetch(request)), weights)
        trainer.publisher.close()
    sampler.subscriber.close()


@pytest.mark.parametrize(("name", "number"), [("pipeline", 2), ("experts", 4)])
def test_activations(name, number, devices, monkeypatch, capsys):
    """With differences at 4 bits, and cotangents at 8, a pipeline's mean loss is within half a percent of raw."""
    path = EXAMPLES / f"{name}.py"
    run_script(monkeypatch, path, *[] if FULL else ["3"])
    assert devices == {"jax_num_cpu_devices": number}
    lines = capsys.readouterr().out.splitlines()
    sent = [int(re.search(r"sends ([\d,]+) bytes", line)[1].replace(",", "")) for line in lines]
    assert sent[0] > 3 * max(sent[1:]) and len(path.read_text().splitlines()) <= 80
    raw, *_, differences = (float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines)
    assert not FULL or name != "pipeline" or abs(differences - raw) <= 0.005 * raw


def run_here(path, monkeypatch, capsys):
    """Runs 6 steps of an example in this process. Returns the words that it prints, and bytes: (sent, uncompressed)."""
    load_script(path, monkeypatch).main(6)
    words = capsys.readouterr().out.replace(",", "").split()
    return words, [int(words[words.index(before) + 1]) for before in ("sends", "uncompressed")]


ONE_LINE = dict.fromkeys(["nnx_train", "equinox_train", "trainstate_train", "pmap_train"], 62) | {"keras_train": 74}


@pytest.mark.parametrize(("name", "lines"), ONE_LINE.items())
def test_one_line(name, lines, monkeypatch, capsys):
    """Examples of other libraries are short enough to copy, and run in this process."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for library in ("flax", "equinox", "keras"):
        pytest.importorskip(library, reason="needs the extras `examples` and `test`")
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= lines
    words, (sent, raw) = run_here(path, monkeypatch, capsys)
    losses = [float(word) for before, word in itertools.pairwise(words) if before == "loss"]
    assert losses[-1] < losses[0]
    assert raw > 1.5 * sent  # "auto" chooses one_shot for such small messages


@NESTED
def test_maxtext_step(monkeypatch, capsys):
    """Between slices, only compressed gradients, the sum of losses and the weights travel."""
    pytest.importorskip("flax", reason="needs the extra `test`")
    _, (sent, raw) = run_here(EXAMPLES / "maxtext_step.py", monkeypatch, capsys)
    assert raw > 3 * sent


def test_lm_train(tmp_path, monkeypatch, capsys):
    """A run that continues from a checkpoint ends as before, and draws its losses."""
    for library in ("flax", "orbax.checkpoint"):
        pytest.importorskip(library, reason="needs the extras `examples` and `test`")
    script = load_script(EXAMPLES / "lm_train.py", monkeypatch)
    smaller = dict(Transformer=functools.partial(script.Transformer, layers=1), LENGTH=16, EXAMPLES=8, MICRO_BATCHES=2)
    for name, value in smaller.items():
        monkeypatch.setattr(script, name, value)
    make = script.ocp.CheckpointManagerOptions
    often = lambda **options: make(**options | {"save_interval_steps": 2, "max_to_keep": 2})
    monkeypatch.setattr(script.ocp, "CheckpointManagerOptions", often)
    for _ in range(2):
        script.main(4, tmp_path)
        shutil.rmtree(tmp_path / "checkpoints/4")
    losses = re.findall(r"^(step 3: loss .*|continues at .*)$", capsys.readouterr().out, re.MULTILINE)
    assert losses == [losses[0], "continues at step 2", losses[0]]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def common(monkeypatch):
    """The common code of the wide-area demonstrations, with a smaller model."""
    monkeypatch.syspath_prepend(EXAMPLES / "wan")
    import common

    monkeypatch.setattr(common, "SIZES", (128, 128, 128, 10))
    return common


WIDE_AREA = sorted(path.stem for path in (EXAMPLES / "wan").glob("*.py") if "TECHNIQUES" in path.read_text())


@pytest.mark.parametrize("name", WIDE_AREA)
def test_wide_area(name, common, monkeypatch):
    """Traces a step of every technique of every demonstration, without running it."""
    mesh = jax.make_mesh((2, 2), common.AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    batch, args = (np.zeros((8, 64), np.float32), np.zeros(8, np.int32)), types.SimpleNamespace(lr=0.1, ratio=0.5)
    for make in load_script(EXAMPLES / "wan" / f"{name}.py", monkeypatch).TECHNIQUES.values():
        train = make(mesh, cgx.Sharding(common.AXES), args)
        train.step.lower(train.init(common.init_params()), batch)


def test_wide_area_demonstration(common, devices, tmp_path, monkeypatch, capsys):
    """Runs on virtual devices, which play GPUs, and makes a table and a plot of loss against time."""
    options = "--local", "--gpu", "--epoch", "1", "--bs", "224", "--out", str(tmp_path / "new")
    run_script(monkeypatch, EXAMPLES / "wan/fp16.py", *options)
    printed = capsys.readouterr().out
    assert "float16" in printed and "loss at end" in printed
    assert (tmp_path / "new/fp16.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:Decoupled.join. this center begins without others")
def test_decoupled_centers(common, capsys, monkeypatch):
    """One of three programs trains while the other two are missing."""
    addresses = [f"127.0.0.1:{port}" for port in (28760, 28761)]
    load_script(EXAMPLES / "wan/decoupled.py", monkeypatch).train(addresses, 0, 41)
    assert "center 0: round 1 of (0,), loss" in capsys.readouterr().out

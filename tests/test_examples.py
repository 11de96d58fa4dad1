"""Runs the examples for a short time."""

import itertools
import pathlib
import re
import sys

import jax
import numpy as np
import pytest
from helpers import load_script, run
from jax.sharding import AxisType

import jaxcgx as cgx

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def test_digits(tmp_path):
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    plot = tmp_path / "curves.png"
    words = "--steps", "2", "--rate", "1gbit", "--plot", plot
    # XLA crashes if it has to keep a program of several processes.
    result = run(sys.executable, EXAMPLES / "digits.py", *words, env={"JAX_ENABLE_COMPILATION_CACHE": "false"})
    sent = [float(x) for x in re.findall(r" (\d\.\d{3}) ", result.stdout)]
    assert len(sent) == 4 and sent == sorted(sent, reverse=True), result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_fsdp():
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    result = run(sys.executable, EXAMPLES / "fsdp.py", "--steps", "2", "--devices", "2")
    raw, compressed = (int(line.split()[-5].replace(",", "")) for line in result.stdout.splitlines())
    assert raw > 4 * compressed


def test_pipeline():
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    lines = run(sys.executable, EXAMPLES / "pipeline.py", "3").stdout.splitlines()
    raw, compressed = (int(re.search(r"sends ([\d,]+) bytes", line)[1].replace(",", "")) for line in lines)
    assert raw > 3 * compressed and len((EXAMPLES / "pipeline.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", ["nnx_train", "equinox_train", "trainstate_train", "pmap_train"])
def test_one_line(name, monkeypatch, capsys):
    """Tests the examples of other libraries.

    They are short enough to copy, and run in this process with its devices.
    """
    for library in ("sklearn", "flax", "equinox"):
        pytest.importorskip(library, reason="needs the extras `examples` and `test`")
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 62
    with jax.numpy_dtype_promotion("standard"):
        load_script(path, monkeypatch).main(6)
    words = capsys.readouterr().out.replace(",", "").split()
    losses = [float(word) for before, word in itertools.pairwise(words) if before == "loss"]
    sent, raw = (int(words[words.index(before) + 1]) for before in ("sends", "uncompressed"))
    assert losses[-1] < losses[0]
    assert raw > 1.5 * sent  # "auto" chooses one_shot for such small messages


WIDE_AREA = sorted(path.stem for path in (EXAMPLES / "wan").glob("*.py") if "TECHNIQUES" in path.read_text())


@pytest.mark.parametrize("name", WIDE_AREA)
def test_wide_area(name, monkeypatch):
    """Traces a step of every technique of every demonstration, without running it. The frame's model is smaller."""
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    monkeypatch.syspath_prepend(EXAMPLES / "wan")
    import common

    monkeypatch.setattr(common, "SIZES", (64, 128, 128, 10))
    mesh = jax.make_mesh((2, 2), common.AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    batch = np.zeros((8, 64), np.float32), np.zeros(8, np.int32)
    with jax.numpy_dtype_promotion("standard"):
        for make in load_script(EXAMPLES / "wan" / f"{name}.py", monkeypatch).TECHNIQUES.values():
            train = make(mesh, cgx.Sharding(common.AXES))
            train.step.lower(train.init(common.init_params()), batch)


def test_wide_area_demonstration(tmp_path):
    """Runs on virtual devices, and makes a table and a plot of loss against time."""
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    result = run(sys.executable, EXAMPLES / "wan/fp16.py", "--local", "--steps", "2", "--out", tmp_path / "new")
    assert "float16" in result.stdout and "loss at end" in result.stdout
    assert (tmp_path / "new/fp16.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:Decoupled.join. this center begins without others")
def test_decoupled_centers(capsys, monkeypatch):
    """One of three programs trains while the other two are missing."""
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    monkeypatch.syspath_prepend(EXAMPLES / "wan")
    import common

    monkeypatch.setattr(common, "SIZES", (64, 128, 128, 10))
    with jax.numpy_dtype_promotion("standard"):
        load_script(EXAMPLES / "wan/decoupled.py", monkeypatch).train(
            [f"127.0.0.1:{port}" for port in (28760, 28761)], 0, 41
        )
    assert "center 0: round 1 of (0,), loss" in capsys.readouterr().out

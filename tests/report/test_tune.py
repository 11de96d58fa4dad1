"""Tests python -m jaxcgx tune: from saved gradients to a saved plan."""

import functools
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import names
from helpers import vnmse

import jaxcgx as cgx
from jaxcgx import __main__
from jaxcgx.report import tune

PLANS = pathlib.Path(__file__).parents[2] / "docs/plans.md"
SCALES = {"block/0/kernel": 1.0, "block/1/kernel": 0.01, "embed": 0.1}


def arrays(step=0):
    rng = np.random.RandomState(step)
    kernels = {name: (rng.standard_normal((64, 128)) * scale).astype(np.float32) for name, scale in SCALES.items()}
    return kernels | {"block/0/bias": rng.standard_normal(128).astype(np.float32), "steps": np.int32(step)}


BITS = tuple(cgx.MaxMin(bits, 1024) for bits in range(2, 9))
measure = jax.jit(functools.partial(cgx.gradient_statistics, codecs=BITS))


@pytest.fixture
def tuned(tmp_path):
    """Runs the command with a file of these arrays, and maybe one of the plan to adapt. Returns the saved plan."""

    def run(found, *options, plan=None):
        gradients, base, out = (str(tmp_path / name) for name in ("grads.npz", "base.toml", "plan.toml"))
        np.savez(gradients, **found)
        if plan is not None:
            plan.save(base)
            options = ("--plan", base, *options)
        assert __main__.main(["tune", gradients, "--out", out, *options]) is None
        return cgx.Plan.load(out)

    return run


@pytest.mark.parametrize("method", ["lgreco", "kmeans"])
def test_the_choice_is_that_of_adapt(tuned, tmp_path, capsys, method):
    steps = [arrays(0), arrays(1)]
    found = tuned({f"{name}@{i}": x for i, step in enumerate(steps) for name, x in step.items()}, "--method", method)
    plan = cgx.Plan.cgx().adapt(measure(steps[0]) + measure(steps[1]), method=method)
    assert found == plan
    printed = capsys.readouterr().out
    lines = [re.split(" {2,}", line) for line in printed.splitlines()]
    assert printed.endswith(f"saved to {tmp_path}/plan.toml\n")
    # The tables agree with the plan.
    tree = {name: jnp.asarray(x) for name, x in steps[0].items()}
    for row in plan.explain(tree, 2).rows:
        (cells,) = [cells for cells in lines if cells[0] == row.leaf]
        size = row.raw_bytes if row.why else row.codec.wire_bytes(row.shape, row.dtype)
        spelled = "Raw()" if row.why else f"MaxMin(bits={row.codec.bits}, bucket_size={row.codec.bucket_size})"
        assert cells[2:5] == [spelled, f"{size:,}", f"{row.raw_bytes:,}"] and (row.why or cells[-1]) == cells[-1]
        if not row.why:
            x = np.stack([step[row.leaf] for step in steps])
            lost = vnmse(x, np.stack([cgx.roundtrip(each, row.codec) for each in x]))
            assert float(cells[6]) == pytest.approx(lost**0.5, abs=1e-4)
    total = lambda name: sum(int(cells[1].replace(",", "")) for cells in lines if cells[0] == name)
    assert total("adapted") < total("before")


def test_what_is_measured_once_is_not_measured_again(tuned, monkeypatch):
    measured = []

    def noted(*args, codecs, **kwargs):
        measured.append(codecs)
        return cgx.gradient_statistics(*args, codecs=codecs, **kwargs)

    monkeypatch.setattr(tune, "gradient_statistics", noted)
    tuned(arrays(), "--bits", "3")
    assert measured == [(cgx.MaxMin(3, 1024), cgx.MaxMin(4, 1024))]
    tuned(arrays(), "--bits", "3", plan=cgx.Plan(cgx.MaxMin(4), [("embed", cgx.Sign())]))
    assert measured[1:] == [(cgx.MaxMin(3), cgx.MaxMin(4)), (cgx.Sign(),)]


@pytest.mark.parametrize(("budget", "alpha"), [("error", 0.5), ("bytes", 0.9)])
def test_a_plan_of_ones_own(tuned, budget, alpha):
    base = cgx.Plan({"node": cgx.AbsMax(5, 64), "local": cgx.Raw()}, [("embed", cgx.Cast("float16"))], fusion_mb=8)
    found = tuned(arrays(), "--bits", "3", "7", "--budget", budget, "--alpha", str(alpha), plan=base)
    candidates = [cgx.AbsMax(bits, 64) for bits in (3, 5, 7)]
    statistics = jax.jit(functools.partial(cgx.gradient_statistics, codecs=candidates))(arrays())
    assert found == base.adapt(statistics, budget=budget, alpha=alpha)


def test_default_bits_of_a_codec_that_lacks_some(tuned):
    base = cgx.Plan(cgx.Eden(4, 128))
    candidates = [cgx.Eden(bits, 128) for bits in range(2, 7)]
    key = jax.random.fold_in(jax.random.key(0), 0)
    statistics = jax.jit(functools.partial(cgx.gradient_statistics, codecs=candidates, key=key))(arrays())
    assert tuned(arrays(), plan=base) == base.adapt(statistics)
    with pytest.raises(SystemExit, match="Eden.* 1 to 6, got 8"):
        tuned(arrays(), "--bits", "8", plan=base)


def test_a_plan_that_skips(tuned, capsys):
    gradients = dict(w=np.ones((64, 64), np.float32), kernel=np.eye(64, dtype=np.float32))
    plan = tuned(gradients, "--bits", "8", plan=cgx.Plan(cgx.MaxMin(4), [("w", cgx.Skip())]))
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("w ")]
    assert line == ["w", "64x64", "Skip()", "0", "0", "1.00", "0.0000"]
    assert plan.rules[0].codec == cgx.Skip()


def test_the_guide(tmp_path, monkeypatch, capsys):
    """docs/plans.md saves gradients. The output that it prints is the real one."""
    blocks = re.findall("```(\\w*)\n(.*?)```", PLANS.read_text(), re.DOTALL)
    (save,) = [text for language, text in blocks if "np.savez" in text]
    (printed,) = [text for language, text in blocks if text.startswith("$ python -m jaxcgx tune")]
    monkeypatch.chdir(tmp_path)
    rng = np.random.RandomState(0)
    kernels = [jnp.asarray(rng.standard_normal((64, 128)) * scale, jnp.float32) for scale in (1, 0.1)]
    grads = {"block": [{"kernel": kernel, "bias": jnp.zeros(128)} for kernel in kernels]}
    exec(save, dict(jax=jax, np=np, grads=grads))
    command, _, expected = printed.partition("\n")
    __main__.main(command.split()[4:])  # the words after "$ python -m jaxcgx"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("found", "options", "words"),
    [
        ({}, [], "tune - none"),
        ({"w@0": np.float32([[1]]), "w@2": np.float32([[1, 2]])}, [], "tune - another 'w' in step 2"),
        ({"w": np.ones((64, 64))}, [], "tune w float64 .astype(numpy.float32)"),
        ({"w": np.asarray(jnp.ones((64, 64), jnp.bfloat16))}, [], "tune w |V2 .astype(numpy.float32)"),
        ({"w": np.array(["a", "b"])}, [], "tune w <U1"),
        ({"w": np.array([None])}, [], "tune - another"),
        ({"w": np.ones(3, np.float32), "w@0": np.ones(3, np.float32)}, [], "tune w@0 another of 'w' in step 0"),
        ({"w@1": np.ones(3, np.float32), "w@01": np.ones(3, np.float32)}, [], "tune w@01 another of 'w' in step 1"),
        (arrays(), ["--method", "bayes"], "Plan.adapt method 'bayes'"),
        (arrays(), ["--alpha", "-1"], "Plan.adapt alpha -1.0"),
        (arrays(), ["--bits", "9"], "MaxMin bits 9"),
        (arrays(), ["--plan", "nowhere.toml"], "tune - No such file 'nowhere.toml'"),
        ({"b": np.ones(3, np.float32)}, [], "Plan.adapt statistics none"),
    ],
)
def test_bad_input(tuned, found, options, words):
    with names(SystemExit, words) as caught:
        tuned(found, *options)
    assert str(caught.value).startswith("python -m jaxcgx tune: ")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (cgx.Plan(cgx.ByteGrad()), "tune --plan ByteGrad(compatible=False)"),
        (cgx.Plan(cgx.Raw()), "tune --plan Raw()"),
        (cgx.Plan({"a": cgx.MaxMin(4), "b": cgx.MaxMin(8)}), "tune --plan {'a' MaxMin(bits=4) MaxMin(bits=8)"),
        (cgx.Plan(cgx.MaxMin(4), [("head", cgx.Raw())]), "tune gradients none for Rule(codec=Raw(), path='head')"),
    ],
)
def test_plans_that_are_wrong(tuned, monkeypatch, plan, words):
    monkeypatch.setattr(tune, "statistics", None)  # the error comes before anything is measured
    with names(SystemExit, words) as caught:
        tuned(arrays(), plan=plan)
    assert str(caught.value).count("tune: ") == 1


@pytest.mark.parametrize("content", ["truncated", "npy", "empty", "text"])
def test_files_that_are_no_gradients(tmp_path, content):
    np.savez(whole := io.BytesIO(), **arrays())
    np.save(lone := io.BytesIO(), np.ones(3))
    half = whole.getvalue()[: len(whole.getvalue()) // 2]
    path = tmp_path / "grads.npz"
    path.write_bytes({"truncated": half, "npy": lone.getvalue(), "empty": b"", "text": b"gradients"}[content])
    with names(SystemExit, "tune - another") as caught:
        __main__.main(["tune", str(path), "--out", str(tmp_path / "plan.toml")])
    assert str(path) in str(caught.value)

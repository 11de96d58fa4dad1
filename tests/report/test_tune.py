"""python -m jaxcgx tune: from saved gradients to a saved plan."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcgx as cgx
from jaxcgx import __main__
from jaxcgx.report import tune

SCALES = {"block/0/kernel": 1.0, "block/1/kernel": 0.01, "embed": 0.1}


def arrays(step=0):
    rng = np.random.RandomState(step)
    return {name: (rng.standard_normal((64, 128)) * scale).astype(np.float32) for name, scale in SCALES.items()} | {
        "block/0/bias": rng.standard_normal(128).astype(np.float32), "steps": np.int32(step)}


@pytest.fixture
def saved(tmp_path):
    """Writes arrays and returns the paths of their file and of one for a plan."""

    def save(found):
        np.savez(tmp_path / "grads.npz", **found)
        return str(tmp_path / "grads.npz"), str(tmp_path / "plan.toml")

    return save


@pytest.mark.parametrize("method", ["lgreco", "kmeans"])
def test_the_choice_is_that_of_adapt(saved, capsys, method):
    steps = [arrays(0), arrays(1)]
    gradients, out = saved({f"{name}@{i}": x for i, step in enumerate(steps) for name, x in step.items()})
    assert __main__.main(["tune", gradients, "--out", out, "--method", method]) is None
    statistics = cgx.gradient_statistics(steps[0]) + cgx.gradient_statistics(steps[1])
    plan = cgx.Plan.cgx().adapt(statistics, method=method)
    assert cgx.Plan.load(out) == plan
    printed = capsys.readouterr().out
    lines = [re.split(" {2,}", line) for line in printed.splitlines()]
    assert printed.endswith(f"saved to {out}\n")
    # The tables say what the plan does.
    tree = {name: jnp.asarray(x) for name, x in steps[0].items()}
    for row in plan.explain(tree, 2).rows:
        (cells,) = [cells for cells in lines if cells[0] == row.leaf]
        size = row.raw_bytes if row.why else row.codec.wire_bytes(row.shape, row.dtype)
        spelled = "Raw()" if row.why else f"MaxMin(bits={row.codec.bits}" + (")" if row.codec.bucket_size == 512 else f", bucket_size={row.codec.bucket_size})")
        assert cells[2:5] == [spelled, f"{size:,}", f"{row.raw_bytes:,}"] and (row.why or cells[-1]) == cells[-1]
        if not row.why:
            lost = sum(np.square(np.float64(cgx.roundtrip(step[row.leaf], row.codec)) - step[row.leaf]).sum() for step in steps)
            assert float(cells[6]) == pytest.approx((lost / sum(np.square(np.float64(step[row.leaf])).sum() for step in steps)) ** 0.5, abs=1e-4)
    before, adapted = (sum(int(cells[1].replace(",", "")) for cells in lines if cells[0] == name) for name in ("before", "adapted"))
    assert adapted < before


def test_a_plan_of_ones_own(saved, tmp_path):
    gradients, out = saved(arrays())
    base = cgx.Plan({"node": cgx.AbsMax(5, 64), "local": cgx.Raw()}, [("embed", cgx.Cast("float16"))], fusion_mb=8)
    base.save(tmp_path / "base.toml")
    __main__.main(["tune", gradients, "--out", out, "--plan", str(tmp_path / "base.toml"), "--bits", "3", "7", "--alpha", "0.5"])
    candidates = [cgx.AbsMax(bits, 64) for bits in (3, 5, 7)]
    assert cgx.Plan.load(out) == base.adapt(cgx.gradient_statistics(arrays(), codecs=candidates), alpha=0.5)


def test_stochastic_candidates(saved, tmp_path):
    gradients, out = saved(arrays())
    cgx.Plan.cgx(rounding="stochastic").save(tmp_path / "base.toml")
    __main__.main(["tune", gradients, "--out", out, "--plan", str(tmp_path / "base.toml")])
    assert {rule.codec.rounding for rule in cgx.Plan.load(out).rules} == {"stochastic"}


def test_how_gradients_are_saved(saved):
    """docs/plans.md's line."""
    grads = {"block": [{"kernel": jnp.ones((2, 3))}, {"kernel": jnp.zeros(3)}]}
    found = jax.tree_util.tree_flatten_with_path(grads)[0]
    gradients, _ = saved({jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found})
    (step,) = tune.read(gradients)
    assert {name: x.shape for name, x in step.items()} == {"block/0/kernel": (2, 3), "block/1/kernel": (3,)}


@pytest.mark.parametrize(("found", "options", "words"), [
    ({}, [], "expected gradients, got none"),
    ({"w@0": np.ones((64, 64), np.float32), "w@2": np.ones((64, 65), np.float32)}, [], "expected the same arrays in every step, but 'w' of step 2 is not as in step 0"),
    ({"w": np.ones((64, 64))}, [], "array 'w': expected float32 or float16, got float64; save it as .astype(numpy.float32)"),
    ({"w": np.asarray(jnp.ones((64, 64), jnp.bfloat16))}, [], "array 'w': expected float32 or float16, got |V2; save it as .astype(numpy.float32)"),
    (arrays(), ["--method", "bayes"], "Plan.adapt: argument 'method': expected one of 'lgreco', 'kmeans', got 'bayes'"),
    (arrays(), ["--alpha", "-1"], "Plan.adapt: argument 'alpha': expected a positive number, got -1.0"),
    (arrays(), ["--bits", "9"], "MaxMin: argument 'bits': expected an integer from 1 to 8, got 9"),
    (arrays(), ["--plan", "nowhere.toml"], "No such file or directory: 'nowhere.toml'"),
    ({"b": np.ones(3, np.float32)}, [], "expected a leaf that gets the plan's default codec, got none"),
], ids=["empty", "steps", "float64", "bfloat16", "method", "alpha", "bits", "plan", "guards"])  # fmt: skip
def test_bad_input(saved, found, options, words):
    gradients, out = saved(found)
    with pytest.raises(SystemExit) as caught:
        __main__.main(["tune", gradients, "--out", out, *options])
    assert str(caught.value).startswith("python -m jaxcgx tune: ") and words in str(caught.value)


def test_a_codec_without_bits(saved, tmp_path):
    gradients, out = saved(arrays())
    cgx.Plan(cgx.ByteGrad()).save(tmp_path / "base.toml")
    with pytest.raises(SystemExit, match="argument 'plan': expected one whose default codec has bits, got ByteGrad"):
        __main__.main(["tune", gradients, "--out", out, "--plan", str(tmp_path / "base.toml")])

"""Tests Skip() in a plan: which leaves it applies to, and what tables report."""

import jax.numpy as jnp
import numpy as np
import pytest
from errors import table

import jaxcgx as cgx
from jaxcgx import __main__

TREE = {"lora": {"a": jnp.ones((64, 32)), "bias": jnp.ones(3)}, "w": jnp.ones((64, 64)), "ids": jnp.ones(3, jnp.int32)}


def skipped(plan):
    return {row.leaf for row in plan.explain(TREE, 4).rows if row.codec == cgx.Skip()}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (cgx.Plan(cgx.MaxMin(4), [("w", cgx.Skip())]), {"w"}),
        (cgx.Plan(cgx.MaxMin(4), [("bias|ids", cgx.Skip())]), {"lora/bias", "ids"}),
        (cgx.Plan(cgx.Skip(), [("lora", cgx.MaxMin(4))]), {"w", "ids"}),
        (cgx.Plan(cgx.MaxMin(4), [("lora", cgx.Skip()), cgx.Rule(cgx.Raw(), "bias", priority=1)]), {"lora/a"}),
    ],
    ids=["a rule", "stronger than guards", "the default", "of a lower priority"],
)
def test_leaves(plan, expected):
    assert skipped(plan) == expected


def test_a_table_says_it():
    found = cgx.Plan(cgx.Skip(), [("lora", cgx.MaxMin(4))]).explain(TREE, {"node": 2, "local": 2})
    rows = {row.leaf: row for row in found.rows}
    assert (rows["w"].bytes, rows["w"].raw_bytes, rows["w"].message, rows["w"].why) == (0, 0, None, None)
    assert found.raw_bytes == 4 * (64 * 32 + 3) and rows["lora/bias"].codec == cgx.Raw()
    assert "Skip()" in str(found)


WHERE_IT_HAS_NO_MEANING = {
    "Plan": [(lambda: cgx.Plan({"node": cgx.Skip(), "local": cgx.Raw()}), ValueError, "default", "Skip()", "rule")],
    "Plan.explain": [
        (
            lambda: skipped(cgx.Plan(cgx.MaxMin(4), [("bias", cgx.Skip()), ("lora", cgx.MaxMin(8))])),
            ValueError,
            "tree 'lora/bias'",
            "two",
            "priority",
        )
    ],
    "Plan.adapt": [
        (
            lambda: cgx.Plan(cgx.Skip()).adapt(cgx.gradient_statistics({"w": TREE["w"]}, codecs=[cgx.MaxMin(4)])),
            ValueError,
            "",
            "Skip()",
        )
    ],
}
test_where_it_has_no_meaning = table(WHERE_IT_HAS_NO_MEANING)


def test_tune(tmp_path, capsys):
    np.savez(tmp_path / "grads.npz", w=np.ones((64, 64), np.float32), kernel=np.eye(64, dtype=np.float32))
    cgx.Plan(cgx.MaxMin(4), [("w", cgx.Skip())]).save(tmp_path / "base.toml")
    options = ["--bits", "8", "--plan", str(tmp_path / "base.toml")]
    __main__.main(["tune", str(tmp_path / "grads.npz"), "--out", str(tmp_path / "plan.toml"), *options])
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("w ")]
    assert line == ["w", "64x64", "Skip()", "0", "0", "1.00", "0.0000"]
    assert cgx.Plan.load(tmp_path / "plan.toml").rules[0].codec == cgx.Skip()

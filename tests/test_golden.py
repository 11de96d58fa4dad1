"""Tests that the wire format is unchanged: kernels and reference give tests/golden/v1.json."""

import base64
import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FULL, assert_same_values, assert_trees

import jaxcgx as cgx
from jaxcgx.native import ops, reference
from jaxcgx.native.layout import Layout
from jaxcgx.native.reference import Encode, Reduce

FILE = pathlib.Path(__file__).parent / "golden/v1.json"
GOLDEN = json.loads(FILE.read_text())
KEY = np.array(GOLDEN["key"], np.uint32)
ENCODE, REDUCE = GOLDEN["encode"], GOLDEN["reduce"]


def name_of(case):
    parts = [
        *("-".join(map(str, v.values())) if isinstance(v, dict) else v for v in case["codec"].values()),
        case["leaves"][0].replace(" ", "_"),
        case["chunks"],
    ]
    return "-".join(map(str, parts)) + "-feedback" * ("residuals" in case) + "-ids" * ("ids" in case)


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=name_of)


# The reference compiles slowly, so it runs one case of each kind.
FOR_REFERENCE = {
    "MaxMin-5-64-stochastic-True-short-3-feedback",
    "MaxMin-4-24-nearest-False-special-1",
    "MaxMin-7-100-nearest-False-float16-3",
    "ByteGrad-False-short-3-feedback",
    "AbsMax-8-24-special-1",
    "Float8-e4m3-24-special-1",
    "Float8-e5m2-24-special-1",
    "Sign-24-special-1",
    "Cast-bfloat16-stochastic-special-1",
    "Cast-float16-nearest-special-1",
    "Cast-float16-stochastic-special-1",
    "Raw-special-1",
    "MaxMin-4-40-nearest-False-rank_1-1",
    "Cast-bfloat16-nearest-rank_1-1",
    "AbsMax-8-3-tiny-1",  # reduce
    "Micro-nvfp4-special_0-1",
    "Micro-mxfp4-special-1",
    "Micro-mxfp8-special-1",
    "Micro-nvfp4-stochastic-short-3-feedback",
    "Micro-mxfp4-stochastic-special-1",
    "Micro-nvfp4-eden-short-3-feedback",
    "Micro-nvfp4-eden-rank_1-1",  # reduce
    # By default test_reference.py has it, as its sums are those of Raw and its packing computes nothing in floats.
    *["Lossless-rank_1-1"] * FULL,
}


def of_reference(cases):
    return [c for c in cases if name_of(c) in FOR_REFERENCE]


def bits_of(name):
    """Returns (dtype, bits of the elements) of an input."""
    row = GOLDEN["inputs"][name]
    if "repeat" in row:
        name, times = row["repeat"]
        dtype, bits = bits_of(name)
        return dtype, np.tile(bits, times)
    return row["dtype"], np.frombuffer(base64.b64decode(row["bits"]), "<u4" if row["dtype"] == "float32" else "<u2")


def arrays(names):
    return [jnp.asarray(bits.view(jnp.dtype(dtype))) for dtype, bits in map(bits_of, names)]


def rows(case, field):
    return [base64.b64decode(row) for row in case[field]]


def floats(case, field):
    return [np.frombuffer(row, np.float32) for row in rows(case, field)]


def stacked(case, field):
    return jnp.stack([np.frombuffer(row, np.uint8) for row in rows(case, field)])


def made_of(settings):
    """Returns a codec, or the value of one of its settings, which may be another codec."""
    if not isinstance(settings, dict):
        return settings
    return getattr(cgx, settings["codec"])(
        **{name: made_of(value) for name, value in settings.items() if name != "codec"}
    )


def layout_of(case):
    return Layout.of(made_of(case["codec"]), arrays(case["leaves"]), case["chunks"], case.get("ids"))


# encode


def check_encode(case, encode):
    """Tests `encode`, a function of a layout and operands that returns the payload and the new residuals."""
    feedback = "residuals" in case
    residuals = arrays(case["residuals"]) if feedback else None
    payload, new = encode(layout_of(case), Encode(arrays(case["leaves"]), residuals, jnp.asarray(KEY)))
    np.testing.assert_array_equal(payload, stacked(case, "payload"))
    if feedback:
        assert_trees(assert_same_values, new, floats(case, "new_residuals"))


def encode_by_kernels(layout, operands):
    if operands.residuals is None:
        return ops.encode(layout, operands.leaves, operands.key), []
    return ops.encode_fed(layout, operands.leaves, operands.residuals, operands.key)


@each(ENCODE)
def test_kernels_encode(case):
    check_encode(case, encode_by_kernels)


@pytest.mark.short
def test_kernels_encode_one():
    check_encode(next(c for c in ENCODE if c["codec"].get("rounding") == "stochastic"), encode_by_kernels)


@each(of_reference(ENCODE))
def test_reference_encodes(case):
    check_encode(case, lambda layout, operands: jax.jit(functools.partial(reference.encode, layout))(operands))


# decode


def digest(leaves):
    """Returns a digest of the bits of leaves, in which all NaNs are the same."""
    found = hashlib.sha256()
    for x in map(np.array, leaves):
        x[np.isnan(x)] = np.nan
        found.update(x.tobytes())
    return found.hexdigest()


@each(ENCODE)
def test_kernels_decode(case):
    assert digest(ops.decode(layout_of(case), stacked(case, "payload"))) == case["decoded"]


# reduce


def operands_of(case):
    where = jnp.array([case["chunk"], case.get("rank", 0)], jnp.int32)
    own = arrays(case["leaves"]) if "rank" in case else None
    return Reduce(stacked(case, "payloads"), where, own=own, key=jnp.asarray(KEY))


def check_reduce(case, reduce):
    """Tests `reduce`, a function of operands and `encoded` that returns sums, or a payload if `encoded`."""
    operands = operands_of(case)
    if "sums" in case:
        assert_trees(assert_same_values, reduce(operands, False), floats(case, "sums"))
    np.testing.assert_array_equal(reduce(operands, True), stacked(case, "payload")[0])


def reduce_by_kernels(case):
    def reduce(operands, encoded):
        chunk, rank = operands.where
        common = dict(own=operands.own and ops.Own(operands.own, rank), divisor=case["divisor"])
        if not encoded:
            return ops.reduce(layout_of(case), operands.payloads, **common)
        return ops.reduce_encoded(layout_of(case), operands.payloads, chunk=chunk, key=operands.key, **common)

    return reduce


@each(REDUCE)
def test_kernels_reduce(case):
    check_reduce(case, reduce_by_kernels(case))


@each(of_reference(REDUCE))
def test_reference_reduces(case):
    run = functools.partial(reference.reduce, layout_of(case), divisor=case["divisor"])
    # One program has both, so it sums only once.
    both = jax.jit(lambda operands: (run(operands), run(operands, encoded=True)[0]))
    check_reduce(case, lambda operands, encoded: both(operands)[encoded])


# Examples in docs/wire-format.md


def test_examples_of_the_document():
    ten = np.float32([0, 1, 2, 3, 4, 5, 6, 7.5, -1, -0.25])
    payload = np.asarray(cgx.encode(ten, cgx.MaxMin(4, bucket_size=8))).tobytes()
    assert payload.hex() == "0000003f0000000000cd4c3d000080bf2064a8fcf0000000" + "00" * 8
    payload = np.asarray(cgx.encode(np.float32(np.arange(20) % 8), cgx.MaxMin(3))).tobytes()
    assert payload.hex() == "0000803f00000000" + "00" * 8 + "6c2cb131c606341612" + "00" * 7
    layout = Layout(cgx.MaxMin(4, 64), ((1000,), (300,)), (jnp.dtype("float32"),) * 2, 3)
    assert layout.chunk_bytes == 288
    assert [[(p.leaf, p.start, p.coded) for p in chunk] for chunk in layout.pieces] == [
        [(0, 0, 448)],
        [(0, 448, 448)],
        [(0, 896, 104), (1, 0, 300)],
    ]

"""Tests that handlers check everything again. Wrong calls give INVALID_ARGUMENT and never a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import jaxcgx as cgx
from jaxcgx.codecs.attribute import FIELDS
from jaxcgx.native.layout import Layout

LAYOUT = Layout(cgx.MaxMin(4, 64), ((100,), (7,)), (jnp.float32, jnp.bfloat16), chunks=2)
LEAVES = (np.asarray(normal(100)), np.asarray(normal(7, dtype=jnp.bfloat16)))
PAYLOAD = (2, LAYOUT.chunk_bytes)
WHERE = np.array([1, 0], np.int32)
SPARSE = Layout(cgx.TopK(0.1), ((100,), (7,)), (jnp.float32, jnp.bfloat16), chunks=2)
LISTS = np.zeros((2, SPARSE.chunk_bytes), np.uint8)
LOST = (np.zeros(100, np.float32), np.zeros(7, np.float32))
NEW = [((100,), "float32"), ((7,), "float32")]


def call(op, operands, results, **changes):
    attributes = {**LAYOUT.attributes, "batch": np.int64(1), **changes}
    if op in ("encode", "reduce"):
        attributes.setdefault("feedback", False)
    if op == "reduce":
        attributes = dict(ranks=np.int64(2), own=False, encoded=True, divisor=np.float32(1)) | attributes
    out = [jax.ShapeDtypeStruct(*r) for r in results]
    of_arrays = jax.ffi.ffi_call(f"jaxcgx_{op}", out)
    # A new program each time, because JAX takes attributes that differ only in type, int32(1) and int64(1), as equal.
    return jax.block_until_ready(jax.jit(lambda *arrays: of_arrays(*arrays, **attributes))(*operands))


def codec(of=LAYOUT.codec, **changes):
    return {**of.native, **{k: type(of.native[k])(v) for k, v in changes.items()}}


def topk(**changes):
    return dict(codec=codec(SPARSE.codec, **changes))


@pytest.mark.parametrize("field", FIELDS)
def test_the_fields_of_a_codec_are_those_of_the_handlers(field):
    """Names and types must agree, because a handler looks fields up by name."""
    assert list(LAYOUT.codec.native) == list(FIELDS)
    other = np.int64 if FIELDS[field] is np.int32 else np.int32
    without = {name: value for name, value in LAYOUT.codec.native.items() if name != field}
    for wrong in (without, without | {field: other(LAYOUT.codec.native[field])}, LAYOUT.codec.native | {"more": 1}):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="INVALID_ARGUMENT"):
            call("encode", LEAVES, [(PAYLOAD, "uint8")], codec=wrong)


BYTES = np.zeros(PAYLOAD, np.uint8)
BOTH = [((100,), "float32"), ((7,), "bfloat16")]
DRAWS = dict(operands=(*LEAVES, np.zeros(2, np.uint32)), codec=codec(stochastic=1))
FED = dict(operands=[BYTES, WHERE, *LOST], results=[(PAYLOAD[1:], "uint8"), *NEW], feedback=True)
# A right call of each operation, which the rows of WRONG change.
RIGHT = {
    "encode": dict(operands=LEAVES, results=[(PAYLOAD, "uint8")]),
    "decode": dict(operands=[BYTES], results=BOTH),
    "reduce": dict(operands=[BYTES, WHERE], results=[(PAYLOAD[1:], "uint8")]),
    "encode lists": dict(operands=LEAVES, results=[(LISTS.shape, "uint8")]) | topk(),
    "clear": dict(operands=[LISTS, *LEAVES], results=BOTH) | topk(),
}
WRONG = {
    "encode": [
        (dict(results=[((2, LAYOUT.chunk_bytes - 1), "uint8")]), "payload has"),
        (dict(results=[(PAYLOAD, "int8")]), "payload has another dtype"),
        (dict(operands=LEAVES[:1]), "operands: got 1, expected 2"),
        (dict(operands=LEAVES[::-1]), "leaf 0 has another dtype"),
        (dict(operands=(LEAVES[0][:99], LEAVES[1])), "leaf 0 has 99 elements, expected 100"),
        (dict(feedback=True), "operands: got 2, expected 4"),
        (dict(batch=np.int64(2)), "leaf 0 has 100 elements, expected 200"),
        (dict(batch=np.int64(-1)), "batch out of range"),
        (dict(batch=np.int64(2**39), sizes=np.array([2**39, 7])), "leaf 0: its size overflows"),
        (dict(sizes=np.array([2**40, 2**40])), "more than 2^40 elements"),
        (dict(chunks=np.int64(0)), "chunks out of range: 0"),
        (dict(sizes=np.array([-100, 7])), "leaf 0 has size -100"),
        (dict(sizes=np.array([2**62, 7])), "leaf 0 has size"),
        (dict(dtypes=np.array([9, 1])), "leaf 0 has an unknown dtype"),
        (dict(ids=np.array([1])), "sizes, dtypes and ids differ in length"),
        (
            dict(codec=codec(kind=99)),
            "no codec of kind 99 in this native module; if its C++ code is new, run `make build`",
        ),
        (dict(codec=codec(bits=9)), "no codec of kind 1 with 9 bits"),
        (dict(codec=codec(bits=-1)), "no codec of kind 1 with -1 bits"),
        (dict(codec=codec(bucket_size=-1)), "bucket_size out of range"),
        (dict(codec=codec(bucket_size=0)), "bucket_size is 0"),
        (dict(codec=codec(stochastic=1)), "operands: got 2, expected 3"),
        (DRAWS, "keys has 2 elements, expected 3"),
        (dict(codec=codec(kind=6, bits=0, stochastic=1)), "no stochastic rounding"),
        (dict(batch=np.float32(0.5)), "attribute 'batch': "),
        (dict(codec=np.int64(3)), "attribute 'codec': "),
        (dict(codec={"kind": np.int32(1)}), "attribute 'bits': "),
    ],
    "decode": [
        (dict(operands=[BYTES[1]]), "payload has"),
        (dict(results=BOTH[:1]), "results: got 1, expected 2"),
        (dict(results=[((101,), "float32"), BOTH[1]]), "leaf 0 has 101 elements"),
    ],
    "reduce": [
        (dict(operands=[BYTES, WHERE + 1]), "chunk 2 of 2"),
        (dict(operands=[BYTES, WHERE - 2]), "chunk -1 of 2"),
        (dict(ranks=np.int64(0)), "ranks out of range"),
        (dict(ranks=np.int64(3)), "payloads has"),
        (dict(divisor=np.float32(0)), "divisor is not a positive number"),
        (dict(divisor=np.float32(2**-127)), "2^-126 or more"),
        (dict(results=NEW, encoded=False), "expected one chunk for a sum that is not encoded, got 2"),
        (dict(operands=[BYTES, np.array([1, 5], np.int32), *LEAVES], own=True), "own rank 5 of 2"),
        (FED | dict(operands=[BYTES, WHERE]), "operands: got 2, expected 4"),
        (FED | dict(results=[(PAYLOAD[1:], "uint8")]), "results: got 1, expected 3"),
        (FED | dict(operands=[BYTES, WHERE, *LEAVES]), "residual 1 has another dtype"),
        (FED | dict(results=[(PAYLOAD[1:], "uint8"), *NEW[::-1]]), "new residual 0 has 7 elements"),
        (FED, "new residual 0 is not in place of the residual"),
        (FED | dict(own=True), "not with own leaves"),
        (FED | dict(results=NEW, encoded=False, chunks=np.int64(1)), "feedback is for a sum that is encoded"),
        (dict(operands=[LISTS, WHERE], results=[(LISTS.shape[1:], "uint8")]) | topk(), "payload has"),
    ],
    "encode lists": [
        (topk(ratio=1.5), "ratio out of range: 1.5"),
        (topk(ratio=np.nan), "ratio out of range: nan"),
        (topk(ratio=0.5), "payload has"),
        (topk(lists=0), "lists out of range: 0"),
        (topk(select=3), "select out of range: 3"),
        (topk(select=1, stochastic=1), "share out of range: 0"),
        (topk(select=2, stochastic=1, share=1, lower=0), "lower out of range: 0"),
        (topk(select=2, stochastic=1, share=1, lower=1, refinements=101), "refinements out of range: 101"),
        (topk(select=1, share=1, lower=1), "stochastic must be true exactly if"),
        (topk(values_kind=7), "a sparse codec of their own"),
        (topk(values_kind=10), "have no fixed size"),
        (topk(values_kind=1, values_bits=4), "values: bucket_size is 0"),
        (topk(bucket_size=3), "without buckets has a bucket_size"),
        (dict(chunks=np.int64(1), sizes=np.array([2**32, 7])), "more than 2^31 - 1 elements: 4294967296"),
    ],
    "clear": [
        ({}, "cleared array 0 is not in place of the array"),
        (dict(results=[BOTH[0], ((8,), "bfloat16")]), "cleared array 1 has 8 elements, expected 7"),
        (dict(results=BOTH[:1]), "results: got 1, expected 2"),
        (dict(operands=[LISTS[:, 1:], *LEAVES]), "payload has"),
        (dict(operands=[BYTES, *LEAVES], codec=codec()), "this codec sends every element"),
    ],
}


@pytest.mark.parametrize(("given", "changes", "words"), [(given, *row) for given in WRONG for row in WRONG[given]])
def test_a_wrong_call_is_refused(given, changes, words):
    op = given.partition(" ")[0]
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:  # jax turns some errors into ValueError
        call(op, **RIGHT[given] | changes)
    assert all(part in str(caught.value) for part in ("INVALID_ARGUMENT", f"jaxcgx_{op}: ", words))

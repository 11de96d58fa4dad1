"""Fills in the rows of v1.json that have no bytes yet: `python tests/golden/make.py`.

To pin another codec, add a row of its settings, leaves and chunks to "encode" or "reduce". Rows that have bytes stay as
they are, because the bytes of a version never change. Leaves name rows of "inputs", which have the bits of their
elements in base64, little-endian. The payloads of a sum are those of the leaves "rank 0", "rank 1" and "rank 2".
"""

import base64
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import test_golden as golden

from jaxcgx.native import ops
from jaxcgx.native.reference import Encode


def text(arrays):
    return [base64.b64encode(np.asarray(x).tobytes()).decode() for x in arrays]


def fill_encode(row):
    residuals = golden.arrays(row["residuals"]) if "residuals" in row else None
    operands = Encode(golden.arrays(row["leaves"]), residuals, jnp.asarray(golden.KEY))
    payload, new = golden.encode_by_kernels(golden.layout_of(row), operands)
    row["payload"], row["decoded"] = text(payload), golden.digest(ops.decode(golden.layout_of(row), payload))
    if residuals is not None:
        row["new_residuals"] = text(new)


def fill_reduce(row):
    layout, chunk, payloads = golden.layout_of(row), row["chunk"], []
    for rank in range(3):
        leaves = golden.arrays([name.replace("rank 0", f"rank {rank}") for name in row["leaves"]])
        payloads.append(ops.encode(layout, leaves, jnp.array([rank, 1], jnp.uint32))[chunk])
    row["payloads"] = text(payloads)
    if "rank" in row:
        row["leaves"] = [name.replace("rank 0", f"rank {row['rank']}") for name in row["leaves"]]
    reduce = golden.reduce_by_kernels(row)
    row["payload"] = text([reduce(golden.operands_of(row), True)])
    if row["chunks"] == 1:
        row["sums"] = text(reduce(golden.operands_of(row), False))


def spelled(golden):
    """Returns the text of the file, with a row on a line."""
    parts = {name: json.dumps(content) for name, content in golden.items()}
    for name in ("encode", "reduce"):
        parts[name] = "[\n" + ",\n".join(map(json.dumps, golden[name])) + "\n]"
    rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in golden["inputs"].items())
    parts["inputs"] = "{\n" + ",\n".join(rows) + "\n}"
    return "{\n" + ",\n".join(f'"{name}": {content}' for name, content in parts.items()) + "\n}\n"


if __name__ == "__main__":
    for part, fill in ("encode", fill_encode), ("reduce", fill_reduce):
        for row in golden.GOLDEN[part]:
            if "payload" not in row:
                fill(row)
    golden.FILE.write_text(spelled(golden.GOLDEN))

"""Writes v1.json, the golden vectors of docs/wire-format.md: `python tests/golden/make.py`.

Run it only when the version of the wire changes, and then name the file after the new version. The vectors make sure
that the bytes of a version never change. Bytes are stored in base64. An input is stored as the bits of its elements,
little-endian.
"""

import base64
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

FILE = pathlib.Path(__file__).with_name("v1.json")
KEY = [0x243F6A88, 0x85A308D3]
rng = np.random.default_rng(0)


def special_buckets():
    """Returns buckets of 24 numbers, each with one kind of difficulty."""
    wave = np.float32(np.sin(np.arange(1, 25) * 1.7))
    with_nan, with_inf, mixed_zeros, spikes = wave.copy(), wave.copy(), np.zeros(24, np.float32), wave.copy()
    with_nan[5], with_inf[7], with_inf[11], mixed_zeros[::3], spikes[3] = np.nan, np.inf, -np.inf, -0.0, 1e30
    return np.float32(
        np.stack(
            [
                wave,
                with_nan,
                with_inf,
                mixed_zeros,
                spikes,
                np.full(24, -3.3),
                np.full(24, 1e-44),
                np.full(24, 3e38),  # constant
                wave * np.float32(1e-43),
                wave * np.float32(1e-38),
                wave * np.float32(3e-25),  # scaled by 2^80
                wave * np.float32(1e37),
                wave * np.float32(3e38),
                2e38 + wave * 1e38,  # scaled by 2^-40; a span that doesn't fit
                np.float32(1e6) + wave,
                -np.abs(wave),
                np.abs(wave) + 3,
                np.float32(2**-40) * np.arange(24),
                np.arange(24) - 12.5,
                2.0 ** np.arange(-20, 4),
                65504 + wave * 40,
                wave * 2.0**-14,  # the limits of float16
            ]
        )
    )


def make_inputs():
    noise = lambda n, scale=1.0: np.float32(rng.standard_normal(n) * scale)
    halves = special_buckets()[[0, 2, 5, 18, 20, 21]].reshape(-1)
    inputs = {
        "normal": noise(200, 1e-3),
        "bfloat16": jnp.asarray(noise(77), jnp.bfloat16),
        "float16": jnp.asarray(noise(141, 5), jnp.float16),
        "empty": noise(0),
        "scalar": noise(1),
        "long": noise(600),
        "special": special_buckets().reshape(-1),
        "special bfloat16": jnp.asarray(halves).astype(jnp.bfloat16),
        "special float16": jnp.asarray(halves).astype(jnp.float16),
        "short": noise(50),
        "short residual": noise(50, 0.1),
        "bfloat16 residual": noise(77, 0.1),
        "special residual": noise(24),
        **{f"rank {r}": noise(90) for r in range(3)},
        **{f"rank {r} bfloat16": jnp.asarray(noise(45), jnp.bfloat16) for r in range(3)},
        "tiny": np.float32([2**-126, -(2**-126), 2**-149, -0.0, 3 * 2**-140, 1e-38]),
    }
    for i, bucket in enumerate(special_buckets()):
        inputs[f"special {i}"] = bucket
    inputs["many"] = np.tile(inputs[MANY[0]], MANY[1])
    return {name: np.asarray(x) for name, x in inputs.items()}


MESSAGE = ["normal", "bfloat16", "float16", "empty", "scalar"]
SPECIAL = ["special", "special bfloat16", "special float16"]
SPECIALS = [f"special {i}" for i in range(len(special_buckets()))] + SPECIAL[1:]
FEEDBACK = ["short", "bfloat16"], ["short residual", "bfloat16 residual"]
MICRO = [cgx.Micro(name) for name in ("nvfp4", "mxfp4", "mxfp8")]
MANY = ("long", 60)  # "many" is 60 times "long"


def encode_cases():
    """Yields (codec, chunks, leaves, residuals, ids)."""
    both = ("nearest", "stochastic")
    for codec in [cgx.MaxMin(bits, 40, rounding) for bits in range(1, 9) for rounding in both]:
        yield codec, 1 + codec.bits % 2 * 2, MESSAGE, None, None
    for codec in [cgx.AbsMax(bits, 40) for bits in range(2, 9)]:
        yield codec, 1 + codec.bits % 2 * 2, MESSAGE, None, None
    byte_grad = [cgx.ByteGrad(), cgx.ByteGrad(compatible=True)]
    eight = [cgx.Float8("e4m3", 40), cgx.Float8("e5m2", 40), cgx.Sign(40)]
    plain = [*(cgx.Cast(dtype, rounding) for dtype in ("bfloat16", "float16") for rounding in both), cgx.Raw()]
    skip = [cgx.MaxMin(2, 64, skip_incomplete=True), cgx.MaxMin(5, 64, "stochastic", skip_incomplete=True)]
    for codec in [*byte_grad, *eight, *skip]:
        yield codec, 1, MESSAGE, None, None
    for codec in [*byte_grad, *eight, *skip, *plain, cgx.MaxMin(4, 40), cgx.MaxMin(3, 40, "stochastic")]:
        yield codec, 3, ["scalar", "float16", "empty", "long"], None, None
    for bucket_size in (1, 7, 100, 121, 127, 128, 129, 2000):
        leaves = ["float16", "long"] if bucket_size > 100 else ["float16"]
        yield cgx.MaxMin(7, bucket_size), 3, leaves, None, None
        yield cgx.Sign(bucket_size), 3, leaves, None, None
    for codec in [
        cgx.MaxMin(4, 24),
        cgx.MaxMin(8, 24),
        cgx.MaxMin(4, 24, "stochastic"),
        cgx.AbsMax(2, 24),
        cgx.AbsMax(8, 24),
        cgx.Float8("e4m3", 24),
        cgx.Float8("e5m2", 24),
        cgx.Sign(24),
        *plain,
    ]:
        yield codec, 1, SPECIAL, None, None
    for codec in byte_grad:  # each leaf is a bucket
        yield codec, 1, SPECIALS, None, None
    yield cgx.Sign(35000), 1, ["many"], None, None  # more than one group of blocks
    yield cgx.MaxMin(4, 40, "stochastic"), 3, MESSAGE, None, [7, 2**31 + 1, 0, 5, 3]
    yield cgx.MaxMin(4, 512), 5, ["empty"], None, None
    for codec in [cgx.MaxMin(4, 40), cgx.MaxMin(4, 40, "stochastic"), *skip, *byte_grad, *eight, *plain]:
        yield codec, 3, *FEEDBACK, None
    for i in (1, 2, 8, 12):
        yield cgx.MaxMin(4, 24), 1, [f"special {i}"], ["special residual"], None
    sampled = cgx.Sampled(0.2, lower=0.9)
    fitted = cgx.Sampled(0.1, "exponential", 0.7, 3)
    for codec in [
        cgx.TopK(0.05),
        cgx.TopK(0.3),
        cgx.TopK(0.0),
        cgx.TopK(1.0),
        cgx.TopK(0.005, lists=3),
        cgx.TopK(0.1, select=sampled),
        cgx.TopK(0.04, select=fitted),
        cgx.TopK(0.2, cgx.MaxMin(4, 20)),
        cgx.TopK(0.2, cgx.MaxMin(3, 16, "stochastic", skip_incomplete=True)),
        cgx.TopK(0.1, cgx.Cast("float16"), sampled),
    ]:
        yield codec, 3, ["scalar", "float16", "empty", "long"], None, [5, 1, 2, 0]
    yield cgx.TopK(0.002), 1, ["many"], None, None  # the low bits of an index have more than a byte
    for codec in [cgx.TopK(0.1), cgx.TopK(0.2, select=fitted)]:
        yield codec, 1, SPECIAL, None, None
    yield cgx.TopK(0.1, cgx.AbsMax(8, 24)), 3, *FEEDBACK, None
    for codec in MICRO:
        yield codec, 3, ["scalar", "float16", "empty", "long"], None, None
        yield codec, 1, SPECIALS if codec.whole else SPECIAL, None, None
        yield codec, 3, *FEEDBACK, None
    for codec in [cgx.Eden(bits, 128) for bits in range(1, 7)]:
        yield codec, 1 + codec.bits % 2 * 2, MESSAGE, None, None
    rotated = [
        cgx.MaxMin(4, 128, rotate=True),
        cgx.MaxMin(3, 256, "stochastic", rotate=True),
        cgx.AbsMax(8, 128, rotate=True),
    ]
    for codec in [cgx.Eden(4, 128), cgx.Eden(2), *rotated]:
        yield codec, 3, ["scalar", "float16", "empty", "long"], None, [5, 1, 2, 0]
        yield codec, 1, SPECIALS, None, None  # each leaf is a bucket
        yield codec, 3, *FEEDBACK, None
    yield cgx.Eden(3), 2, ["many"], None, None
    for leaves in (MESSAGE, SPECIAL, ["scalar", "float16", "empty", "long"]):
        yield cgx.Lossless(), 3, leaves, None, None
    yield cgx.Lossless(), 3, *FEEDBACK, None


def reduce_cases():
    """Yields (codec, leaves of each rank, chunks, chunk, own rank or None, divisor)."""
    leaves = [[f"rank {r}", f"rank {r} bfloat16"] for r in range(3)]
    for codec in [
        cgx.MaxMin(4, 40),
        cgx.MaxMin(4, 40, "stochastic"),
        cgx.MaxMin(8, 64, skip_incomplete=True),
        cgx.ByteGrad(),
        cgx.AbsMax(4, 40),
        cgx.Float8("e4m3", 40),
        cgx.Float8("e5m2", 40),
        cgx.Sign(40),
        cgx.Cast("bfloat16"),
        cgx.Cast("float16", "stochastic"),
        cgx.Raw(),
    ]:
        yield codec, leaves, 1, 0, 1, 3.0
    yield cgx.MaxMin(4, 40, "stochastic"), leaves, 3, 2, 0, 1.0
    yield cgx.MaxMin(4, 40), leaves, 1, 0, None, 3.0
    yield cgx.AbsMax(8, 3), [["tiny"]] * 2, 1, 0, None, 8.0  # denormal sums
    yield cgx.TopK(0.1, cgx.Cast("bfloat16")), leaves, 1, 0, 1, 3.0
    yield cgx.TopK(0.1, cgx.MaxMin(4, 8), pull="top"), leaves, 1, 0, None, 1.0
    for codec in MICRO:
        yield codec, leaves, 1, 0, 1, 3.0
    yield cgx.Eden(4, 128), leaves, 1, 0, 1, 3.0
    yield cgx.Eden(2), leaves, 3, 2, None, 1.0
    yield cgx.MaxMin(4, 128, rotate=True), leaves, 1, 0, 1, 3.0
    yield cgx.Lossless(), leaves, 1, 0, 1, 3.0
    yield cgx.Lossless(), leaves, 3, 2, None, 1.0


def text(x):
    return base64.b64encode(np.asarray(x).tobytes()).decode()


def settings(codec):
    nested = lambda value: settings(value) if dataclasses.is_dataclass(value) else value
    return {
        "codec": type(codec).__name__,
        **{
            f.name: nested(getattr(codec, f.name))
            for f in dataclasses.fields(codec)
            if f.name != "rotate" or codec.rotate  # this field is newer than most vectors
        },
    }


def make():
    inputs = make_inputs()
    golden = {"version": 1, "key": KEY, "encode": [], "reduce": []}
    golden["inputs"] = {name: {"dtype": x.dtype.name, "bits": text(x)} for name, x in inputs.items() if name != "many"}
    golden["inputs"]["many"] = {"repeat": MANY}
    key = jnp.array(KEY, jnp.uint32)
    for codec, chunks, leaves, residuals, ids in encode_cases():
        layout = Layout.of(codec, [inputs[n] for n in leaves], chunks, ids)
        case = dict(codec=settings(codec), chunks=chunks, leaves=leaves, residuals=residuals, ids=ids)
        arrays = [inputs[n] for n in leaves]
        if residuals is None:
            payload = ops.encode(layout, arrays, key)
        else:
            payload, new = ops.encode_fed(layout, arrays, [inputs[n] for n in residuals], key)
            case["new_residuals"] = [text(x) for x in new]
        golden["encode"].append({**case, "payload": [text(chunk) for chunk in payload]})
    for codec, leaves, chunks, chunk, rank, divisor in reduce_cases():
        layouts = [Layout.of(codec, [inputs[n] for n in names], chunks) for names in leaves]
        payloads = jnp.stack(
            [
                ops.encode(layout, [inputs[n] for n in names], jnp.array([r, 1], jnp.uint32))[chunk]
                for r, (layout, names) in enumerate(zip(layouts, leaves))
            ]
        )
        own = None if rank is None else ops.Own([inputs[n] for n in leaves[rank]], rank)
        case = dict(
            codec=settings(codec),
            chunks=chunks,
            chunk=chunk,
            divisor=divisor,
            rank=rank,
            leaves=leaves[0 if rank is None else rank],
            payloads=[text(p) for p in payloads],
        )
        payload = ops.reduce_encoded(layouts[0], payloads, chunk=chunk, own=own, divisor=divisor, key=key)
        case["payload"] = [text(payload)]
        if chunks == 1:
            case["sums"] = [text(x) for x in ops.reduce(layouts[0], payloads, own=own, divisor=divisor)]
        golden["reduce"].append(case)
    return golden


if __name__ == "__main__":
    with jax.default_device(jax.devices("cpu")[0]):
        made = make()
    lines = []
    for part, content in made.items():
        if part in ("encode", "reduce"):
            rows = ",\n".join(json.dumps({k: v for k, v in row.items() if v is not None}) for row in content)
            lines.append(f'"{part}": [\n{rows}\n]')
        elif part == "inputs":
            rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())
            lines.append(f'"{part}": {{\n{rows}\n}}')
        else:
            lines.append(f'"{part}": {json.dumps(content)}')
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")

"""A small program that runs every operation of some codecs on the GPU and compares the results with the CPU's.

python everything.py GROUP [repetitions]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

GROUPS = {
    "fast": [
        *(cgx.MaxMin(bits, 512) for bits in range(1, 9)),
        cgx.MaxMin(4, 512, "stochastic"),
        cgx.AbsMax(8, 256),
        cgx.AbsMax(3, 64),
        cgx.Float8(),
        cgx.Sign(),
    ],
    "other": [
        cgx.MaxMin(4, 33),
        cgx.MaxMin(4, 9000),
        cgx.MaxMin(3, 100, "stochastic", skip_incomplete=True),
        cgx.ByteGrad(),
        cgx.Float8("e5m2", 33),
        *map(cgx.Micro, ("nvfp4", "mxfp4", "mxfp8")),
        *(cgx.Micro(name, "stochastic") for name in ("nvfp4", "mxfp8")),
        cgx.Sign(9000),
    ],
    "rotated": [
        cgx.Eden(4),
        cgx.Micro("nvfp4", "eden"),
        cgx.MaxMin(4, 256, rotate=True),
        cgx.MaxMin(3, 128, "stochastic", rotate=True),
    ],
    "floats": [cgx.Cast("bfloat16"), cgx.Cast("float16", "stochastic"), cgx.Raw(), cgx.Lossless()],
    "topk": [
        cgx.TopK(),
        cgx.TopK(0),
        cgx.TopK(0.1, cgx.MaxMin(4, 64, "stochastic"), "sampled", "top"),
        cgx.TopK(0.5, cgx.Cast(), "fitted"),
    ],
}
SHAPES = [(20_000, "float32"), (1_001, "bfloat16"), (7, "float16"), (4_096, "float32")]
MESSAGES = [SHAPES, [(0, "float32"), (0, "bfloat16")]]  # empty calls may also be captured


def leaves_of(shapes):
    return [np.random.RandomState(i).standard_normal(n).astype(jnp.dtype(t)) for i, (n, t) in enumerate(shapes)]


def step(codec, like):
    """Runs everything twice in one program. The second round takes the results of the first.

    The program has no arithmetic except the operations.
    """
    layout = Layout.of(codec, like, chunks=2)

    def run(leaves, residuals, key):
        for _ in range(2):
            payload, residuals = ops.encode_fed(layout, leaves, residuals, key)
            payloads = jnp.stack([payload[1]] * 3)
            summed = ops.reduce_encoded(layout, payloads, chunk=1, own=ops.Own(leaves, 1), divisor=3, key=key)
            summed_too, residuals = ops.reduce_fed(layout, payloads, residuals, chunk=1, divisor=3, key=key)
            leaves = ops.decode(layout, payload)
            if codec.sparse:
                residuals = ops.clear(Layout.of(codec, residuals, chunks=2), payload, residuals)
        return payload, summed, summed_too, residuals, leaves

    return jax.jit(run if codec.stochastic else lambda leaves, residuals, _: run(leaves, residuals, None))


def on(platform, codecs, repetitions=1):
    results = []
    for leaves in map(leaves_of, MESSAGES):
        residuals = [np.full(x.shape, 0.01, np.float32) for x in leaves]
        args = jax.device_put((leaves, residuals, np.array([1, 2], np.uint32)), jax.devices(platform)[0])
        programs = [step(codec, leaves) for codec in codecs]
        results += [[jax.tree.map(np.asarray, f(*args)) for _ in range(repetitions)] for f in programs]
    return results


def main(group, repetitions=1):
    codecs = GROUPS[group]
    both = on("cpu", codecs), on("gpu", codecs, int(repetitions))
    for codec, (expected,), results in zip(codecs * len(MESSAGES), *both, strict=True):
        for got in results:
            leaves = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
            assert leaves, codec
            for a, b in leaves:
                assert a.tobytes() == b.tobytes(), codec
    print("the same bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])

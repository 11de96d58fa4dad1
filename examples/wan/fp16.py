"""FP16: gradients travel as float16 inside data centers and between them, and are computed in float32.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/fp16.py --rate 100mbit --delay 5ms
"""

import optax
from common import AXES, RAW, demonstrate, loss_fn

import jaxcgx as cgx


def full(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, RAW, sharding=sharding)


def fp16(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, cgx.Plan.fp16(axis_name=AXES), sharding=sharding)


TECHNIQUES = {"float32": full, "float16": fp16}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

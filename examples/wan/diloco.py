"""DiLoCo: data centers train on their own, and exchange 4-bit outer gradients only once in 20 steps.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/diloco.py --rate 100mbit --delay 5ms
"""

import optax
from common import RAW, demonstrate, loss_fn

import jaxcgx as cgx


def every_step(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.adam(args.lr), mesh, RAW, sharding=sharding)


def diloco(mesh, sharding, args):
    rounds = cgx.wan.Diloco(cgx.MaxMin(4), every=20, outer="sgd")
    return cgx.make_train_step(loss_fn, optax.adam(args.lr), mesh, rounds, sharding=sharding)


def streaming(mesh, sharding, args):
    rounds = cgx.wan.Diloco(cgx.MaxMin(4), every=20, outer="sgd", fragments=4, overlap=2, alpha=0.5)
    return cgx.make_train_step(loss_fn, optax.adam(args.lr), mesh, rounds, sharding=sharding)


TECHNIQUES = {"every step": every_step, "DiLoCo, H = 20": diloco, "DiLoCo, streaming": streaming}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES, lr=1e-3)

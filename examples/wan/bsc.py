"""Bidirectional sparsification: after a warm-up, one percent of each large gradient travels between data centers.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/bsc.py --rate 100mbit --delay 5ms
"""

import optax
from common import RAW, demonstrate, loss_fn

import jaxcgx as cgx


def dense(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr, momentum=0.9), mesh, RAW, sharding=sharding)


def sparse(mesh, sharding, args):
    exchange = cgx.BSC(args.ratio, warm_up=cgx.WarmUp(epochs=3, steps_per_epoch=10))
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, exchange, sharding=sharding)


TECHNIQUES = {"dense": dense, "sparse": sparse}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES, ratio=0.01)

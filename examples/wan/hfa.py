"""Hierarchical averaging: ranks often average parameters inside a data center, and seldom between data centers.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/hfa.py --rate 100mbit --delay 5ms
"""

import optax
from common import RAW, demonstrate, loss_fn

import jaxcgx as cgx


def every_step(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, RAW, sharding=sharding)


def hfa(mesh, sharding, args):
    rounds = cgx.wan.HFA(cgx.MaxMin(8), k1=5, k2=2)
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, rounds, sharding=sharding)


TECHNIQUES = {"every step": every_step, "K1 = 5, K2 = 2": hfa}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

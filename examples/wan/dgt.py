"""Differential transmission: the important gradient blocks travel at once, the others while the next step computes.

The script compares this with sending all blocks at once, and with choosing the blocks at random. It starts two data
centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/dgt.py --rate 100mbit --delay 5ms
"""

import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx

PLAN = cgx.Plan({"dc": cgx.Cast("bfloat16"), "local": cgx.Raw()})


def plain(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, PLAN, sharding=sharding)


def differential(mesh, sharding, args):
    exchange = cgx.wan.Differential(PLAN, k=args.ratio, adaptive=args.ratio / 4)
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, exchange, sharding=sharding)


def random_blocks(mesh, sharding, args):
    exchange = cgx.wan.Differential(PLAN, k=args.ratio, adaptive=args.ratio / 4, ranked=False)
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, exchange, sharding=sharding)


TECHNIQUES = {"all at once": plain, "differential": differential, "random blocks": random_blocks}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES, ratio=0.8)

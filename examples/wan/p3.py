"""P3: gradients travel until the next step needs them, in the order in which it needs them.

The script compares this with sending gradients after the backward pass, and with sending them during the backward pass.
It starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/p3.py --rate 100mbit --delay 5ms
"""

import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx

PLAN = cgx.Plan({"dc": cgx.Cast("bfloat16"), "local": cgx.Raw()})


def plain(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, PLAN, sharding=sharding)


def backward(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, PLAN, sharding=sharding, overlap="backward")


def priority(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, PLAN, sharding=sharding, overlap=cgx.Priority())


TECHNIQUES = {"at the end": plain, "behind the backward pass": backward, "until it is needed": priority}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

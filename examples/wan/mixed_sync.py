"""Mixed sync: gradients travel while the next step computes, and a correction compensates their delay of one step.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/mixed_sync.py --rate 100mbit --delay 5ms
"""

import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx

PLAN = cgx.Plan({"dc": cgx.Cast("bfloat16"), "local": cgx.Raw()})


def synchronous(mesh, sharding, args):
    return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, PLAN, sharding=sharding)


def late(compensation):
    exchange = cgx.wan.MixedSync(PLAN, compensation=compensation)
    return lambda mesh, sharding, args: cgx.make_train_step(
        loss_fn, optax.sgd(args.lr), mesh, exchange, sharding=sharding
    )


TECHNIQUES = {"synchronous": synchronous, "late": late(0.0), "late, compensated": late(0.04)}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

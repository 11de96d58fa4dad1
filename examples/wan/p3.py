"""P3: gradients travel until the next step needs them, those of the first layers first.

Beside it, the same step whose gradients travel only behind its backward pass. Two data centers of two ranks:

    pip install ".[examples]"
    sudo python examples/wan/p3.py [--rate 100mbit] [--delay 5ms] [--steps 100]
"""

import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx

PLAN = cgx.Plan({"dc": cgx.Cast("bfloat16"), "local": cgx.Raw()})


def plain(mesh, axes):
    return cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, data_axis=axes, plan=PLAN)


def backward(mesh, axes):
    return cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, data_axis=axes, plan=PLAN, overlap="backward")


def priority(mesh, axes):
    return cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, data_axis=axes, plan=PLAN, overlap="priority")


TECHNIQUES = {"at the end": plain, "behind the backward pass": backward, "until it is needed": priority}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

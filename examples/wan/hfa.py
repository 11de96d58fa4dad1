"""Hierarchical averaging: ranks often average parameters inside a data center, and seldom between data centers.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/hfa.py --rate 100mbit --delay 5ms
"""

import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx

OPTIMIZER = optax.sgd(0.1)


def every_step(mesh, axes):
    plan = cgx.Plan({"dc": cgx.Raw(), "local": cgx.Raw()})
    return cgx.make_train_step(loss_fn, OPTIMIZER, mesh, data_axis=axes, plan=plan)


def hfa(mesh, axes):
    how = cgx.wan.hfa(OPTIMIZER, k1=5, k2=2, axis_name=axes[0], plan=cgx.MaxMin(8))
    return cgx.make_train_step(loss_fn, OPTIMIZER, mesh, data_axis=axes, diloco=how)


TECHNIQUES = {"every step": every_step, "K1 = 5, K2 = 2": hfa}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

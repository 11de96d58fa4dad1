"""Mixed precision: large gradients are sparsified between data centers, small gradients travel as float16 everywhere.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/mpq.py --rate 100mbit --delay 5ms
"""

import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx


def dense(mesh, axes):
    plan = cgx.Plan({"dc": cgx.Raw(), "local": cgx.Raw()})
    return cgx.make_train_step(loss_fn, optax.sgd(0.1, momentum=0.9), mesh, data_axis=axes, plan=plan)


def mixed(mesh, axes):
    options = dict(threshold=0.01, warmup_epochs=3, steps_per_epoch=10)
    return cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, data_axis=axes, compress=cgx.mpq, **options)


TECHNIQUES = {"float32": dense, "mixed precision": mixed}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

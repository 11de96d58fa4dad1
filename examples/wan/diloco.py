"""DiLoCo: data centers train on their own, and exchange 4-bit outer gradients only once in 20 steps.

The script starts two data centers of two ranks each:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/diloco.py --rate 100mbit --delay 5ms
"""

import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx

INNER = optax.adam(1e-3)


def every_step(mesh, axes):
    plan = cgx.Plan({"dc": cgx.Raw(), "local": cgx.Raw()})
    return cgx.make_train_step(loss_fn, INNER, mesh, data_axis=axes, plan=plan)


def diloco(mesh, axes):
    given = cgx.wan.diloco(INNER, "sgd", every=20, axis_name=axes[0], plan=cgx.MaxMin(4))
    return cgx.make_train_step(loss_fn, INNER, mesh, data_axis=axes, diloco=given)


def streaming(mesh, axes):
    given = cgx.wan.diloco(
        INNER, "sgd", every=20, axis_name=axes[0], plan=cgx.MaxMin(4), fragments=4, overlap=2, alpha=0.5
    )
    return cgx.make_train_step(loss_fn, INNER, mesh, data_axis=axes, diloco=given)


TECHNIQUES = {"every step": every_step, "DiLoCo, H = 20": diloco, "DiLoCo, streaming": streaming}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

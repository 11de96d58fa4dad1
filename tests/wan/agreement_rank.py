"""A rank that test_agreement.py starts:

    python agreement_rank.py PORT RANK

The two ranks make trainings whose settings differ, and print the errors of `init`.
"""

import ctypes
import functools
import json
import signal
import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import jaxcgx as cgx

INNER = optax.sgd(0.5)
# {name: settings of each rank}
CASES = {
    "every": [dict(every=10), dict(every=5)],
    "fragments": [dict(every=4, fragments=2), dict(every=4)],
    "alpha": [dict(every=4, overlap=1), dict(every=4, overlap=1, alpha=0.5)],
    "outer": [dict(outer="sgd"), dict(outer="nesterov")],
    "rate": [dict(outer=optax.sgd(0.5)), dict(outer=optax.sgd(0.25))],
    "k2": [dict(k1=2, k2=2), dict(k1=2, k2=3)],
    "form": [dict(k1=2, k2=2), dict(every=4, outer="sgd")],
    "same": [dict(every=4, outer=optax.adam(0.5)), dict(every=4, outer=optax.adam(0.5))],
}


def init(options, axis_type):
    mesh = jax.make_mesh((2,), ("dc",), axis_types=(axis_type,))
    form = cgx.wan.HFA if "k1" in options else functools.partial(cgx.wan.Diloco, every=500)
    loss = lambda params, x: ((x @ params["w"]) ** 2).mean()
    train = cgx.make_train_step(loss, INNER, mesh, form(cgx.Raw(), **options), sharding=cgx.Sharding("dc"))
    params = {"w": jnp.ones((6, 4)), "n": jnp.ones(3)}
    jax.eval_shape(train.init, params)
    try:
        train.init(params)
    except ValueError as error:
        return str(error)
    return "none"


def main():
    port, rank = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    found = {name: init(options[rank], AxisType.Auto) for name, options in CASES.items()}
    print("RESULT", json.dumps(found | {"explicit": init({}, AxisType.Explicit)}), flush=True)


if __name__ == "__main__":
    main()

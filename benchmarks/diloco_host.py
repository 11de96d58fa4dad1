"""A host of diloco.py: the methods of training_speed_jax.py that it is compared with, and those of cgx.wan.diloco.

python benchmarks/diloco_host.py '{"address": "10.77.0.1:20000", "rank": 0, "hosts": 2, "model": ..., ...}'
"""

import json
import sys

import training_speed_jax as host
from training_speed_models import make_loss

import jaxcgx as cgx


def diloco(every, **options):
    """Centres of one host each."""

    def make(run):
        inner = run.optimizer()
        given = cgx.wan.diloco(inner, "sgd", every=every, axis_name=host.TCP, plan=cgx.MaxMin(4), **options)
        return cgx.make_train_step(make_loss(run.model), inner, run.mesh, data_axis=host.TCP, diloco=given)

    return make


METHODS = host.METHODS | {
    "DiLoCo": {
        "DiLoCo, 4 bits, H 20": diloco(20),
        "DiLoCo, 4 bits, H 20, streaming": diloco(20, fragments=4, overlap=3, alpha=0.5),
    }
}


if __name__ == "__main__":
    host.main(**json.loads(sys.argv[1]), methods=METHODS)

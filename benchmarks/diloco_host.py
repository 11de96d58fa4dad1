"""A host of diloco.py: the methods of training_speed_jax.py that it is compared with, and those of cgx.wan.diloco.

python benchmarks/diloco_host.py '{"address": "10.77.0.1:20000", "rank": 0, "ranks": 2, "model": ..., ...}'
"""

import json
import os
import sys

import jax
import overlap
import training_speed_jax as host
from training_speed_models import make_loss

import jaxcgx as cgx

STREAMING = dict(every=20, fragments=4, overlap=3, alpha=0.5)


def diloco(every, **options):
    """Centers of one host each."""

    def make(run):
        inner = run.optimizer()
        given = cgx.wan.diloco(inner, "sgd", every=every, axis_name=host.TCP, plan=cgx.MaxMin(4), **options)
        return cgx.make_train_step(make_loss(run.model), inner, run.mesh, data_axis=host.TCP, diloco=given)

    return make


METHODS = host.METHODS | {
    "DiLoCo": {"DiLoCo, 4 bits, H 20": diloco(20), "DiLoCo, 4 bits, H 20, streaming": diloco(**STREAMING)}
}


class Steps:
    """Some steps of streaming, from one in which no exchange is under way to another, for `overlap.events`."""

    def __init__(self, mesh, path, rank):
        given = host.Data(path, rank, mesh.size)
        self._program = host.Program(host.Run("transformer", 1e-3, mesh), given, diloco(**STREAMING))
        self.text = self._program.text
        self._period = STREAMING["every"] // STREAMING["fragments"]
        self._program.run(2 * STREAMING["every"] - 1)

    def __call__(self):
        self._program.run(2 * self._period)


def trace(address, rank, hosts, path):
    """Prints what the first host does when, in two periods."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, hosts, rank)
    mesh = jax.make_mesh((hosts,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    print("RESULTS", json.dumps(overlap.events(Steps(mesh, path, rank))), flush=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if arguments.pop("trace", False):
        trace(**arguments)
    else:
        host.main(**arguments, methods=METHODS)

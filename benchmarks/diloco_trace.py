"""The script that a host of diloco.py runs to trace two periods of streaming. Rank 0 prints the events.

python benchmarks/diloco_trace.py '{"address": "10.77.0.1:20000", "rank": 0, "processes": 2, "path": ...}'
"""

import json
import os
import sys

import jax
import overlap
from host import Data
from training_speed_jax import STREAMING, Program, Run, diloco


class Steps:
    """Streaming steps, from one without an exchange in flight to another one, for `overlap.events`."""

    def __init__(self, mesh, path, rank):
        self._program = Program(Run("transformer", 1e-3, mesh), Data(path, rank, mesh.size), diloco(**STREAMING))
        self._program.run(2 * STREAMING["every"] - 1)

    def text(self):
        """Returns the texts of the compiled programs of all exchanges."""
        return "\n".join(each.as_text() for each in self._program.training.step.acts(self._program.state))

    def __call__(self):
        self._program.run(2 * STREAMING["every"] // STREAMING["fragments"])


def trace(address, rank, processes, path):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, processes, rank)
    mesh = jax.make_mesh((processes,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    print("RESULTS", json.dumps(overlap.events(Steps(mesh, path, rank), sums="")), flush=True)


if __name__ == "__main__":
    trace(**json.loads(sys.argv[1]))

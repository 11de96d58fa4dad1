"""python ray_probe.py FOLDER SIGNAL ARGUMENTS: runs recipes/ray_train.py, whose workers log what they restore and save.

One worker sends itself the signal after step 50.
"""

import json
import os
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))

import ray_train


class Probe(ray_train.Worker):
    def train(self, arguments, folder, world):
        os.environ |= world
        import checkpoints
        import jax
        import numpy as np
        from jax.experimental.multihost_utils import process_allgather
        from jax.sharding import PartitionSpec as P

        import jaxcgx as cgx

        def write(event, step, tree, world):
            check = lambda x: cgx.check_replicas(x, "data")
            mapped = jax.shard_map(check, mesh=world.mesh, in_specs=P(), out_specs=P(), check_vma=False)
            agree = jax.jit(mapped)(tree.params)
            rows = [process_allgather(x, tiled=True) for x in jax.tree.leaves(tree) if not x.is_fully_replicated]
            sums = [float(each) for x in rows for each in np.ravel(x.sum(0, dtype=np.float64))[:64]]
            if world.speaks:
                line = dict(event=event, step=step, ranks=world.ranks, agree=bool(agree.agree), sums=sums)
                with (FOLDER / "probe.jsonl").open("a") as file:
                    file.write(f"{json.dumps(line)}\n")

        restore, save = checkpoints.Checkpoints.restore, checkpoints.Checkpoints.save

        def probed_restore(self, template):
            step, tree = restore(self, template)
            write("restore", step, tree, self.world)
            return step, tree

        def probed_save(self, step, tree):
            write("save", step, tree, self.world)
            save(self, step, tree)
            killed = FOLDER / "killed"
            if step == 50 and self.world.first == 2 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), SIGNAL)
            time.sleep(1)  # meanwhile, the number of workers may grow, or JAX tells the other workers of SIGTERM

        checkpoints.Checkpoints.restore, checkpoints.Checkpoints.save = probed_restore, probed_save
        return super().train(arguments, folder, world)


FOLDER, SIGNAL = pathlib.Path(sys.argv[1]), signal.Signals[sys.argv[2]]
ray_train.Worker = Probe
ray_train.main(sys.argv[3:])

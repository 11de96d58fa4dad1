"""A rank of wan.py. Each technique trains the same model when it is its turn.

python benchmarks/wan_host.py '{"address": "10.77.0.1:20000", "rank": 0, "ranks": 4, "shape": [2, 2], ...}'
"""

import json
import sys
from functools import partial

import jax
from host import Data, serve
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training_speed_jax import Run, ours
from training_speed_models import make_loss

import jaxcgx as cgx

AXES = "dc", "local"
TCP = cgx.Tcp("dc"), "local"
PERIOD = 20  # steps between two exchanges of centers, for techniques that don't exchange in every step


def over(codec):
    """Returns a plan with a codec between centers and float32 inside them."""
    return {"dc": codec, "local": cgx.Raw()}


RAW, BITS4 = over(cgx.Raw()), over(cgx.MaxMin(4))


# A technique: a function of a Run that returns a TrainStep.
step = partial(ours, axis=TCP)


def routed(codecs, overlay):
    """Returns a plan whose exchanges between centers follow an overlay."""
    return cgx.Plan.every(codecs, schedule={"dc": overlay, "local": "auto"})


def measured(codecs, exchange=lambda plan: plan):
    """An overlay that follows the links as they are measured."""

    def make(run):
        topology = cgx.wan.Topology(run.mesh, TCP[0])
        return topology.steps(lambda overlay: step(exchange(routed(codecs, overlay)))(run))

    return make


DGT = partial(cgx.wan.Differential, k=0.5)
HFA = partial(cgx.wan.HFA, k1=PERIOD // 4, k2=4)
DILOCO = partial(cgx.wan.Diloco, every=PERIOD, outer="sgd")
OWNERS = cgx.wan.Overlay.owners(4, 2)

ANY = {
    "float32": step(RAW),
    "4 bits": step(BITS4),
    "FP16": step(cgx.Plan.fp16(axis_name=AXES)),
    "BSC": step(cgx.BSC(), momentum=False),
    "MPQ": step(cgx.MPQ(), momentum=False),
    "DGT, defer": step(DGT(RAW)),
    "DGT, defer, random": step(DGT(RAW, ranked=False)),
    "DGT, quantize": step(DGT(RAW, rest="quantize")),
    "DGT, drop": step(DGT(RAW, rest="drop")),
    "DGT, drop, random": step(DGT(RAW, rest="drop", ranked=False)),
    "DGT, lost by the sender": step(DGT(RAW, rest="drop", keep=False)),
    "P3": step(RAW, overlap=cgx.Priority()),
    "mixed sync": step(cgx.wan.MixedSync(RAW)),
    "HFA": step(HFA(cgx.Raw())),
    "DiLoCo": step(DILOCO(cgx.Raw())),
    "4 bits + DGT, defer": step(DGT(BITS4)),
    "4 bits + P3": step(BITS4, overlap=cgx.Priority()),
    "4 bits + mixed sync": step(cgx.wan.MixedSync(BITS4)),
    "4 bits + HFA": step(HFA(cgx.MaxMin(4))),
    "4 bits + DiLoCo": step(DILOCO(cgx.MaxMin(4))),
    "4 bits + DiLoCo, streaming": step(DILOCO(cgx.MaxMin(4), fragments=4, overlap=3, alpha=0.5)),
}
# Techniques with routes over several centers.
SEVERAL = {
    "float32": step(RAW),
    "4 bits": step(BITS4),
    "MultiGPS, 2 owners": step(routed(RAW, OWNERS)),
    "TSEngine": measured(RAW),
    "4 bits + MultiGPS, 2 owners": step(routed(BITS4, OWNERS)),
    "4 bits + TSEngine": measured(BITS4),
    "4 bits + TSEngine + DGT, defer": measured(BITS4, DGT),
}
METHODS = {"2 centers of 2 ranks": {"jaxcgx": ANY}, "4 centers": {"jaxcgx": SEVERAL}}


class Program:
    """A model that one technique trains."""

    def __init__(self, run, data, technique):
        self._training = technique(run)
        self._data, self._at, self._loss = data, 0, jax.jit(make_loss(run.model))
        self._sharding = NamedSharding(run.mesh, P(AXES))
        self._state = self._training.init(data.weights)

    def run(self, steps):
        for _ in range(steps):
            batch = [jax.make_array_from_process_local_data(self._sharding, b) for b in self._data.batch(self._at)]
            self._state, _ = self._training.step(self._state, tuple(batch))
            jax.block_until_ready(self._state.params)
            self._at += 1
        # The bytes, the time and the weights of these steps include what P3 has sent.
        self._state = jax.block_until_ready(self._training.finish(self._state))

    def loss(self):
        """Returns the loss of this rank's part of the held-out text."""
        weights = jax.tree.map(lambda w: w.addressable_data(0), self._state.params)
        return float(self._loss(weights, tuple(self._data.held_out)))


def main(address, rank, ranks, shape, name, model, rate, data):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, ranks, rank)
    mesh = jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * 2)
    make = partial(partial, Program, Run(model, rate, mesh), Data(data, rank, ranks))
    serve({kind: {n: make(technique) for n, technique in given.items()} for kind, given in METHODS[name].items()})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

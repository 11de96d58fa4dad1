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
from training_speed_jax import Run
from training_speed_models import make_loss

import jaxcgx as cgx

AXES = "dc", "local"
TCP = cgx.Tcp("dc"), "local"
PERIOD = 20  # steps between two exchanges of centers, for techniques that don't exchange in every step


def over(codec):
    """Returns a plan with a codec between centers and float32 inside them."""
    return {"dc": codec, "local": cgx.Raw()}


RAW, BITS4 = over(cgx.Raw()), over(cgx.MaxMin(4))


def step(momentum=True, **options):
    """A technique that is a set of options of make_train_step: a function of a Run that returns its init and step."""
    return lambda run: cgx.make_train_step(
        make_loss(run.model), run.optimizer(momentum), run.mesh, data_axis=TCP, **options
    )


def few(form, **options):
    """A technique with few exchanges."""

    def make(run):
        inner = run.optimizer()
        given = form(inner, axis_name=TCP[0], **options)
        return cgx.make_train_step(make_loss(run.model), inner, run.mesh, data_axis=TCP, diloco=given)

    return make


def measured(**options):
    """An overlay that follows the links as they are measured."""

    def make(run):
        topology = cgx.wan.Topology(run.mesh, TCP[0])
        return topology.steps(lambda overlay: step(schedule={"dc": overlay, "local": "auto"}, **options)(run))

    return make


def dgt(rest="defer", **options):
    return cgx.wan.Differential(k=0.5, rest=rest, **options)


HFA = partial(few, cgx.wan.hfa, k1=PERIOD // 4, k2=4)
DILOCO = partial(few, cgx.wan.diloco, outer="sgd", every=PERIOD)

ANY = {
    "float32": step(plan=RAW),
    "4 bits": step(plan=BITS4),
    "FP16": step(plan=cgx.Plan.fp16(axis_name=AXES)),
    "BSC": step(momentum=False, compress=cgx.bsc),
    "MPQ": step(momentum=False, compress=cgx.mpq),
    "DGT, defer": step(plan=RAW, compress=dgt()),
    "DGT, defer, random": step(plan=RAW, compress=dgt(ranked=False)),
    "DGT, quantize": step(plan=RAW, compress=dgt("quantize")),
    "DGT, drop": step(plan=RAW, compress=dgt("drop")),
    "DGT, drop, random": step(plan=RAW, compress=dgt("drop", ranked=False)),
    "DGT, lost by the sender": step(plan=RAW, compress=dgt("drop"), feedback=False),
    "P3": step(plan=RAW, overlap="priority"),
    "mixed sync": step(plan=RAW, compress=cgx.wan.mixed_sync),
    "HFA": HFA(),
    "DiLoCo": DILOCO(),
    "4 bits + DGT, defer": step(plan=BITS4, compress=dgt()),
    "4 bits + P3": step(plan=BITS4, overlap="priority"),
    "4 bits + mixed sync": step(plan=BITS4, compress=cgx.wan.mixed_sync),
    "4 bits + HFA": HFA(plan=cgx.MaxMin(4)),
    "4 bits + DiLoCo": DILOCO(plan=cgx.MaxMin(4)),
    "4 bits + DiLoCo, streaming": DILOCO(plan=cgx.MaxMin(4), fragments=4, overlap=3, alpha=0.5),
}
# Techniques with routes over several centers.
SEVERAL = {
    "float32": step(plan=RAW),
    "4 bits": step(plan=BITS4),
    "MultiGPS, 2 owners": step(plan=RAW, schedule={"dc": cgx.wan.Overlay.owners(4, 2), "local": "auto"}),
    "TSEngine": measured(plan=RAW),
    "4 bits + MultiGPS, 2 owners": step(plan=BITS4, schedule={"dc": cgx.wan.Overlay.owners(4, 2), "local": "auto"}),
    "4 bits + TSEngine": measured(plan=BITS4),
    "4 bits + TSEngine + DGT, defer": measured(plan=BITS4, compress=dgt()),
}
METHODS = {"2 centers of 2 ranks": {"jaxcgx": ANY}, "4 centers": {"jaxcgx": SEVERAL}}


class Program:
    """A model that one technique trains."""

    def __init__(self, run, data, technique):
        self._training = technique(run)
        self._data, self._at, self._loss = data, 0, jax.jit(make_loss(run.model))
        self._sharding = NamedSharding(run.mesh, P(AXES))
        self._weights, self._state = self._training.init(data.weights)

    def run(self, steps):
        for _ in range(steps):
            batch = [jax.make_array_from_process_local_data(self._sharding, b) for b in self._data.batch(self._at)]
            self._weights, self._state, _ = self._training.step(self._weights, self._state, tuple(batch))
            jax.block_until_ready(self._weights)
            self._at += 1
        # The bytes, the time and the weights of these steps include what P3 has sent.
        self._weights, self._state = jax.block_until_ready(self._training.finish(self._weights, self._state))

    def loss(self):
        """Returns the loss of this rank's part of the held-out text."""
        weights = jax.tree.map(lambda w: w.addressable_data(0), self._weights)
        return float(self._loss(weights, tuple(self._data.held_out)))


def main(address, rank, ranks, shape, name, model, rate, data):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, ranks, rank)
    mesh = jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * 2)
    make = partial(partial, Program, Run(model, rate, mesh), Data(data, rank, ranks))
    serve({kind: {n: make(technique) for n, technique in given.items()} for kind, given in METHODS[name].items()})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

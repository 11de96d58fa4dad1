"""A host of training_speed.py in JAX. Each of METHODS trains the same model when it is its turn.

python benchmarks/training_speed_jax.py '{"address": "10.77.0.1:20000", "rank": 0, "ranks": 2, "model": ..., ...}'
"""

import json
import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from host import Data, serve
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training_speed_models import make_loss

import jaxcgx as cgx
from jaxcgx.train.step import TrainStep

BUCKET = 512  # elements that share a scale in the quantization written by hand
TCP = cgx.Tcp("data")


class Run(NamedTuple):
    """The model to train, and its ranks."""

    model: str
    rate: float
    mesh: jax.sharding.Mesh

    def loss(self):
        """Returns the loss: a function of the weights and of a batch."""
        return make_loss(self.model)

    def optimizer(self, momentum=True):
        """Returns the model's optimizer, without momentum for a method that has its own."""
        if not self.model.startswith("ResNet"):
            return optax.adam(self.rate) if momentum else optax.adam(self.rate, b1=0.0)
        return optax.sgd(self.rate, momentum=0.9 if momentum else None)


# Exchanges that users write with JAX alone: functions (gradients, lost) -> (mean over the ranks, lost) inside
# shard_map. `lost` is the vector of the errors that compression made in the previous step.


def nothing(grads, lost):
    return grads, lost


def psum(grads, lost):
    return jax.tree.map(lambda g: lax.psum(g, "data") / lax.axis_size("data"), grads), lost


def joined_psum(grads, lost):
    x, unravel = ravel_pytree(grads)
    return unravel(lax.pmean(x, "data")), lost


def psum_bfloat16(grads, lost):
    means, _ = psum(jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads), lost)
    return jax.tree.map(lambda g: g.astype(jnp.float32), means), lost


def quantize(x, bits):
    """Returns (codes, scales) of a vector of whole buckets. Scales are the minimum of each bucket, and the step."""
    rows = x.reshape(-1, BUCKET)
    low = rows.min(1, keepdims=True)
    step = (rows.max(1, keepdims=True) - low) / (2**bits - 1)
    codes = jnp.round((rows - low) / jnp.where(step > 0, step, 1)).astype(jnp.uint8)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes, jnp.concatenate([low, step], 1)


def dequantize(codes, scales):
    if codes.shape[1] < BUCKET:
        codes = jnp.stack([codes & 15, codes >> 4], 2).reshape(-1, BUCKET)
    return (codes.astype(jnp.float32) * scales[:, 1:] + scales[:, :1]).reshape(-1)


def to_bfloat16(x):
    """A codec without scales. It sends the bits as integers, because XLA converts bfloat16 to float32 on CPUs."""
    return (lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)


def from_bfloat16(codes):
    return lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)


def compressed_mean(grads, lost, *, encode, decode=dequantize):
    ranks = lax.axis_size("data")
    x, unravel = ravel_pytree(grads)
    x = jnp.pad(x + lost, (0, -x.size % (ranks * BUCKET)))
    payload = encode(x)
    lost = (x - decode(*payload))[: lost.size]
    parts = decode(*(lax.all_to_all(p, "data", 0, 0, tiled=True) for p in payload))
    payload = encode(parts.reshape(ranks, -1).mean(0))
    mean = decode(*(lax.all_gather(p, "data", tiled=True) for p in payload))
    return unravel(mean[: lost.size]), lost


# Methods: functions of a Run that return a TrainStep.


class State(NamedTuple):
    params: Any
    opt_state: Any
    lost: jax.Array  # the errors of every rank


def by_hand(exchange):
    """Trains with one of the functions above."""

    def make(run):
        optimizer = run.optimizer()
        specs = State(P(), P(), P("data"))

        def init(weights):
            shape = run.mesh.size, sum(w.size for w in weights.values())
            place = jax.tree.map(lambda spec: NamedSharding(run.mesh, spec), specs)
            return jax.jit(lambda w: State(w, optimizer.init(w), jnp.zeros(shape)), out_shardings=place)(weights)

        def step(state, batch):
            loss, grads = jax.value_and_grad(run.loss())(state.params, batch)
            means, lost = exchange(grads, state.lost[0])
            updates, opt_state = optimizer.update(means, state.opt_state, state.params)
            return State(optax.apply_updates(state.params, updates), opt_state, lost[None]), loss[None]

        both = specs, P("data")
        mapped = jax.shard_map(step, mesh=run.mesh, in_specs=both, out_specs=both, check_vma=False)
        return TrainStep(init, jax.jit(mapped, donate_argnums=0), finish=lambda state: state)

    return make


def ours(exchange, axis="data", momentum=True, **options):
    """Trains with make_train_step."""
    return lambda run: cgx.make_train_step(
        run.loss(), run.optimizer(momentum), run.mesh, exchange, sharding=cgx.Sharding(axis), **options
    )


STREAMING = dict(every=20, fragments=4, overlap=3, alpha=0.5)


def diloco(every, **options):
    """Trains centers of one host each, which exchange every `every` steps."""
    return ours(cgx.wan.Diloco(cgx.MaxMin(4), every, outer="sgd", **options), TCP)


METHODS = {
    "alone": {"no exchange": by_hand(nothing)},
    "plain": {
        "psum, float32": by_hand(psum),
        "psum, one array": by_hand(joined_psum),
        "psum, bfloat16": by_hand(psum_bfloat16),
        "by hand, bfloat16": by_hand(partial(compressed_mean, encode=to_bfloat16, decode=from_bfloat16)),
    },
    "by hand": {
        "by hand, 8 bits": by_hand(partial(compressed_mean, encode=partial(quantize, bits=8))),
        "by hand, 4 bits": by_hand(partial(compressed_mean, encode=partial(quantize, bits=4))),
    },
    "jaxcgx": {
        "Raw, backward": ours(cgx.Raw(), TCP, overlap="backward"),
        "MaxMin(4), Gloo": ours(cgx.MaxMin(4)),
        "MaxMin(4), Tcp": ours(cgx.MaxMin(4), TCP),
        "MaxMin(4), backward": ours(cgx.MaxMin(4), TCP, overlap="backward"),
        "MaxMin(4), priority": ours(cgx.MaxMin(4), TCP, overlap=cgx.Priority()),
        "Eden(4), Tcp": ours(cgx.Eden(4), TCP),
        "ByteGrad, Tcp": ours(cgx.ByteGrad(), TCP),
        "Cast, Tcp": ours(cgx.Cast(), TCP),
        "Float8, Tcp": ours(cgx.Float8(), TCP),
        "DGC 1 %, Tcp": ours(cgx.DGC(0.01), TCP, momentum=False),
        "DGC 1 %, backward": ours(cgx.DGC(0.01), TCP, momentum=False, overlap="backward"),
        "DGC 1 %, priority": ours(cgx.DGC(0.01), TCP, momentum=False, overlap=cgx.Priority()),
        "DGC 1 %, 8 bits, priority": ours(
            cgx.DGC(0.01, values=cgx.MaxMin(8)), TCP, momentum=False, overlap=cgx.Priority()
        ),
        "PowerSGD(4), Gloo": ours(cgx.PowerSGD(4)),
        "PowerSGD(4), Tcp": ours(cgx.PowerSGD(4), TCP),
        "PowerSGD(4), backward": ours(cgx.PowerSGD(4), TCP, overlap="backward"),
        "PowerSGD(4), priority": ours(cgx.PowerSGD(4), TCP, overlap=cgx.Priority()),
    },
    "DiLoCo": {"DiLoCo, 4 bits, H 20": diloco(20), "DiLoCo, 4 bits, H 20, streaming": diloco(**STREAMING)},
}


class Program:
    """A model that one method trains."""

    def __init__(self, run, data, method):
        self.training = method(run)
        self._data, self._loss = data, jax.jit(run.loss())
        self._sharding = NamedSharding(run.mesh, P("data"))
        self.begin(0)

    def begin(self, batch):
        """Begins with the first weights, at this batch."""
        self.state, self._at = self.training.init(self._data.weights), batch

    def _batch(self):
        return tuple(jax.make_array_from_process_local_data(self._sharding, b) for b in self._data.batch(self._at))

    def run(self, steps):
        for _ in range(steps):
            self.state, _ = self.training.step(self.state, self._batch())
            jax.block_until_ready(self.state)
            self._at += 1
        self.state = jax.block_until_ready(self.training.finish(self.state))

    def loss(self):
        """Returns the loss of this host's part of the held-out examples."""
        weights = jax.tree.map(lambda w: w.addressable_data(0), self.state.params)
        return float(self._loss(weights, tuple(self._data.held_out)))


def main(address, rank, ranks, model, rate, data):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, ranks, rank)
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,))
    run, data = Run(model, rate, mesh), Data(data, rank, ranks)
    make = partial(partial, Program, run, data)
    serve({kind: {name: make(method) for name, method in given.items()} for kind, given in METHODS.items()})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

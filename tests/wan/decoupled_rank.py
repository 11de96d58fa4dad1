"""A process of a center that test_decoupled.py starts: python decoupled_rank.py PORT RANK ADDRESS..."""

import ctypes
import hashlib
import signal
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

PARAMS = {"w": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.ones(4, np.float32)}
RANKS, ROUNDS = 2, 2


def digest(params):
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()


def train(params, member):
    """Trains until the last round, and returns the digest of the outer parameters."""
    while not member.last or member.last.number < ROUNDS:
        params = member.step(jax.tree.map(lambda x: 0.75 * x, params))
    return digest(member.params)


def join(addresses, place, params):
    options = dict(every=2, plan=cgx.MaxMin(4), outer="sgd", quorum=2, grace=60)
    return cgx.wan.Decoupled(addresses=addresses, place=place, **options).join(params)


def main():
    port, rank, *addresses = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, int(rank))
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))
    whole = lambda x: jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), lambda at: x[at])
    # It joins with zeros and gets the parameters of the other center.
    params, member = join(addresses, 1, {name: whole(np.zeros_like(x)) for name, x in PARAMS.items()})
    with member:
        print("RESULT", train(params, member), digest(params) == digest(PARAMS), flush=True)


if __name__ == "__main__":
    main()

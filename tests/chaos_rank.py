"""A process that heavy_chaos.py starts in a host: a rank of a training over Tcp, or a center of a decoupled training.

    python chaos_rank.py FOLDER PLACE tcp STEPS ADDRESS RANKS
    python chaos_rank.py FOLDER PLACE center ROUNDS ADDRESS...

It writes a line of JSON for each step or round to FOLDER/PLACE. The last line has the digest of the parameters, or the
error that ended the training.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcgx as cgx

PACE = 0.1  # seconds between steps
SIZES = 64, 32


def digest(params):
    leaves = jax.tree.leaves(params)
    return hashlib.sha256(b"".join(np.asarray(x.addressable_data(0)).tobytes() for x in leaves)).hexdigest()


def over_tcp(say, place, steps, address, ranks):
    jax.distributed.initialize(address, int(ranks), place)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = np.random.default_rng(0).standard_normal((8 * mesh.size, SIZES[0]), np.float32)
    batch = jax.make_array_from_callback(rows.shape, jax.NamedSharding(mesh, jax.P("data")), lambda at: rows[at])
    loss_fn = lambda w, x: jnp.mean((x @ w - 1) ** 2)
    exchange, sharding = cgx.MaxMin(4, rounding="stochastic"), cgx.Sharding(cgx.Tcp("data", timeout=60))
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, exchange, sharding=sharding)
    state = train.init(np.zeros(SIZES, np.float32))
    for step in range(steps):
        try:
            state, _ = jax.block_until_ready(train.step(state, batch))
        except jax.errors.JaxRuntimeError as error:
            return say(error=str(error))
        say(step=step)
        time.sleep(PACE)
    return say(digest=digest(state.params))


def as_center(say, place, rounds, *addresses):
    """Trains until a round. A center that is alone for long ends, too: the others may have ended."""
    target = np.random.default_rng(place).standard_normal(SIZES, np.float32)
    learn = jax.jit(lambda w: w - (w - target) / 8)
    options = dict(every=5, outer="sgd", quorum=2, grace=2.0, plan=cgx.MaxMin(4))
    params, member = cgx.wan.Decoupled(addresses=addresses, place=place, **options).join(jnp.zeros(SIZES))
    lonely, last = 0, None
    with member:
        while (member.last is None or member.last.number < rounds) and lonely < 300:
            params = member.step(learn(params))
            if member.last != last:
                last = member.last
                say(round=last.number, centers=last.centers, waited=member.waited)
            lonely = lonely + 1 if len(member.centers) == 1 else 0
            time.sleep(PACE)
        say(digest=digest(member.params), round=member.last.number)


def main():
    folder, place, role, count, *words = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 1)
    with open(pathlib.Path(folder, place), "w") as out:
        say = lambda **what: print(json.dumps(what | dict(at=time.monotonic())), file=out, flush=True)
        (over_tcp if role == "tcp" else as_center)(say, int(place), int(count), *words)
    if role == "tcp":
        time.sleep(5)  # the others may need the coordinator for their errors
        os._exit(0)


if __name__ == "__main__":
    main()

"""Decoupled centers: three programs train together, one of them dies and comes back, and the others don't wait for it.

    pip install ".[examples]"
    python examples/wan/decoupled.py

Each center is a separate process that trains on handwritten digits. To use several hosts, start one process on each
host, with the same addresses and its own place, from 0:

    python examples/wan/decoupled.py --place 0 --addresses a.example:7000 b.example:7000
"""

import argparse
import subprocess
import sys
import time

import jax
import numpy as np
import optax
from common import init_params, loss_fn
from sklearn.datasets import load_digits

import jaxcgx as cgx

ADDRESSES = [f"127.0.0.1:{port}" for port in (7000, 7001, 7002)]
BATCH = 32


def train(addresses, place, steps):
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    inner, rng = optax.adam(1e-3), np.random.default_rng(place)

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = inner.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    params = init_params()
    state = inner.init(params)
    decoupled = cgx.wan.Decoupled(
        addresses=addresses, place=place, outer="sgd", every=20, plan=cgx.MaxMin(4), grace=2.0
    )
    params, member = decoupled.join(params)
    with member:
        for _ in range(steps):
            chosen = rng.choice(len(images), BATCH)
            params, state, _ = step(params, state, (images[chosen], labels[chosen]))
            last = member.last
            params = member.step(params, tokens=BATCH)
            if member.last != last:
                loss = float(loss_fn(member.params, (images, labels)))
                print(
                    f"center {place}: round {member.last.number} of {member.last.centers}, loss {loss:.4f}", flush=True
                )
            time.sleep(0.02)  # stands for the longer steps of a larger model


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--addresses", nargs="+", default=ADDRESSES)
    parser.add_argument("--place", type=int, help="which center this process is; without it, all of them start here")
    args = parser.parse_args()
    if args.place is not None:
        train(args.addresses, args.place, args.steps)
        return
    start = lambda place: subprocess.Popen([sys.executable, *sys.argv, "--place", str(place)])
    centers = [start(place) for place in range(len(args.addresses))]
    time.sleep(10)
    print("the last center dies", flush=True)
    centers[-1].kill()
    centers[-1].wait()
    time.sleep(3)
    print("the last center comes back", flush=True)
    centers[-1] = start(len(centers) - 1)
    sys.exit(max(center.wait() for center in centers))


if __name__ == "__main__":
    main()

"""Overlays from measured links (TSEngine, NetStorm): trees that cross the slow link between data centers only once.

The script compares them with a fixed ring and with two_shot, which don't consider the links. It starts two data centers
of two ranks each. All four ranks are on one axis of the mesh:

    pip install ".[examples]"
    sudo env PATH="$PATH" python examples/wan/tsengine.py --rate 100mbit --delay 5ms
"""

import jax
import optax
from common import demonstrate, loss_fn

import jaxcgx as cgx


def maker(mesh, sharding, args):
    """Returns (a function from a schedule to a training step, a mesh of all ranks with one axis, this axis)."""
    mesh = jax.sharding.Mesh(mesh.devices.reshape(-1), ("rank",))
    axis = cgx.Tcp("rank") if isinstance(sharding.axis[0], cgx.Tcp) else "rank"

    def make(schedule):
        plan = cgx.Plan.every(cgx.MaxMin(8), schedule=schedule)
        return cgx.make_train_step(loss_fn, optax.sgd(args.lr), mesh, plan, sharding=cgx.Sharding(axis))

    return make, mesh, axis


def fixed(schedule):
    return lambda mesh, sharding, args: maker(mesh, sharding, args)[0](schedule)


def adaptive(mesh, sharding, args):
    make, mesh, axis = maker(mesh, sharding, args)
    if axis == "rank":
        print("Virtual devices have no links to measure: here, topology is a fixed tree.", flush=True)
        return make("tree")
    return cgx.wan.Topology(mesh, axis).steps(make, every=5)


TECHNIQUES = {"ring": fixed(cgx.wan.Overlay.ring(range(4))), "two_shot": fixed("two_shot"), "topology": adaptive}

if __name__ == "__main__":
    demonstrate(__doc__, TECHNIQUES)

"""The beginning of every call over a communicator: the ranks find each other, and compare their arguments.

`broadcast` is such a call, which gives all ranks the arrays of one.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer
from mpi4py import MPI

from jaxcgx import mpi
from jaxcgx.checks import check_integer, check_whole, wrong
from jaxcgx.mpi.agreement import agree, describe, greet
from jaxcgx.mpi.ranks import check_communicator, over
from jaxcgx.mpi.waiting import Communicator, check_ready
from jaxcgx.transports.mpi import Net
from jaxcgx.typing import PyTree


def enter(op: str, comm: Communicator | Net, arrays: Mapping[str, PyTree], settings: Mapping[str, object]) -> Net:
    """Returns the transport over a communicator, and lets the ranks compare their arguments when the program runs.

    With `jaxcgx.mpi.CHECK`, they also do so now.

    Args:
      op: the function that the user called.
      comm: a communicator or a hierarchy.
      arrays: {name: tree of arrays} of its arguments. Their types are compared.
      settings: {name: value} of its other arguments.
    """
    given = comm if isinstance(comm, Net) else check_communicator(op, "axis_name", comm)
    users = given.comm if isinstance(given, Net) else given
    check_ready(op, users)
    mine = describe(op, arrays, settings)
    if mpi.CHECK:  # before the ranks meet, which waits longer
        agree(users, mine)
    net = given if isinstance(given, Net) else over(op, given)
    _check_one_device(op, arrays)
    greet(mine, net)
    return net


def _check_one_device(op: str, arrays: Mapping[str, PyTree]) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    devices = {
        device
        for leaf in jax.tree_util.tree_leaves(dict(arrays))
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        for device in leaf.devices()
    }
    if (count := max(len(devices), 1 if mesh.empty else mesh.size)) > 1:
        remedy = "start a process for each device, or use a mesh, and the name of its axis in place of a communicator"
        raise wrong(op, "x", "arrays on the one device that a rank computes on", f"{count} devices", remedy)


def broadcast(x: PyTree, root: int = 0, comm: Communicator | Net | None = None) -> PyTree:
    """Returns the `x` of rank `root` on every rank, bit for bit. Use it for parameters before the first step.

    Args:
      x: a pytree of arrays of any dtype, including random keys.
      root: a rank.
      comm: the ranks, MPI.COMM_WORLD by default.
    """
    name = "broadcast"
    net = enter(name, MPI.COMM_WORLD if comm is None else comm, dict(x=x), dict(root=root))
    root = check_integer(name, "root", root)
    if not 0 <= root < net.size:
        raise wrong(name, "root", f"a rank from 0 to {net.size - 1}", root)

    def one(path: PyTree, leaf: PyTree) -> jax.Array:
        leaf = check_whole(name, "x", path, leaf)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return net.broadcast(leaf, root)
        data = net.broadcast(jax.random.key_data(leaf), root)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))

    return jax.tree_util.tree_map_with_path(one, x)

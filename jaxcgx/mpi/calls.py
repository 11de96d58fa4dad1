"""The beginning of every call over a communicator: the ranks find each other, and compare their arguments."""

from collections.abc import Mapping

import jax
from jax.core import Tracer

from jaxcgx import mpi
from jaxcgx.checks import wrong
from jaxcgx.mpi import ranks
from jaxcgx.mpi.agreement import agree, describe
from jaxcgx.mpi.greeting import greet
from jaxcgx.mpi.nodes import check_communicator
from jaxcgx.mpi.waiting import Communicator, check_ready
from jaxcgx.transports.mpi import Net
from jaxcgx.typing import PyTree


def enter(op: str, comm: Communicator | Net, arrays: Mapping[str, PyTree], settings: Mapping[str, object]) -> Net:
    """Returns the transport over a communicator, and lets the ranks compare their arguments.

    They compare them when the program runs, and with `jaxcgx.mpi.CHECK` also now.

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
    net = given if isinstance(given, Net) else ranks.over(op, given)
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

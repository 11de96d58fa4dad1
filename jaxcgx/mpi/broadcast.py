"""broadcast: one rank's arrays for all ranks of a communicator."""

import jax
import jax.numpy as jnp
from mpi4py import MPI

from jaxcgx.checks import check_integer, check_whole, wrong
from jaxcgx.mpi.calls import enter
from jaxcgx.mpi.waiting import Communicator
from jaxcgx.transports.mpi import Net
from jaxcgx.typing import PyTree


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

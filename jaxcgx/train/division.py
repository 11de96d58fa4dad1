"""Division: which part of a batch and of the parameters is a rank's. Here for ranks with whole arrays on a device each.

A mesh (mesh.py), and one with sharded parameters or states (sharded.py), override what is different there.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcgx.exchange.reduce import plain_reduce
from jaxcgx.train.batch import OP, split_batch
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.base import Transport
from jaxcgx.typing import Batch, DType, Key, Params, PyTree, Specs

Function = Callable[..., Any]


class Division:
    """The ranks of a step. Each has whole arrays on its own device, as a process of mpirun or a rank of a center.

    A function of one rank runs on all ranks by `over`. Specs are PartitionSpecs.

    Attributes:
      batch_specs: the caller's specs of a batch, or None.
      names: the axes of the ranks, outermost first; () if JAX doesn't know the ranks.
      rows: the PartitionSpec of arrays with a row for each rank.
      size: the number of rows that a program has of such arrays.
      crosses: whether an exchange may go on while later programs run.
      dims: for each parameter, the dimension along which a rank gets only its slice of the mean; () for whole means.
      shard_axes: for each parameter, the other axes of the mesh over which it is sharded; () if there are none.
      params_specs: the specs of parameters in `over`.
      mesh: the mesh, or None.
      noisy: whether gathers of parameters or updates draw noise.
    """

    names: tuple[Any, ...] = ()
    rows: P = P()
    size: int = 1
    crosses: bool = False
    dims: tuple[int | None, ...] = ()
    shard_axes: tuple[tuple[Any, ...], ...] = ()
    params_specs: Specs = P()
    mesh: Any = None
    noisy: bool = False
    remedy: ClassVar[str] = "a rank has the row of its own alone"

    def __init__(self, batch_specs: Specs = None) -> None:
        self.batch_specs = batch_specs

    def net(self) -> Transport:
        """Returns the transport over the ranks, inside a step that is traced."""
        raise NotImplementedError(f"{type(self).__name__}.net")

    def numbers(self) -> jax.Array:
        """Returns the numbers of the ranks whose rows a program has."""
        return jnp.array([self.net().rank])

    def first(self, tree: PyTree) -> PyTree:
        """Returns the first rank's tree, from which all ranks start."""
        return tree

    def guesses(self, parts: int) -> bool:
        """Returns whether it is only a guess which dimensions of a batch have the examples."""
        return self.batch_specs is None and parts == 1

    def check_batch(self, batch: Batch) -> None:
        """Refuses batches that jit would misread."""

    def place(self, batch: Batch, parts: int) -> tuple[Batch, Specs]:
        """Returns (the batch, placed as the ranks need it; its specs). `parts` is the number of micro-batches."""
        # The batch belongs to this rank alone, and only micro-batches split it. Without them, leaves may have different
        # lengths: leaves as long as the first one are taken for examples.
        given, rows = self.batch_specs, P("ranks")
        if self.guesses(parts):
            lengths = [np.shape(x)[0] for x in jax.tree_util.tree_leaves(batch) if np.ndim(x)]
            given = jax.tree_util.tree_map(lambda x: rows if np.shape(x)[:1] == (*lengths[:1],) else P(), batch)
        return batch, split_batch(batch, given, rows, said=lambda _: None)

    def over(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        """Returns a function that runs a function of one rank on all ranks."""
        return function

    def shardings(self, specs: Specs) -> Any:
        """Returns the shardings for a tree of specs, or None for the default device."""
        return None

    def check(self, params: Params) -> None:
        """Checks that parameters can be divided."""

    def shards(self, params: Params) -> Params:
        """Returns the shapes of a device's shards of the gradients before the exchange."""
        return params

    def specs_of(self, params: Params) -> Specs:
        """Returns the specs of the parameters, a tree like them."""
        return jax.tree_util.tree_map(lambda _: P(), params)

    def specs_of_updates(self, params: Params) -> Specs:
        """Returns the specs of the updates that an optimizer makes from gradients."""
        return self.specs_of(params)

    def specs_of_state(self, state: PyTree, params: Params, specs: Specs) -> Specs:
        """Returns the specs of an optimizer's state. `specs` are those of the updates of these parameters."""
        return P()

    def specs_of_means(self, skipped: PyTree) -> Specs:
        """Returns the specs of the means that ranks get, without the leaves that are skipped."""
        return P()

    def by_partitioner(self, function: Function, specs: Specs) -> Function:
        """Returns the function, but with results that are sharded by `specs`. It runs outside of `over`."""
        return function

    def over_devices(self, function: Function, specs: Callable[[], Specs]) -> Function:
        """Returns the function, such that devices divide its work if its results, with these specs, are sharded."""
        return function

    def init_exchange(self, init: Callable[[Params], ExchangeState], params: Params) -> ExchangeState:
        """Returns the state of an exchange, with rows. `init` must depend only on the shapes of parameters."""
        sent = init(params)
        return ExchangeState(row(sent.own), sent.shared)

    def on_shards(self, function: Function, sent: ExchangeState) -> Function:
        """Returns a function that runs an exchange on all shards over the other axes of a mesh, inside of `over`.

        The function is one of (gradients, sent, parameters or None, loss) that returns (means, sent).
        """
        return function

    def open(self, params: Params, loss: Function, key: Key | None) -> tuple[Params, Function]:
        """Returns (whole parameters, a loss function of these), inside of `over`."""
        return params, loss

    def like_whole(self, params: Params) -> Params:
        """Returns parameters in their whole shapes, whatever their values, inside of `over`."""
        return params

    def init_lost(self, params: Params, skipped: PyTree) -> PyTree:
        """Returns the errors of the gather of updates before the first step. None: there are none."""
        return None

    def specs_of_lost(self, skipped: PyTree) -> Specs:
        """Returns the specs of the result of `init_lost`."""
        return None

    def send_updates(self, updates: PyTree, lost: PyTree, skipped: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        """Returns (the updates, whole where the parameters are whole; the new errors of their gather)."""
        return updates, lost


def in_rows(function: Function, own: PyTree, *others: PyTree) -> PyTree:
    """Calls a function of one rank with rows [1, ...] of its own state, which are then written in place.

    Reshaping a donated row to [...] makes XLA copy it, so the function runs under vmap.
    """
    return jax.vmap(function)(own, *others)


def row(tree: PyTree) -> PyTree:
    return jax.tree_util.tree_map(lambda x: lax.expand_dims(x, (0,)), tree)


def without_row(tree: PyTree) -> PyTree:
    return jax.tree_util.tree_map(lambda x: lax.squeeze(x, (0,)), tree)  # x[0] takes ten times as long to trace


def mean_of(x: jax.Array, net: Transport) -> jax.Array:
    """Returns the uncompressed mean over the ranks of a step's own number, such as its loss."""
    return plain_reduce(OP, x, net, mean=True)


def first_of(x: jax.Array, net: Transport) -> jax.Array:
    """Returns the first rank's array on every rank."""
    if not addable(x):
        return jax.random.wrap_key_data(first_of(jax.random.key_data(x), net), impl=jax.random.key_impl(x))
    short = jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32  # XLA on CPUs can't add short numbers
    numbers = x.astype(short) if x.dtype.itemsize < 4 else x
    return net.plain_psum(jnp.where(net.rank == 0, numbers, jnp.zeros_like(numbers))).astype(x.dtype)


def addable(x: jax.Array) -> bool:
    """Returns whether an array holds numbers. Arrays of random keys don't."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def wide(dtype: DType) -> DType:
    """Returns the dtype in which numbers of a dtype are added up.

    It is float32 for integers and for smaller floating-point numbers, else the same dtype.
    """
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def after(tree: PyTree, x: jax.Array) -> jax.Array:
    """Returns x. XLA computes the arrays in the tree before it computes anything from the result."""
    zeros = [_zero(y) for y in jax.tree_util.tree_leaves(tree) if y.size]
    return jnp.where(sum(zeros) > 0, jnp.zeros_like(x), x) if zeros else x


def _zero(x: jax.Array) -> jax.Array:
    """Returns 0. Nothing is above infinity, but XLA doesn't know this, so it computes x first."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return (jnp.real(x.reshape(-1)[0]).astype(jnp.float32) > jnp.inf).astype(jnp.uint32)

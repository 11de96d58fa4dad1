"""Division: which part of the batch and of the parameters is this rank's. A mesh, and processes of mpirun."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat
from jaxcgx.collectives.splitting import Ranks
from jaxcgx.exchange.message import Sum
from jaxcgx.optim.batch import check_even, split_batch
from jaxcgx.optim.cut import flatten_specs
from jaxcgx.transports.axes import axis_names, crosses
from jaxcgx.transports.base import Transport
from jaxcgx.transports.resolve import check_axes
from jaxcgx.train.state import Sharding
from jaxcgx.typing import Batch, Params, PyTree, Specs

MEAN = Sum()


class Division(Protocol):
    """The ranks of a step. Functions of one rank run on all of them by `over`.

    For ZeRO-1: `updates(function, specs)` runs the update on this rank's slices. For FSDP: `open(params)` returns whole
    parameters from shards, and its transpose leaves slices of gradients. Exchanges need nothing of either: the room of
    the exchange gives `Routes` a dimension for each leaf that is scattered, and `end` then returns slices.
    """

    @property
    def rows(self) -> P: ...

    @property
    def size(self) -> int: ...

    @property
    def crosses(self) -> bool: ...

    def net(self) -> Transport: ...

    def place(self, batch: Batch) -> tuple[Batch, Specs]: ...

    def over(self, function: Callable[..., PyTree], in_specs: Specs, out_specs: Specs) -> Callable[..., PyTree]: ...

    def first(self, state: PyTree, spec: Specs) -> PyTree: ...

    def updates(self, function: Callable[..., PyTree], specs: Specs) -> Callable[..., PyTree]: ...


@dataclasses.dataclass(frozen=True)
class OverMesh:
    """The devices along axes of a mesh."""

    mesh: Mesh
    axis: Any  # names, some of them marked
    sharding: Sharding = Sharding()

    @property
    def names(self) -> tuple[str, ...]:
        return axis_names(self.axis)

    @property
    def rows(self) -> P:
        return P(self.names)

    @property
    def size(self) -> int:
        return math.prod(self.mesh.shape[n] for n in self.names)

    @property
    def crosses(self) -> bool:
        return crosses(self.axis)

    @property
    def dims(self) -> tuple[int | None, ...]:
        """For each parameter, the dimension of which a rank updates only its slice (ZeRO-1)."""
        specs = [] if self.sharding.optimizer is None else [s for _, s in flatten_specs(self.sharding.optimizer)[0]]
        return tuple(next((d for d, name in enumerate(s) if name is not None), None) for s in specs)

    def net(self) -> Transport:
        return check_axes("make_train_step", self.axis)

    def place(self, batch: Batch) -> tuple[Batch, Specs]:
        batch = jax.tree_util.tree_map(jnp.asarray, batch)
        said = Ranks("make_train_step", self.mesh, self.names).spec_of_batch
        specs = split_batch(batch, self.sharding.batch, self.rows, said=said)
        check_even(batch, specs, self.mesh.shape)
        return batch, specs

    def over(self, function: Callable[..., PyTree], in_specs: Specs, out_specs: Specs) -> Callable[..., PyTree]:
        """Without check_vma, which refuses loops that start from zeros in a loss."""
        return jax.shard_map(
            function, mesh=self.mesh, axis_names=set(self.names), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def first(self, state: PyTree, spec: Specs) -> PyTree:
        """Returns a state of one rank in its place: with rows for all ranks where the spec has their axes."""
        place = functools.partial(NamedSharding, self.mesh)
        rows = lambda x: jnp.broadcast_to(x[None], (self.size, *x.shape))
        make = lambda s: jax.tree_util.tree_map(rows if spec == self.rows else jnp.copy, s)
        return jax.jit(make, out_shardings=place(spec))(state)

    def updates(self, function: Callable[..., PyTree], specs: Specs) -> Callable[..., PyTree]:
        if specs is None:
            return function
        shardings = jax.tree_util.tree_map(lambda s: NamedSharding(self.mesh, s), specs)

        def run(*args: PyTree) -> tuple[PyTree, PyTree]:
            updates, state = function(*args)
            return jax.lax.with_sharding_constraint(updates, shardings), state

        return run


@dataclasses.dataclass(frozen=True)
class OverProcesses:
    """The processes of mpirun (a sketch): a function of one rank is the function, and a row is a leading axis of 1."""

    comm: Any
    rows = P()

    @property
    def size(self) -> int:
        return self.net().size

    @property
    def crosses(self) -> bool:
        return False

    def net(self) -> Transport:
        from jaxcgx.transports.mpi import Comm  # this import starts MPI

        return Comm(self.comm)

    def place(self, batch: Batch) -> tuple[Batch, Specs]:
        return batch, jax.tree_util.tree_map(lambda x: P("rank") if jnp.ndim(x) else P(), batch)

    def over(self, function: Callable[..., PyTree], in_specs: Specs, out_specs: Specs) -> Callable[..., PyTree]:
        return function

    def first(self, state: PyTree, spec: Specs) -> PyTree:
        return jax.tree_util.tree_map(lambda x: x[None], state)  # parameters: the first rank's, by a broadcast

    def updates(self, function: Callable[..., PyTree], specs: Specs) -> Callable[..., PyTree]:
        return function


def in_rows(function: Callable[..., PyTree], own: PyTree, *others: PyTree) -> PyTree:
    """Calls a function of one rank with rows [1, ...] of its own state, which are then written in place.

    Reshaping a donated row to [...] makes XLA copy it, so the function runs under vmap.
    """
    return jax.vmap(function)(own, *others)


def row(tree: PyTree) -> PyTree:
    return jax.tree_util.tree_map(lambda x: lax.expand_dims(x, (0,)), tree)


def without_row(tree: PyTree) -> PyTree:
    return jax.tree_util.tree_map(lambda x: lax.squeeze(x, (0,)), tree)  # x[0] takes ten times as long to trace


def mean_of(x: PyTree, net: Transport) -> PyTree:
    """Returns the uncompressed mean over the ranks of a step's own numbers."""
    tracked = _compat.tracked_axes(net.names)
    return jax.tree_util.tree_map(lambda y: net.plain_pmean(_compat.vary(jnp.asarray(y), tracked)), x)


def first_of(x: jax.Array, net: Transport) -> jax.Array:
    """Returns the first rank's integers, flags or keys on every rank."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(first_of(jax.random.key_data(x), net), impl=jax.random.key_impl(x))
    numbers = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    return net.plain_psum(jnp.where(net.rank == 0, numbers, 0)).astype(x.dtype)


def whole(params: Params) -> Params:
    """FSDP gathers here."""
    return params

"""The ranks of a step: the devices along axes of a mesh, or the processes of an MPI communicator."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import wrong
from jaxcgx.collectives import local_value_and_grad
from jaxcgx.collectives.old_arguments import Options
from jaxcgx.collectives.old_psum import plain_reduce, reduce
from jaxcgx.collectives.state import State
from jaxcgx.transports.axes import axis_names
from jaxcgx.transports.base import Transport
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.typing import AxisName


class Rows(NamedTuple):
    """The rows of arrays per rank, as `init` makes them."""

    size: int  # the number of rows; 1 if a rank makes only its own row
    varying: frozenset[Any]  # the axes over which the rows vary, if JAX tracks that
    sharded: bool  # whether they are sharded over the mesh in context, which has `size` ranks


class Ranks(Protocol):
    """The properties and functions of ranks that a step needs."""

    @property
    def levels(self) -> tuple[Any, ...]:
        """The keys of dicts of codecs and schedules, outermost first. A communicator without a hierarchy has none."""
        ...

    @property
    def remedy(self) -> str:
        """The remedy in errors about arrays per rank that have the rows of several ranks."""
        ...

    def net(self) -> Transport:
        """Returns the transport over the ranks, inside a step that is traced."""
        ...

    def rows(self, axis_size: int | None) -> Rows:
        """Returns the rows of arrays per rank. `axis_size` is the number of ranks from the user, or None."""
        ...

    def numbers(self, count: int | None) -> jax.Array:
        """Returns the ranks for which `init` makes rows: all `count` ranks of a mesh, or only this process's rank."""
        ...

    def first(self, x: Any) -> Any:
        """Returns the first rank's tree, from which all ranks start."""
        ...

    def compressed_pmean(self, x: Any, plan: Any, state: State, **options: Any) -> Any:
        """Returns the mean of all ranks' trees, as `jaxcgx.compressed_pmean` does."""
        ...

    def pmean(self, x: Any) -> Any:
        """Returns the uncompressed mean of all ranks' trees."""
        ...

    def value_and_grad(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `jax.value_and_grad(objective, has_aux=True)`, with gradients that are not summed over the ranks."""
        ...


class UnknownRanksError(ValueError):
    """`init` can't see the number of ranks."""


@dataclasses.dataclass(frozen=True)
class MeshRanks:
    """The ranks along named axes. `Ranks` documents the members."""

    function: str
    axis_name: AxisName

    @property
    def levels(self) -> tuple[Any, ...]:
        return axis_names(self.axis_name)

    @property
    def remedy(self) -> str:
        return (
            f"shard the state over {self.axis_name!r}, as jaxcgx.state_specs(state, {self.axis_name!r}) says; under "
            "jax.pmap, make it with axis_size=1; one of another number of ranks is for jaxcgx.reshard_state"
        )

    def net(self) -> Transport:
        return check_axes(self.function, self.axis_name)

    def rows(self, axis_size: int | None) -> Rows:
        try:
            return Rows(1, _compat.tracked_axes(self.net().names), False)
        except NameError:
            pass  # outside of shard_map
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        found = math.prod(sizes[name] for name in self.levels) if all(name in sizes for name in self.levels) else None
        count = found if axis_size is None else axis_size
        if count is None:
            raise wrong(
                self.function,
                "axis_size",
                f"the number of ranks of {self.axis_name!r}, which init can't see",
                None,
                "pass it, or call init under jax.set_mesh(mesh) or inside jax.shard_map; for jax.pmap pass "
                "axis_size=1, and replicate the state",
                kind=UnknownRanksError,
            )
        return Rows(count, frozenset(), count == found)

    def numbers(self, count: int | None) -> jax.Array:
        return jnp.arange(count)

    def first(self, x: Any) -> Any:
        return x  # on a mesh, all ranks share one tree

    def compressed_pmean(self, x: Any, plan: Any, state: State, **options: Any) -> Any:
        return reduce(
            "compressed_pmean", x, net=self.net(), codec=plan, options=Options(**options), state=state, mean=True
        )

    def pmean(self, x: Any) -> Any:
        return plain_reduce("compressed_pmean", x, self.net(), mean=True)

    def value_and_grad(self, objective: Callable[..., Any]) -> Callable[..., Any]:
        return local_value_and_grad(objective, self.axis_name, has_aux=True)

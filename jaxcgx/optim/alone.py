"""How a training step is placed in a process of mpirun: it has everything whole, on a device of its own."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


class Alone:
    """A process without a mesh. `Placement` documents the members; no shardings leave all on the default device."""

    names: tuple[Any, ...] = ()
    ranks = None  # the communicator says it

    def check_batch(self, batch: Any) -> None:
        pass

    def shardings(self, specs: Any) -> None:
        return None

    def specs_of(self, params: Any) -> Any:
        return jax.tree_util.tree_map(lambda _: P(), params)

    def shards(self, params: Any) -> Any:
        return params

    def init_per_rank(self, init: Callable[..., Any], params: Any) -> tuple[Callable[..., Any], Any]:
        return init, P()

    def optimizer_specs(self, optimizer: Any, params: Any, specs: Any) -> Any:
        return P()

    def update_shards(self, update: Callable[..., Any], grads: Any, state: Any, params: Any) -> Any:
        return update(grads, state, params)

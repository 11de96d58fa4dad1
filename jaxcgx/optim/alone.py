"""The placement of a training step whose ranks have only whole arrays: a process of mpirun, with its own device."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx.optim.batch import check_batch_specs, split_batch
from jaxcgx.optim.cut import Cut


@dataclasses.dataclass(frozen=True)
class Alone:
    """A rank without a mesh. `Placement` documents the members. It has no shardings: arrays are on the default device.

    That of a rank of a center (jaxcgx/wan/centers.py) is nearly the same.
    """

    data_axis: Any  # the communicator, or inside a center the axis of the ranks
    batch_specs: Any = None

    mesh: ClassVar[Any] = None
    names: ClassVar[tuple[Any, ...]] = ()
    others: ClassVar[frozenset[Any]] = frozenset()
    ranks: ClassVar[Any] = None
    whole_specs: ClassVar[Any] = None
    state_specs: ClassVar[Any] = None
    params: ClassVar[Cut] = Cut.of(None, ())
    state: ClassVar[Cut] = Cut.of(None, ())
    rows: ClassVar[P] = P()
    params_of_rank: ClassVar[P] = P()

    def __post_init__(self) -> None:
        check_batch_specs(self.batch_specs, ())

    def check_batch(self, batch: Any) -> None:
        pass

    def shardings(self, specs: Any) -> None:
        return None

    def specs_of(self, params: Any) -> Any:
        return jax.tree_util.tree_map(lambda _: P(), params)

    specs_of_updates = specs_of

    def freeze(self, skipped: Any) -> "Alone":
        return self

    def gradients_of_rank(self, skipped: Any) -> P:
        return P()

    def specs_of_rows(self, sent: Any) -> P:
        return P()

    def place_batch(self, batch: Any, accumulate: int) -> tuple[Any, Any]:
        # The batch belongs to this rank alone, and only `accumulate` splits it. Without that, leaves may have different
        # lengths: leaves as long as the first one are taken for examples.
        given, rows = self.batch_specs, P("ranks")
        if given is None and accumulate == 1:
            lengths = [np.shape(x)[0] for x in jax.tree_util.tree_leaves(batch) if np.ndim(x)]
            given = jax.tree_util.tree_map(lambda x: rows if np.shape(x)[:1] == (*lengths[:1],) else P(), batch)
        return batch, split_batch(batch, given, rows, said=lambda _: None)

    def over_ranks(self, function: Callable[..., Any], **specs: Any) -> Callable[..., Any]:
        return function

    def shards(self, params: Any) -> Any:
        return params

    def init_per_rank(self, init: Callable[..., Any], params: Any) -> Any:
        return init(params)

    def specs_of_state(self, optimizer: Any, params: Any, specs: Any) -> Any:
        return P()

    def by_partitioner(self, function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
        return function

    def in_place(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def update_shards(
        self, update: Callable[..., Any], grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> Any:
        return update(grads, state, params, **extra)

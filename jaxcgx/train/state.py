"""The values that travel between the rooms of a training step."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxcgx.checks import check_integer, set_field
from jaxcgx.codecs import Codec, Raw
from jaxcgx.plan import Plan
from jaxcgx.typing import STATIC, AxisName, Params, PyTree, Specs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangeState:
    """The state of an exchange.

    Attributes:
      own: what differs from rank to rank, with a row for each rank, [ranks, ...].
      shared: what is the same on every rank.
    """

    own: PyTree
    shared: PyTree


class PerRank(NamedTuple):
    """A model state that differs between ranks.

    Attributes:
      rows: a tree like the state of one rank, `[ranks, *shape]`, sharded over the ranks.
    """

    rows: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """Gradients that one step has computed and the next step applies (`Priority`).

    Attributes:
      grads: every rank's gradients, [ranks, ...]; None if they are on their way.
      ticket: the exchange that has begun, [ranks, ...]; None if the next step begins it. Only the process that began an
        exchange can end it.
      loss: the mean loss of these gradients.
      order: the numbers of the leaves in the order in which their gradients were ready.
    """

    grads: PyTree
    ticket: PyTree
    loss: PyTree
    order: tuple[int, ...] = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes: one pytree, which `init` makes, and `step` and `finish` replace.

    Attributes:
      params: the parameters.
      model_state: the state of the model, a `PerRank` with model_state="per_rank"; None without.
      opt_state: the optimizer's state.
      exchange: the state of the exchange.
      pending: the gradients that the next step applies; None except with `Priority`.
      lost: the errors of gathered updates, which are sent later; None without.
    """

    params: Params
    model_state: PyTree
    opt_state: PyTree
    exchange: PyTree
    pending: Pending | None = None
    lost: PyTree = None

    def replace(self, **changes: PyTree) -> "TrainState":
        """Returns the state with other values of the fields in `changes`."""
        return dataclasses.replace(self, **changes)


class Metrics(NamedTuple):
    """The metrics of a step, the same on every rank.

    With rounds, `loss` has one number for each center, and `telemetry` that inside centers and that between them.

    Attributes:
      loss: the mean over ranks and micro-batches, uncompressed.
      aux: the auxiliary outputs of all ranks; None without has_aux.
      telemetry: the Telemetry of the exchange; None without telemetry=True.
    """

    loss: jax.Array
    aux: PyTree
    telemetry: PyTree = None


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a step divides its arrays over a mesh.

    Args:
      axis: the axis of the mesh, or a tuple of axes, over which batches are split. An axis may be a `Tcp`.
      params: the sharding of the parameters: a tree of PartitionSpecs like the parameters. Over `axis` (ZeRO-3, FSDP),
        each rank has its shards of parameters, gradients and optimizer state. It gathers the parameters for the loss.
        Gradients go straight to the owners of their shards, with the codecs of the exchange's plan. `shard_specs` makes
        such specs. The other axes of the mesh are left to XLA's partitioner. Over these axes, gradients are compressed
        shard by shard (docs/meshes.md), and the rules of plans apply to shards.
      optimizer: the sharding of the optimizer's state, if it differs from `params`: the specs of the parameters with
        `axis` added (ZeRO-1). Each rank has whole parameters, and computes the updates of its shards. The updates are
        gathered.
      batch: the sharding of a batch over `axis`, if not every array is split along its first dimension: a
        PartitionSpec, or a tree of them like the batch or a prefix of it. With P(), an array is whole on every rank and
        for every micro-batch, such as the weights of classes. On Explicit meshes, the types of arrays have their
        sharding. Over MPI, any axis name marks the dimension that is split into micro-batches.
      gather: a codec, {axis: codec} or a Plan for the gather of parameters or of updates. The shards of parameters are
        never rounded. The errors of gathered updates are kept in the state and sent later, except if the exchange keeps
        no errors (`keep=False`). The rules of plans apply to shards.
      regather: whether to gather parameters again for the backward pass, as FSDP does, instead of keeping them. On
        CPUs, XLA may merge both gathers. With False, all micro-batches use the same gathered parameters.
    """

    axis: AxisName = "data"
    _: dataclasses.KW_ONLY
    params: Specs = None
    optimizer: Specs = None
    batch: Specs = None
    gather: Codec | Plan | Mapping[AxisName, Codec] = Raw()
    regather: bool = True


@dataclasses.dataclass(frozen=True)
class Priority:
    """The gradients of a step travel until the next step needs them, those of the first layers first (P3).

    A step applies the gradients of the step before, and computes new gradients at the new parameters. So the parameters
    that it returns lack the last update. After the last step, `finish` applies it.

    Args:
      slice_elements: the number of elements in a slice of a message. Slices of the first layers overtake others. Leaves
        share messages of up to this number of elements, unless the plan's `fusion_mb` says otherwise.
    """

    slice_elements: int = 50_000

    def __post_init__(self) -> None:
        set_field(self, "slice_elements", check_integer, 1)

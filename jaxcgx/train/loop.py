"""make_train_step: makes a data-parallel training step from a loss, an optimizer, a mesh and an exchange."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from jaxcgx.checks import check_flag, check_integer, check_type, wrong
from jaxcgx.train.batch import OP, axes_beside, axes_over, spell_axes
from jaxcgx.train.division import Division, OverMesh
from jaxcgx.train.exchange import AnyExchange, Exchange, ForMesh, is_rounds
from jaxcgx.train.feedback import as_exchange
from jaxcgx.train.gradient import Loss
from jaxcgx.train.outputs import ModelState
from jaxcgx.train.rounds import Rounds, train_rounds
from jaxcgx.train.sharded import ShardedMesh, gather_plan
from jaxcgx.train.state import Priority, Sharding
from jaxcgx.train.step import Training, TrainStep
from jaxcgx.train.update import Update, check_optimizer, import_optax
from jaxcgx.transports.axes import check_for_mesh, crosses, is_communicator
from jaxcgx.typing import Specs

if TYPE_CHECKING:
    import optax


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: "optax.GradientTransformation",
    mesh_or_comm: Any,  # jax.sharding.Mesh has a decorator without types: for type checkers it is unknown
    exchange: AnyExchange | Rounds,
    *,
    sharding: Sharding = Sharding(),
    accumulate: int = 1,
    overlap: str | Priority | None = None,
    model_state: str | None = None,
    has_aux: bool = False,
    aux_specs: Specs = None,
    weighted: bool = False,
    donate: bool = True,
) -> TrainStep:
    """Makes the functions of data-parallel training with compressed gradients: a TrainStep.

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), mesh, cgx.MaxMin(4))
        state = train.init(params)
        for batch in batches:
            state, metrics = train.step(state, batch)

    Between the processes of mpirun, pass a communicator in place of a mesh (docs/mpi.md):

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), MPI.COMM_WORLD, cgx.MaxMin(4))

    Args:
      loss_fn: a function (params, batch) that returns the loss of its part of the batch or, with `has_aux`, (the loss,
        a pytree of arrays). If you pass a random key to `step`, a new one in every step, `loss_fn` is called with
        (params, batch, key). The key differs for every rank and micro-batch.
      optimizer: an optax.GradientTransformation. If it takes `value`, it gets the mean loss.
      mesh_or_comm: a jax.sharding.Mesh; or an MPI communicator, or `jaxcgx.mpi.hierarchy()`. A batch is then the batch
        of the process, and `init` takes the parameters of the first rank.
      exchange: how gradients are exchanged. A codec, {axis: codec} or a Plan, or a schedule of these, {first step:
        plan}, keeps the errors of compression and sends them later: a `Feedback`. Others are `Momentum`, `DGC`, `BSC`,
        `MPQ`, `Dion`, `wan.Differential`, `wan.MixedSync` and `wan.Demo`. Rounds (`wan.Diloco`, `wan.HFA`) exchange
        parameters in place of gradients. `wan.from_env` chooses among these. Parameters that the plan skips (`Skip`)
        are frozen. They are not differentiated, the optimizer doesn't see them, and they keep their bits.
      sharding: how batches, parameters and the optimizer's state are divided over the mesh: a `Sharding`. Scalars of a
        batch, including single random keys, are the same on every rank and for every micro-batch.
      accumulate: the number of micro-batches into which a rank's part of the batch is split. Their gradients are
        averaged in float32 and sent once. The model state is passed from one micro-batch to the next.
      overlap: "backward": messages are made and sent in the order in which their gradients are ready in the backward
        pass. Over `Tcp`, the backward pass continues during the exchange. The plan's `fusion_mb` is the largest size
        of a message. Its default depends on the size of the gradients, and is 1 to 4 MiB. With micro-batches, or a loop
        over layers, all gradients are ready at the same time. Or a `Priority`: the gradients of a step travel until the
        next step needs them.
      model_state: for models with state besides the parameters, such as statistics of batches or random streams; any
        pytree of arrays. `loss_fn` is then called with (params, model_state, batch) and returns (loss, the new model
        state) or, with `has_aux`, (loss, (the new model state, aux)). `init` takes (params, model_state).
        "mean": all ranks have the same state. Floating-point numbers that the loss renews are averaged over the ranks
        after each step, uncompressed. Other numbers, such as counters, are those of the first rank: let `jax.lax.psum`
        add up those that depend on the batch. Random keys (`jax.random.key`) are folded with the rank before `loss_fn`
        gets them, and the new ones are those of plain JAX.
        "per_rank": each rank keeps its own state. `TrainState.model_state` is a `PerRank`, with a row for each rank.
      has_aux: whether `loss_fn` returns auxiliary outputs. Arrays with the examples along their first dimension are
        joined: `metrics.aux` has those of the whole batch. Other floating-point outputs are averaged. Random keys are
        those of plain JAX, as if neither rank nor micro-batch were folded into the keys that the loss gets. `aux_specs`
        says what all other outputs are.
      aux_specs: what becomes of auxiliary outputs, a tree like them or a prefix of it: "mean", "sum", "first" (of the
        first rank's last micro-batch), "key" (a raw random key, uint32[2]), or a PartitionSpec with the axis of the
        ranks at the dimension of the examples. None: as `has_aux` says.
      weighted: whether `loss_fn` returns (sum, weight) in place of a loss. The loss is then the sum of all sums divided
        by the sum of all weights, over all ranks and micro-batches. An example is a mean over tokens that are not
        masked. The weight must not depend on the parameters.
      donate: whether the state is updated in place. `step` and `finish` then invalidate the state that they got.
    """
    check_type(OP, "sharding", sharding, Sharding, "a jaxcgx.Sharding")
    if isinstance(exchange, ForMesh):
        options = dict[str, Any](sharding=sharding, accumulate=accumulate, overlap=overlap, model_state=model_state)
        options |= dict(has_aux=has_aux, aux_specs=aux_specs, weighted=weighted, donate=donate)
        make = lambda each: make_train_step(loss_fn, optimizer, mesh_or_comm, each, **options)
        return exchange.steps(mesh_or_comm, sharding.axis, make)
    optax = import_optax(OP)
    loss = Loss(OP, loss_fn, model_state is not None, has_aux=has_aux, weighted=weighted, aux_specs=aux_specs)
    check_flag(OP, "donate", donate)
    check_optimizer(OP, "optimizer", optimizer)
    rounds = cast(Rounds, exchange) if is_rounds(exchange) else None
    exchange = as_exchange(exchange) if rounds is None else as_exchange(rounds.inside, rounds.op, "inside")
    division = _divide(mesh_or_comm, sharding, exchange)
    _check_overlap(overlap, mesh_or_comm, exchange, rounds)
    training = Training(
        division=division,
        loss=loss,
        exchange=exchange,
        update=Update(optax.with_extra_args_support(optimizer), division),
        model_state=ModelState(model_state),
        accumulate=check_integer(OP, "accumulate", accumulate, 1),
        overlap=overlap,
    )
    if rounds is not None:
        return train_rounds(rounds, training, sharding.axis, donate)
    return training.functions(donate)


def _divide(mesh_or_comm: Any, sharding: Sharding, exchange: Exchange) -> Division:
    gather = gather_plan(sharding)
    if is_communicator(mesh_or_comm):
        from jaxcgx.train.processes import Processes  # this import starts MPI, which is optional

        return Processes(mesh_or_comm, sharding)
    _check_mesh(mesh_or_comm, sharding)
    if sharding.params is sharding.optimizer is None:
        return OverMesh(mesh_or_comm, sharding.axis, sharding.batch)
    division = ShardedMesh(mesh_or_comm, sharding, gather, keep=getattr(exchange, "keep", True))
    if division.dims and not exchange.scatters:
        expected = f"a plan or a Feedback, where gradients are sharded over {sharding.axis!r}"
        remedy = "pass one, such as jaxcgx.TopK(0.01), or leave parameters and optimizer state whole"
        raise wrong(OP, "exchange", expected, type(exchange).__name__, remedy)
    return division


def _check_mesh(mesh: Any, sharding: Sharding) -> None:
    names = axes_over(OP, mesh, sharding.axis, "sharding.axis")
    other = axes_beside(mesh, names)
    if other and crosses(sharding.axis):  # XLA crashes on ordered effects in a shard_map over the other axes
        expected = f"names of axes on a mesh with another axis, {other[0]!r}"
        raise wrong(OP, "sharding.axis", expected, repr(sharding.axis), f"write {spell_axes(names)}")
    if other and sharding.params is None:
        expected = f"PartitionSpecs of the parameters over the axes of the mesh that aren't {sharding.axis!r}"
        raise wrong(OP, "sharding.params", expected, None)


def _check_overlap(overlap: Any, mesh_or_comm: Any, exchange: Exchange, rounds: Rounds | None) -> None:
    if overlap is None:
        return
    if not (isinstance(overlap, Priority) or overlap == "backward"):
        raise wrong(OP, "overlap", 'None, "backward" or a jaxcgx.Priority', repr(overlap))
    if rounds is not None and isinstance(overlap, Priority):
        expected = f"None or 'backward' with {type(rounds).__name__}"
        remedy = "leave it out: what centers exchange travels while they go on training"
        raise wrong(OP, "overlap", expected, repr(overlap), remedy)
    check_for_mesh(OP, "overlap", overlap, mesh_or_comm)
    if exchange.plan is None:
        expected = f"None with {type(exchange).__name__}, whose exchange has no messages"
        raise wrong(OP, "overlap", expected, repr(overlap), "leave it out")

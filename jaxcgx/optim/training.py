"""The parts of a training step: every rank's gradients, their exchange, and the optimizer's update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_array, spell_array, wrong
from jaxcgx.optim.accumulation import OP, Given, Output, Parts, addable, local_gradients, wide
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.backward import order_of
from jaxcgx.optim.batch import dimensions
from jaxcgx.optim.frozen import find_skipped, join, part
from jaxcgx.optim.halves import Early, after
from jaxcgx.optim.model_state import ModelState, agree, put
from jaxcgx.optim.nesting import check_opt_state, has_rows, warn_of_momentum
from jaxcgx.optim.outputs import find_outputs
from jaxcgx.optim.pending import check_arrived
from jaxcgx.optim.placement import Placement
from jaxcgx.optim.ranks import Ranks
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.sharded import Sharded
from jaxcgx.optim.telemetry import Telemetry
from jaxcgx.plan.leaves import spell_path
from jaxcgx.transports.axes import crosses

VALUE = dict(value=P())  # the spec of the extra argument `value` of a transformation


class Metrics(NamedTuple):
    """The metrics of a step, the same on every rank.

    Attributes:
      loss: the mean over ranks and micro-batches, uncompressed.
      aux: the auxiliary outputs, or None without has_aux. Leaves with the examples along a dimension are those of the
        whole batch. Leaves that don't depend on the batch are unchanged. Random keys are those of the first rank's last
        micro-batch. All other leaves are means.
      telemetry: the Telemetry of the exchange, or None without telemetry=True.
    """

    loss: jax.Array
    aux: Any
    telemetry: Telemetry | None


class Found(NamedTuple):
    """The results of a loss function on all ranks."""

    gradients: Any  # every rank's gradients, like the trained parameters, [ranks, *shape]
    loss: jax.Array
    aux: Any
    model_state: Any

    def metrics(self, sent: Any) -> Metrics:
        """Returns the metrics of a step. `sent` is the state after the exchange on which the step reports."""
        # The state of a user's own transformation may have no telemetry.
        return Metrics(self.loss, self.aux, getattr(sent, "telemetry", None))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """The parts of a training step. `make_train_step` explains the arguments from which they are made."""

    placement: Placement | Alone
    ranks: Ranks
    sharded: Sharded
    state: ModelState
    optimizer: Any  # takes extra arguments
    transformation: Any  # exchanges gradients
    ordered: Callable[..., Any] | None  # (order) -> such a transformation; None: the order of the tree
    objective: Callable[..., Any]  # a function (params, Given)
    accumulate: int
    has_aux: bool
    plan: Any  # None: the transformation makes its own plan, which skips nothing

    def init(self, params: Any, model_state: Any = None) -> tuple[Any, Any, Any]:
        """Returns (parameters, model state, optimizer state) before the first step, placed as `step` needs them."""
        self.state.check_given(model_state)
        params, model_state = as_arrays("params", params), as_arrays("model_state", model_state)
        self.sharded.check(params)
        placement, skipped = self.placement, self.skipped(params)
        specs, sending = placement.specs_of(params), self.sharded.freeze(skipped)
        trained, updated = (part(tree, skipped)[0] for tree in (params, sending.placement.specs_of_updates(params)))
        self._check(trained)
        rest_specs = placement.specs_of_state(self.optimizer, trained, updated)

        def fresh(params: Any) -> tuple[Any, ...]:
            own = jax.tree_util.tree_map(jnp.copy, params)  # `step` must not donate the caller's arrays
            return own, self.optimizer.init(part(params, skipped)[0]), sending.init_lost(params)

        @functools.partial(jax.jit, out_shardings=(None, placement.shardings(self.state.spec), None))
        def make(params: Any, model_state: Any) -> tuple[Any, ...]:
            params, model_state = self.ranks.first((params, model_state))
            own, rest, lost = placement.by_partitioner(fresh, (specs, rest_specs, sending.lost_specs))(params)
            opt_state = placement.init_per_rank(self.transformation.init, params), rest, *lost
            return own, self.state.first(model_state, placement.ranks), opt_state

        params = jax.device_put(params, placement.shardings(specs))
        made = make(params, put(model_state, placement.shardings(P())))
        warn_of_momentum(OP, "optimizer", made[2])
        return made

    def step(self, params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
        """Returns (parameters, model state, optimizer state, Metrics) after a step of all ranks."""
        check_opt_state(opt_state)
        check_arrived(opt_state)
        extra, batch = self._begin(params, opt_state[0], batch)
        find, order = self.prepare(params, model_state, sent=opt_state[0], batch=batch, key=key)
        found = find(params, opt_state[0])
        extra |= dict(value=found.loss)
        params, opt_state = self.apply(params, opt_state, found.gradients, extra=extra, order=order)
        return params, found.model_state, opt_state, found.metrics(opt_state[0])

    def finish(self, params: Any, model_state: Any, opt_state: Any) -> tuple[Any, ...]:
        """Returns (parameters, model state, optimizer state) unchanged, because no gradients are pending."""
        return params, model_state, opt_state

    def _begin(self, params: Any, sent: Any, batch: Any) -> tuple[dict[str, Any], Any]:
        """Begins what the transformation can exchange before it gets gradients.

        Returns (an extra argument of its `update`, the batch). XLA begins before it computes anything from the batch.
        """
        placement, update = self.placement, self.transformation.update
        if not isinstance(update, Early) or not crosses(placement.data_axis) or placement.others:
            return {}, batch
        batch, specs = placement.place_batch(batch, self.accumulate)
        leaves, tree = jax.tree_util.tree_flatten(batch)
        specs = [spec if addable(x) else P() for x, spec in zip(leaves, jax.tree_util.tree_leaves(specs))]
        tied = [i for i, spec in enumerate(specs) if any(spec)]

        def of_rank(params: Any, sent: Any, parts: list[Any]) -> tuple[Any, list[Any]]:
            begun = update.begin(sent, params)
            return begun, parts if begun is None else [begun.before(x) for x in parts]

        kept, rows = placement.specs_of_rows(sent), [specs[i] for i in tied]
        begun, parts = placement.over_ranks(
            of_rank, in_specs=(placement.params_of_rank, kept, rows), out_specs=(placement.rows, rows)
        )(params, sent, [leaves[i] for i in tied])
        for i, part_of_batch in zip(tied, parts):
            leaves[i] = part_of_batch
        return dict(begun=begun), tree.unflatten(leaves)

    def prepare(
        self, params: Any, model_state: Any, sent: Any, batch: Any, key: Any
    ) -> tuple[Callable[[Any, Any], Found], tuple[int, ...] | None]:
        """Returns (a function (parameters, sent) -> Found, the order in which its gradients are ready).

        `sent` is the state of the exchange of gradients. The order is None if `ordered` is None.
        """
        self.state.check_rows(model_state, self.placement.ranks)
        placement, skipped = self.placement, self.skipped(params)
        batch, batch_specs = placement.place_batch(batch, self.accumulate)
        spec = self.state.spec
        given = lambda params, sent: (params, model_state, batch, (key, self.sharded.key(sent)))
        # The loss is traced without check_vma, because check_vma refuses loops that start from zeros.
        in_specs = placement.params_of_rank, spec, batch_specs, P()
        guessed = placement.mesh is None and self.accumulate == 1 and placement.batch_specs is None
        parts, of_aux = Parts(self.accumulate, dimensions(batch_specs), guessed=guessed), None
        if self.has_aux or self.state.shared(model_state):
            of_aux, outputs = self._look(parts, in_specs, given(params, sent))
            parts = parts._replace(outputs=outputs)
        aux_specs = [P() if y.rows is None else P(*[None] * y.rows, *placement.rows) for y in parts.outputs]
        find = placement.over_ranks(
            functools.partial(self._find, skipped, parts),
            in_specs=in_specs,
            out_specs=(placement.rows, spec, P(), aux_specs),
            check_vma=False,
        )
        order = None
        if self.ordered is not None:
            find = jax.jit(find)  # with jit, it is traced only once, for its order and for the step
            trained = [i for i, skip in enumerate(jax.tree_util.tree_leaves(skipped)) if not skip]
            program = jax.make_jaxpr(find)(*given(params, sent))
            ends = [trained[i] for i in order_of(program, len(trained))]
            order = *ends, *(i for i, skip in enumerate(jax.tree_util.tree_leaves(skipped)) if skip)

        def found(params: Any, sent: Any) -> Found:
            grads, model_state, loss, aux = find(*given(params, sent))
            return Found(grads, loss, of_aux and of_aux.unflatten(aux), model_state)

        return found, order

    def apply(
        self, params: Any, opt_state: Any, grads: Any, extra: dict[str, Any], order: tuple[int, ...] | None
    ) -> tuple[Any, Any]:
        """Returns (parameters, optimizer state) after an update with the mean of all ranks' gradients.

        Args:
          params: the parameters.
          opt_state: the optimizer's state.
          grads: the gradients, as in `Found`.
          extra: the extra arguments of the transformation: `value`, the loss of these gradients, and `begun`.
          order: the order in which leaves are sent. None: the order of the tree.
        """
        placement, (sent, *rest) = self.placement, opt_state
        kept = placement.specs_of_rows(sent)
        exchange = placement.over_ranks(
            self.exchanging(params, order),
            in_specs=(placement.params_of_rank, placement.rows, kept, dict.fromkeys(extra, placement.rows) | VALUE),
            out_specs=(placement.gradients_of_rank(self.skipped(params)), kept),
        )
        noise = self.sharded.key(sent)
        means, sent = exchange(params, grads, sent, extra)
        return self.update(params, (sent, *rest), means, loss=extra["value"], noise=noise)

    def exchanging(self, params: Any, order: tuple[int, ...] | None) -> Callable[..., Any]:
        """Returns a rank's function (parameters, rows of gradients, sent, extra) -> (means, new sent).

        `sent` is the state of the exchange of gradients. `extra` are the extra arguments of the transformation.
        """
        transformation = self.transformation if order is None or self.ordered is None else self.ordered(order)
        return functools.partial(self._exchange, self.skipped(params), transformation)

    def update(self, params: Any, opt_state: Any, means: Any, loss: Any, noise: Any = None) -> tuple[Any, Any]:
        """Returns (parameters, optimizer state) after an update with the means of gradients.

        `noise` is the key of the gather of updates.
        """
        sent, rest, *lost = opt_state  # lost: the errors of the gather of updates
        # The optimizer runs outside of shard_map, so that norms and other numbers are those of whole arrays.
        skipped = self.skipped(params)
        sending = self.sharded.freeze(skipped)
        trained, frozen = part(params, skipped)
        updated, _ = part(sending.placement.specs_of_updates(params), skipped)
        placed = updated, self.placement.specs_of_state(self.optimizer, trained, updated)
        in_place = self.placement.in_place
        updates, rest = in_place(self.placement.by_partitioner(self._update, placed))(means, rest, trained, loss)
        updates, lost = sending.send_updates(updates, tuple(lost), noise)
        moved = in_place(import_optax(OP).apply_updates)(trained, updates)
        return join(moved, frozen), (sent, rest, *lost)

    def _check(self, trained: Any) -> None:
        """Checks that parameters can be trained, and that the optimizer doesn't compress gradients itself."""
        for path, x in jax.tree_util.tree_leaves_with_path(trained):
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                rule = f'rules=[("{spell_path(path)}", jaxcgx.Skip())]'
                remedy = f"freeze it: plan=jaxcgx.Plan(codec, {rule})"
                expected = "parameters of floating point where they are trained"
                raise wrong("train.init", "params", expected, spell_array(x), remedy, path=path)
        axes = [(name, self.placement.mesh.shape[name]) for name in self.placement.names]
        _, state = jax.make_jaxpr(self.optimizer.init, axis_env=axes, return_shape=True)(trained)
        if any(map(has_rows, jax.tree_util.tree_leaves(state, is_leaf=has_rows))):
            expected, got = "an optimizer without compression, which plan= adds", "one that exchanges gradients itself"
            raise wrong(OP, "optimizer", expected, got, "pass the plain one, such as optax.adam(1e-3)")

    def skipped(self, params: Any) -> Any:
        """Returns for each parameter whether it is frozen."""
        return find_skipped(self.plan, self.placement.shards(params))

    def _look(self, parts: Parts, in_specs: Any, given: Any) -> tuple[Any, list[Output]]:
        """Traces a rank's step. Returns (the structure of the auxiliary outputs, an `Output` for each)."""
        found: Any = None

        def look(params: Any, model_state: Any, batch: Any, keys: tuple[Any, Any]) -> None:
            nonlocal found
            whole, _ = self.sharded.open(params, self.objective, keys[1])
            of_rank = Given(None, self.state.of_rank(model_state), batch, keys[0])
            own = self.state.own(model_state)
            found = find_outputs(self.objective, whole, of_rank, parts=parts, own=own, names=self.placement.names)

        jax.eval_shape(self.placement.over_ranks(look, in_specs=in_specs, out_specs=P(), check_vma=False), *given)
        return found

    def _find(
        self, skipped: Any, parts: Parts, params: Any, model_state: Any, batch: Any, keys: tuple[Any, Any]
    ) -> tuple[Any, ...]:
        """Computes the gradients of one rank. Returns (gradients, model state, loss, leaves of the auxiliary outputs).

        The gradients are the rank's own, with a leading axis of 1. The loss and averaged outputs are means over all
        ranks.

        Args:
          skipped: for each parameter, whether it is frozen.
          parts: the micro-batches.
          params: the rank's parameters or shards of parameters.
          model_state: the model state.
          batch: the rank's part of the batch.
          keys: (the key of the loss function, the key of the gather of parameters).
        """
        key, noise = keys
        whole, loss_of_whole = self.sharded.open(params, self.objective, noise)
        trained, frozen = part(whole, skipped)
        loss_of_trained = lambda trained, given: loss_of_whole(join(trained, given.frozen), given)
        own_state = self.state.of_rank(model_state)
        gradients = local_gradients(loss_of_trained, self.ranks, parts)
        found = gradients(trained, Given(frozen, own_state, batch, key))
        leaves = jax.tree_util.tree_leaves(found.aux)
        # Constants may differ between processes of mpirun, so all ranks take the first rank's.
        kept = lambda x, y: y.rows is not None or (addable(x) and not y.averaged and self.placement.mesh is not None)
        sent = [None if kept(x, y) else x for x, y in zip(leaves, parts.outputs)]
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        loss = found.loss
        if isinstance(self.transformation.update, Early) and self.ordered is None:
            # It travels behind an exchange that has begun before, and XLA may let the gradients wait for it.
            loss = after(found.gradients, loss)
        loss, weight, sent = agree((loss, found.weight, sent), self.ranks, averaged=inexact)
        grads = found.gradients
        if weight is not None:  # the other numbers are means of sums, and this is the mean of the weights
            divide = lambda x, dtype: (x.astype(dtype) / weight.astype(dtype)).astype(x.dtype)
            loss, grads = jax.tree_util.tree_map(lambda x: divide(x, wide(x.dtype)), (loss, grads))
            narrow = lambda x, y: divide(x, x.dtype).astype(y.dtype) if y.averaged else x
            sent = [narrow(x, y) for x, y in zip(sent, parts.outputs)]
        aux = [x if of_all is None else of_all for x, of_all in zip(leaves, sent)]
        grads = jax.tree_util.tree_map(lambda x: x[None], grads)
        model_state = self.state.of_all(model_state, own_state, found.model_state)
        # An exchange that waits for the loss waits for the other means, too.
        return grads, model_state, after((sent, model_state), loss), aux

    def _exchange(
        self, skipped: Any, transformation: Any, params: Any, grads: Any, sent: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Returns (the mean of all ranks' gradients, the new state of the exchange)."""
        update = import_optax(OP).with_extra_args_support(transformation).update
        # The rules of the plan expect all leaves. Nothing reads the leaves that the plan skips.
        _, frozen = part(self.sharded.like_whole(params), skipped)
        own = join(jax.tree_util.tree_map(lambda x: x[0], grads), frozen)
        given = None if self.placement.state else params  # slices of means can't have weight decay
        mean, sent = self.placement.update_shards(update, own, state=sent, params=given, extra=extra)
        return part(mean, skipped)[0], sent

    def _update(self, grads: Any, rest: Any, params: Any, loss: Any) -> Any:
        """Returns the optimizer's update.

        The optimizer gets the loss as `value`, unless it, or an optimizer inside of it, doesn't take this argument.
        """
        try:
            return self.optimizer.update(grads, rest, params, value=loss)
        except (TypeError, ValueError) as error:
            # Line searches and Sophia call the loss function.
            if asked := [name for name in ("value_fn", "obj_fn") if name in str(error)]:
                raise wrong(
                    OP,
                    "optimizer",
                    "one that needs gradients, parameters and the loss",
                    f"one that calls the loss function itself, as {asked[0]!r}, whose gradients would travel "
                    "uncompressed",
                    "for optax.lbfgs pass linesearch=None",
                ) from error
            if "unexpected keyword argument 'value'" not in str(error):
                raise
        return self.optimizer.update(grads, rest, params)


def as_arrays(argument: str, tree: Any) -> Any:
    """Returns a tree of parameters or of a model's state, an argument of `init`, as JAX arrays."""
    remedy = "leave it out; in Equinox, params, static = eqx.partition(model, eqx.is_inexact_array)"
    check = functools.partial(check_array, "train.init", argument, remedy=remedy)
    return jax.tree_util.tree_map_with_path(lambda path, x: check(x, path), tree)

"""What a training step does: every rank's gradients, their exchange, the optimizer's update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import spell_array, wrong
from jaxcgx.optim.accumulation import OP, Given, Output, Parts, addable, local_gradients, wide
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.backward import order_of
from jaxcgx.optim.batch import dimensions
from jaxcgx.optim.frozen import find_skipped, join, part
from jaxcgx.optim.model_state import ModelState, agree, put
from jaxcgx.optim.nesting import has_rows
from jaxcgx.optim.outputs import find_outputs
from jaxcgx.optim.placement import Placement
from jaxcgx.optim.ranks import Ranks
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.sharded import Sharded
from jaxcgx.optim.telemetry import Telemetry
from jaxcgx.plan.leaves import spell_path


class Metrics(NamedTuple):
    """What a step reports, the same on every rank."""

    loss: jax.Array  # the mean over ranks and micro-batches, uncompressed
    # Leaves with the examples along a dimension are those of the whole batch. What doesn't depend on the batch is as it
    # was returned, the rest is the mean. Random keys are those of the first rank's last micro-batch. None without
    # has_aux.
    aux: Any
    telemetry: Telemetry | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """The parts of a training step. `make_train_step` explains what they are made of."""

    placement: Placement | Alone
    ranks: Ranks
    sharded: Sharded
    state: ModelState
    optimizer: Any  # takes extra arguments
    transformation: Any  # exchanges gradients
    ordered: Callable[..., Any] | None  # makes one that exchanges them in an order; None: in that of the tree
    objective: Callable[..., Any]  # a function (params, Given)
    accumulate: int
    has_aux: bool
    plan: Any  # None: the transformation makes one, which skips nothing

    def init(self, params: Any, model_state: Any = None) -> tuple[Any, Any, Any]:
        """(parameters, model state, optimizer state) before the first step, where `step` wants them."""
        self.state.check_given(model_state)
        params, model_state = jax.tree_util.tree_map(jnp.asarray, (params, model_state))
        self.sharded.check(params)
        placement, skipped = self.placement, self.skipped(params)
        specs, sending = placement.specs_of(params), self.sharded.freeze(skipped)
        trained, updated = (part(tree, skipped)[0] for tree in (params, sending.placement.specs_of_updates(params)))
        self._check(trained)
        rest_specs = placement.specs_of_state(self.optimizer, trained, updated)

        def fresh(params: Any) -> tuple[Any, ...]:
            own = jax.tree_util.tree_map(jnp.copy, params)  # what is donated later must not be the caller's
            return own, self.optimizer.init(part(params, skipped)[0]), sending.init_lost(params)

        @functools.partial(jax.jit, out_shardings=(None, placement.shardings(self.state.spec), None))
        def make(params: Any, model_state: Any) -> tuple[Any, ...]:
            params, model_state = self.ranks.first((params, model_state))
            own, rest, lost = placement.by_partitioner(fresh, (specs, rest_specs, sending.lost_specs))(params)
            opt_state = placement.init_per_rank(self.transformation.init, params), rest, *lost
            return own, self.state.first(model_state, placement.ranks), opt_state

        params = jax.device_put(params, placement.shardings(specs))
        return make(params, put(model_state, placement.shardings(P())))

    def step(self, params: Any, model_state: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, ...]:
        """(parameters, model state, optimizer state, Metrics) after a step of all ranks."""
        self.state.check_rows(model_state, self.placement.ranks)
        sent, rest, *lost = opt_state  # lost: by the gather of updates
        placement, skipped, noise = self.placement, self.skipped(params), self.sharded.key(sent)
        batch, batch_specs = placement.place_batch(batch, self.accumulate)
        whole, cut, spec = placement.params_of_rank, placement.gradients_of_rank(skipped), self.state.spec
        # A loss is traced without check_vma, which refuses loops that start from zeros.
        in_specs, given = (whole, spec, batch_specs, P()), (params, model_state, batch, (key, noise))
        parts, of_aux = Parts(self.accumulate, dimensions(batch_specs)), None
        if self.has_aux or self.state.counts(model_state):
            of_aux, outputs = self._look(parts, in_specs, given)
            parts = parts._replace(outputs=outputs)
        aux_specs = [P() if y.rows is None else P(*[None] * y.rows, *placement.rows) for y in parts.outputs]
        find = placement.over_ranks(
            functools.partial(self._find, skipped, parts),
            in_specs=in_specs,
            out_specs=(placement.rows, spec, P(), aux_specs),
            check_vma=False,
        )
        kept = placement.specs_of_rows(sent)
        transformation = self.transformation
        if self.ordered is not None:
            find = jax.jit(find)  # traced once, for its order and for the step
            program = jax.make_jaxpr(find)(*given)
            transformation = self.ordered(order_of(program, len(jax.tree_util.tree_leaves(params))))
        exchange = placement.over_ranks(
            functools.partial(self._exchange, skipped, transformation),
            in_specs=(whole, placement.rows, kept, P()),
            out_specs=(cut, kept),
        )
        grads, model_state, loss, aux = find(*given)
        grads, sent = exchange(params, grads, sent, loss)
        # Outside of shard_map, where norms and other numbers of an optimizer are those of whole arrays.
        sending = self.sharded.freeze(skipped)
        trained, frozen = part(params, skipped)
        updated, _ = part(sending.placement.specs_of_updates(params), skipped)
        placed = updated, placement.specs_of_state(self.optimizer, trained, updated)
        updates, rest = placement.by_partitioner(self._update, placed)(grads, rest, trained, loss)
        updates, lost = sending.send_updates(updates, tuple(lost), noise)
        params = join(import_optax(OP).apply_updates(trained, updates), frozen)
        telemetry = getattr(sent, "telemetry", None)  # which a transformation of the user's own may not have
        return params, model_state, (sent, rest, *lost), Metrics(loss, of_aux and of_aux.unflatten(aux), telemetry)

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
        """For each parameter whether it is frozen."""
        return find_skipped(self.plan, self.placement.shards(params))

    def _look(self, parts: Parts, in_specs: Any, given: Any) -> tuple[Any, list[Output]]:
        """(the structure of the auxiliary outputs, what becomes of each), found where a rank's step is traced."""
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
        """What one rank finds: its gradients, with a leading axis of 1, and what all ranks then have of the rest.

        parts: the micro-batches.
        keys: of the loss function, and of the gather of parameters.
        """
        key, noise = keys
        whole, loss_of_whole = self.sharded.open(params, self.objective, noise)
        trained, frozen = part(whole, skipped)
        loss_of_trained = lambda trained, given: loss_of_whole(join(trained, given.frozen), given)
        own_state = self.state.of_rank(model_state)
        gradients = local_gradients(loss_of_trained, self.ranks, parts)
        found = gradients(trained, Given(frozen, own_state, batch, key))
        leaves = jax.tree_util.tree_leaves(found.aux)
        # Processes of mpirun may have constants of their own.
        kept = lambda x, y: y.rows is not None or (addable(x) and not y.averaged and self.placement.mesh is not None)
        sent = [None if kept(x, y) else x for x, y in zip(leaves, parts.outputs)]
        inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        loss, weight, sent = agree((found.loss, found.weight, sent), self.ranks, averaged=inexact)
        aux = [x if of_all is None else of_all for x, of_all in zip(leaves, sent)]
        grads = found.gradients
        if weight is not None:  # loss and gradients are means of sums, weight is that of the weights
            divide = lambda x, dtype: (x.astype(dtype) / weight.astype(dtype)).astype(x.dtype)
            loss, grads = jax.tree_util.tree_map(lambda x: divide(x, wide(x.dtype)), (loss, grads))
        # Rules of the plan are for all leaves. Nothing reads those that it skips.
        grads = jax.tree_util.tree_map(lambda x: x[None], join(grads, frozen))
        return grads, self.state.of_all(model_state, own_state, found.model_state), loss, aux

    def _exchange(
        self, skipped: Any, transformation: Any, params: Any, grads: Any, sent: Any, loss: Any
    ) -> tuple[Any, Any]:
        """The mean of the gradients that the ranks found, and the new state of the exchange."""
        update = import_optax(OP).with_extra_args_support(transformation).update
        own = jax.tree_util.tree_map(lambda x: x[0], grads)
        given = None if self.placement.state else params  # slices of means take no weight decay
        mean, sent = self.placement.update_shards(functools.partial(update, value=loss), own, state=sent, params=given)
        return part(mean, skipped)[0], sent

    def _update(self, grads: Any, rest: Any, params: Any, loss: Any) -> Any:
        """The optimizer's update with the loss; without it where the optimizer, or one inside of it, takes none."""
        try:
            return self.optimizer.update(grads, rest, params, value=loss)
        except (TypeError, ValueError) as error:
            # Searches along a line, and Sophia.
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

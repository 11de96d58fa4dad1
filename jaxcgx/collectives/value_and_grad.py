"""value_and_grad: jax.value_and_grad for programs that leave the ranks to jit, with compressed gradients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat
from jaxcgx.checks import check_flag, wrong
from jaxcgx.codecs.checks import check_codec
from jaxcgx.collectives.arguments import Options
from jaxcgx.collectives.batches import Split, check_unchanged, is_none, part
from jaxcgx.collectives.gradients import local_value_and_grad, vary, without_constraints
from jaxcgx.collectives.psum import reduce
from jaxcgx.collectives.splitting import Ranks
from jaxcgx.collectives.state import State
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan
from jaxcgx.transports.axes import axis_names, check_axis_names
from jaxcgx.transports.resolve import check_axes

OP = "value_and_grad"


def value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: Any,
    plan: Any,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    mesh: Any = None,
    feedback: bool = False,
    weighted: bool = False,
    batch_specs: Any = None,
    param_specs: Any = None,
) -> "ValueAndGrad":
    """`jax.value_and_grad` for a batch that is sharded over an axis of a mesh; the gradients' mean travels compressed.

        compressed = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4))  # was jax.value_and_grad(loss_fn)
        loss, grads = compressed(params, batch)

    It is used as jax.value_and_grad is, inside or outside of jax.jit, and not inside of shard_map. Every rank of the
    axis computes the loss of its part of the batch. `loss_fn` must return a mean over the examples that it gets: the
    value and the gradients are means over the ranks. Other axes of the mesh are left to XLA's partitioner.

    Arguments that are not differentiated are split over the ranks as their sharding says. Where nothing says it, which
    is so for host arrays and under jit on Auto meshes, they are split along their first dimension. Scalars are the same
    on every rank, and random keys are folded with the rank, so that every rank draws its own noise.

    Args:
      loss_fn: a function as for jax.value_and_grad. The differentiated arguments are the same on every rank. They may
        have leaves that are no arrays of floating point, such as the functions of an Equinox module, whose gradient is
        None.
      axis_name: the axis of the mesh, or a tuple of axes, outermost first, that the batch is split over.
      plan: a codec, {axis name: codec} or a `Plan`. For codecs that round stochastically pass a random key,
        `codec_key=`, in each call. The gradients of leaves that a plan skips (`Skip`) are zeros, as those of
        jax.lax.stop_gradient.
      argnums: as in jax.value_and_grad.
      has_aux: whether `loss_fn` returns (loss, aux). Arrays of `aux` that have the examples along a dimension are those
        of the whole batch. Others are averaged over the ranks.
      mesh: the mesh; by default the one in context (jax.set_mesh), or that of the arguments.
      feedback: keep what compression loses for the next step. `init(params)` makes the residuals, and a call takes
        `residuals=` and returns ((value, grads), residuals).
      weighted: whether `loss_fn` returns (sum, weight) in place of a loss. The value is the sum of all sums over the
        sum of all weights: a mean over tokens that are not masked.
      batch_specs: how the arguments that are not differentiated are split over the axis: a PartitionSpec, or a tuple
        with a tree of them (or a prefix of one) for each such positional argument.
      param_specs: for a mesh with other axes, where types don't say how the differentiated arguments are sharded over
        these: a tree of PartitionSpecs, or a prefix of one. Gradients are compressed shard by shard.
    """
    if not callable(loss_fn):
        raise wrong(OP, "loss_fn", "a function", repr(loss_fn), kind=TypeError)
    check_axis_names(OP, axis_name)
    if not isinstance(plan, Plan | dict):
        check_codec(OP, plan, "plan")
    for name, flag in (("has_aux", has_aux), ("feedback", feedback), ("weighted", weighted)):
        check_flag(OP, name, flag)
    return ValueAndGrad(
        loss_fn=loss_fn,
        axis_name=axis_name,
        plan=plan,
        argnums=argnums,
        has_aux=has_aux,
        mesh=mesh,
        feedback=feedback,
        weighted=weighted,
        batch_specs=batch_specs,
        param_specs=param_specs,
    )


def grad(loss_fn: Callable[..., Any], axis_name: Any, plan: Any, **options: Any) -> Callable[..., Any]:
    """`jax.grad` for a batch that is sharded over an axis of a mesh: `value_and_grad` without the value.

    Args:
      loss_fn: as in `value_and_grad`, and so are the others.
      axis_name: the axis that the batch is split over.
      plan: a codec, {axis name: codec} or a `Plan`.
      **options: those of `value_and_grad`.
    """
    both = value_and_grad(loss_fn, axis_name, plan, **options)

    def gradients(*args: Any, **kwargs: Any) -> Any:
        found = both(*args, **kwargs)
        (value, grads), *residuals = found if both.feedback else (found,)
        result = (grads, value[1]) if both.has_aux else grads
        return (result, *residuals) if both.feedback else result

    return functools.update_wrapper(gradients, loss_fn)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ValueAndGrad:
    """What `value_and_grad` returns: a function like that of jax.value_and_grad, and `init`."""

    loss_fn: Callable[..., Any]
    axis_name: Any
    plan: Any
    argnums: int | Sequence[int]
    has_aux: bool
    mesh: Any
    feedback: bool
    weighted: bool
    batch_specs: Any
    param_specs: Any

    def __call__(self, *args: Any, residuals: Any = None, codec_key: Any = None, **kwargs: Any) -> Any:
        if (residuals is not None) != self.feedback:
            expected = (
                "what init(params) or the call before returned" if self.feedback else "none without feedback=True"
            )
            raise wrong(OP, "residuals", expected, "none" if residuals is None else "some")
        places = self._places(len(args))
        params, fixed = part([args[i] for i in places])
        others = ([x for i, x in enumerate(args) if i not in places], kwargs, fixed)
        ranks = self._ranks((params, others))
        param_specs = ranks.specs_of_params(params, self._as_list(self.param_specs))
        split = Split.of(ranks, places, others=others, given=self._given_specs(others), param_specs=param_specs)
        done = _run(
            self,
            split,
            params=params,
            arrays=split.arrays(others),
            residuals=self._as_list(residuals),
            codec_key=codec_key,
        )
        value = (done.value, done.aux) if self.has_aux else done.value
        result = value, self._as_argument(done.grads)
        return (result, self._as_argument(done.residuals)) if self.feedback else result

    def init(self, params: Any) -> Any:
        """Residuals of zeros, with a row for each rank, sharded over the axis.

        Args:
          params: the differentiated argument, or a tuple of them where `argnums` is a sequence.
        """
        given, _ = part(self._as_list(params))
        ranks = self._ranks(given)
        specs = ranks.specs_of_params(given, self._as_list(self.param_specs))

        fed = jax.tree_util.tree_map(lambda x: x if jnp.result_type(x) in DTYPES else None, given)
        if isinstance(self.plan, Plan):
            skipped = _several(self.plan.skipped(OP, "plan", _alone(fed)), fed)
            fed = jax.tree_util.tree_map(lambda x, skip: None if skip else x, fed, skipped)
        make = lambda: jax.tree_util.tree_map(lambda x: jnp.zeros((ranks.size, *np.shape(x)), jnp.float32), fed)
        sharding = lambda x, spec: None if x is None else NamedSharding(ranks.mesh, P(ranks.names, *spec))
        shardings = jax.tree_util.tree_map(sharding, fed, specs, is_leaf=is_none)
        return self._as_argument(jax.jit(make, out_shardings=shardings)())

    def _ranks(self, arguments: Any) -> Ranks:
        names = axis_names(self.axis_name)
        if inside := [name for name in names if name in jax.sharding.get_abstract_mesh().manual_axes]:
            remedy = "inside, take jaxcgx.local_value_and_grad and jaxcgx.compressed_pmean"
            raise wrong(OP, "axis_name", "a call outside of shard_map", f"one inside of it, over {inside[0]!r}", remedy)
        return Ranks.of(OP, self.mesh, names, arrays=jax.tree_util.tree_leaves(arguments))

    def _places(self, count: int) -> tuple[int, ...]:
        """The positions of the differentiated arguments among `count`."""
        asked = self._as_list(self.argnums)
        if any(not -count <= i < count for i in asked):
            raise wrong(OP, "argnums", f"positions among {count} arguments", self.argnums)
        return tuple(i % count for i in asked)

    def _as_list(self, value: Any) -> Any:
        """What a caller gives for the differentiated arguments, as a list; None as it is."""
        return value if value is None else [value] if isinstance(self.argnums, int) else list(value)

    def _as_argument(self, values: Sequence[Any]) -> Any:
        return values[0] if isinstance(self.argnums, int) else tuple(values)

    def _given_specs(self, others: tuple[list[Any], dict[str, Any], Any]) -> list[Any]:
        """For each leaf of the other arguments, the caller's spec, or None. What belongs to parameters is whole."""
        positional, keywords, fixed = others
        rest = [None] * len(jax.tree_util.tree_leaves(keywords)) + [P()] * len(jax.tree_util.tree_leaves(fixed))
        if self.batch_specs is None or isinstance(self.batch_specs, P):
            every = self.batch_specs
            return [every if np.ndim(x) else None for x in jax.tree_util.tree_leaves(positional)] + rest
        is_spec = lambda x: isinstance(x, P)
        fill = lambda spec, below: [spec] * len(jax.tree_util.tree_leaves(below))
        try:
            specs = jax.tree_util.tree_map(fill, list(self.batch_specs), positional, is_leaf=is_spec)
        except (TypeError, ValueError) as error:
            expected = f"a PartitionSpec, or a tuple with a tree of them for each of {len(positional)} arguments"
            raise wrong(OP, "batch_specs", expected, self.batch_specs) from error
        return jax.tree_util.tree_leaves(specs, is_leaf=is_spec) + rest


class _Done(NamedTuple):
    """What a step has found, or the specs of that."""

    value: Any
    aux: Any
    grads: Any
    residuals: Any


# jit: outside of the caller's jit, shard_map would run operation by operation.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(call: ValueAndGrad, split: Split, params: Any, arrays: Any, residuals: Any, codec_key: Any) -> "_Done":
    """The step of all ranks; gradients and residuals are lists like `params`."""
    ranks, names = split.ranks, split.ranks.names

    def of_rank(params: Any, arrays: Any, residuals: Any, codec_key: Any) -> Any:
        rank = lax.axis_index(names)
        arrays = [jax.random.fold_in(x, rank) if key else x for x, key in zip(arrays, split.keys)]

        def loss(*params: Any) -> Any:
            given = split.arguments(params, arrays)
            before = jax.tree_util.tree_leaves_with_path(given)
            found = call.loss_fn(*given[0], **given[1])
            check_unchanged(OP, before, given)
            return found

        with without_constraints(OP, "loss_fn", names):
            value, aux, grads = (_of_sums if call.weighted else _of_mean)(loss, params, call.axis_name, call.has_aux)
        mean = functools.partial(_mean, call.axis_name, call.plan)
        if ranks.others:
            specs = split.param_specs.tree
            row = lambda x, spec: None if x is None else P(None, *spec)
            rows = residuals and jax.tree_util.tree_map(row, residuals, specs, is_leaf=is_none)
            mean = jax.shard_map(
                mean, in_specs=(specs, rows, P()), out_specs=(specs, rows), axis_names=set(ranks.others)
            )
        grads, kept = mean(grads, residuals, codec_key)
        shown = [_of_all(x, spec, names) for x, spec in zip(jax.tree_util.tree_leaves(aux), aux_specs)]
        return _Done(value, shown, grads, kept)

    tree, aux_specs = split.aux_specs(call.loss_fn, params, arrays=arrays) if call.has_aux else (None, [])
    arrays = [ranks.place(x, spec) for x, spec in zip(arrays, split.specs)]
    done = ranks.map(
        of_rank, in_specs=(P(), list(split.specs), P(names), P()), out_specs=_Done(P(), aux_specs, P(), P(names))
    )(params, arrays, residuals, codec_key)
    return done._replace(aux=None if tree is None else tree.unflatten(done.aux))


def _mean(axis_name: Any, plan: Any, grads: Any, residuals: Any, key: Any) -> tuple[Any, Any]:
    """The compressed mean of gradients over the ranks, and the new residuals."""
    net, options = check_axes(OP, axis_name), Options(key=key)
    state = State(residuals=None if residuals is None else _alone(jax.tree_util.tree_map(lambda x: x[0], residuals)))
    found = reduce(OP, _alone(grads), net=net, codec=plan, options=options, state=state, mean=True)
    if residuals is None:
        return _several(found, grads), None
    return _several(found[0], grads), jax.tree_util.tree_map(lambda x: x[None], _several(found[1], grads))


def _alone(trees: list[Any]) -> Any:
    """The only tree, whose paths rules of a plan then see; of several, all with their numbers in front."""
    return trees[0] if len(trees) == 1 else trees


def _several(found: Any, trees: list[Any]) -> list[Any]:
    """The list of what was found for `_alone(trees)`."""
    return [found] if len(trees) == 1 else found


def _of_mean(loss: Callable[..., Any], params: Any, axis_name: Any, has_aux: bool) -> tuple[Any, Any, Any]:
    """(the mean of the ranks' losses, this rank's aux, this rank's gradients)."""
    every = tuple(range(len(params)))
    found, grads = local_value_and_grad(loss, axis_name, argnums=every, has_aux=has_aux)(*params)
    value, aux = found if has_aux else (found, None)
    return _pmean(value, axis_names(axis_name)), aux, list(grads)


# The value is S / W with S the sum of all ranks' sums and W that of their weights. Its differential is the sum over
# ranks of ds / W - S / W^2 dw. A rank's gradients are that times the number of ranks, because their mean is taken.
def _of_sums(loss: Callable[..., Any], params: Any, axis_name: Any, has_aux: bool) -> tuple[Any, Any, Any]:
    """(the sum of all sums over the sum of all weights, this rank's aux, this rank's gradients)."""
    names = axis_names(axis_name)
    tracked = _compat.tracked_axes(names)

    def sums(*params: Any) -> tuple[Any, Any]:
        found, aux = loss(*params) if has_aux else (loss(*params), None)
        try:
            total, weight = (_compat.vary(jnp.asarray(x, jnp.result_type(float)), tracked) for x in found)
        except (TypeError, ValueError) as error:
            raise wrong(OP, "loss_fn", "a function that returns (sum, weight) with weighted=True", found) from error
        return (total, weight), aux

    (total, weight), back, aux = jax.vjp(sums, *vary(params, names), has_aux=True)
    all_sums, all_weights = lax.psum((total, weight), names)
    value, ranks = all_sums / all_weights, lax.axis_size(names)
    cts = ranks / all_weights, -ranks * value / all_weights
    return value, aux, list(back(tuple(_compat.vary(ct, tracked) for ct in cts)))


def _pmean(x: Any, names: tuple[Any, ...]) -> jax.Array:
    return lax.pmean(_compat.vary(jnp.asarray(x), _compat.tracked_axes(names)), names)


def _of_all(x: Any, spec: P, names: tuple[Any, ...]) -> jax.Array:
    """An auxiliary output as it leaves a rank: a part of the whole, or the mean."""
    return _compat.vary(x, _compat.tracked_axes(names)) if any(spec) else _pmean(x, names)

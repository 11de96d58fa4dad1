"""value_and_grad: jax.value_and_grad with compressed gradients, for programs in which jit distributes the batch."""

import contextlib
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
from jaxcgx.checks import check_flag, spell_array, wrong
from jaxcgx.codecs.checks import check_codec
from jaxcgx.collectives import eager
from jaxcgx.collectives.batches import Split, assign, changes, check_aliases, insert, is_none, part
from jaxcgx.collectives.gradients import check_constraints, own, vary, without_constraints
from jaxcgx.collectives.old_arguments import Options
from jaxcgx.collectives.old_psum import plain_reduce, reduce
from jaxcgx.collectives.splitting import Ranks
from jaxcgx.collectives.state import State
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan
from jaxcgx.transports.axes import axis_names, check_axis_names
from jaxcgx.typing import AxisName

OP = "value_and_grad"


def value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: AxisName,
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
    """Makes a `jax.value_and_grad` for a batch that is sharded over an axis of a mesh, with compressed gradients.

        compressed = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4))  # was jax.value_and_grad(loss_fn)
        loss, grads = compressed(params, batch)

    Use the result like the function that jax.value_and_grad returns. A call outside of jax.jit is compiled as well, but
    traced every time. Every rank of the axis computes the loss of its part of the batch. `loss_fn` must return a mean
    over the examples that it gets, because the value and the gradients are means over the ranks. XLA's partitioner
    handles the other axes of the mesh.

    Arguments that are not differentiated are split over the ranks according to their sharding. If their sharding isn't
    known, as for host arrays and under jit on Auto meshes, they are split along their first dimension. Scalars are the
    same on every rank. The rank is folded into random keys, so every rank draws its own noise.

    Inside of shard_map, pmap or vmap(axis_name=...), the arguments and aux are this rank's own. The value and the
    gradients are means over the ranks there, too.

    Args:
      loss_fn: a function as for jax.value_and_grad. The differentiated arguments must be the same on every rank. Leaves
        that aren't floating point, such as functions, have the gradient None. So does a Python number that is an
        attribute of a module.
      axis_name: the axis of the mesh over which the batch is split, or a tuple of axes, outermost first.
      plan: a codec, {axis name: codec} or a `Plan`. If a codec rounds stochastically, pass a random key, `codec_key=`,
        in each call. Leaves that a plan skips (`Skip`) have gradients of zeros, as with jax.lax.stop_gradient.
      argnums: as in jax.value_and_grad.
      has_aux: whether `loss_fn` returns (loss, aux). An array of `aux` that has the examples along a dimension is
        returned for the whole batch. Values that don't depend on the batch are returned unchanged. All other values are
        averaged over the ranks, weighted if weighted=True. The same holds for variables that a module of Flax NNX
        changes in itself.
      mesh: the mesh; by default the mesh in context (jax.set_mesh), or the mesh of the arguments.
      feedback: whether compression errors are kept as residuals for the next step. `init(params)` makes the residuals.
        A call then takes `residuals=` and returns ((value, grads), residuals).
      weighted: whether `loss_fn` returns (sum, weight) instead of a loss. The value is then the sum of all sums divided
        by the sum of all weights, for example a mean over all tokens that are not masked.
      batch_specs: how the arguments that are not differentiated are split over the axis. Either one PartitionSpec, or a
        tuple with a tree of PartitionSpecs (or a prefix of a tree) for each of these positional arguments. A dict
        {name: specs} at the end of the tuple is for keyword arguments.
      param_specs: how the differentiated arguments are sharded over the other axes of the mesh, if their types don't
        say it: a tree of PartitionSpecs, or a prefix of a tree. Gradients are compressed shard by shard.
    """
    if not callable(loss_fn):
        raise wrong(OP, "loss_fn", "a function", repr(loss_fn), kind=TypeError)
    check_axis_names(OP, axis_name)
    if not isinstance(plan, Plan | dict):
        check_codec(OP, plan, "plan")
    if not all(isinstance(i, int) for i in (argnums if isinstance(argnums, tuple | list) else [argnums])):
        remedy = (
            'for an nnx.DiffState, pass its position, and skip what is frozen: cgx.Plan(codec, rules=[("kernel", '
            "cgx.Skip())], min_size=0)"
        )
        raise wrong(OP, "argnums", "a position or a tuple of positions", repr(argnums), remedy, kind=TypeError)
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


def grad(loss_fn: Callable[..., Any], axis_name: AxisName, plan: Any, **options: Any) -> Callable[..., Any]:
    """Makes a `jax.grad` for a batch that is sharded over an axis of a mesh: `value_and_grad` without the value.

    Args:
      loss_fn: as in `value_and_grad`.
      axis_name: the axis over which the batch is split, or a tuple of axes, as in `value_and_grad`.
      plan: a codec, {axis name: codec} or a `Plan`.
      **options: further arguments of `value_and_grad`.
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
    """The result of `value_and_grad`: a function like the result of jax.value_and_grad, with a method `init`.

    Attributes:
      loss_fn: the loss function.
      axis_name: the axis or axes of the batch.
      plan: a codec, {axis name: codec} or a `Plan`.
      argnums: the positions of the differentiated arguments.
      has_aux: whether the loss function returns (loss, aux).
      mesh: the mesh that was given, or None.
      feedback: whether calls take and return residuals.
      weighted: whether the loss function returns (sum, weight).
      batch_specs: how the other arguments are split, or None.
      param_specs: how the differentiated arguments are sharded over other axes, or None.
    """

    loss_fn: Callable[..., Any]
    axis_name: AxisName
    plan: Any
    argnums: int | Sequence[int]
    has_aux: bool
    mesh: Any
    feedback: bool
    weighted: bool
    batch_specs: Any
    param_specs: Any

    def __call__(self, *args: Any, residuals: Any = None, codec_key: Any = None, **kwargs: Any) -> Any:
        if inside := _bound(axis_names(self.axis_name)):
            self._check_inside()
        if (residuals is not None) != self.feedback:
            expected = (
                "what init(params) or the call before returned" if self.feedback else "none without feedback=True"
            )
            raise wrong(OP, "residuals", expected, "none" if residuals is None else "some")
        places = self._places(len(args))
        check_aliases(OP, (args, kwargs))
        params, fixed = part([args[i] for i in places])
        if not jax.tree_util.tree_leaves(params):
            expected = "arguments that have arrays of floating point"
            got = ", ".join(repr(type(args[i]).__name__) for i in places)
            raise wrong(OP, "argnums", expected, f"{got} without any", "for a number, pass float(number)")
        others = ([x for i, x in enumerate(args) if i not in places], kwargs, fixed)
        if inside:
            return self._inside(places, params, others, key=codec_key)
        done = self._outside(places, params, others, residuals=residuals, key=codec_key)
        aux, changed = done.extras
        for i, new in changed.items():
            whole = list(args), kwargs
            assign(whole, jax.tree_util.tree_leaves_with_path(whole)[i][0], new)
        value = (done.value, aux) if self.has_aux else done.value
        result = value, self.as_argument(done.grads)
        return (result, self.as_argument(done.residuals)) if self.feedback else result

    def _inside(self, places: tuple[int, ...], params: Any, others: Any, key: Any) -> Any:
        """Returns the result of a call inside of shard_map, pmap or vmap."""
        positional, keywords, fixed = others
        arguments = lambda *params: (insert(positional, places, params, fixed), keywords)
        value, (aux, changed), grads, _ = self.on_this_rank(arguments, params)
        if changed:
            expected, got = "a function that leaves modules as they are inside of shard_map", "one that changes them"
            raise wrong(OP, "loss_fn", expected, got, "call it outside, or return what is new with has_aux=True")
        grads, _ = _mean(self, grads, residuals=None, key=key)
        return (value, aux) if self.has_aux else value, self.as_argument(grads)

    def _outside(self, places: tuple[int, ...], params: Any, others: Any, residuals: Any, key: Any) -> "_Done":
        """Splits the arguments over the ranks, and runs the step on all ranks."""
        ranks = self._ranks((params, others))
        param_specs = ranks.specs_of_params(params, self.as_list(self.param_specs))
        self._check_residuals(ranks, residuals)
        split = Split.of(ranks, places, others=others, given=self._given_specs(ranks, others), param_specs=param_specs)
        given = params, split.arrays(others), self.as_list(residuals), key
        program, traced = self._traced(split, given, extras=self.has_aux)
        check_constraints(OP, "loss_fn", tuple(ranks.manual), traced.jaxpr)
        split.check_closure(self.call_loss, *given[:2])
        return eager.call(traced, *given, mesh=ranks.mesh) if _compat.is_eager() else program(*given)

    def _traced(self, split: Split, given: tuple[Any, ...], extras: bool) -> tuple[Any, Any]:
        """Returns (the program of `_run`, its trace). Without `extras`, it is traced again if the loss has extras."""
        # Without jit, shard_map would run operation by operation if the caller has no jit. Every call makes a new jit,
        # because values that the loss closes over may have changed.
        program = jax.jit(functools.partial(_run, self, split, extras))
        try:
            return program, program.trace(*given)
        except _Changed:
            return self._traced(split, given, extras=True)
        except TypeError as error:
            if "shape" in str(error):  # a part's shape may not match an array that is closed over
                error.add_note(
                    f"{OP}: 'loss_fn' gets a rank's part of the batch, one of {split.ranks.size}. What else has a row "
                    "for each example must be an argument of the call, too, and not closed over."
                )
            raise

    def init(self, params: Any) -> Any:
        """Returns residuals of zeros, with a row for each rank, sharded over the axis.

        Args:
          params: the differentiated argument, or a tuple of the differentiated arguments if `argnums` is a sequence.
        """
        given, _ = part(self.as_list(params))
        ranks = self._ranks(given)
        specs = ranks.specs_of_params(given, self.as_list(self.param_specs))

        fed = jax.tree_util.tree_map(lambda x: x if jnp.result_type(x) in DTYPES else None, given)
        if isinstance(self.plan, Plan):
            skipped = self.as_list(self.plan.skipped(OP, "plan", self.as_argument(fed)))
            fed = jax.tree_util.tree_map(lambda x, skip: None if skip else x, fed, skipped)
        make = lambda: jax.tree_util.tree_map(lambda x: jnp.zeros((ranks.size, *np.shape(x)), jnp.float32), fed)
        sharding = lambda x, spec: None if x is None else NamedSharding(ranks.mesh, P(ranks.names, *spec))
        shardings = jax.tree_util.tree_map(sharding, fed, specs, is_leaf=is_none)
        return self.as_argument(jax.jit(make, out_shardings=shardings)())

    def _ranks(self, arguments: Any) -> Ranks:
        return Ranks.of(OP, self.mesh, axis_names(self.axis_name), arrays=jax.tree_util.tree_leaves(arguments))

    def _check_residuals(self, ranks: Ranks, residuals: Any) -> None:
        """Checks that residuals have a row for each rank. Each rank later checks the shapes in its row."""
        for path, x in jax.tree_util.tree_leaves_with_path(residuals):
            if np.shape(x)[:1] != (ranks.size,):
                expected, got = f"arrays with a row for each of {ranks.size} ranks", spell_array(x)
                remedy = (
                    "pass what init(params) or the call before returned; of a checkpoint of another number of ranks, "
                    "what jaxcgx.restore_state(path, template, per_rank={'residuals': 'sum'}) returns"
                )
                raise wrong(OP, "residuals", expected, got, remedy, path=path)

    def _check_inside(self) -> None:
        check_axes(OP, self.axis_name)
        for name in ("mesh", "batch_specs", "param_specs"):
            if getattr(self, name) is not None:
                expected = "None inside of shard_map and pmap, where every rank has its part already"
                raise wrong(OP, name, expected, repr(getattr(self, name)), "leave it out")
        if self.feedback:
            remedy = "take jaxcgx.local_value_and_grad and jaxcgx.compressed_pmean(..., residuals=...)"
            raise wrong(OP, "feedback", "False inside of shard_map and pmap", True, remedy)

    def call_loss(self, given: tuple[Any, Any]) -> tuple[Any, tuple[Any, dict[int, Any]]]:
        """Calls `loss_fn` with the `given` (arguments, keyword arguments).

        Returns (loss or (sum, weight), (aux, the leaves of its arguments that it has changed)).
        """
        before = jax.tree_util.tree_flatten_with_path(given)
        found, aux = self.loss_fn(*given[0], **given[1]), None
        is_pair = lambda x: isinstance(x, tuple | list) and len(x) == 2
        if self.has_aux:
            if not is_pair(found):
                expected, remedy = "a function that returns (loss, aux), with has_aux=True", "leave out has_aux"
                raise wrong(OP, "loss_fn", expected, "one that returns no pair", remedy)
            found, aux = found
        if is_pair(found) != self.weighted:
            expected = "a function that returns " + ("(sum, weight), with weighted=True" if self.weighted else "a loss")
            got = f"one that returns {'a pair' if is_pair(found) else 'no pair'}"
            remedy = "leave out weighted" if self.weighted else "pass weighted=True for (sum, weight)"
            remedy += "" if self.weighted or self.has_aux else ", has_aux=True for (loss, aux)"
            raise wrong(OP, "loss_fn", expected, got, remedy)
        return found, (aux, changes(OP, before, given))

    def on_this_rank(self, arguments: Callable[..., Any], params: list[Any]) -> tuple[Any, Any, list[Any], Any]:
        """Returns (mean of all ranks' losses, (aux, changes), gradients, share).

        `params` are the differentiated arguments, and `arguments` makes all arguments of them. The mean of the
        gradients over the ranks is the gradient for the whole batch. `aux` and `changes` are this rank's own. `share`
        is the rank's weight in their mean.
        """
        loss = lambda *params: self.call_loss(arguments(*params))
        with without_constraints(OP, "loss_fn", axis_names(self.axis_name)):
            return (_of_sums if self.weighted else _of_mean)(loss, params, self.axis_name)

    def _places(self, count: int) -> tuple[int, ...]:
        """Returns the positions of the differentiated arguments, from 0, in a call with `count` arguments."""
        asked = self.as_list(self.argnums)
        if any(not -count <= i < count for i in asked):
            raise wrong(OP, "argnums", f"positions among {count} arguments", self.argnums)
        return tuple(i % count for i in asked)

    def as_list(self, value: Any) -> Any:
        """Returns the caller's value for the differentiated arguments as a list, or None if it is None."""
        return value if value is None else [value] if isinstance(self.argnums, int) else list(value)

    def as_argument(self, values: Sequence[Any]) -> Any:
        """Returns values of the differentiated arguments as the caller would have them: one of them, or a tuple."""
        return values[0] if isinstance(self.argnums, int) else tuple(values)

    def _given_specs(self, ranks: Ranks, others: tuple[list[Any], dict[str, Any], Any]) -> list[Any]:
        """Returns the caller's spec, or None, for each leaf of the other arguments.

        Leaves of the differentiated arguments that have no gradient are whole on every rank.
        """
        positional, keywords, fixed = others
        whole = [P()] * len(jax.tree_util.tree_leaves(fixed))
        given = self.batch_specs
        if given is None or isinstance(given, P):
            return [given if np.ndim(x) else None for x in jax.tree_util.tree_leaves((positional, keywords))] + whole
        given = [given] if isinstance(given, dict) else list(given)
        named = given.pop() if len(given) > len(positional) and isinstance(given[-1], dict) else {}
        for name, value in keywords.items():
            if name not in named and any(map(np.ndim, jax.tree_util.tree_leaves(value))):
                raise wrong(OP, "batch_specs", f"one for {name!r}, too", self.batch_specs, ranks.remedy)
        named, arguments = {**dict.fromkeys(keywords, P()), **named}, [positional, keywords]
        is_spec = lambda x: isinstance(x, P)
        try:
            specs = jax.tree_util.tree_broadcast([given, named], arguments, is_leaf=is_spec)
        except (TypeError, ValueError) as error:
            expected = f"a PartitionSpec, or a tuple with a tree of them for each of {len(positional)} arguments"
            expected += f", and a dict of {', '.join(map(repr, keywords))}" if keywords else ""
            raise wrong(OP, "batch_specs", expected, self.batch_specs) from error
        leaves = zip(jax.tree_util.tree_leaves(arguments), jax.tree_util.tree_leaves(specs, is_leaf=is_spec))
        return [spec if np.ndim(x) else P() for x, spec in leaves] + whole


class _Done(NamedTuple):
    """The results of a step, or their specs."""

    value: Any
    extras: Any  # (aux, changes)
    grads: Any
    residuals: Any


class _Changed(Exception):
    """Raised if a loss changes its arguments in a trace that allows no auxiliary outputs."""


def _run(
    call: ValueAndGrad, split: Split, extras: bool, params: Any, arrays: Any, residuals: Any, codec_key: Any
) -> "_Done":
    """Runs the step on all ranks. Gradients and residuals are lists like `params`.

    `extras` says whether the loss may have auxiliary outputs or change its arguments. If so, two more traces find out
    how these outputs are split over the ranks.
    """
    ranks, names = split.ranks, split.ranks.names
    tree, specs_of_extras = jax.tree_util.tree_structure((None, {})), []
    if extras:
        tree, specs_of_extras = split.aux_specs(call.call_loss, params, arrays=arrays)

    def of_rank(params: Any, arrays: Any, residuals: Any, codec_key: Any) -> Any:
        rank = lax.axis_index(names)
        arrays = [jax.random.fold_in(x, rank) if key else x for x, key in zip(arrays, split.keys)]
        value, found, grads, share = call.on_this_rank(lambda *params: split.arguments(params, arrays), params)
        if not extras and jax.tree_util.tree_leaves(found):
            raise _Changed
        grads, kept = _mean_of_shards(call, split, grads, residuals=residuals, key=codec_key)
        counted = lambda x: jnp.where(share == 0, 0, x * share)  # a mean over no tokens may be NaN
        net = check_axes(OP, call.axis_name)
        mean_of = lambda x: plain_reduce(OP, counted(x), net, mean=True).astype(jnp.result_type(x))
        extra = zip(jax.tree_util.tree_leaves(found), specs_of_extras)
        shown = [mean_of(x) if spec == P() else jnp.asarray(x) for x, spec in extra]
        return _Done(value, shown, grads, kept)

    arrays = [ranks.place(x, spec) for x, spec in zip(arrays, split.specs)]
    out_specs = _Done(P(), [spec or P() for spec in specs_of_extras], P(), P(names))
    step = ranks.map(of_rank, in_specs=(P(), list(split.specs), P(names), P()), out_specs=out_specs)
    try:
        done = step(params, arrays, residuals, codec_key)
    except NotImplementedError as error:
        if "Closing over" not in str(error):
            raise
        expected, got = "a function that takes what is sharded as an argument", "one that closes over it"
        raise wrong(OP, "loss_fn", expected, f"{got}: {error}", "pass it to the call") from error
    return done._replace(extras=tree.unflatten(done.extras))


def _mean_of_shards(call: ValueAndGrad, split: Split, grads: Any, residuals: Any, key: Any) -> tuple[Any, Any]:
    """Returns `_mean`, for each shard if other axes of the mesh shard the parameters."""
    mean, specs = functools.partial(_mean, call), split.param_specs
    if others := set(split.ranks.others):
        row = lambda x, spec: None if x is None else P(None, *spec)
        shards = specs, residuals and jax.tree_util.tree_map(row, residuals, specs, is_leaf=is_none)
        mean = jax.shard_map(mean, in_specs=(*shards, P()), out_specs=shards, axis_names=others, check_vma=False)
    return mean(grads, residuals, key)


def _mean(call: ValueAndGrad, grads: list[Any], residuals: Any, key: Any) -> tuple[Any, Any]:
    """Returns the compressed mean of gradients over the ranks, and the new residuals or None, as lists."""
    net, options = check_axes(OP, call.axis_name), Options(key=key, codec_name="plan", key_name="codec_key")
    grads = call.as_argument(grads)  # so that the plan's rules see paths in the argument
    if residuals is None:
        found = reduce(OP, grads, net=net, codec=call.plan, options=options, state=State(), mean=True)
        return call.as_list(found), None
    state = State(residuals=jax.tree_util.tree_map(lambda x: x[0], call.as_argument(residuals)))
    mean, kept = reduce(OP, grads, net=net, codec=call.plan, options=options, state=state, mean=True)
    return call.as_list(mean), call.as_list(jax.tree_util.tree_map(lambda x: x[None], kept))


def _of_mean(loss: Callable[..., Any], params: Any, axis_name: AxisName) -> tuple[Any, Any, Any, Any]:
    """Returns the results of `on_this_rank` for a loss that is a mean. Every rank has the share 1."""
    names = axis_names(axis_name)

    def checked(*params: Any) -> tuple[Any, Any]:
        value, aux = loss(*params)
        return own(OP, "loss_fn", names, value), aux

    every = tuple(range(len(params)))
    (value, aux), grads = jax.value_and_grad(checked, argnums=every, has_aux=True)(*vary(params, names))
    return plain_reduce(OP, value, check_axes(OP, axis_name), mean=True), aux, list(grads), 1


# Rank r returns (s_r, w_r). The value is S / W, where S is the sum of all s_r and W is the sum of all w_r. The
# differential of the value is the sum over r of ds_r / W - S / W^2 dw_r. A rank's gradients are its term times the
# number of ranks, because the mean over ranks follows.
def _of_sums(loss: Callable[..., Any], params: Any, axis_name: AxisName) -> tuple[Any, Any, Any, Any]:
    """Returns the results of `on_this_rank` for a loss that returns (sum, weight).

    The share of a rank is its weight divided by the mean of all weights.
    """
    names = axis_names(axis_name)
    tracked = _compat.tracked_axes(names)

    def sums(*params: Any) -> tuple[Any, Any]:
        found, aux = loss(*params)
        try:
            total, weight = (_compat.vary(jnp.asarray(x, jnp.result_type(float)), tracked).reshape(()) for x in found)
        except (TypeError, ValueError) as error:
            expected = "a function that returns (sum, weight), two scalars, with weighted=True"
            raise wrong(OP, "loss_fn", expected, found) from error
        return (total, weight), aux

    (total, weight), back, aux = jax.vjp(sums, *vary(params, names), has_aux=True)
    all_sums, all_weights = plain_reduce(OP, (total, weight), check_axes(OP, axis_name), mean=False)
    value, ranks = all_sums / all_weights, lax.axis_size(names)
    cts = ranks / all_weights, -ranks * value / all_weights
    grads = list(back(tuple(_compat.vary(ct, tracked) for ct in cts)))
    return value, aux, grads, ranks * weight / all_weights


def _bound(names: tuple[Any, ...]) -> bool:
    """Returns whether the caller is inside of shard_map, pmap or vmap over one of the axes."""
    for name in names:
        with contextlib.suppress(NameError):
            return bool(lax.axis_size(name))
    return False

"""make_train_step: data-parallel training done, for a loss, an optimizer and a mesh."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat
from jaxcgx.checks import check_flag
from jaxcgx.collectives.gradients import local_value_and_grad
from jaxcgx.optim.compress import compress_gradients
from jaxcgx.optim.extra import import_optax
from jaxcgx.optim.state import specs_per_rank, state_specs
from jaxcgx.transports.axes import axis_names

OP = "make_train_step"


class Metrics(NamedTuple):
    """What a step reports, the same on every rank."""

    loss: Any  # the mean over ranks and micro-batches, uncompressed
    aux: Any  # the mean of each leaf, too
    telemetry: Any  # Telemetry, or None


class TrainStep(NamedTuple):
    init: Callable  # params -> (params, opt_state), where `step` wants them
    step: Callable  # jitted: (params, opt_state, batch, key=None) -> (params, opt_state, Metrics)


def make_train_step(
    loss_fn,
    optimizer,
    mesh,
    *,
    data_axis="data",
    compress=compress_gradients,
    param_specs=None,
    accumulate=1,
    has_aux=False,
    donate=True,
    **options,
):
    """Data-parallel training with compressed gradients: a TrainStep.

        train = cgx.make_train_step(loss_fn, optax.adam(1e-3), mesh, plan=cgx.MaxMin(4))
        params, opt_state = train.init(params)
        for batch in batches:
            params, opt_state, metrics = train.step(params, opt_state, batch)

    loss_fn: (params, batch) -> the loss, or with `has_aux` (the loss, a pytree of arrays); of what it is given of a
    batch alone.
    Where `step` is given a random key, another one every step, (params, batch, key) -> ..., with another key for every
    rank and
    micro-batch.
    optimizer: an optax.GradientTransformation; one that takes extra arguments gets value=the mean loss. data_axis: the
    mesh's
    axis, or tuple of axes, that batches are split over, along their leaves' first dimensions.
    compress: what makes the transformation that gradients are exchanged by: `compress_gradients`, `dgc` or `bsc`. All
    other
    options, `plan` and `telemetry` among them, are its.
    param_specs: for a mesh with other axes, which XLA's partitioner gets: a tree of PartitionSpecs like the parameters,
    that says how
    they are sharded over them. Gradients are compressed shard by shard (docs/meshes.md); plans see shards.
    accumulate: micro-batches that a rank's batch is split into; their gradients are averaged in float32 and sent once.
    donate: parameters and state are updated in place; those that were given are gone.
    """
    optax = import_optax(OP)
    names, others = _check_mesh(mesh, data_axis, param_specs)
    if not callable(loss_fn):
        raise TypeError(f"{OP}: argument 'loss_fn': expected a function, got {loss_fn!r}")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(f"{OP}: argument 'optimizer': expected an optax.GradientTransformation, got {optimizer!r}")
    if not callable(compress):
        raise TypeError(
            f"{OP}: argument 'compress': expected jaxcgx.compress_gradients, jaxcgx.dgc or jaxcgx.bsc, got {compress!r}"
        )
    for name, flag in dict(has_aux=has_aux, donate=donate).items():
        check_flag(OP, name, flag)
    if isinstance(accumulate, bool) or not isinstance(accumulate, numbers.Integral) or accumulate < 1:
        raise ValueError(f"{OP}: argument 'accumulate': expected a positive integer, got {accumulate!r}")
    if "axis_size" in options:
        raise TypeError(
            f"{OP}: argument 'axis_size': expected none, as the mesh says how many ranks there are, got "
            f"{options['axis_size']!r}; leave it out"
        )
    if compress is compress_gradients and "plan" not in options:
        raise TypeError(
            f"{OP}: argument 'plan': expected a codec, {{axis: codec}} or a Plan, got nothing; pass "
            "plan=jaxcgx.MaxMin(4), or "
            "compress=jaxcgx.dgc"
        )
    optimizer = optax.with_extra_args_support(optimizer)
    ranks = math.prod(mesh.shape[name] for name in names)
    transformation = compress(data_axis, axis_size=ranks, **options)
    value_and_grad = local_value_and_grad(loss_fn, data_axis, has_aux=has_aux)

    def gradients(params, batch, key):
        """((loss, aux), gradients) of one rank's micro-batch."""
        found, grads = value_and_grad(params, batch, *(() if key is None else (key,)))
        return jax.tree_util.tree_map(jnp.asarray, found if has_aux else (found, None)), grads

    def local_gradients(params, batch, key):
        """The same of its whole batch."""
        if key is not None:
            key = jax.random.fold_in(key, lax.axis_index(names))
        if accumulate == 1:
            return gradients(params, batch, key)

        def add(total, i):
            micro = jax.tree_util.tree_map(lambda x: x[i], parts)
            found = gradients(params, micro, None if key is None else jax.random.fold_in(key, i))
            return jax.tree_util.tree_map(lambda t, x: t + x.astype(t.dtype), total, found), None

        parts = jax.tree_util.tree_map(functools.partial(_split, accumulate), batch)
        shapes = jax.eval_shape(gradients, params, jax.tree_util.tree_map(lambda x: x[0], parts), key)
        tracked = _compat.tracked_axes(names)
        zeros = jax.tree_util.tree_map(lambda x: _compat.vary(jnp.zeros(x.shape, _wide(x.dtype)), tracked), shapes)
        found, grads = lax.scan(add, zeros, jnp.arange(accumulate))[0]
        found = jax.tree_util.tree_map(lambda x: x / accumulate, found)
        return found, jax.tree_util.tree_map(lambda x, shape: (x / accumulate).astype(shape.dtype), grads, shapes[1])

    def exchange(grads, state, params):
        if param_specs is None:
            return transformation.update(grads, state, params)
        specs = param_specs, specs_per_rank(state, None, param_specs)
        return jax.shard_map(transformation.update, in_specs=(*specs, param_specs), out_specs=specs, axis_names=others)(
            grads, state, params
        )

    def local_step(params, state, batch, key):
        found, grads = local_gradients(params, batch, key)
        mean, sent = exchange(grads, state[0], params)
        tracked = _compat.tracked_axes(names)
        loss, aux = jax.tree_util.tree_map(lambda x: lax.pmean(_compat.vary(x, tracked), names), found)
        updates, rest = optimizer.update(mean, state[1], params, value=loss)
        return optax.apply_updates(params, updates), (sent, rest), Metrics(loss, aux, sent.telemetry)

    def init(params):
        params = jax.tree_util.tree_map(jnp.asarray, params)
        specs = jax.tree_util.tree_map(lambda _: P(), params) if param_specs is None else param_specs
        place = functools.partial(jax.tree_util.tree_map, lambda spec: NamedSharding(mesh, spec))
        shard = lambda x, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        shards = jax.tree_util.tree_map(shard, params, place(specs))
        per_rank = specs_per_rank(jax.eval_shape(transformation.init, shards), names, specs)
        first = jax.shard_map(transformation.init, mesh=mesh, in_specs=(specs,), out_specs=per_rank)
        rest = jax.tree_util.tree_map(lambda _: P(), jax.eval_shape(optimizer.init, params))
        if param_specs is not None:
            rest = optax.tree_map_params(
                optimizer, lambda _, spec: spec, rest, specs, transform_non_params=lambda _: P()
            )

        def fresh(params):  # a copy: what is donated later must not be the caller's
            return jax.tree_util.tree_map(jnp.copy, params), (first(params), optimizer.init(params))

        return jax.jit(fresh, out_shardings=place((specs, (per_rank, rest))))(jax.device_put(params, place(specs)))

    @functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    def step(params, opt_state, batch, key=None):
        specs = state_specs(opt_state, data_axis)
        if AxisType.Explicit in mesh.axis_types:  # where shard_map moves nothing
            batch = jax.tree_util.tree_map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, P(names))), batch)
        return jax.shard_map(
            local_step,
            mesh=mesh,
            axis_names=set(names),
            in_specs=(P(), specs, P(names), P()),
            out_specs=(P(), specs, P()),
        )(params, opt_state, batch, key)

    return TrainStep(init, step)


def _check_mesh(mesh, data_axis, param_specs):
    """The names of the data axes, and of the others."""
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"{OP}: argument 'mesh': expected a jax.sharding.Mesh, got {mesh!r}")
    names = axis_names(data_axis)
    if not names or any(name not in mesh.shape for name in names):
        raise ValueError(
            f"{OP}: argument 'data_axis': expected an axis of the mesh, {', '.join(map(repr, mesh.shape))}, or a tuple "
            "of "
            f"them, got {data_axis!r}"
        )
    others = {name for name in mesh.shape if name not in names}
    if param_specs is None and any(mesh.shape[name] > 1 for name in others):
        raise ValueError(
            f"{OP}: argument 'param_specs': expected a tree of PartitionSpecs like the parameters for a mesh with other "
            f"axes than {data_axis!r}, which says how they are sharded over them, got None"
        )
    for spec in jax.tree_util.tree_leaves(param_specs, is_leaf=lambda x: isinstance(x, P)):
        if any(name in names for part in spec for name in (part if isinstance(part, tuple) else (part,))):
            raise ValueError(
                f"{OP}: argument 'param_specs': expected parameters that are whole on every rank of {data_axis!r}, got "
                f"{spec}; docs/meshes.md shows how to train weights that are sharded over it"
            )
    return names, others


def _split(parts, x):
    """[parts, size / parts, ...]"""
    if x.ndim == 0 or x.shape[0] % parts:
        raise ValueError(
            f"{OP}: argument 'accumulate': expected batches that every rank can split into {parts}, got "
            f"{x.dtype}{list(x.shape)} on a rank"
        )
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def _wide(dtype):
    """What numbers of a dtype are added up in."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)

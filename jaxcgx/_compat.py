"""Every branch on a JAX version and every private import of JAX. Supported: 0.9 to 0.12."""

import jax
from jax import lax
from jax._src import effects
from jax._src.core import (
    NamedAxisEffect,  # what makes jit and scan ask which axes are bound; public nowhere
    abstract_token,  # public from 0.11 on
)
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax._src.distributed import global_state as distributed
from jax._src.effects import remat_allowed_effects
from jax._src.sharding_impls import ShardingContext  # what lowering rules see of a mesh
from jax.extend.core import Primitive  # noqa: F401  (re-exported)
from jax.interpreters import ad, batching, mlir  # noqa: F401  (re-exported)


def varying_axes(x) -> frozenset:
    """The manual mesh axes that `x` varies over: what shard_map's check_vma tracks."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    if hasattr(aval, "vma"):  # until 0.9
        return aval.vma
    return aval.manual_axis_type.varying


def match_varying(*arrays):
    """The arrays, all varying over the union of the axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [vary(x, axes) for x in arrays]


def vary(x, axes):
    """x, varying over `axes` besides what it varies over."""
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def tracked_axes(names) -> frozenset:
    """Those of some named axes over which JAX tracks what varies: a mesh's, under check_vma."""
    return frozenset(name for name in names if varying_axes(lax.axis_index(name)))


def result_aval(operands, shape, dtype, rows=0, invarying=()):
    """A result of `shape` and `dtype` that varies over the axes its operands vary over, but for those of `invarying`.
    It is
    whole on every device but for its first `rows` dimensions, which are sharded like an operand's (Explicit meshes)."""
    like = operands[0]
    mesh = like.sharding.mesh
    lead = next((spec for spec in (x.sharding.spec[:rows] for x in operands) if any(spec)), (None,) * rows)
    spec = jax.sharding.PartitionSpec(*lead, *(None,) * (len(shape) - rows))
    axes = varying_axes(like) - frozenset(invarying)
    manual = (
        dict(vma=axes) if hasattr(like, "vma") else dict(manual_axis_type=like.manual_axis_type.update(varying=axes))
    )
    return like.update(
        shape=tuple(shape), dtype=dtype, weak_type=False, sharding=jax.sharding.NamedSharding(mesh, spec), **manual
    )


def all_gather(x, axes, *, axis, tiled, to):
    """lax.all_gather, which in 0.9 doesn't take to="invarying"."""
    if to == "invarying" and jax.__version_info__ < (0, 10):
        from jax._src.lax.parallel import all_gather_invariant

        return all_gather_invariant(x, axes, axis=axis, tiled=tiled)
    return lax.all_gather(x, axes, axis=axis, tiled=tiled, to=to)


def axis_effects(axes):
    """The effects of a primitive that communicates over named axes."""
    return {NamedAxisEffect(axis) for axis in axes}


def allow_in_remat(effects):
    """Lets jax.checkpoint recompute what has these effects: a collective is sent again, by all ranks alike."""
    for effect in effects:
        remat_allowed_effects.add_type(type(effect))


def whole(x):
    """x on every device where its type says that it is sharded (Explicit meshes), as `result_aval` promises of
    results."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*(None,) * x.ndim))


def zero_tangent(primal):
    """The symbolic zero that is the tangent of `primal`."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def needs_devices(primitive):
    """Has JAX tell the lowering rules of a primitive the devices, which a partitioning rule must know."""
    prim_requires_devices_during_lowering.add(primitive)


def partitioner_decides(ctx) -> bool:
    """Whether XLA's partitioner (Shardy) distributes what is being lowered: jit on several devices, outside
    shard_map."""
    context = ctx.module_context.axis_context
    return (
        isinstance(context, ShardingContext)
        and context.num_devices > 1
        and context.device_assignment is not None
        and context.abstract_mesh is not None
        and not context.abstract_mesh.empty
        and jax.config.jax_use_shardy_partitioner
    )


class OrderedEffect(effects.Effect):
    """Operations that have it run in the order of the program, and programs in the order in which they are called."""


class OrderedOnEachDevice(OrderedEffect):
    """The same for programs on several devices, on each by itself."""


class CalledByPython(effects.Effect):
    """Beside an ordered effect: the second call of a program that was compiled ahead of time forgets the tokens of
    that, unless
    there is one that is not ordered (JAX 0.9 to 0.12)."""


for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(OrderedEffect)
    _allowed.add_type(CalledByPython)
effects.ordered_effects.add_type(OrderedEffect)
effects.shardable_ordered_effects.add_type(OrderedOnEachDevice)


def devices_of(ctx):
    """The devices of the mesh that shard_map is being lowered for, in its order; None where JAX doesn't say."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def rendezvous():
    """jax.distributed's store of keys and values, this process, their number, and the coordinator's address; the store
    is None
    before jax.distributed.initialize."""
    return distributed.client, distributed.process_id, distributed.num_processes, distributed.coordinator_address


def lower_ordered(target, effect, **options):
    """A lowering rule to an FFI call in the order of an effect: JAX's own calls of handlers take no tokens before
    0.11."""
    call = jax.ffi.ffi_lowering(target, has_side_effect=True, **options)

    def rule(ctx, *operands, **attributes):
        with_token = ctx.replace(avals_in=[*ctx.avals_in, abstract_token], avals_out=[*ctx.avals_out, abstract_token])
        *results, token = call(with_token, *operands, ctx.tokens_in.get(effect), **attributes)
        ctx.set_tokens_out(mlir.TokenSet({effect: token}))
        return results

    return rule

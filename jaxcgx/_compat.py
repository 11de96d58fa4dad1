"""Every branch on a JAX version and every private import of JAX. Supported: 0.9 to 0.12."""

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src import effects, shard_map
from jax._src.core import (
    NamedAxisEffect,  # tells jit and scan which axes must be bound; it is public nowhere
    abstract_token,  # it is public from 0.11 on
    eval_jaxpr,  # types don't have the public one
    trace_state_clean,  # it is public nowhere
)
from jax._src.dispatch import prim_requires_devices_during_lowering  # it is public nowhere
from jax._src.distributed import global_state as distributed  # its store of keys and values is public nowhere
from jax._src.effects import remat_allowed_effects  # it is public nowhere
from jax._src.interpreters import ad as private_ad  # the rules of shard_map
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext  # what lowering rules see of a mesh
from jax._src.xla_bridge import backends_are_initialized  # it is public nowhere
from jax.core import ShapedArray
from jax.extend.core import Primitive  # JAX promises nothing about jax.extend between versions
from jax.interpreters import ad, batching, mlir  # nor about jax.interpreters

__all__ = [
    "GLOO_SCATTERS_WRONGLY",
    "OrderedEffect",
    "OrderedOnEachDevice",
    "Primitive",
    "ad",
    "all_gather",
    "allow_in_remat",
    "axis_effects",
    "backends_are_initialized",
    "batching",
    "devices_of",
    "effects_in_order",
    "eval_jaxpr",
    "is_eager",
    "lower_call_of_python",
    "lower_ordered",
    "match_varying",
    "mesh_of_a_part",
    "mlir",
    "needs_devices",
    "partitioner_decides",
    "reduce_scatter_is_wrong",
    "rendezvous",
    "result_aval",
    "tracked_axes",
    "transposed_axes",
    "vary",
    "varying_axes",
    "whole",
    "zero_tangent",
]


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes that `x` varies over, which shard_map's check_vma tracks."""
    aval: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    if hasattr(aval, "vma"):  # until 0.9
        return aval.vma
    return aval.manual_axis_type.varying


def is_eager() -> bool:
    """Whether nothing is traced: outside of jit, vmap and grad."""
    return trace_state_clean()


def match_varying(*arrays: Any) -> list[jax.Array]:
    """The arrays, all varying over the union of the axes that any of them varies over."""
    axes = frozenset[Any]().union(*map(varying_axes, arrays))
    return [vary(x, axes) for x in arrays]


def vary(x: Any, axes: frozenset[Any]) -> jax.Array:
    """x, varying over `axes` too."""
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def tracked_axes(names: Iterable[Any]) -> frozenset[Any]:
    """The named axes over which JAX tracks what varies: those of a mesh, under check_vma."""
    return frozenset(name for name in names if varying_axes(lax.axis_index(name)))


# Neither a type nor a context of JAX says this. But a transposition is a call of shard_map's rule, and the rules of the
# operations in its body are called inside of that call.
def transposed_axes() -> frozenset[Any]:
    """The named axes of the `shard_map`s that JAX is transposing: those which are differentiated from outside."""
    found, frame = frozenset[Any](), inspect.currentframe()
    while frame is not None:
        if frame.f_code is _transpose_shard_map:
            known = frame.f_locals
            found |= frozenset(known["newly_manual_axes"] if "newly_manual_axes" in known else known["manual_axes"])
        frame = frame.f_back
    return found


_rules: Any = getattr(private_ad, "fancy_transposes", {})  # newer versions have it there
_transpose_shard_map = (ad.primitive_transposes | _rules)[shard_map.shard_map_p].__code__


def result_aval(
    operands: Sequence[Any], shape: Sequence[int], dtype: Any, rows: int = 0, invarying: Iterable[Any] = ()
) -> ShapedArray:
    """A result that varies over the axes that its operands vary over, except those of `invarying`.

    With Explicit meshes it is whole on every device, except that its first `rows` dimensions are sharded like an
    operand's.
    """
    like = operands[0]
    mesh = like.sharding.mesh
    lead = next((spec for spec in (x.sharding.spec[:rows] for x in operands) if any(spec)), (None,) * rows)
    spec = jax.sharding.PartitionSpec(*lead, *(None,) * (len(shape) - rows))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    axes = varying_axes(like) - frozenset(invarying)
    if hasattr(like, "vma"):  # until 0.9
        manual = dict(vma=axes)
    else:
        manual = dict(manual_axis_type=like.manual_axis_type.update(varying=axes))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding, **manual)


def all_gather(x: Any, axes: Any, *, axis: int, tiled: bool, to: str) -> jax.Array:
    """lax.all_gather, which in 0.9 doesn't take to="invarying"."""
    if to == "invarying" and jax.__version_info__ < (0, 10):
        from jax._src.lax.parallel import all_gather_invariant  # later versions lack it

        return all_gather_invariant(x, axes, axis=axis, tiled=tiled)
    return lax.all_gather(x, axes, axis=axis, tiled=tiled, to=to)


# Between CPU processes, lax.psum_scatter gives wrong numbers for large arrays: Gloo sends from a buffer that it already
# overwrites (jax #40830, gloo #303).
GLOO_SCATTERS_WRONGLY = jax.__version_info__ < (0, 12)


def reduce_scatter_is_wrong() -> bool:
    """Whether lax.psum_scatter here is the one of GLOO_SCATTERS_WRONGLY."""
    return GLOO_SCATTERS_WRONGLY and jax.process_count() > 1 and jax.default_backend() == "cpu"


def axis_effects(axes: Iterable[Hashable]) -> set[Any]:
    """The effects of a primitive that communicates over named axes."""
    return {NamedAxisEffect(axis) for axis in axes}


def allow_in_remat(effects: Iterable[Any]) -> None:
    """Lets jax.checkpoint recompute operations with these effects: all ranks then send a collective again."""
    for effect in effects:
        remat_allowed_effects.add_type(type(effect))


def whole(x: Any) -> jax.Array:
    """x, whole on every device as `result_aval` promises, also if its type is sharded (Explicit meshes)."""
    sharding: Any = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*(None,) * x.ndim))


def zero_tangent(primal: Any) -> Any:
    """The symbolic zero that is the tangent of `primal`."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def needs_devices(primitive: Primitive) -> None:
    """Makes JAX tell the lowering rules of a primitive the devices, which a partitioning rule must know."""
    prim_requires_devices_during_lowering.add(primitive)


def partitioner_decides(ctx: Any) -> bool:
    """Whether XLA's partitioner (Shardy) distributes the program: jit on several devices, outside shard_map."""
    context = ctx.module_context.axis_context
    shardy: Any = jax.config
    return (
        isinstance(context, ShardingContext)
        and context.num_devices > 1
        and context.device_assignment is not None
        and context.abstract_mesh is not None
        and not context.abstract_mesh.empty
        and shardy.jax_use_shardy_partitioner
    )


def mesh_of_a_part(ctx: Any) -> contextlib.AbstractContextManager[Any]:
    """No mesh, where the partitioner asks for the program of one device; else the mesh as it is.

    Newer versions of JAX leave the caller's mesh there, and an Explicit one leads to shardings within the part.
    """
    part = isinstance(ctx.module_context.axis_context, SPMDAxisContext)
    if part and not jax.sharding.get_abstract_mesh().manual_axes:
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    return contextlib.nullcontext()


class OrderedEffect(effects.Effect):
    """Operations with it run in the order of the program, and programs in the order in which they are called."""


class OrderedOnEachDevice(OrderedEffect):
    """The same for programs on several devices, on each device by itself."""


class _CalledByPython(effects.Effect):
    """An effect without an order.

    In JAX 0.9 to 0.12, the second call of a program that was compiled ahead of time forgets the tokens of ordered
    effects, unless the program has an effect without an order.
    """


def effects_in_order(order: Any) -> frozenset[Any]:
    """The effects of operations that run in the order of an ordered effect."""
    return frozenset({order, _CalledByPython()})


for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(OrderedEffect)
    _allowed.add_type(_CalledByPython)
effects.ordered_effects.add_type(OrderedEffect)
effects.shardable_ordered_effects.add_type(OrderedOnEachDevice)


def devices_of(ctx: Any) -> list[Any] | None:
    """The devices of the mesh that shard_map is being lowered for, in its order; None where JAX doesn't say."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def rendezvous() -> tuple[Any, int, int, str | None]:
    """jax.distributed's store of keys and values, this process, the number of processes, the coordinator's address.

    The store is None before jax.distributed.initialize.
    """
    return distributed.client, distributed.process_id, distributed.num_processes, distributed.coordinator_address


def lower_call_of_python(ctx: Any, call: Callable[..., None], operand: Any, effect: Any) -> Sequence[Any]:
    """Lowers an operation of one operand and no results to a call of Python, in the order of an effect."""

    def called(operand: Any) -> tuple[()]:
        call(operand)
        return ()

    _, token, _ = mlir.emit_python_callback(
        ctx, called, ctx.tokens_in.get(effect), [operand], ctx.avals_in, [], has_side_effect=True
    )
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    return []


def counts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants a scan has, and how many arrays it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from JAX 0.12 on
    return len(list(consts)), len(list(carry))


def lower_ordered(target: str, effect: OrderedEffect, **options: Any) -> Callable[..., Any]:
    """A lowering rule to an FFI call in the order of an effect. JAX's own rules take tokens from 0.11 on."""
    call: Any = jax.ffi.ffi_lowering(target, has_side_effect=True, **options)

    def rule(ctx: Any, *operands: Any, **attributes: Any) -> Sequence[Any]:
        with_token = ctx.replace(avals_in=[*ctx.avals_in, abstract_token], avals_out=[*ctx.avals_out, abstract_token])
        *results, token = call(with_token, *operands, ctx.tokens_in.get(effect), **attributes)
        ctx.set_tokens_out(mlir.TokenSet({effect: token}))
        return results

    return rule

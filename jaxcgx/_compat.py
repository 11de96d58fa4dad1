"""All code that depends on the version of JAX, and all private imports of JAX. Supported: 0.9 to 0.12."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax._src import effects, shard_map

# Tells jit and scan which axes must be bound.
from jax._src.core import NamedAxisEffect as NamedAxisEffect
from jax._src.core import (
    Token,  # not public
    abstract_token,  # public since 0.11
    internal_mutable_array_effect,  # not public
    trace_state_clean,  # not public
)
from jax._src.core import eval_jaxpr as eval_jaxpr  # type checkers don't find the public one

# JAX passes the devices to the lowering rules of these primitives. Partitioning rules need them.
from jax._src.dispatch import prim_requires_devices_during_lowering as prim_requires_devices_during_lowering
from jax._src.dispatch import runtime_tokens  # the order of programs; not public
from jax._src.distributed import global_state as distributed  # its key-value store is not public
from jax._src.effects import remat_allowed_effects as remat_allowed_effects  # not public
from jax._src.interpreters import ad as private_ad  # has the transpose rule of shard_map in newer versions
from jax._src.interpreters.batching import BatchTracer as BatchTracer  # not public
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext  # the contexts of the mesh in lowering rules
from jax._src.xla_bridge import backends_are_initialized as backends_are_initialized  # not public
from jax.core import ShapedArray
from jax.extend.core import Primitive as Primitive  # jax.extend may change in any version
from jax.extend.core import jaxpr_as_fun

# Other modules import these three from here, because jax.interpreters may change in any version.
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

from jaxcgx.typing import PyTree


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the manual mesh axes that `x` varies over, as shard_map's check_vma tracks them."""
    aval: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    if hasattr(aval, "vma"):  # up to 0.9
        return aval.vma
    return aval.manual_axis_type.varying


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the jaxpr of a closed one. Newer versions of JAX have only one class of jaxprs."""
    return getattr(jaxpr, "jaxpr", jaxpr)


is_eager = trace_state_clean  # whether nothing is being traced: the caller is outside of jit, vmap and grad


def replicating_pmap() -> bool:
    """Returns whether the caller is traced by a pmap all of whose out_axes are None.

    No type and no context of JAX has them, so this looks at the frames of its calls.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.pmap" and "out_axes" in frame.f_locals:
            axes = jax.tree.leaves(frame.f_locals["out_axes"], is_leaf=lambda x: x is None)
            return all(axis is None for axis in axes)
        frame = frame.f_back
    return False


def match_varying(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, all marked as varying over every axis that any of them varies over."""
    axes = frozenset[Any]().union(*map(varying_axes, arrays))
    return [vary(x, axes) for x in arrays]


def vary(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Returns x, marked as varying over `axes`, in addition to its own axes."""
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def tracked_axes(names: Iterable[Any]) -> frozenset[Any]:
    """Returns the axes among `names` for which JAX tracks which values vary: mesh axes under check_vma."""
    return frozenset(name for name in names if varying_axes(jax.lax.axis_index(name)))


def vary_over(tree: PyTree, names: Iterable[Any]) -> PyTree:
    """Returns the arrays, marked as varying over the axes `names` if JAX tracks this for them."""
    tracked = tracked_axes(names)
    return jax.tree.map(lambda x: vary(x, tracked), tree)


# No type and no context of JAX has these axes, so jaxcgx wraps the rule with which JAX transposes a shard_map. The
# context is part of the keys of JAX's caches. Otherwise, a jitted function that was differentiated inside of a
# shard_map would have the same backward pass when JAX differentiates another shard_map from outside.
_TRANSPOSED: Any = jax.make_user_context(frozenset())


def transposed_axes() -> frozenset[Any]:
    """Returns the axes of the `shard_map`s that JAX is transposing, because they are differentiated from outside."""
    return _TRANSPOSED.value


def _with_transposed_axes(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def transpose(*args: Any, **params: Any) -> Any:
        axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        with _TRANSPOSED(transposed_axes() | frozenset(axes)):
            return rule(*args, **params)

    return transpose


for _rules in (ad.primitive_transposes, getattr(private_ad, "fancy_transposes", {})):  # newer versions have the latter
    if shard_map.shard_map_p in _rules:
        _rules[shard_map.shard_map_p] = _with_transposed_axes(_rules[shard_map.shard_map_p])


def result_aval(
    operands: Sequence[Any], shape: Sequence[int], dtype: Any, rows: int = 0, invarying: Iterable[Any] = ()
) -> ShapedArray:
    """Returns the type of a result, which varies over the axes of the first operand except `invarying`.

    On Explicit meshes, the result is whole on every device, except that its first `rows` dimensions are sharded like an
    operand's first dimensions.
    """
    like = operands[0]
    mesh = like.sharding.mesh
    lead = next((spec for spec in (x.sharding.spec[:rows] for x in operands) if any(spec)), (None,) * rows)
    spec = jax.sharding.PartitionSpec(*lead, *(None,) * (len(shape) - rows))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    axes = varying_axes(like) - frozenset(invarying)
    if hasattr(like, "vma"):  # up to 0.9
        manual = dict(vma=axes)
    else:
        manual = dict(manual_axis_type=like.manual_axis_type.update(varying=axes))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding, **manual)


def all_gather(x: jax.Array, axes: Hashable, *, axis: int, tiled: bool, to: str) -> jax.Array:
    """Calls lax.all_gather, which doesn't accept to="invarying" in 0.9."""
    if to == "invarying" and jax.__version_info__ < (0, 10):
        from jax._src.lax.parallel import all_gather_invariant  # not in later versions

        return all_gather_invariant(x, axes, axis=axis, tiled=tiled)
    return jax.lax.all_gather(x, axes, axis=axis, tiled=tiled, to=to)


# Between CPU processes, lax.psum_scatter gives wrong numbers for large arrays in these versions: Gloo overwrites a
# buffer while it still sends from it (jax #40830, gloo #303).
GLOO_SCATTERS_WRONGLY = jax.__version_info__ < (0, 12)


def reduce_scatter_is_wrong() -> bool:
    """Returns whether lax.psum_scatter is wrong here (GLOO_SCATTERS_WRONGLY): with several processes on CPUs."""
    return GLOO_SCATTERS_WRONGLY and jax.process_count() > 1 and jax.default_backend() == "cpu"


def storing_crashes() -> bool:
    """Returns whether JAX would store CPU programs, in a version that crashes when it stores one over Tcp."""
    config: Any = jax.config
    stores = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir is not None
    return stores and jax.__version_info__[:2] == (0, 10) and jax.default_backend() == "cpu"


def whole(x: jax.Array) -> jax.Array:
    """Returns x, whole on every device as in `result_aval`. On an Explicit mesh, x may be sharded before."""
    sharding: Any = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*(None,) * x.ndim))


def zero_tangent(primal: Any) -> Any:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def partitioner_decides(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether XLA's partitioner (Shardy) distributes the program: jit on several devices, outside shard_map."""
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


def mesh_of_a_part(ctx: mlir.LoweringRuleContext) -> contextlib.AbstractContextManager[Any]:
    """Returns a context without a mesh if the partitioner lowers the program of one device, else an empty context.

    Newer versions of JAX keep the caller's mesh in this lowering. An Explicit mesh would then shard arrays within the
    program of one device.
    """
    part = isinstance(ctx.module_context.axis_context, SPMDAxisContext)
    if part and not jax.sharding.get_abstract_mesh().manual_axes:
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    return contextlib.nullcontext()


class OrderedEffect(effects.Effect):
    """An effect whose operations run in the order of the program. Programs with it run in the order of their calls."""


class OrderedOnEachDevice(OrderedEffect):
    """An ordered effect for programs on several devices. Each device has its own order."""


class _CalledByPython(effects.Effect):
    """An effect without an order, for programs with ordered effects.

    In JAX 0.9 to 0.12, the second call of a program that was compiled ahead of time forgets the tokens of ordered
    effects, unless the program also has an effect without an order.
    """


_CALLED_BY_PYTHON = _CalledByPython()


def effects_in_order(order: OrderedEffect) -> frozenset[Any]:
    return frozenset({order, _CALLED_BY_PYTHON})


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


def mesh_of(ctx: mlir.LoweringRuleContext) -> jax.sharding.Mesh | None:
    """Returns the mesh for which shard_map is being lowered; None if its devices are unknown."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def rendezvous() -> tuple[Any, int, int, str | None]:
    """Returns (key-value store, None before jax.distributed.initialize; number and count of processes; coordinator)."""
    return distributed.client, distributed.process_id, distributed.num_processes, distributed.coordinator_address


def lower_call_of_python(ctx: Any, call: Callable[..., None], operand: Any, effect: OrderedEffect) -> Sequence[Any]:
    """Lowers an operation with one operand and no results to a call of a Python function, in the order of an effect."""

    def called(operand: jax.Array) -> tuple[()]:
        call(operand)
        return ()

    _, token, _ = mlir.emit_python_callback(
        ctx, called, ctx.tokens_in.get(effect), [operand], ctx.avals_in, [], has_side_effect=True
    )
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    return []


def lower_ordered(target: str, effect: OrderedEffect, **options: Any) -> Callable[..., Any]:
    """Returns a lowering rule to an FFI call in the order of an effect. JAX's own rules take tokens since 0.11."""
    call: Any = jax.ffi.ffi_lowering(target, has_side_effect=True, **options)

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **attributes: Any) -> Sequence[Any]:
        with_token = ctx.replace(avals_in=[*ctx.avals_in, abstract_token], avals_out=[*ctx.avals_out, abstract_token])
        *results, token = call(with_token, *operands, ctx.tokens_in.get(effect), **attributes)
        ctx.set_tokens_out(mlir.TokenSet({effect: token}))
        return results

    return rule


# JAX calls programs with an ordered effect in Python, after the one before has ended. It calls others in C++, without
# waiting. Python takes 2 ms more for 200 arrays. So the program of a training step has no effect. Its place in the
# order is an argument and a result: an array without elements, like JAX's own tokens.

in_order_p: Any = Primitive("jaxcgx_in_order")
in_order_p.multiple_results = True


def _lower_in_order(
    ctx: mlir.LoweringRuleContext, place: Any, *operands: Any, program: Any, order: OrderedEffect
) -> Sequence[Any]:
    others = dict(ctx.tokens_in.items())
    inner = ctx.replace(
        avals_in=ctx.avals_in[1:],
        avals_out=ctx.avals_out[1:],
        tokens_in=mlir.TokenSet({**others, order: mlir.TokenSet.create([order]).get(order)}),
    )
    results = mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(inner, *operands)
    if others:
        assert inner.tokens_out is not None
        ctx.set_tokens_out(mlir.TokenSet({effect: inner.tokens_out.get(effect) for effect in others}))
    return [place, *results]


def _abstract_in_order(place: Any, *_: Any, program: Any, order: OrderedEffect) -> tuple[list[Any], Any]:
    # References that the program makes end with it.
    return [place, *program.out_avals], program.effects - effects_in_order(order) - {internal_mutable_array_effect}


in_order_p.def_impl(lambda place, *operands, program, order: [place, *jaxpr_as_fun(program)(*operands)])
in_order_p.def_effectful_abstract_eval(_abstract_in_order)
mlir.register_lowering(in_order_p, _lower_in_order)


class InOrder:
    """A jitted function on a mesh. Its calls run in the order of an effect that its operations have."""

    def __init__(
        self, function: Callable[..., Any], order: OrderedEffect, mesh: jax.sharding.Mesh, donate: Sequence[int]
    ) -> None:
        self._order, self._devices = order, [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        here = jax.sharding.Mesh(self._devices, "here")
        self._here = jax.sharding.NamedSharding(here, jax.sharding.PartitionSpec("here"))
        self._everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        def placed(place: jax.Array, *args: Any) -> tuple[jax.Array, Any]:
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            place, *results = in_order_p.bind(place, *jax.tree.leaves(args), program=program, order=order)
            return place, jax.tree.structure(shapes).unflatten(results)

        # Profilers have the function's name, and errors those of its arguments.
        signature, name = inspect.signature(function), inspect.Parameter("place", inspect.Parameter.POSITIONAL_ONLY)
        placed = functools.wraps(function)(placed)
        vars(placed)["__signature__"] = signature.replace(parameters=[name, *signature.parameters.values()])
        donated = [1 + number for number in donate]
        self._jitted: Any = jax.jit(placed, donate_argnums=donated, out_shardings=(self._everywhere, None))
        self._last: tuple[Token | None, Any] = None, None  # the place after the last call, as JAX and `_jitted` have it

    def __call__(self, *args: Any) -> Any:
        place = self._place()
        if self._devices[0].platform == "cpu":  # exchanges of several programs could keep all of XLA's threads waiting
            place.block_until_ready()
        place, result = self._jitted(place, *args)
        token = Token(self._moved(place, self._here))
        runtime_tokens.set_token_result(self._order, token)
        self._last = token, place
        return result

    def lower(self, *args: Any) -> jax.stages.Lowered:
        return self._jitted.lower(self._place(), *args)

    def clear_cache(self) -> None:
        self._jitted.clear_cache()

    def _place(self) -> jax.Array:
        """Returns the place after the program with this effect that was called last: an array without elements."""
        token, place = self._last
        if runtime_tokens.current_tokens.get(self._order) is token is not None:
            return place
        last: Any = runtime_tokens.get_token_input(self._order, self._devices)
        return self._moved(last._buf, self._everywhere)

    def _moved(self, place: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
        return jax.make_array_from_single_device_arrays((0,), sharding, [x.data for x in place.addressable_shards])

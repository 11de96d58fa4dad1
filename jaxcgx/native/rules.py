"""The rules that primitives share: for operands, lowering, batching, partitioning and registration.

Without a rule, XLA's partitioner gathers every operand of a custom call on every device if jit distributes a program
(Auto, Explicit meshes). Inside shard_map no such rule is needed: an operation sees only its shard. Messages are
independent of one another, so the axes of vmap stay sharded. A message is gathered, because its bytes depend on all of
its leaves. An array that is only rounded (roundtrip) stays sharded if that cuts no bucket.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcgx import _compat
from jaxcgx._compat import Primitive, ad, batching, mlir
from jaxcgx.native import registration
from jaxcgx.native.layout import Layout

Rule = Callable[..., Any]


# Operands


def places(tree: Any) -> Any:
    """Returns the pytree of a structure, whose leaves are the places of the arrays among the operands."""
    return tree.unflatten(range(tree.num_leaves))


def add(rows: jax.Array) -> jax.Array:
    """Returns the sum of rows [ranks, ...], added in their order. Floats under 32 bits are added in float32."""
    short = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize < 4
    return functools.reduce(jnp.add, rows.astype(jnp.float32) if short else rows).astype(rows.dtype)


def digest(*what: Any) -> np.int64:
    """Returns a number that differs if any of the values differs. It is the same in every process."""
    # The ranks of an exchange compare it before they use any bytes. Values without a plain form, such as functions in a
    # user's codec, count only as their types. Their texts would contain addresses, which differ between processes.
    return np.frombuffer(hashlib.sha256(repr(_plain(what)).encode()).digest(), "<i8")[0]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [type(value).__qualname__, *([field.name, _plain(getattr(value, field.name))] for field in fields)]


# Batching and differentiation


def one_by_one(function: Rule) -> Rule:
    """Maps a function over the first axis, like jax.vmap, which computes every branch of a lax.switch."""
    # JAX can't do that under shard_map's check_vma.
    return lambda *operands: jax.lax.map(lambda each: function(*each), operands)


def in_front(operands: Sequence[Any], dims: Sequence[int | None], size: int | None = None) -> list[jax.Array]:
    """Returns the operands with the axis `dims` that vmap maps in front. An operand that vmap doesn't map is repeated.

    `size` is the length of the axis. It is needed if no operand has it.
    """
    size = size or next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    moved = []
    for x, dim in zip(operands, dims):
        if dim is None:
            x = jnp.broadcast_to(x, (size, *x.shape))
        elif dim:  # moveaxis takes 125 calls of Python for nothing
            x = jnp.moveaxis(x, dim, 0)
        moved.append(x)
    return moved


def batch_rule(
    primitive: Primitive,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    batch: tuple[int, ...],
    **params: object,
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule of an operation that handles all messages in one call, along the axes `batch`."""
    moved = in_front(operands, dims)
    results = primitive.bind(*moved, batch=(len(moved[0]), *batch), **params)
    return results, [0] * len(results)


def exchange_aval(x: Any, *, operation: str, net: Any, **params: object) -> tuple[Any, frozenset[Any]]:
    shape = (net.size, *x.shape) if operation == "all_gather" else x.shape
    return _compat.result_aval([x], shape, x.dtype), net.effects


def batch_exchange(
    primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], *, operation: str, **params: object
) -> tuple[jax.Array, int]:
    """The batching rule of an engine's exchange: one exchange of longer rows."""
    before, after = int(operation == "all_to_all"), int(operation in ("all_to_all", "all_gather"))  # behind the ranks
    return primitive.bind(jnp.moveaxis(operands[0], dims[0], before), operation=operation, **params), after


def zero_jvp(primitive: Primitive) -> Rule:
    """Returns the differentiation rule of an operation whose results have derivative zero."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: object) -> Any:
        results = primitive.bind(*primals, **params)
        return results, [_compat.zero_tangent(r) for r in results]

    return rule


# Lowering


def _lower_to_reference(function: Rule, over: Rule) -> Rule:
    """Returns a lowering rule to jnp. `over` maps the function over an axis of the batch."""

    def batched(*leaves: Any, tree: Any, batch: tuple[int, ...], **params: object) -> list[jax.Array]:
        def one(*leaves: Any) -> list[jax.Array]:
            return jax.tree.leaves(function(operands=tree.unflatten(leaves), **params))

        for _ in batch:
            one = over(one)
        return one(*map(_compat.whole, leaves))

    return mlir.lower_fun(batched, multiple_results=True)


def _lower_to_handler(target: str, attributes: Rule, workspace_bytes: Callable[..., int]) -> Rule:
    """Returns a lowering rule to an FFI call. A workspace is one more result of the call, not of the primitive."""

    def rule(ctx: Any, *leaves: Any, tree: Any, layout: Layout, batch: tuple[int, ...], **params: object) -> Any:
        extra, work = attributes(layout=layout, operands=tree.unflatten(ctx.avals_in), **params)
        message = layout.attributes | dict(batch=np.int64(math.prod(batch)))
        at, number = places(tree), len(ctx.avals_out)
        overwritten = getattr(at, at.in_place or "", None) or []
        if workspace := workspace_bytes(message, **work):
            hidden = _compat.result_aval(ctx.avals_in, (workspace,), np.dtype("uint8"))
            ctx = ctx.replace(avals_out=[*ctx.avals_out, hidden])
        aliases = dict(zip(overwritten, range(number - len(overwritten), number)))
        call = jax.ffi.ffi_lowering(f"jaxcgx_{target}", operand_output_aliases=aliases)
        return call(ctx, *leaves, **message, **extra)[:number]

    return rule


def _spec(x: Any) -> tuple[Any, ...]:
    spec = getattr(x.sharding, "spec", ())
    return (*spec, *(None,) * (len(x.shape) - len(spec)))


def _shards(mesh: Mesh, entry: Any) -> int:
    """Returns the number of shards into which an entry of a spec cuts its axis."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def partitioned(primitive: Primitive, direct: Rule, keeps: Callable[..., bool] | None = None) -> Rule:
    """Returns a lowering rule: `direct`, and if the partitioner distributes the program, one with a rule for it.

    keeps(shape, shards, **params) returns whether the first operand and the first result may stay sharded. `shape` has
    the axes after the batch, and `shards` has the number of shards along each of these axes.
    """
    _compat.prim_requires_devices_during_lowering.add(primitive)

    def rule(ctx: Any, *operands: Any, batch: tuple[int, ...], **params: object) -> Any:
        if not _compat.partitioner_decides(ctx):
            with _compat.mesh_of_a_part(ctx):
                return direct(ctx, *operands, batch=batch, **params)
        n = len(batch)

        def partition(mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
            specs = [_spec(a) for a in args]
            rows = next((s[:n] for s in specs if any(s[:n])), (None,) * n)
            cut, shape = specs[0][n:], args[0].shape[n:]
            if not (keeps and keeps(shape, [_shards(mesh, entry) for entry in cut], **params)):
                cut = (None,) * len(shape)

            def place(i: int, value: Any) -> NamedSharding:
                rest = cut if keeps and i == 0 else (None,) * (len(value.shape) - n)
                return NamedSharding(mesh, PartitionSpec(*rows, *rest))

            return mesh, bind, [place(*r) for r in enumerate(results)], tuple(place(*a) for a in enumerate(args))

        def bind(*operands: Any) -> Any:
            return primitive.bind(*operands, batch=operands[0].shape[:n], **params)

        def factors(value: str, avals: Sequence[Any]) -> list[list[str]]:
            # Axes with the same name are sharded alike in all values.
            return [
                [f"row{k}" if k < n else f"{'x' if keeps and i == 0 else f'{value}{i}'}_{k}" for k in range(a.ndim)]
                for i, a in enumerate(avals)
            ]

        ins, outs = factors("in", ctx.avals_in), factors("out", ctx.avals_out)
        whole = dict.fromkeys(f for value in ins + outs for f in value if not f.startswith(("row", "x_")))
        call = custom_partitioning(bind)
        call.def_partition(
            partition,
            sharding_rule=" -> ".join(", ".join(map(" ".join, side)) for side in (ins, outs)),
            need_replication_factors=tuple(whole),
        )
        out = mlir.lower_fun(lambda *operands: call(*operands), multiple_results=True)(ctx, *operands)
        # Otherwise, a program has only an address, which another program may get later. JAX's compilation cache would
        # take one for the other.
        what = mlir.ir.StringAttr.get(f"{primitive.name}, {batch=}, {params}")
        out[0].owner.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"jaxcgx": what})
        return out

    return rule


def refuse(error: str) -> Rule:

    def rule(ctx: Any, *operands: Any, **params: object) -> Any:
        raise NotImplementedError(error)

    return rule


def refuse_gpus(operation: str) -> Rule:
    """Returns a lowering rule for GPUs, for a build without the CUDA half."""
    why = "the computation is placed on a GPU, and this build has no CUDA half"
    return refuse(f"jaxcgx_{operation}: {why}; {registration.CUDA_REMEDY}")


# Registration


def define_impl(primitive: Primitive) -> None:
    """Runs a primitive outside jit as a compiled program of its own, also under `jax.disable_jit`, like JAX's."""
    # With `jax.jit` alone, `jax.disable_jit` would make the implementation call itself forever.

    @functools.lru_cache
    def compiled(params: tuple[tuple[str, Any], ...]) -> Rule:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    def impl(*operands: Any, **params: object) -> Any:
        with jax.disable_jit(False):
            return compiled(tuple(params.items()))(*operands)

    primitive.def_impl(impl)


def register(
    primitive: Primitive,
    target: str,
    *,
    abstract: Rule,
    function: Rule,
    attributes: Rule = lambda operands, layout: ({}, dict(payloads=1, encodes=False)),
    jvp: Rule | None = None,
    over: Rule = jax.vmap,
) -> None:
    """Gives a primitive with several results its rules. The handler is jaxcgx_`target`.

    `abstract` returns the avals of the results, as a pytree. `function` is the operation in jnp, which `over` maps over
    an axis of the batch. `attributes` returns a dict of the handler's attributes, and a dict of values that determine
    the size of CUDA's workspace. Without `jvp`, derivatives are zero.
    """
    primitive.multiple_results = True
    define_impl(primitive)

    def abstract_eval(*avals: Any, tree: Any, **params: object) -> list[Any]:
        return jax.tree.leaves(abstract(operands=tree.unflatten(avals), **params))

    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = functools.partial(batch_rule, primitive)
    ad.primitive_jvps[primitive] = jvp or zero_jvp(primitive)
    to_reference = _lower_to_reference(function, over)
    mlir.register_lowering(primitive, to_reference)  # for platforms without kernels: TPUs, AMD's GPUs
    if registration.MODULE is None:
        return

    def to_kernel(workspace_bytes: Callable[..., int]) -> Rule:
        return partitioned(primitive, _lower_to_handler(target, attributes, workspace_bytes))

    cpu = to_kernel(lambda message, **work: 0)
    cuda = to_kernel(registration.MODULE.workspace_bytes) if registration.has_cuda() else refuse_gpus(target)
    for platform, kernel in ("cpu", cpu), ("cuda", cuda):

        def rule(ctx: Any, *operands: Any, layout: Layout, kernel: Rule = kernel, **params: object) -> Any:
            chosen = to_reference if layout.codec.native is None else kernel
            return chosen(ctx, *operands, layout=layout, **params)

        mlir.register_lowering(primitive, rule, platform=platform)

"""The rules that all primitives of native operations share: for lowering, batching and registration."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat
from jaxcgx._compat import ad, batching, mlir
from jaxcgx.native import partitioning, registration
from jaxcgx.native.eager import define_impl
from jaxcgx.native.layout import Layout


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function over the first axis, like jax.vmap, for functions that use lax.switch.

    jax.vmap would compute every branch, which JAX can't do under shard_map's check_vma.
    """
    return lambda *operands: lax.map(lambda each: function(*each), operands)


def _lower_to_reference(function: Callable[..., Any], over: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering rule to jnp. `over` maps the function over an axis of the batch."""

    def batched(*leaves: Any, tree: Any, batch: tuple[Any, ...], **params: Any) -> list[jax.Array]:
        def one(*leaves: Any) -> list[jax.Array]:
            return jax.tree.leaves(function(operands=tree.unflatten(leaves), **params))

        for _ in batch:
            one = over(one)
        return one(*map(_compat.whole, leaves))

    return mlir.lower_fun(batched, multiple_results=True)


def _lower_to_handler(
    target: str, attributes: Callable[..., Any], workspace_bytes: Callable[..., int]
) -> Callable[..., Any]:
    """Returns a lowering rule to an FFI call.

    A workspace is one more result of the call, which is not a result of the primitive.
    """

    def rule(ctx: Any, *leaves: Any, tree: Any, layout: Layout, batch: tuple[Any, ...], **params: Any) -> Any:
        extra, work = attributes(layout=layout, operands=tree.unflatten(ctx.avals_in), **params)
        message = layout.attributes | dict(batch=np.int64(math.prod(batch)))
        in_place = tree.unflatten(range(len(leaves))).in_place
        number = len(ctx.avals_out)
        if workspace := workspace_bytes(message, **work):
            hidden = _compat.result_aval(ctx.avals_in, (workspace,), np.dtype("uint8"))
            ctx = ctx.replace(avals_out=[*ctx.avals_out, hidden])
        call = jax.ffi.ffi_lowering(
            f"jaxcgx_{target}", operand_output_aliases=dict(zip(in_place, range(number - len(in_place), number)))
        )
        return call(ctx, *leaves, **message, **extra)[:number]

    return rule


def _refuse(target: str, why: str) -> Callable[..., Any]:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        raise NotImplementedError(f"jaxcgx_{target}: {why}")

    return rule


def _lower(to_kernel: Callable[..., Any], to_reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering rule: `to_kernel` if the codec has kernels, else `to_reference`."""

    def rule(ctx: Any, *operands: Any, layout: Layout, **params: Any) -> Any:
        chosen = to_reference if layout.codec.native is None else to_kernel
        return chosen(ctx, *operands, layout=layout, **params)

    return rule


def in_front(operands: Sequence[Any], dims: Sequence[int | None], size: int | None = None) -> list[jax.Array]:
    """Returns the operands with the axis that vmap maps in front. An operand that vmap doesn't map is repeated.

    Args:
      operands: the arrays.
      dims: for each array, the axis that vmap maps, or None.
      size: the length of the axis, needed if no operand has it.
    """
    size = size or next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    repeated = lambda x: jnp.broadcast_to(x, (size, *x.shape))
    moved = lambda x, d: x if d == 0 else jnp.moveaxis(x, d, 0)  # moveaxis takes 125 calls of Python for nothing
    return [repeated(x) if d is None else moved(x, d) for x, d in zip(operands, dims)]


def one_of_same(x: jax.Array, dim: int | None) -> jax.Array:
    """Returns an operand without its batch dimension, along which it is the same.

    The vmap of a lax.cond with a mapped predicate gives all operands such a dimension, also constants.
    """
    return x if dim is None else lax.index_in_dim(x, 0, dim, keepdims=False)


def batch_rule(
    primitive: Any, operands: Sequence[Any], dims: Sequence[int | None], *, batch: tuple[Any, ...], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    moved = in_front(operands, dims)
    results = primitive.bind(*moved, batch=(len(moved[0]), *batch), **params)
    return results, [0] * len(results)


def zero_jvp(primitive: Any) -> Callable[..., Any]:
    """Returns the differentiation rule of an operation whose results have derivative zero."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        results = primitive.bind(*primals, **params)
        return results, [_compat.zero_tangent(r) for r in results]

    return rule


def register(
    primitive: Any,
    target: str,
    *,
    abstract: Callable[..., Any],
    attributes: Callable[..., Any],
    function: Callable[..., Any],
    jvp: Callable[..., Any],
    over: Callable[..., Any] = jax.vmap,
) -> None:
    """Gives a primitive its rules.

    Args:
      primitive: a primitive with several results.
      target: the handler is jaxcgx_`target`.
      abstract: returns the avals of the results, as a pytree.
      attributes: returns a dict of the handler's attributes, and a dict of values that determine the size of CUDA's
        workspace.
      function: the operation in jnp.
      jvp: the differentiation rule.
      over: maps `function` over an axis of the batch.
    """
    primitive.multiple_results = True
    define_impl(primitive)

    def abstract_eval(*avals: Any, tree: Any, **params: Any) -> list[Any]:
        return jax.tree.leaves(abstract(operands=tree.unflatten(avals), **params))

    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = functools.partial(batch_rule, primitive)
    ad.primitive_jvps[primitive] = jvp
    to_reference = _lower_to_reference(function, over)
    mlir.register_lowering(primitive, to_reference)  # for platforms without kernels: TPUs, AMD's GPUs
    if registration.MODULE is None:
        return

    def to_handler(workspace_bytes: Callable[..., int]) -> Callable[..., Any]:
        return partitioning.lower(primitive, _lower_to_handler(target, attributes, workspace_bytes))

    rules = {
        "cpu": to_handler(lambda message, **work: 0),
        "cuda": to_handler(registration.MODULE.workspace_bytes)
        if hasattr(registration.MODULE, "workspace_bytes")
        else _refuse(
            target, f"the computation is placed on a GPU, and this build has no CUDA half; {registration.CUDA_REMEDY}"
        ),
    }
    for platform, rule in rules.items():
        mlir.register_lowering(primitive, _lower(rule, to_reference), platform=platform)

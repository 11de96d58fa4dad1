"""Rules that tell XLA's partitioner which arrays stay sharded if jit distributes a program (Auto, Explicit meshes).

Without a rule the partitioner gathers every operand of a custom call on every device. Inside shard_map no rule is
needed: an operation sees only its shard.

Messages are independent of one another, so the axes of vmap stay sharded. A message is gathered, because its bytes
depend on all of its leaves. An array that is only rounded (roundtrip) stays sharded if that cuts no bucket.
"""

import math
from collections.abc import Callable
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxcgx import _compat
from jaxcgx._compat import mlir


def _spec(x: Any) -> tuple[Any, ...]:
    """Returns the spec of a value that the partitioner asks about, with an entry for each axis of the value."""
    spec = getattr(x.sharding, "spec", ())
    return (*spec, *(None,) * (len(x.shape) - len(spec)))


def _shards(mesh: Any, entry: Any) -> int:
    """Returns the number of shards into which an entry of a spec cuts its axis."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def lower(primitive: Any, direct: Callable[..., Any], keeps: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """Returns a lowering rule. If the partitioner distributes the program, it includes a rule for the partitioner.

    Args:
      primitive: the primitive that is lowered.
      direct: the lowering rule without a partitioner.
      keeps: keeps(shape, shards, **params) returns whether the first operand and the first result may stay sharded.
        `shape` has the axes after the batch, and `shards` has the number of shards along each of these axes.
    """

    _compat.prim_requires_devices_during_lowering.add(primitive)

    def rule(ctx: Any, *operands: Any, batch: tuple[Any, ...], **params: Any) -> Any:
        if not _compat.partitioner_decides(ctx):
            with _compat.mesh_of_a_part(ctx):
                return direct(ctx, *operands, batch=batch, **params)
        n = len(batch)

        def partition(mesh: Any, args: Any, results: Any) -> tuple[Any, ...]:
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

        def factors(value: str, avals: Any) -> list[list[str]]:
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
        return mlir.lower_fun(lambda *operands: call(*operands), multiple_results=True)(ctx, *operands)

    return rule

"""What XLA's partitioner may leave sharded where jit distributes a computation itself (Auto and Explicit meshes).

Without a rule it gathers every operand of a custom call on every device. Inside shard_map nothing of this is needed:
there an operation sees its shard and nothing else.

Messages are independent of one another, so the axes of vmap stay sharded. A message is whole: its bytes depend on all
of
its leaves. An array that is only rounded (roundtrip) stays sharded where no bucket is cut.
"""

import math

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxcgx import _compat
from jaxcgx._compat import mlir


def _spec(x):
    """An entry for each axis of a value that the partitioner asks about."""
    spec = getattr(x.sharding, "spec", ())
    return (*spec, *(None,) * (len(x.shape) - len(spec)))


def _shards(mesh, entry):
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def lower(primitive, direct, keeps=None):
    """The lowering rule `direct` of a primitive, with a rule for the partitioner where it decides.

    keeps(shape, shards, **params): whether the first operand, whose axes behind those of the batch have this shape, may
    be
    cut into so many shards along them, and the first result with it.
    """

    _compat.needs_devices(primitive)

    def rule(ctx, *operands, batch, **params):
        if not _compat.partitioner_decides(ctx):
            return direct(ctx, *operands, batch=batch, **params)
        n = len(batch)

        def partition(mesh, args, results):
            specs = [_spec(a) for a in args]
            rows = next((s[:n] for s in specs if any(s[:n])), (None,) * n)
            cut, shape = specs[0][n:], args[0].shape[n:]
            if not (keeps and keeps(shape, [_shards(mesh, entry) for entry in cut], **params)):
                cut = (None,) * len(shape)

            def place(i, value):
                rest = cut if keeps and i == 0 else (None,) * (len(value.shape) - n)
                return NamedSharding(mesh, PartitionSpec(*rows, *rest))

            return mesh, bind, [place(*r) for r in enumerate(results)], tuple(place(*a) for a in enumerate(args))

        def bind(*operands):
            return primitive.bind(*operands, batch=operands[0].shape[:n], **params)

        def factors(value, avals):
            # An axis of the same name is cut alike in every value that has it.
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

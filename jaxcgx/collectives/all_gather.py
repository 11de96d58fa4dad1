"""compressed_all_gather: lax.all_gather that sends a fraction of the bytes."""

import math

import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import check_choice
from jaxcgx.collectives import psum_scatter
from jaxcgx.collectives.call import Call, check_dimension
from jaxcgx.exchange import primitive, schedules
from jaxcgx.transports import rows
from jaxcgx.transports.resolve import check_axes


def compressed_all_gather(
    x,
    axis_name,
    codec,
    *,
    key=None,
    axis=0,
    tiled=False,
    to="varying",
    schedule="auto",
    backward_codec=None,
    strict=False,
    fusion_mb=None,
):
    """Every rank's `x`, as `jax.lax.all_gather`. What a rank sends it too takes from its bytes: every rank has the
    same.

    axis, tiled, to: as in lax ("varying" or "invarying"). schedule: "one_shot" is the only one. backward_codec: of the
    transpose, which is compressed_psum_scatter; the same codec by default. A dict of codecs gathers over the outermost
    axis first, a share each. The rest as in `compressed_psum`.
    """
    return gather(
        "compressed_all_gather",
        x,
        check_axes("compressed_all_gather", axis_name),
        codec,
        key,
        axis,
        tiled,
        to,
        schedule,
        backward_codec,
        strict,
        fusion_mb,
    )


def gather(op, x, net, codec, key, axis, tiled, to, schedule, backward_codec, strict, fusion_mb):
    call = Call(op, x, net, codec, key, strict, fusion_mb, backward_codec)
    check_choice(op, "schedule", schedule, ("auto", "one_shot"))
    check_choice(op, "to", to, ("varying", "invarying"))
    dims = [
        check_dimension(op, "axis", axis, leaf, path, extra=0 if tiled else 1)
        for leaf, path in zip(call.leaves, call.paths)
    ]

    def plain(leaf, i):
        return net.plain_all_gather(leaf, dims[i], tiled, to)

    def compressed(leaves, key, ids, route):
        shapes = [x.shape for x in leaves]
        for j, (part, codec) in enumerate(route.stages):
            leaves = primitive.bind(
                all_gather_p,
                leaves,
                route.key(key, j, route.stages[j + 1 :]),
                net=part,
                ranks=part.size,
                codec=codec,
                backward=route.backward[j],
                ids=ids,
                to=to,
            )
        n = len(route.stages)
        gathered = [
            jnp.transpose(x, (*reversed(range(n)), *range(n, x.ndim))).reshape(call.size, *s)
            for x, s in zip(leaves, shapes)
        ]
        return [rows.join(x, dims[i], tiled) for x, i in zip(gathered, ids)]

    return call.run(plain, compressed)


def _run(leaves, key, *, net, ranks, codec, backward, ids, to):
    return schedules.all_gather(net, codec, leaves, ids, key)


def _shape(shape, *, ranks, **params):
    return (ranks, *shape)


# Rank r's leaf is in row r of every rank: its cotangent is the sum of theirs, psum_scatter. Where the result is typed
# as one
# value that all ranks share ("invarying"), so is its cotangent, and rank r takes row r of it. An axis of vmap has no
# such
# type: its cotangents are rows, most of them zero, that psum_scatter adds; ranks of a mesh among them would count double.
def _transpose(avals, cts, key, *, net, ranks, codec, backward, to, batch, **params):
    mapped = math.prod(size for size, name in batch if name is not None)
    if to == "invarying":
        if mapped == 1:
            return [lax.dynamic_index_in_dim(ct, net.rank, len(batch), keepdims=False) for ct in cts]
        cts = [ct * (mapped / ranks) for ct in cts]
    return primitive.bind(
        psum_scatter.psum_scatter_p,
        cts,
        schedules.fold(key, schedules.BACK),
        net=net,
        codec=backward,
        backward=codec,
        schedule="one_shot",
        own="raw",
        batch=batch,
        **params,
    )


all_gather_p = primitive.define(
    "all_gather", _run, _shape, _transpose, same=True, invarying=lambda to, **params: to == "invarying"
)

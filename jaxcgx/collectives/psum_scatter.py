"""compressed_psum_scatter: lax.psum_scatter that sends a fraction of the bytes."""

import jax.numpy as jnp

from jaxcgx.checks import check_choice
from jaxcgx.collectives import all_gather
from jaxcgx.collectives.call import Call, check_dimension, check_divisible, check_hops, check_own
from jaxcgx.exchange import primitive, schedules
from jaxcgx.transports import rows
from jaxcgx.transports.resolve import check_axes


def compressed_psum_scatter(
    x,
    axis_name,
    codec,
    *,
    key=None,
    scatter_dimension=0,
    tiled=False,
    schedule="auto",
    own="raw",
    backward_codec=None,
    strict=False,
    fusion_mb=None,
):
    """The sum of `x` over a named axis, of which every rank keeps its slice, as `jax.lax.psum_scatter`.

    scatter_dimension, tiled: as in lax. schedule: "one_shot" (every slice straight to its owner), "ring", or "auto",
    which
    is "one_shot". backward_codec: of the transpose, which is compressed_all_gather; the same codec by default. A dict
    of
    codecs scatters over the innermost axis first, so that the others carry a share each. The rest as in
    `compressed_psum`.
    """
    return reduce_scatter(
        "compressed_psum_scatter",
        x,
        check_axes("compressed_psum_scatter", axis_name),
        codec,
        key,
        scatter_dimension,
        tiled,
        schedule,
        own,
        backward_codec,
        strict,
        fusion_mb,
    )


def reduce_scatter(op, x, net, codec, key, scatter_dimension, tiled, schedule, own, backward_codec, strict, fusion_mb):
    call = Call(op, x, net, codec, key, strict, fusion_mb, backward_codec)
    check_choice(op, "schedule", schedule, ("auto", "one_shot", "ring"))
    check_own(op, own, schedule)
    schedule = "one_shot" if schedule == "auto" else schedule
    dims = []
    for leaf, path in zip(call.leaves, call.paths):
        dims.append(check_dimension(op, "scatter_dimension", scatter_dimension, leaf, path))
        check_divisible(op, "scatter_dimension", dims[-1], leaf, path, call.size, tiled)

    for route in call.groups:
        for _, codec in route.stages:
            check_hops(op, schedule, codec)

    def plain(leaf, i):
        return net.plain_psum_scatter(leaf, dims[i], tiled)

    def compressed(leaves, key, ids, route):
        parts = [rows.by_axis(rows.split(x, dims[i], call.size, tiled), route.stages) for x, i in zip(leaves, ids)]
        for j, (part, codec) in reversed(list(enumerate(route.stages))):
            parts = [jnp.moveaxis(x, j, 0) for x in parts]
            parts = primitive.bind(
                psum_scatter_p,
                parts,
                route.key(key, j, route.others(j)),
                net=part,
                codec=codec,
                backward=route.backward[j],
                ids=ids,
                schedule=schedule,
                own=own,
            )
        return parts

    return call.run(plain, compressed)


def _run(leaves, key, *, net, codec, backward, ids, schedule, own):
    sums = schedules.reduce_scatter(schedule, net, codec, leaves, ids, key, own)
    return [x.astype(leaf.dtype) for x, leaf in zip(sums, leaves)]


def _shape(shape, **params):
    return shape[1:]


# Row r of the input went into the sum of rank r, from every rank: its cotangent is rank r's, for every rank.
def _transpose(avals, cts, key, *, backward, codec, schedule, own, batch, **params):
    ranks = avals[0].shape[len(batch)]
    return primitive.bind(
        all_gather.all_gather_p,
        cts,
        schedules.fold(key, schedules.BACK),
        ranks=ranks,
        codec=backward,
        backward=codec,
        to="varying",
        batch=batch,
        **params,
    )


psum_scatter_p = primitive.define("psum_scatter", _run, _shape, _transpose, same=False)

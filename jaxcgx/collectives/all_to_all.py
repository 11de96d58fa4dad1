"""compressed_all_to_all: lax.all_to_all that sends a fraction of the bytes."""

import jax.numpy as jnp

from jaxcgx.checks import check_choice
from jaxcgx.collectives.call import Call, check_dimension, check_divisible
from jaxcgx.exchange import primitive, schedules
from jaxcgx.transports import rows
from jaxcgx.transports.resolve import check_axes


def compressed_all_to_all(
    x,
    axis_name,
    split_axis,
    concat_axis,
    codec,
    *,
    key=None,
    tiled=False,
    schedule="auto",
    backward_codec=None,
    strict=False,
    fusion_mb=None,
):
    """Slice r of `x` along `split_axis` to rank r, and the slices that come along `concat_axis`, as
    `jax.lax.all_to_all`.

    split_axis, concat_axis, tiled: as in lax. schedule: "one_shot" is the only one. backward_codec: of the transpose,
    which is the exchange back; the same codec by default. A dict of codecs exchanges over one axis after another,
    innermost first. The rest as in `compressed_psum`.
    """
    return exchange(
        "compressed_all_to_all",
        x,
        check_axes("compressed_all_to_all", axis_name),
        codec,
        split_axis,
        concat_axis,
        key,
        tiled,
        schedule,
        backward_codec,
        strict,
        fusion_mb,
    )


def exchange(op, x, net, codec, split_axis, concat_axis, key, tiled, schedule, backward_codec, strict, fusion_mb):
    call = Call(op, x, net, codec, key, strict, fusion_mb, backward_codec)
    check_choice(op, "schedule", schedule, ("auto", "one_shot"))
    dims = []
    for leaf, path in zip(call.leaves, call.paths):
        dims.append(
            [
                check_dimension(op, name, axis, leaf, path)
                for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis))
            ]
        )
        check_divisible(op, "split_axis", dims[-1][0], leaf, path, call.size, tiled)

    def plain(leaf, i):
        return net.plain_all_to_all(leaf, *dims[i], tiled)

    def compressed(leaves, key, ids, route):
        parts = [rows.by_axis(rows.split(x, dims[i][0], call.size, tiled), route.stages) for x, i in zip(leaves, ids)]
        for j, (part, codec) in reversed(list(enumerate(route.stages))):
            parts = [jnp.moveaxis(x, j, 0) for x in parts]
            parts = primitive.bind(
                all_to_all_p,
                parts,
                route.key(key, j, route.others(j)),
                net=part,
                codec=codec,
                backward=route.backward[j],
                ids=ids,
            )
            parts = [jnp.moveaxis(x, 0, j) for x in parts]
        parts = [x.reshape(call.size, *x.shape[len(route.stages) :]) for x in parts]
        return [rows.join(x, dims[i][1], tiled) for x, i in zip(parts, ids)]

    return call.run(plain, compressed)


def _run(leaves, key, *, net, codec, backward, ids):
    return schedules.all_to_all(net, codec, leaves, ids, key)


def _shape(shape, **params):
    return shape


# Row r went to rank r: its cotangent comes back from there, the way that row r of the result came.
def _transpose(avals, cts, key, *, codec, backward, **params):
    return primitive.bind(
        all_to_all_p, cts, schedules.fold(key, schedules.BACK), codec=backward, backward=codec, **params
    )


all_to_all_p = primitive.define("all_to_all", _run, _shape, _transpose, same=False)

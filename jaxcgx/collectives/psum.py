"""compressed_psum, compressed_pmean: lax.psum and lax.pmean that send a fraction of the bytes."""

import math
import warnings

import jax.numpy as jnp

from jaxcgx.checks import callers_level, check_choice, check_flag
from jaxcgx.collectives.call import (
    Call,
    check_each,
    check_factors,
    check_hops,
    check_momentum,
    check_own,
    check_residuals,
)
from jaxcgx.exchange import costs, feedback, hierarchy, low_rank, primitive, schedules
from jaxcgx.plan import SCHEDULES, Plan
from jaxcgx.transports.resolve import check_axes


def compressed_psum(
    x,
    axis_name,
    codec,
    *,
    key=None,
    residuals=None,
    momentum=None,
    factors=None,
    schedule="auto",
    own="raw",
    leader=False,
    strict=False,
    fusion_mb=None,
):
    """The sum of `x` over a named axis, as `jax.lax.psum`, sent in the codec's bytes.

    x: a pytree of arrays. Leaves that are float32, bfloat16 or float16 are compressed; others go through lax.psum, or
    with `strict=True` are an error. All leaves of a codec share messages of up to `fusion_mb` MiB (64), each one
    exchange.

    axis_name: one name, or a tuple of names. codec: a codec for an exchange over all of them together; or a dict with a
    codec for each name, which come outermost first: `{"node": MaxMin(4), "local": Raw()}` sums over the inner axes by
    reduce-scatter, over the outermost by the compressed exchange of each shard, and gathers back. With `leader=True`
    only
    rank 0 of the inner axes takes part in the outer exchange and the others get its result: fewer messages between
    nodes, one network card in use. Or a `Plan`, which says it for every leaf.

    key: a random key for codecs that round stochastically, the same on every rank and another one every step.
    schedule: "two_shot", "one_shot", "ring", or "auto", which jaxcgx/collectives/costs.py explains; or a dict with one
    for
    each name. own: what a rank adds of its own part to the sum it owns: "raw", as it is (less error), or "encoded", as
    the
    others see it; the same key then gives the same bits whatever the messages (not with `ByteGrad` and `TopK`).

    residuals: what earlier calls lost, to be given back (error feedback): a tree like `x` of this rank's float32
    arrays,
    zeros at first. The result is then a pair, the sum and the new residuals: over all ranks, sum + new residuals = x +
    residuals. None in place of a leaf: no feedback for it. With `own="encoded"` what the sum's own encoding loses stays
    lost; of a hierarchy, what the inner axes lose.

    momentum: arrays that lose what is sent, as in Deep Gradient Compression: a tree like `x` of this rank's arrays, of
    which those of
    leaves that go in sparse codecs (`TopK`) come back 0 where an element of this rank was sent. They follow the
    residuals, without
    which there are none. None in place of a leaf: nothing of it. Leaves that travel raw keep theirs.

    factors: what `PowerSGD` begins with, those of the step before (`init_factors` at first): a tree like `x`, the same
    on every
    rank, None for leaves that have none. The new factors then follow last. Without, or with None for a leaf,
    every call begins alike and finds the less the less gradients change.

    Every rank gets the same bits. Gradients pass as through lax.psum (straight-through).
    """
    op = "compressed_psum"
    return reduce(
        op,
        x,
        check_axes(op, axis_name),
        codec,
        key,
        residuals,
        momentum,
        factors,
        schedule,
        own,
        leader,
        strict,
        fusion_mb,
        mean=False,
    )


def compressed_pmean(
    x,
    axis_name,
    codec,
    *,
    key=None,
    residuals=None,
    momentum=None,
    factors=None,
    schedule="auto",
    own="raw",
    leader=False,
    strict=False,
    fusion_mb=None,
):
    """The mean of `x` over a named axis, as `jax.lax.pmean`: compressed_psum, divided in float32 before the last
    encoding."""
    op = "compressed_pmean"
    return reduce(
        op,
        x,
        check_axes(op, axis_name),
        codec,
        key,
        residuals,
        momentum,
        factors,
        schedule,
        own,
        leader,
        strict,
        fusion_mb,
        mean=True,
    )


def reduce(op, x, net, codec, key, residuals, momentum, factors, schedule, own, leader, strict, fusion_mb, *, mean):
    fed = residuals is not None
    call, plain, compressed = prepare(
        op, x, net, codec, key, schedule, own, leader, strict, fusion_mb, mean=mean, fed=fed
    )
    kept = {}
    if fed:
        for codec in {route.stages[0][1] for route in call.groups}:
            if not codec.contracts:
                warnings.warn(
                    f"{op}: argument 'residuals': {codec} loses more than it is given, so what is over grows without "
                    "bound; take "
                    "more bits, smaller buckets, rounding to nearest, or jaxcgx.Sign",
                    stacklevel=callers_level(),
                )
        kept["residuals"] = check_residuals(op, call, residuals)
    if momentum is not None:
        if not fed:
            raise ValueError(f"{op}: argument 'residuals': expected a tree like x with 'momentum', got None")
        kept["momentum"] = check_momentum(op, call, momentum)
    if factors is not None:
        kept["factors"] = check_factors(op, call, factors)

    def plain_kept(leaf, i):
        if fed and kept["residuals"][i] is not None:
            (leaf,), (kept["residuals"][i],) = feedback.carry([leaf], [kept["residuals"][i]])
        return plain(leaf, i)

    def compressed_kept(leaves, key, ids, route):
        codec = route.stages[0][1]
        fresh = dict(residuals=lambda x: jnp.zeros(x.shape, jnp.float32))
        if codec.sparse:
            fresh["momentum"] = jnp.zeros_like
        if codec.low_rank:
            fresh["factors"] = lambda x: jnp.zeros(codec.factor_shape(x.shape), jnp.float32)
        state = {
            kind: [fresh[kind](x) if kept[kind][i] is None else kept[kind][i] for i, x in zip(ids, leaves)]
            for kind in kept
            if kind in fresh
        }
        done, n = compressed(leaves, key, ids, route, state), len(leaves)
        for number, kind in enumerate(state, 1):
            for i, new in zip(ids, done[number * n :]):
                if kept[kind][i] is not None:
                    kept[kind][i] = new
        return done[:n]

    results = call.run(plain_kept, compressed_kept)
    return (results, *(call.tree.unflatten(state) for state in kept.values())) if kept else results


def prepare(
    op, x, net, codec, key, schedule, own, leader, strict, fusion_mb, *, mean, fed=False, argument="x", local=True
):
    """A checked call, what reduces a leaf and what reduces a message, as Call.run wants them."""
    call = Call(op, x, net, codec, key, strict, fusion_mb, argument=argument, local=local, sums=True)
    check_flag(op, "leader", leader)
    said = ""
    if isinstance(codec, Plan):
        leader = leader or codec.leader
        if schedule == "auto":
            schedule, said = codec.schedule, " of the plan"
    if leader and call.groups and not call.hierarchy:
        raise ValueError(
            f"{op}: argument 'leader': expected False without a hierarchy, got True; give axis_name a tuple and codec a "
            "dict with a codec for each name"
        )
    asked = check_each(op, "schedule", schedule, net, "a schedule") if isinstance(schedule, dict) else [schedule]
    for name in asked:
        check_choice(op, "schedule", name, SCHEDULES)
        check_own(op, own, name)
    parts = dict(zip(net.parts.values(), asked)) if isinstance(schedule, dict) else {}
    chosen = {}
    for route, ids in call.groups.items():
        names = [parts.get(part, "auto" if j else asked[0]) for j, (part, _) in enumerate(route.stages)]
        if fed and names[0] == "ring" and not route.stages[0][1].low_rank:
            raise ValueError(
                f'{op}: argument \'schedule\'{said}: expected "two_shot" or "one_shot" with residuals, got "ring", which encodes '
                'sums of several ranks on the way; pass schedule="two_shot"'
            )
        chosen[route] = _choose(route, [call.leaves[i] for i in ids], names, leader)
        for name, (_, codec) in zip(chosen[route], route.stages):
            check_hops(op, name, codec)

    def compressed(leaves, key, ids, route, state={}):
        return primitive.bind(
            psum_p,
            leaves,
            key,
            state,
            net=net,
            stages=route.stages,
            ids=ids,
            schedule=chosen[route],
            own=own,
            leader=leader,
            divisor=float(call.size) if mean else 1.0,
            tracked=call.tracked,
        )

    def plain(leaf, i):
        return (net.plain_pmean if mean else net.plain_psum)(leaf)

    return call, plain, compressed


def _choose(route, leaves, names, leader):
    """A schedule for each stage. What "auto" takes for the outermost is what costs least, for all messages of a route
    alike."""
    (net, codec), first = route.stages[0], names[0]
    if codec.low_rank:
        first = "psum"
    elif first == "auto":
        share = 1 if leader else math.prod(inner.size for inner, _ in route.stages[1:])  # inner ranks take a share each
        if max(x.size for x in leaves) // share > codec.most:
            first = "two_shot"  # one_shot cuts no leaf
        else:
            sent, back = (
                sum(each.wire_bytes((x.size // share,), x.dtype) for x in leaves)
                for each in (codec, codec.of_sum(net.size))
            )
            first = costs.choose(net.size, sum(4 * x.size for x in leaves) // share, sent, back, codec.sparse)
    return (first, *("two_shot" if name == "auto" else name for name in names[1:]))


def _run(
    leaves,
    key,
    residuals=None,
    momentum=None,
    factors=None,
    *,
    net,
    stages,
    ids,
    schedule,
    own,
    leader,
    divisor,
    tracked,
):
    if stages[0][1].low_rank:
        results, lost, new = low_rank.allreduce(stages, leaves, residuals, factors, ids, key, schedule, own, divisor)
        return [*results, *(lost or []), *(new if factors is not None else [])]
    if len(stages) > 1:
        results, lost, momentum = hierarchy.allreduce(
            net, stages, leaves, residuals, momentum, ids, key, schedule, own, leader, divisor
        )
    else:
        results, lost, sent = schedules.allreduce(schedule[0], *stages[0], leaves, residuals, ids, key, own, divisor)
        momentum = momentum and sent.clear(momentum)
    return [*results, *(lost or []), *(momentum or [])]


def _shape(shape, **params):
    return shape


# What is summed over ranks that don't differ is differentiated by a copy for each: where JAX tracks what varies
# (check_vma), the transpose of a sum is the cast from one to each (pcast), and no byte is sent. Where it doesn't track,
# a cotangent may differ from rank to rank, and the transpose of psum is psum.
def _transpose(avals, cts, key, *, batch, net, divisor, tracked, **params):
    if not tracked:
        return primitive.bind(
            psum_p,
            cts,
            schedules.fold(key, schedules.BACK),
            batch=batch,
            net=net,
            divisor=divisor,
            tracked=tracked,
            **params,
        )
    return [ct / divisor for ct in cts]


psum_p = primitive.define("psum", _run, _shape, _transpose, same=True, invarying=lambda **params: True)

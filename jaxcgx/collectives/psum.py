"""compressed_psum, compressed_pmean: lax.psum and lax.pmean that send a fraction of the bytes."""
from jax import lax

from jaxcgx.collectives import hierarchy, primitive, schedules
from jaxcgx.collectives.call import Call, check_choice, check_flag, check_own
from jaxcgx.plan import SCHEDULES
from jaxcgx.transports.xla import Axes


def compressed_psum(x, axis_name, codec, *, key=None, schedule="auto", own="raw", leader=False, strict=False, fusion_mb=64):
    """The sum of `x` over a named axis, as `jax.lax.psum`, sent in the codec's bytes.

    x: a pytree of arrays. Leaves that are float32, bfloat16 or float16 are compressed; others go through lax.psum, or
    with `strict=True` are an error. All leaves share messages of up to `fusion_mb` MiB, each one exchange.

    axis_name: one name, or a tuple of names. codec: a codec for an exchange over all of them together; or a dict with a
    codec for each name, which come outermost first: `{"node": MaxMin(4), "local": Raw()}` sums over the inner axes by
    reduce-scatter, over the outermost by the compressed exchange of each shard, and gathers back. With `leader=True` only
    rank 0 of the inner axes takes part in the outer exchange and the others get its result: fewer messages between
    nodes, one network card in use.

    key: a random key for codecs that round stochastically, the same on every rank and another one every step.
    schedule: "two_shot", "one_shot", "ring", or "auto", which jaxcgx/collectives/costs.py explains.
    own: what a rank adds of its own part to the sum it owns: "raw", as it is (less error), or "encoded", as the others
    see it; the same key then gives the same bits whatever the messages.

    Every rank gets the same bits. Gradients pass as through lax.psum (straight-through).
    """
    return _reduce("compressed_psum", x, axis_name, codec, key, schedule, own, leader, strict, fusion_mb, mean=False)


def compressed_pmean(x, axis_name, codec, *, key=None, schedule="auto", own="raw", leader=False, strict=False, fusion_mb=64):
    """The mean of `x` over a named axis, as `jax.lax.pmean`: compressed_psum, divided in float32 before the last encoding."""
    return _reduce("compressed_pmean", x, axis_name, codec, key, schedule, own, leader, strict, fusion_mb, mean=True)


def _reduce(*args, **kwargs):
    call, plain, compressed, schedule = prepare(*args, **kwargs)
    return call.run(plain, compressed, schedule)


def prepare(op, x, axis_name, codec, key, schedule, own, leader, strict, fusion_mb, *, mean, argument="x", local=True):
    """A checked call, what reduces a leaf and what a message (as Call.run wants them), and the schedule."""
    call = Call(op, x, axis_name, codec, key, strict, fusion_mb, argument=argument, local=local)
    check_choice(op, "schedule", schedule, SCHEDULES)
    check_own(op, own, schedule)
    check_flag(op, "leader", leader)
    if leader and len(call.stages) < 2:
        raise ValueError(f"{op}: argument 'leader': expected False without a hierarchy, got True; give axis_name a tuple and codec a "
                         "dict with a codec for each name")
    if schedule == "auto":
        schedule = call.schedule(leader)

    def compressed(leaves, key, ids):
        return primitive.bind(psum_p, leaves, key, axes=call.names, stages=call.stages, ids=ids, schedule=schedule, own=own,
                              leader=leader, divisor=float(call.size) if mean else 1.0, tracked=call.tracked)

    def plain(leaf, i):
        return (lax.pmean if mean else lax.psum)(leaf, call.names)

    return call, plain, compressed, schedule


def _run(leaves, key, *, axes, stages, ids, schedule, own, leader, divisor, tracked):
    if len(stages) > 1:
        return hierarchy.allreduce(stages, leaves, ids, key, schedule, own, leader, divisor)
    return schedules.allreduce(schedule, Axes(axes), stages[0][1], leaves, ids, key, own, divisor)


def _shape(shape, **params):
    return shape


# What is summed over ranks that don't differ is differentiated by a copy for each: where JAX tracks what varies
# (check_vma), the transpose of a sum is the cast from one to each (pcast), and no byte is sent. Where it doesn't track,
# a cotangent may differ from rank to rank, and the transpose of psum is psum.
def _transpose(avals, cts, key, *, batch, axes, divisor, tracked, **params):
    if not tracked:
        return primitive.bind(psum_p, cts, schedules.fold(key, schedules.BACK), batch=batch, axes=axes, divisor=divisor, tracked=tracked, **params)
    return [ct / divisor for ct in cts]


psum_p = primitive.define("psum", _run, _shape, _transpose, same=True, invarying=lambda **params: True)

"""compress_gradients: an optax transformation from every rank's gradients to their mean, in a fraction of the bytes."""

import functools
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxcgx import _compat
from jaxcgx.checks import check_flag
from jaxcgx.collectives.psum import compressed_pmean
from jaxcgx.exchange.keys import fold
from jaxcgx.optim.extra import import_optax
from jaxcgx.optim.state import state_specs
from jaxcgx.optim.telemetry import Telemetry, measure
from jaxcgx.plan import Plan, why_raw
from jaxcgx.plan.by_axis import check_codecs
from jaxcgx.plan.leaves import factor_shape
from jaxcgx.transports.axes import axis_names
from jaxcgx.transports.resolve import check_axes

OP = "compress_gradients"


class CompressState(NamedTuple):
    """What compress_gradients keeps; None where its arguments have no use for it, and count and key where nothing is
    compressed.

    What is per rank has a leading axis of the ranks and is sharded over it (`state_specs`): inside of shard_map it is
    of size 1.
    """

    count: Any  # int32[]: steps until now
    key: Any  # uint32[2], the same on every rank and in every step
    residuals: Any  # like the gradients, float32[ranks, *shape]; None for what always travels raw
    momentum: Any  # like the gradients, [ranks, *shape]; None for what always travels raw
    telemetry: Any  # Telemetry of the last step
    # like the gradients, [*shape]: momentum of what is the same on every rank, raw leaves' means and weight decay
    trace: Any = None
    factors: Any = None  # PowerSGD's, like the gradients, float32[rank, n], the same on every rank

    per_rank = {"residuals": "sum", "momentum": "mean"}  # and what of it reshard_state keeps
    replicated = ("trace",)


def compress_gradients(
    axis_name,
    plan,
    *,
    feedback=True,
    beta=None,
    reset_every=None,
    momentum=None,
    nesterov=False,
    momentum_masking=False,
    weight_decay=None,
    skip_nonfinite=False,
    telemetry=False,
    seed=0,
    axis_size=None,
    schedule="auto",
    own="raw",
    leader=False,
    strict=False,
    fusion_mb=None,
):
    """An optax.GradientTransformation: in, the gradients of every rank's own batch; out, their mean over the axis, on
    all ranks.

    axis_name: the axis of the ranks, or a tuple of axes. plan: a codec, {axis: codec} or a Plan; or a schedule of them,
    {0: plan,
    1000: other}: `other` from step 1000 on, counted from 0. A schedule is one compiled program, in which the step
    chooses.

    feedback: what compression loses is kept and sent later (error feedback). beta: of what a step loses; what is kept
    is
    (1 - beta) * what was kept before + beta * what was lost, by default all of it. reset_every: forget it after every
    so many
    steps (both are LoCo's). momentum: every rank sends u = momentum * u + gradient in place of its gradient (DGC's
    momentum
    correction), so that what is sent late has its momentum all the same; the optimizer behind should have none. Leaves
    that
    always travel raw get theirs after the reduction. Where the mean is not finite, u stays as it was.
    nesterov: Nesterov's momentum, u = momentum * (u + gradient), of which u + gradient is sent. momentum_masking: where
    TopK sends
    an element, u is 0 afterwards (DGC's), so that what was meant for a gradient that is gone doesn't go on.
    weight_decay: so many
    times the parameters are added to the mean, with a momentum of their own: what the optimizer's momentum would do
    with it.

    skip_nonfinite: in a step whose mean is not finite everywhere, residuals, momentum and factors stay as they were:
    for optimizers that
    skip such steps (optax.apply_if_finite, loss scaling). They are then not updated in place.
    telemetry: what a step lost, in `state.telemetry`. (Without check_vma both see the shards of a device alone.)
    seed: of the noise of codecs that round stochastically.
    axis_size: the ranks, for an `init` outside of shard_map that sees no mesh (jax.set_mesh) either. schedule, own,
    leader,
    strict, fusion_mb: as in `compressed_pmean`.

    beta, momentum, weight_decay, reset_every and seed may be arrays (optax.inject_hyperparams; the other numbers are
    its static_args). Leaves
    that travel raw under every plan have no residual.
    """
    optax = import_optax(OP)
    settings = _check_settings(plan)
    plans = [each for _, each in settings]
    for name, flag in dict(
        feedback=feedback,
        nesterov=nesterov,
        momentum_masking=momentum_masking,
        skip_nonfinite=skip_nonfinite,
        telemetry=telemetry,
    ).items():
        check_flag(OP, name, flag)
    check_number(OP, "seed", seed, numbers.Integral, lambda x: True, "an integer")
    if beta is not None:
        check_number(OP, "beta", beta, numbers.Real, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    if momentum is not None:
        check_number(OP, "momentum", momentum, numbers.Real, lambda x: 0 <= x < 1, "a number from 0 to below 1")
    elif nesterov or momentum_masking or weight_decay is not None:
        raise ValueError(
            f"{OP}: argument 'momentum': expected a number with 'nesterov', 'momentum_masking' or 'weight_decay', got "
            "None; "
            "optax.add_decayed_weights is weight decay without momentum"
        )
    if weight_decay is not None:
        check_number(OP, "weight_decay", weight_decay, numbers.Real, lambda x: x >= 0, "a number of at least 0")
    for name, number in dict(reset_every=reset_every, axis_size=axis_size).items():
        if number is not None:
            check_number(OP, name, number, numbers.Integral, lambda x: x > 0, "a positive integer")
    if not feedback and (momentum_masking or not (beta is None and reset_every is None)):
        raise ValueError(
            f"{OP}: argument 'feedback': expected True with 'beta', 'reset_every' or 'momentum_masking', got False"
        )
    if momentum_masking and not any(codec.sparse for each in plans for codec in each.codecs):
        raise ValueError(
            f"{OP}: argument 'momentum_masking': expected False without jaxcgx.TopK, the codec that sends some elements "
            "and "
            "not others, got True"
        )
    if feedback or telemetry:
        _check_schedules(axis_name, schedule, plans)
    noisy = any(codec.stochastic for each in plans for codec in each.codecs)
    pmean = functools.partial(
        compressed_pmean,
        axis_name=axis_name,
        schedule=schedule,
        own=own,
        leader=leader,
        strict=strict,
        fusion_mb=fusion_mb,
    )

    def types(tree, ranks):
        """The state, of jax.ShapeDtypeStructs, for gradients or parameters."""
        paths, leaves, structure = _flatten(tree)
        given = list(zip(*(_codecs(each, axis_name, paths, leaves) for each in plans)))
        coded = [any(codecs) for codecs in given]
        # Plans of several ranks share the longest factor, of which each takes what it needs.
        factors = [
            max(filter(None, map(functools.partial(factor_shape, x), codecs)), default=None)
            for x, codecs in zip(leaves, given)
        ]
        traces = [
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            if momentum is not None and (weight_decay is not None or not has)
            else None
            for x, has in zip(leaves, coded)
        ]
        # For every plan that compresses the same leaves, also one with noise or a schedule. optax asks with a tree
        # without leaves.
        compresses = any(coded) if leaves else not all(codec.raw for each in plans for codec in each.codecs)
        scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * len(leaves)
        row = lambda x, dtype: jax.ShapeDtypeStruct((ranks, *x.shape), dtype)
        return CompressState(
            count=jax.ShapeDtypeStruct((), jnp.int32) if compresses else None,
            key=jax.ShapeDtypeStruct((2,), jnp.uint32) if compresses else None,
            residuals=structure.unflatten(
                [row(x, jnp.float32) if feedback and has else None for x, has in zip(leaves, coded)]
            ),
            momentum=structure.unflatten([row(x, x.dtype) if has else None for x, has in zip(leaves, coded)])
            if momentum is not None
            else None,
            telemetry=Telemetry(*[structure.unflatten(scalars)] * len(Telemetry._fields)) if telemetry else None,
            trace=structure.unflatten(traces) if any(traces) else None,
            factors=structure.unflatten([shape and jax.ShapeDtypeStruct(shape, jnp.float32) for shape in factors])
            if any(factors)
            else None,
        )

    def init(params):
        ranks, axes, sharded = _ranks(axis_name, axis_size)
        expected = types(params, ranks)

        def fresh():
            state = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), expected)
            if state.key is None:
                return state
            return state._replace(key=jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))

        if sharded:
            explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
            shard = functools.partial(
                jax.tree_util.tree_map, jax.sharding.reshard if explicit else lax.with_sharding_constraint
            )
            state = jax.jit(
                lambda: shard(fresh(), state_specs(expected, axis_name))
            )()  # jit: no device has it all on the way
        else:
            state = fresh()
        return state._replace(
            **{
                name: jax.tree_util.tree_map(lambda x: _compat.vary(x, axes), getattr(state, name))
                for name in CompressState.per_rank
            }
        )

    def exchange(each, key, structure, leaves, residuals, momenta, factors):
        """The mean with one of the plans, what is lost, momentum, new factors, telemetry."""
        paths, _, _ = _flatten(structure.unflatten(leaves))
        codecs = _codecs(each, axis_name, paths, leaves)
        if telemetry and not feedback:  # nothing else tells what is lost
            residuals = [jnp.zeros((1, *x.shape), jnp.float32) if codec else None for x, codec in zip(leaves, codecs)]
        key = key if any(codec.stochastic for codec in each.codecs) else None
        shapes = [factor_shape(x, given) for x, given in zip(leaves, codecs)]
        warm = [None if shape is None else q[: shape[0]] for q, shape in zip(factors, shapes)]
        state = dict(factors=structure.unflatten(warm)) if any(shapes) else {}
        masked = [momentum_masking and bool(codec) and codec[0].sparse for codec in codecs]
        send = functools.partial(pmean, structure.unflatten(leaves), codec=each, key=key, **state)
        lost, measured = residuals, None
        if all(r is None for r in residuals):
            mean, *kept = map(structure.flatten_up_to, send() if state else (send(),))
        else:
            rows = dict(residuals=structure.unflatten(residuals))
            if any(masked):
                rows["momentum"] = structure.unflatten([u if has else None for u, has in zip(momenta, masked)])
            # Donated residuals are overwritten in place as they are, [1, ...]. A reshape would be a copy, two with the
            # way back.
            mean, lost, *kept = map(structure.flatten_up_to, jax.vmap(lambda rows: send(**rows))(rows))
            mean = [x.reshape(x.shape[1:]) for x in mean]
            if any(masked):
                new, *kept = kept
                momenta = [u if x is None else x for x, u in zip(new, momenta)]
        if state:
            factors = [
                q if new is None else q.at[: shape[0]].set(new.reshape(shape))
                for q, new, shape in zip(factors, *kept, shapes)
            ]
        if telemetry:
            measured = measure(check_axes(OP, axis_name), structure, leaves, codecs, residuals, mean, lost)
        return mean, lost if feedback else [None] * len(lost), momenta, factors, measured

    def accelerate(u, g):
        """Momentum with a gradient in it, and what takes the gradient's place."""
        if u is None:
            return u, g
        rate, new = jnp.asarray(momentum, u.dtype), g.astype(u.dtype)
        u = rate * (u + new) if nesterov else rate * u + new
        return u, (u + new if nesterov else u).reshape(g.shape).astype(g.dtype)

    def behind(trace, u, x, p):
        """The mean with the momentum that an optimizer would give it, but for what had momentum on its rank."""
        if trace is None:
            return trace, x
        rest = x if u is None else jnp.zeros_like(x)
        if weight_decay is not None:
            rest = rest + (jnp.asarray(weight_decay, p.dtype) * p).astype(x.dtype)
        moved, late = accelerate(trace, rest)
        return jnp.where(jnp.isfinite(moved), moved, trace), late if u is None else x + late

    def update(updates, state, params=None):
        check_axes(OP, axis_name)
        _check_state(axis_name, state, types(updates, 1))
        if weight_decay is not None and params is None:
            raise ValueError(
                f"{OP}: argument 'params': expected the parameters with 'weight_decay', got None; call "
                "update(gradients, "
                "state, params)"
            )
        _, leaves, structure = _flatten(updates)
        of_leaves = lambda field: [None] * len(leaves) if field is None else structure.flatten_up_to(field)
        residuals, before, traces, factors = map(
            of_leaves, (state.residuals, state.momentum, state.trace, state.factors)
        )
        sped = list(map(accelerate, before, leaves))
        key = fold(state.key, state.count) if noisy else None
        ways = [functools.partial(exchange, each, key, structure) for each in plans]
        operands = [g for _, g in sped], residuals, [u for u, _ in sped], factors
        if len(ways) > 1 and state.count is not None:
            now = sum((state.count >= start).astype(jnp.int32) for start, _ in settings[1:])
            mean, lost, moved, warm, found = lax.switch(now, ways, *operands)
        else:
            mean, lost, moved, warm, found = ways[0](*operands)
        count = None if state.count is None else optax.safe_increment(state.count)
        if beta is not None:
            lost = [None if r is None else (1 - beta) * r + beta * new for r, new in zip(residuals, lost)]
        # What overflowed once would stay in u for good. Of a leaf that overflows, TopK sends some elements as NaN and
        # the others not.
        moved = [
            u if u is None else jnp.where(jnp.isfinite(x) & jnp.isfinite(u), u, old)
            for x, u, old in zip(mean, moved, before)
        ]
        if skip_nonfinite:
            bad = sum((~jnp.isfinite(x)).any().astype(jnp.int32) for x in mean)
            if shards := tuple(_compat.varying_axes(bad)):  # over which axes of the mesh the gradients are
                bad = lax.psum(bad, shards)
        late = list(map(behind, traces, moved, mean, of_leaves(params if weight_decay is not None else None)))
        traced, mean = [trace for trace, _ in late], [x for _, x in late]
        if skip_nonfinite:
            keep = lambda new, old: jnp.where(bad == 0, new, old)
            old = residuals, before, traces, factors
            lost, moved, traced, warm = jax.tree_util.tree_map(keep, (lost, moved, traced, warm), old)
        if reset_every is not None:
            lost = [None if r is None else jnp.where(count % reset_every == 0, 0, r) for r in lost]
        tree = lambda field, new: None if field is None else structure.unflatten(new)
        return structure.unflatten(mean), CompressState(
            count,
            state.key,
            structure.unflatten(lost),
            tree(state.momentum, moved),
            found,
            tree(state.trace, traced),
            tree(state.factors, warm),
        )

    return optax.GradientTransformation(init, update)


def compressed(optimizer, axis_name, plan, **options):
    """`optimizer`, an optax.GradientTransformation, for gradients of every rank's own: behind compress_gradients with
    these options."""
    return import_optax("compressed").chain(compress_gradients(axis_name, plan, **options), optimizer)


def check_number(op, argument, value, kind, fits, expected, static=False):
    """An array, of optax.inject_hyperparams, passes unless `static`: its value is not known yet."""
    if isinstance(value, jax.Array) and not static:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{op}: argument '{argument}': expected {expected}, got {value!r}")
    if not fits(value):
        raise ValueError(f"{op}: argument '{argument}': expected {expected}, got {value!r}")


def _check_settings(plan):
    """[(first step, Plan)], in order."""
    schedule = {0: plan}
    if isinstance(plan, dict) and any(isinstance(step, numbers.Integral) for step in plan):
        if 0 not in plan or not all(isinstance(step, numbers.Integral) and step >= 0 for step in plan):
            raise ValueError(
                f"{OP}: argument 'plan': expected a schedule {{first step: plan}} that begins with step 0, got steps "
                f"{list(plan)}"
            )
        schedule = plan
    return [(step, _check_plan(schedule[step])) for step in sorted(schedule)]


def _check_plan(plan):
    """What isn't a plan yet as one without guards."""
    return plan if isinstance(plan, Plan) else Plan(check_codecs(OP, "plan", plan), min_size=0, skip_1d=False)


def _check_schedules(axis_name, schedule, plans):
    """That no ring is outermost: it encodes sums of several ranks on the way, of which no rank knows what it lost."""
    outermost = axis_names(axis_name)[0]
    for plan in plans:
        argument, given = ("plan", plan.schedule) if schedule == "auto" else ("schedule", schedule)
        if (given.get(outermost) if isinstance(given, dict) else given) == "ring" and not all(
            codec.raw or codec.low_rank for codec in plan.codecs
        ):
            raise ValueError(
                f'{OP}: argument \'{argument}\': expected the schedule "two_shot" or "one_shot" over {outermost!r} with '
                'feedback or telemetry, got "ring", which encodes sums of several ranks on the way; pass '
                'schedule="two_shot", or feedback=False without telemetry'
            )


def _flatten(tree):
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [path for path, _ in found], [leaf for _, leaf in found], structure


def _codecs(plan, axis_name, paths, leaves):
    """Of each leaf the codecs that it is encoded with, outermost axis first; none where it travels raw."""
    names, found = axis_names(axis_name), []
    for leaf, (codec, guarded) in zip(leaves, plan.assign(OP, "plan", paths, leaves) if leaves else ()):
        codecs = [codec[name] for name in names if name in codec] if isinstance(codec, dict) else [codec]
        found.append([] if guarded or why_raw(leaf, codecs) else codecs)
    return found


def _ranks(axis_name, axis_size):
    """Of the leading axis of what is per rank the size here, the axes that it varies over, and whether a mesh in
    context has it."""
    try:
        return 1, _compat.tracked_axes(check_axes(OP, axis_name).names), False
    except NameError:
        pass  # outside of shard_map
    names = axis_names(axis_name)
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    found = math.prod(sizes[name] for name in names) if all(name in sizes for name in names) else None
    axis_size = found if axis_size is None else axis_size
    if axis_size is None:
        raise ValueError(
            f"{OP}: argument 'axis_size': expected the number of ranks of {axis_name!r}, which init can't see, got "
            "None; pass it, or call init under jax.set_mesh(mesh) or inside jax.shard_map"
        )
    return axis_size, frozenset(), axis_size == found


def _check_state(axis_name, state, expected):
    """That a state is one for these gradients and this plan: of these shapes and dtypes."""
    if not isinstance(state, CompressState):
        raise TypeError(
            f"{OP}: argument 'state': expected what its init returns, a CompressState, got {type(state).__name__}"
        )
    flatten = functools.partial(jax.tree_util.tree_flatten_with_path, is_leaf=lambda x: x is None)
    (wanted, structure), (found, other) = flatten(expected), flatten(state)
    remedy = "it was made with another plan or other options; go on with those, or take a new one from init"
    if structure != other:
        raise ValueError(f"{OP}: argument 'state': expected the structure {structure}, got {other}: {remedy}")
    spell = lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)
    for (path, want), (_, got) in zip(wanted, found):
        alike = want is not None and got is not None and got.shape == want.shape
        if spell(want) == spell(got) or (
            alike and path[0].name in ("momentum", "trace")
        ):  # which have the dtype of their parameters
            continue
        if alike:
            remedy = "what is kept has the dtype that init gives it, whatever parameters are cast to; cast it back"
        elif (
            want is not None
            and got is not None
            and path[0].name in CompressState.per_rank
            and got.shape[1:] == want.shape[1:]
        ):
            remedy = (
                f"that is of several ranks; shard the state over {axis_name!r}, as jaxcgx.state_specs(state, "
                f"{axis_name!r}) says; "
                "one of another number of ranks is for jaxcgx.reshard_state"
            )
        name = jax.tree_util.keystr(path)
        raise ValueError(f"{OP}: argument 'state'{name}: expected {spell(want)}, got {spell(got)}: {remedy}")

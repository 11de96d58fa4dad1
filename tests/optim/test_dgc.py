"""Tests dgc and bsc: the published algorithms, what they conserve, and what they refuse."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import FULL, assert_same_bytes
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import PARAMS, X, loss_fn, mesh_of

import jaxcgx as cgx
from jaxcgx.optim.warmup import warm_up

RANKS, STEPS, RATE, SEED = 4, 200, 2.0**-4, 6
SHAPES = {"bias": (6,), "kernel": (3, 2, 2, 3), "scalar": (), "weights": (5, 7)}


def numbers(seed, *front):
    """Returns numbers with few different values and few bits. Sums are exact, and some magnitudes are equal."""
    rng = np.random.RandomState(seed)
    return {name: (rng.randint(-64, 65, (*front, *shape)) / 64).astype(np.float32) for name, shape in SHAPES.items()}


def published(grads, params, ratios, knobs, nesterov, momentum_masking, dense, dtype):
    """Runs Deep Gradient Compression as published, and returns (parameters after each step, the closest choice).

    The parameters are {leaf: [steps, settings, size]}. The closest choice is the smallest relative distance between the
    last element that was sent and the next one, if they are not equal. Of equal magnitudes the first ones are sent. The
    rounding error of the dtype is kept.

    Args:
      grads: the gradients of each leaf, [steps, ranks, ...].
      params: the first parameters.
      ratios: the ratio of each step.
      knobs: numbers, [settings, 1].
      nesterov: as in dgc.
      momentum_masking: as in dgc.
      dense: a function of a leaf's name that says whether the leaf travels raw.
      dtype: the dtype of values on the wire.
    """
    count, closest, path = len(knobs["momentum"]), math.inf, []
    flat = {name: g.reshape(len(ratios), RANKS, 1, -1) for name, g in grads.items()}
    zeros = lambda *front: {name: np.zeros((*front, count, p.size), np.float32) for name, p in params.items()}
    u, v, behind, decay = zeros(RANKS), zeros(RANKS), zeros(), zeros()
    params = {name: np.broadcast_to(p.reshape(-1), (count, p.size)) for name, p in params.items()}

    def accelerate(buffer, g):
        buffer[...] = knobs["momentum"] * (buffer + g) if nesterov else knobs["momentum"] * buffer + g
        return buffer + g if nesterov else buffer

    def clipped(g):
        norm = lambda g: np.sqrt(sum(np.square(x, dtype=np.float64).sum(-1, keepdims=True) for x in g))
        scale = lambda limit, norm: np.minimum(1, limit / np.maximum(norm, 1e-30)).astype(np.float32)
        g = {name: np.clip(x, -knobs["clip_value"], knobs["clip_value"]) for name, x in g.items()}
        g = {name: x * scale(knobs["clip_norm"], norm([x])) for name, x in g.items()}
        shares = norm([x / RANKS for x in g.values()])  # gradients as in the paper: their sum is the mean
        return {name: x * scale(RANKS**-0.5 * knobs["clip_global_norm"], shares) for name, x in g.items()}

    for t, ratio in enumerate(ratios):
        own, after = clipped({name: g[t] for name, g in flat.items()}), {}
        for name, p in params.items():
            if dense(name):
                step = accelerate(behind[name], own[name].sum(0) / RANKS)
            else:
                v[name] += accelerate(u[name], own[name])
                k = math.ceil(ratio * p.shape[-1])
                order = np.argsort(-np.abs(v[name]), axis=-1, kind="stable")
                if k < p.shape[-1]:
                    least, most = np.abs(np.take_along_axis(v[name], order[..., k - 1 : k + 1], -1)).transpose(2, 0, 1)
                    closest = min(
                        closest, np.min((least - most) / np.maximum(least, 1e-30), where=least > most, initial=math.inf)
                    )
                chosen, sent = order[..., :k], np.zeros_like(v[name])
                np.put_along_axis(
                    sent, chosen, np.take_along_axis(v[name], chosen, -1).astype(dtype).astype(np.float32), -1
                )
                v[name] -= sent
                if momentum_masking and ratio < 1:
                    np.put_along_axis(u[name], chosen, 0, -1)
                step = sent.sum(0) / RANKS
            after[name] = p - np.float32(RATE) * (step + accelerate(decay[name], knobs["weight_decay"] * p))
        params = after
        path.append(params)
    return {name: np.stack([step[name] for step in path]) for name in params}, closest


HALF = cgx.Cast("float16")
CLIPS = dict(clip_value=(math.inf, 0.5), clip_norm=(math.inf, 1.0), clip_global_norm=(math.inf, 0.5))
CROSSED = dict(**CLIPS, weight_decay=(0.0, 2.0**-7), momentum=(0.5, 0.875))


# By default every pair of the three settings.
@pytest.mark.parametrize(
    ("nesterov", "momentum_masking", "values"),
    [
        (nesterov, masking, HALF if half else cgx.Raw())
        for nesterov, masking, half in itertools.product([True, False], repeat=3)
        if FULL or half == (nesterov == masking)
    ],
    ids=str,
)
def test_the_published_recursion(nesterov, momentum_masking, values):
    """All settings are combined in 200 steps. Bits agree if numbers are only added and multiplied by powers of two."""
    grads, params = numbers(SEED, STEPS, RANKS), numbers(2)
    settings = {name: np.float32(x) for name, x in zip(CROSSED, np.array(list(itertools.product(*CROSSED.values()))).T)}
    # For every setting, some leaves travel raw and others don't.
    skip_1d, min_size = nesterov, 36 if values == HALF else 0
    static = dict(nesterov=nesterov, momentum_masking=momentum_masking)

    def steps(knobs, grads):
        transformation = cgx.dgc(
            "data",
            0.05,
            select="exact",
            schedule="one_shot",
            values=values,
            skip_1d=skip_1d,
            min_size=min_size,
            warmup_epochs=2,
            warmup_coeff=[1, 0.2],
            steps_per_epoch=10,
            **static,
            **knobs,
        )

        def step(carry, g):
            params, state = carry
            updates, state = transformation.update(g, state, params)
            params = jax.tree.map(lambda p, x: p - RATE * x, params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, transformation.init(params)), grads)[1]

    ranks = jax.vmap(steps, axis_name="data", in_axes=(None, 1), out_axes=None)
    found = jax.jit(jax.vmap(ranks, in_axes=(0, None), out_axes=1))(settings, grads)
    ratios = [1] * 10 + [0.2] * 10 + [0.05] * (STEPS - 20)
    dense = lambda name: (params[name].ndim < 2 and skip_1d) or params[name].size < min_size
    knobs = {name: x[:, None] for name, x in settings.items()}
    expected, closest = published(
        grads, params, ratios, knobs, dense=dense, dtype=np.float16 if values == HALF else np.float32, **static
    )
    assert closest > 1e-6  # otherwise rounding could decide which elements are sent; SEED is chosen so that it doesn't
    exact = (settings["momentum"] == 0.5) & np.isinf(settings["clip_norm"]) & np.isinf(settings["clip_global_norm"])
    for name in params:
        got, want = np.asarray(found[name]).reshape(expected[name].shape), expected[name]
        if not dense(name):  # for dense leaves, weight decay and the mean share one momentum
            assert_same_bytes(got[:, exact], want[:, exact])
        # If a value is near the midpoint of two float16 numbers, its rounding to float32 decides. The difference is up
        # to 8 * 2**-10, divided by the number of ranks, times the rate.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2.0**-13 if values == HALF else 1e-5)


def test_warm_up():
    """The ratios are those of the original's table, of the paper, and of a list."""
    np.testing.assert_allclose(
        list(warm_up(0.001, 5, None, 1).values()), [0.316, 0.1, 0.0316, 0.01, 0.00316, 0.001], rtol=1e-2
    )
    # The last epoch's ratio is the final one, so no further step follows it.
    assert warm_up(0.001, 5, 0.25, 1) == {0: 0.25, 1: 0.0625, 2: 0.015625, 3: 0.00390625, 4: 0.001}
    assert warm_up(0.001, 2, (1, 0.5), 7) == {0: 1, 7: 0.5, 14: 0.001} and warm_up(0.001, 0, None, None) == {0: 0.001}


AXES = "dc", "local"
SPARSIFIERS = {
    "dgc": ("data", cgx.dgc("data", 0.1, momentum=0.5, axis_size=RANKS, schedule="two_shot")),
    "dgc, float16": (
        "data",
        cgx.dgc("data", 0.1, momentum=0.5, values=HALF, select="fitted", axis_size=RANKS, schedule="one_shot"),
    ),
    "dgc, two axes": (AXES, cgx.dgc(AXES, 0.1, momentum=0.5, select="exact", axis_size=RANKS, schedule="one_shot")),
    "bsc": (AXES, cgx.bsc(AXES, 0.1, 10, momentum=0.5, axis_size=RANKS)),
    "mpq, warm-up": (
        AXES,
        cgx.mpq(AXES, 0.1, 10, momentum=0.5, warmup_epochs=1, warmup_coeff=0.5, steps_per_epoch=3, axis_size=RANKS),
    ),
    "bsc, top": (AXES, cgx.bsc(AXES, 0.1, 10, momentum=0.5, pull="top", axis_size=RANKS, schedule="two_shot")),
}


@pytest.mark.parametrize("name", SPARSIFIERS)
def test_conservation(name):
    """At every step and over all ranks, sent + kept = given + kept before.

    All bits agree, because sums of these numbers are exact.
    """
    axes, transformation = SPARSIFIERS[name]
    shape = (2, 2) if axes == AXES else (RANKS,)
    mesh = jax.make_mesh(
        shape,
        axes if axes == AXES else (axes,),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[:RANKS],
    )
    grads = jax.tree.map(lambda g: np.round(g * 4), numbers(3, RANKS))
    state = transformation.init(jax.tree.map(lambda g: g[0], grads))
    specs = cgx.state_specs(state, axes)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), specs), out_specs=(P(), specs))
    def step(grads, state):
        return transformation.update(jax.tree.map(lambda g: g[0], grads), state)

    total, shares = lambda x: np.asarray(x, np.float64).sum(0), []
    for _ in range(6):
        mean, after = jax.block_until_ready(step(grads, state))
        for leaf in ("kernel", "weights"):
            moved = 0.5 * state.momentum[leaf] + grads[leaf]
            sent = RANKS * np.asarray(mean[leaf], np.float64)
            np.testing.assert_array_equal(
                sent + total(after.residuals[leaf]), total(moved) + total(state.residuals[leaf])
            )
            masked = np.asarray(after.momentum[leaf] != moved)
            assert (np.asarray(after.momentum[leaf])[masked] == 0).all() and ((sent != 0) <= masked.any(0)).all()
            assert 0 < (sent != 0).mean() < 1 and np.abs(after.residuals[leaf]).sum() > 0
            shares.append(masked.mean())
            if axes == AXES:  # all ranks of a data center
                (a, b), (c, d) = (np.asarray(x).reshape(2, 2, -1).transpose(1, 0, 2) for x in (masked, moved))
                assert ((a == b) | (c == 0) | (d == 0)).all()
        state = after
    if "warm-up" in name:
        assert min(shares[:6]) > 2 * max(shares[6:])


@pytest.mark.parametrize("compress", [cgx.bsc, cgx.mpq])
def test_a_warm_up_that_sends_everything_masks_nothing(compress):
    """Large leaves keep their momentum, like small ones. dgc does the same."""
    grads = {"large": np.ones((RANKS, 300), np.float32), "small": np.ones((RANKS, 3), np.float32)}

    def steps(**given):
        optimizer = compress("data", size_bound=100, momentum=0.5, **given)

        def rank(grads):
            state, found = optimizer.init(grads), []
            for _ in range(3):
                updates, state = optimizer.update(grads, state)
                found.append(updates)
            return found

        return jax.jit(jax.vmap(rank, axis_name="data"))(grads)

    for given in (dict(warmup_epochs=1, warmup_coeff=[1.0], steps_per_epoch=9), dict(threshold=1)):
        for updates, momentum in zip(steps(**given), (1.0, 1.5, 1.75)):
            assert all((np.asarray(x) == momentum).all() for x in updates.values())


@pytest.mark.parametrize("mask", ["function", "tree", "prefix"])
def test_a_mask_of_weight_decay(mask):
    """Leaves outside of the mask have the same bits as without weight decay, and others as with it.

    This holds for leaves that travel raw and for others.
    """
    grads, params = numbers(3, 4, RANKS), {"all": numbers(2)}
    chosen = {name: i % 2 == 0 for i, name in enumerate(params["all"])}
    masks = dict(function=lambda params: jax.tree.map(lambda _: True, params) | {"all": chosen})
    masks |= dict(tree={"all": chosen}, prefix={"all": False})

    def steps(weight_decay, mask):
        given = dict(weight_decay=weight_decay, weight_decay_mask=mask, nesterov=True, min_size=36)
        optimizer = optax.chain(cgx.dgc("data", 0.05, **given), optax.sgd(RATE))

        def rank(grads):
            p, state = params, optimizer.init(params)
            for t in range(4):
                updates, state = optimizer.update({"all": {k: g[t] for k, g in grads.items()}}, state, p)
                p = optax.apply_updates(p, updates)
            return p["all"]

        return jax.jit(jax.vmap(rank, axis_name="data"))(grads)

    none, full, masked = steps(None, None), steps(0.125, None), steps(0.125, masks[mask])
    for name in chosen:
        decays = mask != "prefix" and chosen[name]
        np.testing.assert_array_equal(masked[name], (full if decays else none)[name])
        assert (np.asarray(full[name]) != np.asarray(none[name])).any()


def test_states():
    """States are those of compress_gradients. Their residuals can be divided among another number of ranks."""
    plan = dict(min_size=1000, select="exact")
    train_step = cgx.make_train_step(
        loss_fn, optax.sgd(0.1), mesh_of(RANKS), compress=cgx.dgc, ratio=0.02, weight_decay=1e-3, telemetry=True, **plan
    )
    params, state = train_step.init(PARAMS)
    losses = []
    for _ in range(20):
        params, state, metrics = jax.block_until_ready(train_step.step(params, state, X))
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.9 * losses[0] and 0 < metrics.telemetry.vnmse["w"] < 1 and metrics.telemetry.vnmse["b"] == 0
    kept = state[0]
    assert [kept.residuals["b"], kept.momentum["b"]] == [None, None] and kept.trace["b"].any() and kept.count == 20
    assert jax.tree.structure(state[0]) == jax.tree.structure(
        cgx.dgc("data", 0.02, weight_decay=1e-3, telemetry=True, axis_size=RANKS, **plan).init(PARAMS)
    )
    two = cgx.reshard_state(state, 2)[0]
    np.testing.assert_allclose(two.residuals["w"].sum(0), np.asarray(kept.residuals["w"]).sum(0), atol=1e-6)
    np.testing.assert_allclose(two.momentum["w"].mean(0), np.asarray(kept.momentum["w"]).mean(0), atol=1e-6)
    assert_same_bytes(np.asarray(two.trace["w"]), np.asarray(kept.trace["w"]))


def test_an_overflow_does_not_stay():
    """Some NaNs of a leaf are sent. After that, all of them are gone."""
    grads, transformation = jnp.ones((RANKS, 5, 7)), cgx.dgc("data", 0.1, select="exact", clip_global_norm=1.0)
    steps = lambda *grads: functools.reduce(
        lambda carry, g: transformation.update(g, carry[1]), grads, (None, transformation.init(grads[0]))
    )
    bad, zeros = grads.at[2].set(jnp.nan), jnp.zeros_like(grads)
    mean, state = jax.jit(jax.vmap(steps, axis_name="data", out_axes=(None, 0)))(grads, bad, zeros)
    assert (
        jnp.isfinite(mean).all()
        and all(jnp.isfinite(x).all() for x in (state.residuals, state.momentum))
        and mean.any()
    )


def test_sparse_local_steps():
    """In SparseLoCo's combination, ranks train alone for some steps, and then send 1.6 % of the change in 2 bits."""

    def train(codec, rounds=150, steps=10, **options):
        outer = cgx.compressed(optax.sgd(0.7), "data", codec, **options)

        def one(x):
            def round_(carry, _):
                params, state = carry
                local = jax.lax.fori_loop(
                    0, steps, lambda _, p: jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss_fn)(p, x)), params
                )
                updates, state = outer.update(jax.tree.map(jnp.subtract, params, local), state)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(round_, (PARAMS, outer.init(PARAMS)), length=rounds)[0][0]

        return jax.jit(jax.vmap(one, axis_name="data", out_axes=None))(X.reshape(RANKS, -1, 30))

    codec = cgx.TopK(0.016, cgx.MaxMin(2, 64))
    plan = cgx.Plan(codec, min_size=100)
    start, dense, sparse, forgetful = (
        float(loss_fn(params, X)) for params in (PARAMS, train(cgx.Raw()), train(plan), train(plan, feedback=False))
    )
    assert dense < 0.1 * start and sparse < 0.2 * start and sparse < 0.8 * forgetful
    assert codec.wire_bytes((30, 40), jnp.float32) < 4800 / 50


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: cgx.dgc("data", 0), ValueError, says("dgc", "ratio", expected="number 0 1", got="0")),
        (lambda: cgx.dgc("data", "1%"), TypeError, says("dgc", "ratio", expected="number 0 1", got="'1%'")),
        (
            lambda: cgx.dgc("data", jnp.float32(0.1)),
            TypeError,
            says("dgc", "ratio", expected="number 0 1", got="Array(0.1"),
        ),
        (
            lambda: jax.jit(lambda ratio: cgx.dgc("data", ratio))(0.1),
            TypeError,
            says("dgc", "ratio", expected="number 0 1", got=""),
        ),
        (
            lambda: cgx.dgc("data", plan=cgx.MaxMin(4)),
            TypeError,
            says("dgc", "plan", expected="none ratio values min_size skip_1d", got="MaxMin("),
        ),
        (
            lambda: cgx.bsc("data", plan=cgx.MaxMin(4)),
            TypeError,
            says("bsc", "plan", expected="none threshold size_bound", got="MaxMin("),
        ),
        (
            lambda: cgx.dgc("data", values=cgx.PowerSGD(2)),
            ValueError,
            says("dgc", "values", expected="codec array", got="PowerSGD(rank=2)"),
        ),
        (
            lambda: cgx.dgc("data", select="random"),
            ValueError,
            says("dgc", "select", expected="'exact' 'sampled' 'fitted'", got="'random'"),
        ),
        (
            lambda: cgx.dgc("data", clip_norm=0),
            ValueError,
            says("dgc", "clip_norm", expected="positive number", got="0"),
        ),
        (
            lambda: cgx.dgc("data", clip_value="a"),
            TypeError,
            says("dgc", "clip_value", expected="positive number", got="'a'"),
        ),
        (
            lambda: cgx.dgc("data", warmup_epochs=-1),
            ValueError,
            says("dgc", "warmup_epochs", expected="integer 0", got="-1"),
        ),
        (
            lambda: cgx.dgc("data", warmup_epochs=4),
            TypeError,
            says("dgc", "steps_per_epoch", expected="positive integer 'warmup_epochs'", got="None"),
        ),
        (
            lambda: cgx.dgc("data", warmup_coeff=0.25),
            ValueError,
            says("dgc", "warmup_epochs", expected="positive integer 'warmup_coeff' 'steps_per_epoch'", got="0"),
        ),
        (
            lambda: cgx.dgc("data", steps_per_epoch=9),
            ValueError,
            says("dgc", "warmup_epochs", expected="positive integer 'warmup_coeff' 'steps_per_epoch'", got="0"),
        ),
        (
            lambda: cgx.dgc("data", warmup_epochs=2, warmup_coeff=[0.1], steps_per_epoch=9),
            ValueError,
            says("dgc", "warmup_coeff", expected="ratio 2 epochs", got="[0.1]"),
        ),
        (
            lambda: cgx.dgc("data", warmup_epochs=1, warmup_coeff=[2], steps_per_epoch=9),
            ValueError,
            says("dgc", "warmup_coeff", expected="number 0 1 list", got="2"),
        ),
        (lambda: cgx.dgc("data", momentum=1), ValueError, says("dgc", "momentum", expected="number 0 1", got="1")),
        (
            lambda: cgx.bsc("data", size_bound=-1),
            ValueError,
            says("bsc", "size_bound", expected="integer 0 2^40", got="-1"),
        ),
        (
            lambda: cgx.bsc("data", threshold=2),
            ValueError,
            says("bsc", "threshold", expected="number above 0 1", got="2"),
        ),
        (
            lambda: cgx.bsc("data", threshold=0),
            ValueError,
            says("bsc", "threshold", expected="number above 0 1", got="0", remedy="0 large leaves 0.01 1"),
        ),
        (
            lambda: cgx.mpq("data", threshold=0),
            ValueError,
            says("mpq", "threshold", expected="number above 0 1", got="0", remedy="0.01"),
        ),
        (lambda: cgx.mpq("data", plan=cgx.Raw()), TypeError, says("mpq", "plan", expected="none", got="Raw()")),
        (
            lambda: cgx.bsc("data", steps_per_epoch=3),
            ValueError,
            says("bsc", "warmup_epochs", expected="positive integer steps_per_epoch", got="0"),
        ),
        (lambda: cgx.bsc("data", beta=2), ValueError, says("bsc", "beta", expected="number above 0 1", got="2")),
        (
            lambda: cgx.dgc("data", fedback=True),
            TypeError,
            says("dgc", "fedback", expected="option of dgc (ratio, momentum, feedback", got="True"),
        ),
        (
            lambda: cgx.mpq("data", thresold=0.1),
            TypeError,
            says("mpq", "thresold", expected="option of mpq (threshold, size_bound, feedback", got="0.1"),
        ),
        (
            lambda: cgx.wan.mixed_sync("data", stalenes=2),
            TypeError,
            says("mixed_sync", "stalenes", expected="option of mixed_sync (plan, staleness, feedback", got="2"),
        ),
        (
            lambda: cgx.wan.Differential()("data", plans=cgx.Raw()),
            TypeError,
            says("Differential", "plans", expected="option of Differential (plan, feedback", got="Raw()"),
        ),
        (
            lambda: cgx.compressed(optax.sgd(0.1), "data", cgx.Raw(), ratio=0.1),
            TypeError,
            says("compressed", "ratio", expected="option of compressed (feedback", got="0.1"),
        ),
        (
            lambda: jax.shard_map(
                lambda g: cgx.dgc("data").update(g, cgx.dgc("data").init(g)),
                mesh=mesh_of(2),
                in_specs=P(),
                out_specs=P(),
            )(PARAMS),
            ValueError,
            says(
                "dgc", "updates", at="leaf ['b']", expected="varies over 'data'", remedy="jaxcgx.local_value_and_grad"
            ),
        ),
        (
            lambda: cgx.dgc("data", axis_size=2).update(PARAMS, ()),
            NameError,
            says("dgc", "axis_name", expected="no axis 'data'", remedy="jaxcgx.make_train_step compress=jaxcgx.dgc"),
        ),
        (
            lambda: jax.vmap(
                lambda g: cgx.dgc("data", weight_decay=0.1).update(g, cgx.dgc("data", weight_decay=0.1).init(g)),
                axis_name="data",
            )(numbers(1, 2)),
            ValueError,
            says("dgc", "params", expected="'weight_decay'", got="None", remedy="update(gradients, state, params)"),
        ),
        (
            lambda: jax.vmap(
                lambda g: cgx.dgc("data", weight_decay=0.1, weight_decay_mask={"w": True}).update(
                    g, cgx.dgc("data", weight_decay=0.1).init(g), g
                ),
                axis_name="data",
            )(numbers(1, 2)),
            ValueError,
            says("dgc", "weight_decay_mask", expected="a tree of bools like the parameters", got="{'w': True}"),
        ),
        (
            lambda: cgx.dgc("data", weight_decay_mask=True),
            ValueError,
            says("dgc", "weight_decay_mask", expected="None without 'weight_decay'", got="True"),
        ),
        (
            lambda: cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh_of(2), compress=None),
            TypeError,
            says("make_train_step", "compress", expected="jaxcgx.compress_gradients jaxcgx.dgc jaxcgx.bsc", got="None"),
        ),
    ],
    ids=[
        "ratio",
        "no number",
        "array",
        "traced",
        "plan",
        "plan of BSC",
        "values",
        "selection",
        "norm",
        "value",
        "epochs",
        "no steps",
        "no epochs",
        "steps without epochs",
        "list",
        "in the list",
        "momentum",
        "size",
        "threshold",
        "nothing",
        "threshold of MPQ",
        "plan of MPQ",
        "steps of BSC without epochs",
        "option",
        "no option",
        "no option of MPQ",
        "no option of mixed_sync",
        "no option of Differential",
        "no option of compressed",
        "reduced gradients",
        "no axis",
        "no parameters",
        "mask",
        "mask of nothing",
        "compress",
    ],
)
def test_bad_arguments(make, error, words):
    with raises(error, words):
        make()

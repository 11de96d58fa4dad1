"""Tests differential transmission: what travels when, what is conserved, and what is refused."""

import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps
from errors import table
from helpers import FULL, mesh_with
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks, whole_numbers
from started import Processes, free_port
from training import loss_fn

import jaxcgx as cgx
from jaxcgx.wan.geomx import differential
from jaxcgx.wan.geomx.differential import Differential

RANKS, STEPS, BLOCK = 4, 6, 8  # a block of 8 float32 is 32 bytes
# One block, two blocks, and thirteen blocks, of which the last one has 3 elements.
SHAPES = {"bias": (5,), "short": (3, 4), "wide": (9, 11)}
SHARES = {"short": 1, "wide": 6}  # round(0.5 * blocks)
GRADS = {name: np.asarray(whole_numbers((STEPS, RANKS, *s), i)) for i, (name, s) in enumerate(SHAPES.items())}
MEANS = {name: g.mean(1) for name, g in GRADS.items()}
params = lambda: {"w": jnp.asarray(whole_numbers((64, 32), 5)) / 16, "b": jnp.zeros(32)}


def updates_of(how, losses=None, names=tuple(SHAPES)):
    """Returns (the updates of every step, which must be the same on every rank, the last states of all ranks)."""
    given = {name: GRADS[name] for name in names}

    def of_rank(grads):
        transformation = cgx.compress_gradients("data", how)

        def step(state, given):
            g, loss = given
            updates, state = transformation.update(g, state, value=loss)
            return state, updates

        first = transformation.init(jax.tree.map(lambda g: g[0], grads))
        state, updates = jax.lax.scan(step, first, (grads, jnp.float32(losses or [1] * STEPS)))
        return updates, state

    run = jax.jit(jax.vmap(of_rank, in_axes=1, out_axes=0, axis_name="data"))
    updates, state = jax.tree.map(np.asarray, run(given))
    state = types.SimpleNamespace(**state.own._asdict(), **state.shared._asdict())
    for x in jax.tree.leaves(updates):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    return jax.tree.map(lambda x: x[0], updates), state


def blocks(x):
    """Returns a leaf as [blocks, BLOCK]."""
    flat = x.reshape(-1)
    return np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def transcribed(name, rest, alpha=0.3):
    """Differential transmission in NumPy.

    Returns the update of every step, in blocks, and the residuals of every rank.
    """
    grads = np.stack([[blocks(g) for g in step] for step in GRADS[name]])
    real = np.minimum(BLOCK, MEANS[name][0].size - BLOCK * np.arange(grads.shape[2])).astype(np.float32)
    held, late = np.zeros_like(grads[:2])
    contributions, found = np.zeros(len(real), np.float32), []
    for t, g in enumerate(grads):
        sent = g + held
        order = np.argsort(-contributions, kind="stable")
        now = order if t == 0 else order[: SHARES[name]]
        magnitude = (np.abs(sent).sum(-1) / real).mean(0, dtype=np.float32)
        contributions = np.float32(alpha) * contributions + np.float32(1 - alpha) * magnitude
        update = late.mean(0)
        update[now] += sent.mean(0)[now]
        left = sent.copy()
        left[:, now] = 0
        late, held = (left, held) if rest == "defer" else (late, left)
        found.append(update)
    return np.stack(found), late if rest == "defer" else held


@pytest.mark.parametrize("rest", ["defer", "drop"])
def test_the_steps_are_those_of_numpy(rest):
    """All bits agree, because sums of whole numbers are exact. The rest is pending or held back, so nothing is lost."""
    updates, state = updates_of(Differential(cgx.Raw(), k=0.5, block_bytes=4 * BLOCK, rest=rest))
    np.testing.assert_array_equal(updates["bias"], MEANS["bias"])  # it has one block
    for name in SHARES:
        expected, left = transcribed(name, rest)
        np.testing.assert_array_equal([blocks(x) for x in updates[name]], expected)
        np.testing.assert_array_equal(updates[name][0], MEANS[name][0])  # the first exchange has all blocks
        np.testing.assert_array_equal(expected.sum(0) + left.mean(0), sum(map(blocks, MEANS[name])))
        np.testing.assert_array_equal((state.pending if rest == "defer" else state.residuals)[name].sum(), left.sum())
        assert (np.abs(updates[name][1]).reshape(-1) > 0).sum() <= SHARES[name] * BLOCK


@pytest.mark.parametrize("rest", ["defer", "quantize"])
def test_codecs_have_feedback(rest):
    """The errors of a codec, for important blocks and for others, are in the residuals."""
    plan = cgx.MaxMin(3, 8) if rest == "defer" else cgx.Raw()
    updates, state = updates_of(Differential(plan, k=0.5, block_bytes=4 * BLOCK, rest=rest))
    for name in SHAPES:
        left = updates[name].sum(0) - MEANS[name].sum(0)
        if state.residuals[name] is not None:
            left = left + state.residuals[name].mean(0)[0]
        if rest == "defer" and name in SHARES:
            rows = np.zeros_like(blocks(left))
            rows[state.order[name][0][SHARES[name] :]] = state.pending[name].mean(0)[0]
            left = left + rows.reshape(-1)[: left.size].reshape(left.shape)
        np.testing.assert_allclose(left, 0, atol=1e-4)
    assert any(np.abs(r).max() > 0 for r in jax.tree.leaves(state.residuals))


def sent_blocks(updates, name):
    """Returns which blocks of each step have a number that is not 0."""
    return [set(np.flatnonzero(np.abs(blocks(x)).sum(-1))) for x in updates[name]]


def test_random_blocks():
    """The control sends as many blocks, and different ones in every step."""
    how = Differential(cgx.Raw(), k=0.5, block_bytes=4 * BLOCK, rest="drop", ranked=False, keep=False)
    updates, state = updates_of(how)
    assert jax.tree.leaves(state.residuals) == []  # dropped blocks are lost
    chosen = sent_blocks(updates, "wide")
    assert [len(each) for each in chosen] == [13] + [6] * (STEPS - 1) and len(set(map(frozenset, chosen))) > 3


@pytest.fixture
def few(monkeypatch):
    """Sets fewer sizes of the important part, 0.2, 0.43, 0.67 and 0.9, which are compiled sooner."""
    monkeypatch.setattr(differential, "LEVELS", 4)


def test_an_adaptive_share_follows_the_loss(few):
    how = Differential(cgx.Raw(), k=0.9, block_bytes=4 * BLOCK, rest="drop", adaptive=0.2, keep=False)
    updates, _ = updates_of(how, losses=(4.0, 4.0, 2.0, 0.1, float("nan"), 8.0), names=("wide",))
    # 0.9; 0.45, rounded up to 0.67; 0.2; without a loss, or above the first loss, it is k
    assert list(map(len, sent_blocks(updates, "wide"))) == [13, 12, 9, 3, 12, 12]


def test_a_deferred_rest_of_an_adaptive_share(few):
    how = Differential(cgx.Raw(), k=0.9, block_bytes=4 * BLOCK, adaptive=0.2)
    updates, state = updates_of(how, losses=(4.0, 4.0, 2.0, 0.1, 1.0, 4.0), names=("wide",))
    assert updates["wide"].sum() + state.pending["wide"].mean(0).sum() == MEANS["wide"].sum()


def test_training_over_two_centers():
    """In make_train_step, with a codec between centers, every exchange is in the table."""
    plan = cgx.Plan({"dc": cgx.MaxMin(8, 64), "local": cgx.Raw()}, min_size=64)
    train = over_centers(Differential(plan, k=0.25, block_bytes=256), axis=("dc", "local"), dc=2, local=2)
    batch, state = np.asarray(whole_numbers((8, 64), 7)) / 4, train.init(params())
    table = cgx.explain(train.step, state, batch, show=False)
    state, _ = train.step(train.step(state, batch)[0], batch)
    sent = state.exchange.own
    pending = cgx.reshard_state(state.exchange, 2).own.pending["w"]  # pending sums count with their mean over the ranks
    assert pending.shape[0] == 2 and sent.pending["w"].any()
    np.testing.assert_allclose(pending.mean(0), np.asarray(sent.pending["w"]).mean(0), atol=1e-6)
    between = [c for c in table.collectives if c.axes == ("dc",) and c.codec]
    always, first = ([c.raw_bytes for c in between if c.branch == branch] for branch in (False, True))
    # w has 32 blocks of 256 bytes, 8 of which are important. Each rank sends its half of a center's sums, and of the
    # sums of contributions.
    assert sorted(always) == [4 * 32 // 2, 8 * 256 // 2, 24 * 256 // 2] and first == [24 * 256 // 2]
    late, now, _ = sorted((c.bytes for c in between if not c.branch), reverse=True)
    assert late == 3 * now


def over_centers(exchange, rate=0.5, axis="dc", params=None, **sizes):
    """Returns a training step, by default of two centers."""
    mesh, sharding = mesh_with(**sizes or dict(dc=2)), cgx.Sharding(axis, params=params)
    return cgx.make_train_step(loss_fn, optax.sgd(rate), mesh, exchange, sharding=sharding)


@pytest.mark.parametrize("rest", ["defer", "quantize"])
def test_an_adaptive_share_of_all_blocks(rest, few):
    """0.8 of two blocks are both, which are then sent as without differential transmission."""
    batch, found = np.asarray(whole_numbers((8, 64), 7)) / 4, []
    for exchange in (cgx.MaxMin(4), Differential(cgx.MaxMin(4), adaptive=0.2, rest=rest)):
        state, _ = steps.run(over_centers(exchange, 0.01), 2, params(), batch)
        found.append(np.asarray(state.params["w"]))
    np.testing.assert_array_equal(*found)


def test_an_adaptive_share_compiles_few_exchanges():
    """Each size has one exchange of the important blocks, and one of the others. A fixed share has three in all."""
    found = []
    for adaptive in (None, 0.2):
        train = over_centers(Differential(cgx.Plan(cgx.MaxMin(4)), block_bytes=256, adaptive=adaptive))
        program = train.step.lower(train.init(params()), np.ones((8, 64), np.float32)).as_text()
        found.append(program.count("@jaxcgx_encode("))
    assert found[0] > 0 and found[1] <= found[0] / 3 * (2 * differential.LEVELS + 1)


@pytest.fixture(scope="module", params=[*[2] * FULL, 3])
def late(request):
    """Returns {"RESULT" or "ERROR": what each of several processes has printed after it} (differential_rank.py)."""
    rank, port = pathlib.Path(__file__).with_name("differential_rank.py"), free_port()
    with Processes(*([rank, port, i, request.param] for i in range(request.param))) as started:
        printed = [process.stdout.read() for process in started.running]
    return [dict(re.findall("^(RESULT|ERROR) (.*)$", text, re.MULTILINE)) for text in printed]


def test_late_blocks_are_lost(late):
    """Replicas agree bit for bit. What a rank didn't send is in its residuals, so nothing is lost for good."""
    found, ranks = [json.loads(each["RESULT"]) for each in late], len(late)
    for case in found[0]:
        assert len({each[case]["digest"] for each in found}) == 1, case
        wide, half, bias = np.max([each[case]["lost"] for each in found], 0)
        exact = case in ("never", "always", "some")  # otherwise, decoded means are rounded to bfloat16
        assert wide < 1e-3 and half < (1e-3 if exact else 3) and bias < 1e-3, case
    never, always, some = ([each[case] for each in found] for case in ("never", "always", "some"))
    assert all(each["plain"] and each["late"] == 0 for each in never)
    # Half of the blocks are important. Of the others, a rank owns the sum of a part, which its own gradients reach.
    np.testing.assert_allclose([each["late"] for each in always], 0.5 * (ranks - 1) / ranks, atol=0.05)
    assert len({each[0]["digest"] for each in (never, always, some)}) == 3
    assert 0 < sum(each["late"] for each in some) < sum(each["late"] for each in always)


def test_a_rank_that_dies_among_late_blocks(late):
    errors = [each["ERROR"] for each in late if "ERROR" in each]  # JAX may kill a rank as soon as the first has ended
    assert "ERROR" in late[0] and "ERROR" not in late[-1]
    assert all("UNAVAILABLE: jaxcgx_tcp:" in error for error in errors)
    assert any(f"rank {len(late) - 1}" in error for error in errors)


LED = cgx.Plan({"a": cgx.MaxMin(8), "b": cgx.Raw()}, leader=True)


def over(axis, plan=cgx.Raw()):
    """Traces an exchange whose late blocks are lost."""
    over_ranks = mesh(2, 2) if isinstance(axis, tuple) else mesh(2)
    exchange = Differential(plan, k=0.5, block_bytes=256, rest="late-is-lost")
    transformation = cgx.compress_gradients(axis, exchange, axis_size=over_ranks.size)
    update = lambda g: transformation.update(g, transformation.init(g))[0]
    jax.jit(on_ranks(update, over_ranks)).trace({"w": jnp.ones((*over_ranks.devices.shape, 64, 32))})


def without_a_loss():
    share = Differential(cgx.Raw(), k=0.5, block_bytes=4 * BLOCK, adaptive=0.1)
    adaptive = cgx.compress_gradients("data", share, axis_size=2)
    jax.vmap(lambda g: adaptive.update(g, adaptive.init(g)), axis_name="data")({"w": jnp.ones((2, 99))})


def step_of(**options):
    train = over_centers(Differential(cgx.Raw(), block_bytes=256), **options)
    train.step(train.init(params()), np.ones((8, 64), np.float32))


SHARDS = dict(axis="data", params={"w": P("model", None), "b": P()}, data=2, model=2)
BAD_INPUT = {
    "Differential": [
        (lambda: over("a"), ValueError, "rest", "over ('a',)", "jaxcgx.Tcp(axis)"),
        (lambda: over(cgx.Tcp("a"), cgx.TopK(0.1)), ValueError, "rest", "TopK", "another plan"),
        (lambda: over(cgx.Tcp("a"), cgx.Plan(cgx.MaxMin(4), schedule="one_shot")), ValueError, "rest", "one_shot"),
        (lambda: over((cgx.Tcp("a"), "b"), LED), ValueError, "rest", "leader=True", "another plan"),
        (without_a_loss, TypeError, "value", "nothing", "value=loss"),
        (lambda: step_of(axis=("dc", "local"), dc=1, local=2), ValueError, "axis", "one"),
    ],
    "make_train_step": [(lambda: step_of(**SHARDS), ValueError, "exchange .pending['w']", "one with")],
}
test_bad_input = table(BAD_INPUT)

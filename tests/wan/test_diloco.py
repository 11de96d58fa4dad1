"""Tests Diloco and HFA against NumPy, bit for bit, with every part of them, and what they must never do."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says, table
from helpers import FULL, assert_same_trees, assert_trees, mesh_with, normal, sent
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import save

import jaxcgx as cgx
from jaxcgx.train.state import ExchangeState
from jaxcgx.wan.diloco.diloco import OfCenter, Waiting
from jaxcgx.wan.diloco.fragments import cut

# Numbers with few bits, so that their sums and products are exact in any order. None is -0, because sums may turn it
# into +0.
few_bits = lambda shape, seed: jnp.round(4 * normal(shape, seed)) / 4 + 0
PARAMS = {"w": few_bits((6, 4), 1), "b": few_bits((4,), 2), "s": jnp.float32(0.5)}
X = np.round(4 * np.asarray(normal((12, 8, 6), 3))) / 4  # batches of 8 examples
INNER = optax.sgd(0.25)
NESTEROV = optax.sgd(0.5, momentum=0.5, nesterov=True)


def diloco(outer="nesterov", plan=cgx.Raw(), every=500, **options):
    return cgx.wan.Diloco(plan, every, outer=outer, **options)


def quadratic(params, x):
    """A loss with exact gradients."""
    target = x.mean(0)
    return ((params["w"] - target[:, None]) ** 2).sum() / 2 + (params["b"] ** 2).sum() + params["s"] ** 2


def mesh_of(centers=2, local=1, kind=AxisType.Auto):
    return mesh_with(kind, dc=centers, **dict(local=local) if local > 1 else {})


def trainer(rounds, mesh=None, loss=quadratic, optimizer=INNER, axis=None, **options):
    mesh = mesh or mesh_of()
    return cgx.make_train_step(loss, optimizer, mesh, rounds, sharding=cgx.Sharding(axis or mesh.axis_names), **options)


def run(train, steps=8, state=None, batch=lambda t: X[t % len(X)]):
    """Returns [(outer parameters, metrics) after each step], and the last state."""
    state = train.init(PARAMS) if state is None else state
    found = []
    for t in range(steps):
        state, metrics = train.step(state, jnp.asarray(batch(t)))
        found.append((jax.tree.map(np.array, state.params), jax.device_get(metrics)))
    return found, state


def parts(state):
    """Returns (what each center has of each fragment, what is the same in every center)."""
    return [part.own for part in state.exchange.parts], [part.shared for part in state.exchange.parts]


class Transcription:
    """DiLoCo of `quadratic` over two centers, in NumPy. Each of the ranks trains alone, with SGD of rate `inner`."""

    def __init__(self, params=PARAMS, x=X, inner=0.25, ranks=2):
        self.x, self.inner = x, inner
        self.outer = {name: np.array(x) for name, x in params.items()}
        self.own = [{name: np.array(x) for name, x in params.items()} for _ in range(ranks)]
        self.velocity = {name: np.zeros_like(x) for name, x in self.outer.items()}
        self.t = 0

    def train(self):
        for m, params in enumerate(self.own):
            target = self.x[self.t % len(X)].reshape(len(self.own), -1, 6)[m].mean(0)
            gradients = {"w": params["w"] - target[:, None], "b": 2 * params["b"], "s": 2 * params["s"]}
            for name, g in gradients.items():
                params[name] = np.array(params[name] - self.inner * g, np.float32)
        self.t += 1

    def moved(self, rows):
        """Returns the mean of outer gradients of {parameter: rows}, from the first rank of each center."""
        centers = self.own[:: len(self.own) // 2]
        return {name: sum(self.outer[name][at] - own[name][at] for own in centers) / 2 for name, at in rows.items()}

    def step(self, mean, rows, rate, momentum, alpha=0.0):
        """Does Nesterov's outer step for {parameter: rows}."""
        for name, at in rows.items():
            self.velocity[name][at] = momentum * self.velocity[name][at] + mean[name]
            self.outer[name][at] -= rate * (mean[name] + momentum * self.velocity[name][at])
            for own in self.own:
                own[name][at] = alpha * own[name][at] + (1 - alpha) * self.outer[name][at]


WHOLE = {"w": ..., "b": ..., "s": ...}
HALVES = [{"w": slice(0, 3), "b": ...}, {"w": slice(3, 6), "s": ...}]  # the two fragments of PARAMS
bf16 = lambda x: np.float32(jnp.asarray(x, jnp.bfloat16))
# Only outer gradients are rounded.
BF16 = dict(plan=cgx.Plan.every(cgx.Cast("bfloat16"), schedule="one_shot", own="encoded"))


@pytest.mark.short
@pytest.mark.parametrize(
    "mesh", [mesh_of(), mesh_of(kind=AxisType.Explicit), mesh_of(local=2)], ids=("auto", "explicit", "two levels")
)
def test_to_the_bit(mesh):
    """This also holds if two ranks share a center's batch. Outer parameters change only in every third step."""
    got, _ = run(trainer(diloco(NESTEROV, every=3), mesh), 7)
    expected = Transcription()
    for t, (params, metrics) in enumerate(got, 1):
        own = jax.tree.map(np.copy, expected.own)
        expected.train()
        if t % 3 == 0:
            expected.step(expected.moved(WHOLE), WHOLE, 0.5, 0.5)
            assert (params["w"] != got[t - 2][0]["w"]).any()
        assert_same_trees(params, expected.outer)
        if "local" in mesh.axis_names:
            continue
        losses = [quadratic(each, X[t - 1].reshape(2, -1, 6)[m]) for m, each in enumerate(own)]
        np.testing.assert_allclose(metrics.loss, losses, rtol=1e-6)


FORMS = {
    "in one step": dict(every=3, telemetry=True),
    "streaming": dict(every=4, fragments=2, overlap=1, alpha=0.5, telemetry=True),
    "eager": dict(every=2, eager=True),
}


@pytest.mark.parametrize(
    ("form", "local"),
    [(form, local) for form in FORMS for local in (1, 2) if FULL or local == 1 + (form == "streaming")],
)
def test_traced_calls_are_the_same(form, local):
    """Python chooses programs by the step; a traced call has conditionals. Two runs take turns, with two states."""
    train = trainer(diloco(NESTEROV, **FORMS[form], plan=cgx.Plan(cgx.MaxMin(2, 8), min_size=0)), mesh_of(local=local))
    first, second, kept = train.init(PARAMS), train.init(PARAMS), []
    for x in X[:9]:
        first, metrics = train.step(first, jnp.asarray(x))
        second, _ = train.step(second, batch=jnp.asarray(x), key=None)
        kept.append(metrics)
    step = lambda state, x: (train.step(state, x)[0], None)
    scanned, _ = jax.jit(lambda state: jax.lax.scan(step, state, X[:9]))(train.init(PARAMS))
    traced = jax.jit(lambda *args: train.step(*args))
    third = train.init(PARAMS)
    for x, metrics in zip(X[:9], kept):
        third, expected = traced(third, jnp.asarray(x))
        assert_same_trees(metrics, expected)
    for other in (second, third, scanned):
        assert_same_trees(first, other)


def test_a_traced_call_that_closes_over_its_state():
    train = trainer(diloco(every=2), donate=False)
    state = train.init(PARAMS)
    for x in jnp.asarray(X[:3]):
        found = jax.jit(lambda x, state=state: train.step(state, x))(x)
        state, metrics = train.step(state, x)
        assert_same_trees(found, (state, metrics))


def test_optimizers_that_vmap_would_change():
    """Schedules may call Python, and a branch that isn't taken doesn't run."""
    calls = []
    rate = lambda count: jax.pure_callback(lambda c: np.float32(0.25), jax.ShapeDtypeStruct((), jnp.float32), count)

    def watch(updates, _):
        jax.lax.cond(updates["s"] > 1e6, lambda: jax.debug.callback(calls.append, 1), lambda: None)
        return updates

    inner = optax.chain(optax.stateless(watch), optax.sgd(rate))
    expected, _ = run(trainer(diloco(NESTEROV, every=3)), 7)
    found, _ = run(trainer(diloco(NESTEROV, every=3), optimizer=inner), 7)
    jax.effects_barrier()
    assert not calls
    for (got, _), (params, _) in zip(found, expected):
        assert_same_trees(got, params)


def test_arrays_are_placed():
    """A step without an exchange returns the outer parameters and the states of exchanges as they are."""
    train = trainer(diloco(NESTEROV, every=4))
    state, _ = train.step(train.init(PARAMS), X[0])
    placed = lambda tree: all(isinstance(x, jax.Array) and x.sharding.mesh == mesh_of() for x in jax.tree.leaves(tree))
    for given in (state.replace(params=jax.tree.map(np.asarray, state.params)), jax.tree.map(np.asarray, state)):
        assert placed(train.step(given, X[1])[0])


def test_hfa_to_the_bit():
    """The ranks of a center have the same parameters after each average, and those of all centers after an exchange."""
    train = trainer(cgx.wan.HFA(cgx.Raw(), k1=2, k2=2), mesh_of(local=2), donate=False)
    state, expected = train.init(PARAMS), Transcription(ranks=4)
    for t, x in enumerate(X[:9], 1):
        state, _ = train.step(state, x)
        expected.train()
        for first, second in (expected.own[:2], expected.own[2:]) if t % 2 == 0 else ():
            for name in PARAMS:
                first[name] = second[name] = np.array((first[name] + second[name]) / 2)
        if t % 4 == 0:
            expected.step(expected.moved(WHOLE), WHOLE, rate=1.0, momentum=0.0)
        rows = {name: np.stack([own[name] for own in expected.own]) for name in PARAMS}
        assert_trees(np.testing.assert_array_equal, (state.params, state.exchange.params.rows), (expected.outer, rows))
    traced, other = jax.jit(lambda *args: train.step(*args)), train.init(PARAMS)
    for x in X[:9]:
        other, _ = traced(other, x)
    assert_same_trees(state, other)


def test_streaming_to_the_bit():
    """Two fragments, each exchanged in its own step, and mixed in a step later. w is cut."""
    got, state = run(trainer(diloco(NESTEROV, every=4, fragments=2, overlap=1, alpha=0.5, telemetry=True)), 9)
    expected, arriving, last, rho = Transcription(), {}, {}, {}
    for t, (params, _) in enumerate(got, 1):
        expected.train()
        if t in arriving:
            p, mean = arriving.pop(t)
            before = jax.tree.map(np.copy, expected.outer)
            expected.step(mean, HALVES[p], 0.5, 0.5, alpha=0.5)
            flat = lambda tree: np.concatenate([np.ravel(tree[name]) for name in HALVES[p]])
            d, old = flat(mean), last.get(p, 0 * flat(mean))
            step = np.concatenate([np.ravel(expected.outer[n][at] - before[n][at]) for n, at in HALVES[p].items()])
            rho[p] = -(step @ d) / (d @ d), (d @ old) / np.sqrt((d @ d) * (old @ old) or 1)
            last[p] = d
        if t % 2 == 0:
            p = t // 2 % 2
            arriving[t + 1] = p, expected.moved(HALVES[p])
        assert_same_trees(params, expected.outer)
    rows = {name: np.stack([own[name] for own in expected.own]) for name in PARAMS}
    assert_same_trees(state.exchange.params.rows, rows)
    for p, telemetry in enumerate(got[-1][1].telemetry.outer):
        np.testing.assert_allclose((telemetry.gain, telemetry.rho), rho[p], rtol=1e-4)


def test_eager_fragments_of_centers_of_two_ranks_keep_what_compression_loses():
    """Two ranks share a center's batch. A fragment's residuals are what bfloat16 lost of its outer gradients."""
    got, state = run(trainer(diloco(optax.sgd(0.5), every=4, fragments=2, eager=True, **BF16), mesh_of(2, 2)), 10)
    expected, means = Transcription(), {}
    start, lost = jax.tree.map(np.copy, expected.own), jax.tree.map(np.zeros_like, expected.own)
    for t, (params, _) in enumerate(got, 1):
        expected.train()
        for name, at in HALVES[t // 2 % 2].items() if t % 2 == 0 else ():
            if t > 4:
                expected.outer[name][at] -= 0.5 * means[name, str(at)]
            sent = []
            for first, own, residual in zip(start, expected.own, lost):
                moved = first[name][at] - own[name][at]
                sent.append(bf16(moved + residual[name][at]))
                residual[name][at] = moved + residual[name][at] - sent[-1]
                first[name][at] = own[name][at] = expected.outer[name][at] - 0.25 * moved
            means[name, str(at)] = (sent[0] + sent[1]) / 2
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        assert_trees(close, params, expected.outer)
    for own, half in zip(parts(state)[0], HALVES):
        for name, at in half.items():
            close(own.residuals[name], np.stack([each[name][at] for each in lost]))
            assert own.residuals[name].any()


@pytest.mark.parametrize("local, ratio", [(1, 1.0), (2, 1.0), (1, 0.25)])
def test_pulseloco_sends_what_the_forward_pass_sees(local, ratio):
    """Parameters near 16 have bfloat16 neighbors at 1/8. Most changes are smaller, and add up until they are seen."""
    params = jax.tree.map(lambda x: x + 16, PARAMS)
    rounds = cgx.wan.PULSELoCo(cgx.Plan.every(cgx.TopK(ratio)), every=2, outer=NESTEROV)
    train = trainer(rounds, mesh_of(local=local), optimizer=optax.sgd(2**-6))
    got, state = run(train, 12, train.init(params), lambda t: X[t % len(X)] + 16)
    # XLA drops a conversion to bfloat16 and back, as before a comparison on GPUs, but not one of bits.
    text = train.step.lower(state, jnp.asarray(X[0])).as_text()
    assert "ui16" in text and not re.search("compare +NE.*bf16", text)
    expected, shares = Transcription(params, X + 16, 2**-6), []
    lost = jax.tree.map(np.zeros_like, expected.own)
    largest = lambda x: np.asarray(cgx.roundtrip(jnp.asarray(x), cgx.TopK(ratio)))
    for t, (found, _) in enumerate(got, 1):
        expected.train()
        if t % 2 == 0:
            sent = []
            for own, residual in zip(expected.own, lost):
                total = {name: x - own[name] + residual[name] for name, x in expected.outer.items()}
                seen = {name: bf16(x) != bf16(x - total[name]) for name, x in expected.outer.items()}
                sent.append({name: largest(np.where(seen[name], d, 0)) for name, d in total.items()})
                residual.update({name: d - sent[-1][name] for name, d in total.items()})
                shares.append(np.mean(seen["w"]))
            expected.step({name: (sent[0][name] + sent[1][name]) / 2 for name in PARAMS}, WHOLE, 0.5, 0.5)
        assert_trees(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected.outer)
    assert 0 < np.mean(shares) < 0.6
    for name in PARAMS:
        kept = parts(state)[0][0].residuals[name]
        np.testing.assert_allclose(kept, np.stack([each[name] for each in lost]), atol=1e-5)


def test_what_float16_holds_only_as_infinity_travels():
    rounds = cgx.wan.PULSELoCo(cgx.Plan.every(cgx.TopK(1.0)), every=1, outer=NESTEROV, forward="float16")
    train = trainer(rounds, optimizer=optax.sgd(2**-6))
    params = jax.tree.map(lambda x: x + 1e5, PARAMS)
    got, _ = run(train, 1, train.init(params), lambda t: X[0])
    assert all((got[0][0][name] != params[name]).all() for name in PARAMS)


def test_a_state_goes_on_in_another_step():
    """The number of its steps is the state's, not that of the calls. Outer parameters change in the third step."""
    first, second = (trainer(diloco(NESTEROV, every=3), mesh_of(2), donate=False) for _ in range(2))
    _, before = run(first, 2)
    _, here = run(first, 1, before)
    _, there = run(second, 1, before)
    assert_same_trees(there, here)
    assert (there.params["w"] != before.params["w"]).all()


@pytest.mark.parametrize("given", [dict(overlap=1), dict(eager=True)], ids=lambda x: next(iter(x)))
def test_results_that_are_not_applied_yet_on_another_number_of_centers(given, tmp_path):
    """What all centers share and the sum of residuals stay exact. A center's own parameters become their mean.

    The waiting mean is applied as without a stop.
    """
    make = lambda centers: trainer(diloco(NESTEROV, every=2, **given, **BF16), mesh_of(centers), donate=False)
    further = 2 if "eager" in given else 1  # steps until the mean is applied
    _, saved = run(make(2), 4)
    save(tmp_path / "two", saved)
    restored = cgx.restore_state(tmp_path / "two", make(4).init(PARAMS))
    ((old,), (shared,)), ((new,), (other,)) = parts(saved), parts(restored)
    assert_same_trees((restored.params, other), (saved.params, shared))
    mean = lambda new, old: np.testing.assert_allclose(new[3], np.asarray(old).mean(0), rtol=1e-6)
    assert_trees(mean, restored.exchange.params.rows, saved.exchange.params.rows)
    exact = lambda a, b: np.testing.assert_array_equal(np.float64(a).sum(0), np.float64(b).sum(0))
    assert_trees(exact, old.residuals, new.residuals)
    assert old.residuals["w"].any()
    assert_same_trees(run(make(4), further, restored)[1].params, run(make(2), further, saved)[1].params)


@pytest.mark.parametrize("number", [1, 3, 7])
def test_every_element_is_in_one_fragment(number):
    """This includes leaves that are larger than a fragment, tiny or empty."""
    shapes = dict(huge=(10, 1000), tall=(1, 3000), bias=(3,), scalar=(), empty=(0, 5))
    shapes |= {f"layer{i}": (9, 40 + i) for i in range(9)}
    tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    fragments = cut("Diloco", tree, jax.tree.map(lambda _: False, tree), number)
    ones, total = jax.tree.map(jnp.ones_like, tree), jax.tree.map(jnp.zeros_like, tree)
    for fragment in fragments:
        total = jax.tree.map(jnp.add, total, fragment.put(jax.tree.map(jnp.zeros_like, tree), fragment.take(ones)))
    assert_same_trees(total, ones)
    sizes = [sum(x.size for x in jax.tree.leaves(fragment.take(tree))) for fragment in fragments]
    assert max(sizes) <= max(3000, 1.1 * sum(sizes) / number)
    few = {"a": jnp.zeros(2), "empty": jnp.zeros((0, 5))}
    with raises(ValueError, says("Diloco", "fragments", got="3", remedy="fragments=2")):
        cut("Diloco", few, jax.tree.map(lambda _: False, few), 3)  # one would have no elements


@pytest.mark.parametrize("given", [dict(), dict(rules=[cgx.Rule(cgx.Raw(), max_size=1023)], min_size=0)], ids=str)
def test_pieces_have_the_codec_of_their_leaf(given):
    """Guards and rules look at whole leaves. A leaf is as compressed in many pieces as in one."""
    tree = {name: jnp.zeros((64, 64)) for name in "abcd"} | {"bias": jnp.zeros((32, 16))}
    for number in 1, 32:
        state = trainer(diloco(every=32, plan=cgx.Plan(cgx.MaxMin(4), **given), fragments=number)).init(tree)
        fed = sum(x[0].size for each in parts(state)[0] for x in jax.tree.leaves(each.residuals))
        assert fed == 4 * 64 * 64  # the bias is raw


def test_fragments_draw_different_noise():
    """Each fragment has an equal leaf and key, but its own number. The first one has the noise of a single fragment."""
    tree, plan = {name: jnp.zeros((8, 64)) for name in "ab"}, cgx.MaxMin(2, 64, "stochastic")
    shared = lambda number: parts(trainer(diloco(every=4, plan=plan, fragments=number)).init(tree))[1]
    keys = lambda number: [np.asarray(each.key).tolist() for each in shared(number)]
    (whole,), (first, second, *others) = keys(1), keys(4)
    assert first == whole and len({*map(tuple, (first, second, *others))}) == 4


def wide(params, x):
    """A loss with parameters that are large enough to compress."""
    return ((jnp.tanh(x @ params["up"]) @ params["down"] + params["b"].astype(jnp.float32) - x) ** 2).mean()


WIDE = {"up": normal((30, 40), 1, scale=0.3), "down": normal((40, 30), 2, scale=0.3), "b": jnp.zeros(30, jnp.bfloat16)}
DATA = normal((16, 30), 4)


def compressed(local, centers=2):
    """Returns a step with four bits between centers and eight bits inside them, with feedback."""
    inside = cgx.MaxMin(8, 64, "stochastic") if local > 1 else cgx.Raw()
    given = diloco(optax.sgd(0.7), cgx.Plan(cgx.MaxMin(4, 64), min_size=100), every=4, fragments=2, inside=inside)
    return trainer(given, mesh_of(centers, local), wide, optax.sgd(0.5, momentum=0.9), donate=False)


def test_centers_of_several_ranks(tmp_path):
    train = compressed(local=2)
    found, state = run(train, 6, train.init(WIDE), lambda t: DATA)
    own, params = state.exchange.params.rows, state.params
    assert own["up"].shape == (2, 30, 40) and own["up"].sharding.spec == P("dc")
    assert state.exchange.inside.rows.own.residuals["up"].shape == (4, 30, 40) and found[-1][1].loss.shape == (2,)
    assert (own["down"][0] != own["down"][1]).any() and params["b"].dtype == jnp.bfloat16
    fed = parts(state)[0][0].residuals
    assert fed["down"].sharding.spec == P("dc") and fed["b"] is None and np.abs(fed["down"]).max() > 0
    assert train.step._train._cache_size() == 1
    save(tmp_path / "two", state)  # residuals of the exchange inside centers go on in four of them
    four = compressed(local=2, centers=4)
    restored, metrics = four.step(cgx.restore_state(tmp_path / "two", four.init(WIDE)), DATA)
    assert int(restored.exchange.steps) == 7 and np.isfinite(metrics.loss).all()


def test_nothing_is_sent_between_exchanges():
    """Collectives are in branches, or in programs of their own. Between centers they carry bytes."""
    train = compressed(local=1)
    program = train.step.lower(train.init(WIDE), DATA).compile().as_text()
    assert ("all-gather", "u8") in sent(program) and not sent(program[program.index("\nENTRY") :])
    step, *exchanges = (each.as_text() for each in train.step.programs(train.init(WIDE), batch=DATA))
    assert not sent(step) and set.union(*map(sent, exchanges)) == sent(program)


def test_noise_of_restored_centers(tmp_path):
    """All centers have the same batch. With the bits of a new run, their noise differs."""
    plan = cgx.Plan(cgx.MaxMin(2, 8, rounding="stochastic"), min_size=0)
    batch, loss = jax.random.normal(jax.random.key(3), (4, 8)), lambda params, x: ((x @ params) ** 2).mean()
    make = lambda centers: trainer(diloco("sgd", inside=plan), mesh_of(centers, 2), loss, donate=False)

    def centers_after_a_step(train, state):
        state, _ = train.step(state, np.tile(batch, (len(state.exchange.params.rows), 1)))
        return np.asarray(state.exchange.params.rows)

    first, state = make(2).init(normal((8, 16), 4)), make(4).init(normal((8, 16), 4))
    save(tmp_path / "two", first)
    new, restored = (centers_after_a_step(make(4), x) for x in (state, cgx.restore_state(tmp_path / "two", state)))
    np.testing.assert_array_equal(restored, new)
    assert all(np.abs(row - new[0]).max() > 1e-3 for row in new[1:])


def test_parameters_that_are_named_key():
    """Their residuals aren't the keys of noise."""
    attention = collections.namedtuple("Attention", ["query", "key"])
    loss = lambda params, x: ((x @ params.query) * (x @ params.key)).mean()
    inside = cgx.Plan(cgx.MaxMin(4, 8, rounding="stochastic"), min_size=0)
    train = trainer(diloco("sgd", cgx.MaxMin(4), every=2, inside=inside), mesh_of(2, 2), loss)
    state, metrics = train.step(train.init(attention(normal((8, 16), 1), normal((8, 16), 2))), normal((8, 8), 3))
    assert np.isfinite(metrics.loss).all()
    assert np.abs(state.exchange.inside.rows.own.residuals.key).max() > 0


def test_centers_of_one_rank_continue_those_of_several(tmp_path):
    """And the other way round, if nothing is compressed inside a center."""
    make = lambda local: trainer(diloco(every=2, plan=cgx.Plan(cgx.MaxMin(4, 8), min_size=0)), mesh_of(local=local))
    for old, new in (2, 1), (1, 2):
        _, state = run(make(old), 3)
        save(tmp_path / f"{old}", state)
        restored = cgx.restore_state(tmp_path / f"{old}", make(new).init(PARAMS))
        assert_same_trees(restored, state)
        run(make(new), 1, restored)


def test_other_centers_and_ranks_send_what_hfa_held_back(tmp_path):
    """Residuals count once, however many ranks a center has. With batches of zeros, nothing else is sent."""
    linear = lambda params, x: (params["w"] * x.mean(0)[:, None] * jnp.arange(4.0)).sum() + params["s"] * x.sum()
    hfa = cgx.wan.HFA(cgx.Plan(cgx.MaxMin(2, 8), min_size=0), k1=1, k2=1)
    make = lambda **sizes: trainer(hfa, mesh_with(**sizes), linear, donate=False)
    state, _ = make(dc=2, local=2).step(make(dc=2, local=2).init(PARAMS), X[0])
    save(tmp_path / "state", state)
    held = lambda state: np.asarray(parts(state)[0][0].residuals["w"]).sum(0)
    assert np.abs(held(state)).max() > 0.01
    for sizes in dict(dc=2, local=2), dict(dc=2, local=4), dict(dc=4, local=1), dict(dc=3):
        train = make(**sizes)
        start = cgx.restore_state(tmp_path / "state", train.init(PARAMS))
        after, _ = train.step(start, np.zeros((24, 6), np.float32))
        moved = sizes["dc"] * (np.asarray(start.params["w"]) - np.asarray(after.params["w"]))
        np.testing.assert_allclose(moved + held(after), held(state), atol=1e-5)


def test_an_exchange_in_progress_has_not_begun_on_other_ranks():
    waiting = Waiting(np.ones(2, bool), [np.ones((2, 5), np.float32), jax.random.split(jax.random.key(0))])
    state = ExchangeState(OfCenter({"w": np.ones((2, 4), np.float32)}, None, waiting), None)
    moved = cgx.reshard_state(state, 3).own.waiting
    assert moved.begun.tolist() == [False] * 3 and moved.arrays[0].shape == (3, 5) and not moved.arrays[0].any()
    assert moved.arrays[1].shape == (3,) and not jax.random.key_data(moved.arrays[1]).any()


@pytest.mark.parametrize(
    ("given", "local"),
    [({}, 1), (dict(overlap=1), 1), (dict(eager=True), 1), ({}, 2), (dict(fragments=2), 1)],
    ids=["plain", "overlap", "eager", "two ranks", "fragments"],
)
def test_a_failed_exchange_of_each_kind(given, local):
    """A NaN in one center leaves the outer parameters, the outer optimizer's state and residuals as they were."""
    every = 2 * given.get("fragments", 1)
    began = every + 2
    ended = began + (every if "eager" in given else given.get("overlap", 0))
    p = began // 2 % given.get("fragments", 1)
    train = trainer(diloco(NESTEROV, every=every, plan=cgx.MaxMin(2, 8), **given), mesh_of(2, local), donate=False)
    found, now = {}, train.init(PARAMS)
    for t in range(1, ended + 2 * every + 1):
        x = np.where((np.arange(8) < 2)[:, None], np.nan, X[t % len(X)]) if t == began else X[t % len(X)]
        now, _ = train.step(now, jnp.asarray(x))
        found[t] = now.params, parts(now)[0][p].residuals, parts(now)[1][p]
    (_, residuals, shared), before = found[began], found[began - 1]
    exchanged = lambda x: (x.factors, x.number, x.key)
    assert_same_trees((residuals, exchanged(shared)), (before[1], exchanged(before[2])))
    params, before = {t: each[0] for t, each in found.items()}, found[ended - 1]
    assert_same_trees((params[ended], found[ended][2].outer), (before[0], before[2].outer))
    assert residuals["w"].any()
    for each in (*params.values(), now):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(each))
    assert (now.params["w"] != params[ended]["w"]).any()


def test_keys_frozen_parameters_and_micro_batches():
    """Every center has its own keys. Leaves of any dtype that both plans skip stay the same."""

    def loss(params, x, key):
        return (params["w"] * jax.random.normal(key, (3,))).sum() * params["frozen"][0].astype(jnp.float32)

    skip = cgx.Plan(cgx.Raw(), rules=[("frozen", cgx.Skip())])
    train = trainer(diloco("sgd", every=2, plan=skip), loss=loss, accumulate=2)
    start = train.init({"w": jnp.zeros(3), "frozen": jnp.arange(1, 4)})
    key = jax.random.key(5)
    state, _ = train.step(start, jnp.asarray(X[0]), key)
    fold = jax.random.fold_in
    keys = [[fold(fold(fold(key, center), 0), part) for part in range(2)] for center in range(2)]
    expected = [-0.25 * np.mean([jax.random.normal(k, (3,)) for k in both], 0) for both in keys]
    np.testing.assert_allclose(state.exchange.params.rows["w"], expected, rtol=1e-5)
    state, _ = train.step(state, jnp.asarray(X[0]), key)
    assert_same_trees(state.params["frozen"], jnp.arange(1, 4))
    np.testing.assert_allclose(state.params["w"], 2 * np.mean(expected, 0), rtol=1e-5)


def test_models_with_state():
    """Every center has its own state: a mean over its ranks, and random keys that differ."""

    def loss(params, state, x):
        key, drawn = jax.random.split(state["key"])
        new = {"mean": x.mean(0), "key": key, "steps": state["steps"] + 1}
        return (params["w"] * jax.random.normal(drawn, (6,))).sum() + (params["w"] * x.mean(0)).sum(), new

    train = trainer(diloco("sgd", every=2), mesh_of(local=2), loss, model_state="mean")
    start = {"mean": jnp.zeros(6), "key": jax.random.key(3), "steps": jnp.int32(0)}
    state = train.init({"w": jnp.zeros(6)}, start)
    for t in range(2):
        state, metrics = train.step(state, jnp.asarray(X[t]))
    model = state.model_state
    np.testing.assert_allclose(model.rows["mean"], X[1].reshape(2, 4, 6).mean(1), rtol=1e-6)
    assert model.rows["steps"].tolist() == [2, 2] and len(set(map(str, jax.random.key_data(model.rows["key"])))) == 2
    assert metrics.loss.shape == (2,) and (state.params["w"] != 0).all()
    assert cgx.reshard_state(state, 3).model_state.rows["mean"].shape == (3, 6)


def test_forms():
    """Their arguments are those of the papers. SparseLoCo's residual decays, and Pier's momentum rises and falls."""
    sparse, mu = cgx.wan.SparseLoCo(cgx.TopK(0.25, values=cgx.MaxMin(2)), every=1), cgx.wan.MuLoCo()
    assert cgx.wan.SparseLoCo().plan.default == cgx.TopK(0.01, values=cgx.MaxMin(2))
    assert 16 < 4 * 2**24 / cgx.wan.PULSELoCo().plan.default.wire_bytes((2**24,), jnp.float32) < 17
    assert mu.plan.default == cgx.MaxMin(2)
    assert (sparse.decay, mu.every) == (0.95, 30)
    _, state = run(trainer(sparse), 1)
    outer_step = jax.tree.map(lambda x, y: np.asarray(x - y), PARAMS, state.params)
    own = Transcription()
    own.train()
    # The sent part and the residuals add up to the outer gradients.
    for name in ("w", "b"):
        kept = np.asarray(parts(state)[0][0].residuals[name]).mean(0) / 0.95
        np.testing.assert_allclose(outer_step[name] + kept, own.moved(WHOLE)[name], rtol=1e-5, atol=1e-6)
    pier = cgx.wan.Pier(cgx.Raw(), every=9, rounds=10, warmup=0.2, decay_from=0.6)
    state, momenta = pier.optimizer.init(PARAMS), []
    for _ in range(11):
        _, state = pier.optimizer.update(PARAMS, state)
        momenta.append(float(state.hyperparams["momentum"]))
    np.testing.assert_allclose(momenta, [0, 0.45, 0.9, 0.9, 0.9, 0.9, 0.9, 0.675, 0.45, 0.225, 0], atol=1e-6)


def test_matched_nesterov_moves_as_far_as_sgd():
    """This holds for outer gradients that are always the same (rho 1), and for ones that never agree (rho 0)."""
    for rho in (0.0, 0.99999):
        outer = cgx.wan.matched_nesterov(0.5, 0.5, rho=rho)
        state = outer.init(jnp.zeros(12))
        for t in range(12):
            gradient = jnp.zeros(12).at[t].set(1.0) if rho == 0 else jnp.ones(12)
            step, state = outer.update(gradient, state)
        np.testing.assert_allclose(-float(step @ gradient) / float(gradient @ gradient), 0.5, rtol=1e-3)


def test_few_bits_without_feedback_are_a_warning():
    # Scales don't count: in buckets of 32, they take 2 further bits per element.
    for plan in cgx.MaxMin(2), cgx.MaxMin(2, 64), cgx.MaxMin(2, 32), cgx.TopK(0.01), cgx.PowerSGD(2):
        with pytest.warns(UserWarning, match="Diloco: argument 'keep': .* may lose too much"):
            diloco(plan=plan, keep=False)
    for bits in 3, 4:
        diloco(plan=cgx.MaxMin(bits), keep=False)  # a warning would be an error


def test_an_overlap_that_can_not_cross_steps_is_a_warning(monkeypatch):
    """Of several processes on CPUs. A single process only simulates centers."""
    make = lambda axis="dc", **options: trainer(diloco(every=4, **options), axis=axis)
    tcp, low = cgx.Tcp("dc"), cgx.PowerSGD(2)
    make(tcp, overlap=1), make(tcp, plan=low), make(overlap=1, plan=low)  # no warnings
    make(tcp, overlap=1, plan=cgx.TopK(0.1))
    along_trees = cgx.Plan(cgx.TopK(0.1, pull="top"), schedule="tree")
    with pytest.warns(UserWarning, match=r"Diloco: argument 'overlap': .* whole exchange of TopK\(.* along trees"):
        make(tcp, overlap=1, plan=along_trees)
    with pytest.warns(UserWarning, match=r"Diloco: argument 'overlap': .* second sum of PowerSGD\(rank=2\)"):
        make(tcp, overlap=1, plan=low)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    make()
    with pytest.warns(UserWarning, match=r"Diloco: argument 'eager': over 'dc' .* pass jaxcgx.Tcp\('dc'\)"):
        make(eager=True)


def step_of(**options):
    """Returns the call of make_train_step with some other options."""
    given = dict(mesh_or_comm=mesh_of(), exchange=diloco(), sharding=cgx.Sharding("dc")) | options
    return lambda: cgx.make_train_step(quadratic, INNER, **given)


PER_RANK = optax.chain(cgx.compress_gradients("dc", cgx.MaxMin(4)), optax.sgd(1.0))
UNUSED = cgx.Plan(cgx.Raw(), rules=[("typo", cgx.MaxMin(4))])
CUT = cgx.Sharding("dc", params={"w": P("dc"), "b": P(), "s": P()})
TWO, PLAIN = trainer(diloco(every=4, fragments=2)), trainer(cgx.Raw())
FREEZES = diloco(plan=cgx.Plan(cgx.Raw(), rules=[("b", cgx.Skip())]))
LATER = diloco(plan=FREEZES.plan, inside={0: cgx.MaxMin(4), 9: cgx.MaxMin(8)})  # a schedule of plans
ACT = {**PARAMS, "act": jnp.tanh}


def test_axes_may_be_a_list():
    """If each rank were a center, a codec inside would be an error."""
    exchange = diloco(inside=cgx.MaxMin(4))
    step_of(mesh_or_comm=mesh_of(2, 2), sharding=cgx.Sharding(["dc", "local"]), exchange=exchange)()


ERRORS = {
    "Diloco": [
        (lambda: trainer(diloco(), mesh_of(1, 2)), ValueError, "axis", "one", "Diloco"),
        (step_of(exchange=diloco(inside=cgx.MaxMin(4))), ValueError, "inside", "MaxMin", "leave"),
        (lambda: trainer(diloco(PER_RANK)).init(PARAMS), ValueError, "outer", "one with"),
        (lambda: trainer(diloco(fragments=500)).init(PARAMS), ValueError, "fragments", "500", "fragments=11"),
        (lambda: trainer(diloco(plan=cgx.Plan(cgx.Skip()))).init(PARAMS), ValueError, "plan", "none", "jaxcgx.Skip()"),
        (lambda: trainer(diloco(plan=UNUSED)).init(PARAMS), ValueError, "plan", "none", "optional"),
        (lambda: trainer(FREEZES, mesh_of(2, 2)).init(PARAMS), ValueError, "plan ['b']", "another", "jaxcgx.Skip()"),
        (lambda: trainer(LATER, mesh_of(2, 2)).init(PARAMS), ValueError, "plan ['b']", "another", "jaxcgx.Skip()"),
    ],
    "make_train_step": [
        (step_of(mesh_or_comm=mesh_with(dc=2, local=1)), ValueError, "mesh_or_comm", "one with 'local'", "name all"),
        (step_of(sharding=CUT), ValueError, "sharding", "shards", "leave"),
        (step_of(overlap="backward"), ValueError, "overlap", "'backward'", "leave"),
        (step_of(overlap=cgx.Priority()), ValueError, "overlap", "Priority"),
        (step_of(has_aux=True), ValueError, "has_aux", "True"),
        (step_of(model_state="per_rank"), ValueError, "model_state", "'per_rank'", '"mean"'),
    ],
    "train.init": [(lambda: trainer(diloco()).init(ACT), TypeError, "params ['act']", "<", "eqx.partition")],
    "train.step": [
        (lambda: trainer(diloco()).step({}, X[0]), TypeError, "state", "a dict"),
        (lambda: trainer(diloco(every=4)).step(TWO.init(PARAMS), X[0]), ValueError, "state", "2"),
        (lambda: trainer(diloco(every=4)).step(PLAIN.init(PARAMS), X[0]), ValueError, "state", "one with"),
    ],
}
test_errors = table(ERRORS)


def test_clear_cache():
    train = trainer(diloco(every=2, overlap=1), donate=False)
    train.finish(run(train, 2)[1])
    programs = train.step._train, train.step._act, train.finish
    assert all(each._cache_size() > 0 for each in programs)
    train.step.clear_cache()
    assert all(each._cache_size() == 0 for each in programs)
    run(train, 2)


@pytest.mark.parametrize("given", [dict(overlap=1), dict(eager=True)], ids=lambda x: next(iter(x)))
def test_finish_applies_the_last_round(given):
    """Centers go on from the result, as from new parameters. So it is applied once."""
    train = trainer(diloco(optax.sgd(0.5), every=2, **given), donate=False)
    _, state = run(train, 2)
    last, expected = train.finish(state), Transcription()
    for _ in range(2):
        expected.train()
    mean = expected.moved(WHOLE)
    assert_same_trees(state.params, PARAMS)
    assert_same_trees(last.params, {name: np.float32(x - 0.5 * mean[name]) for name, x in PARAMS.items()})
    further = lambda start: [params for params, _ in run(train, 5, start)[0]]
    assert_same_trees(further(last), further(train.init(last.params)))

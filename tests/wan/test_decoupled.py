"""Tests Decoupled: who decides, who is waited for, deaths, joins, and bad input.

Rounds agree with NumPy up to rounding (rtol 1e-6). All centers have the same bits.
"""

import concurrent.futures
import dataclasses
import functools
import pathlib
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, refused, rows, says, table
from helpers import assert_same_trees, load_script, mesh_with, normal
from jax.sharding import AxisType
from started import Processes, free_port, until

import jaxcgx as cgx
from jaxcgx.wan.decoupled.inbox import Assembly, Contribution, Decision
from jaxcgx.wan.decoupled.moves import Packing
from jaxcgx.wan.decoupled.peers import Frame, FrameKind, Version

# Numbers with few bits, so that their sums and products are exact.
PARAMS = {"w": jnp.round(4 * normal((6, 4), 1)) / 4 + 0, "b": jnp.round(4 * normal((4,), 2)) / 4 + 0}
TARGETS = np.round(4 * np.asarray(normal((3, 4), 3))) / 4  # one for each center
RANK = pathlib.Path(__file__).with_name("decoupled_rank.py")
SGD = optax.sgd(1.0)  # one object, so that programs are shared
ALONE = pytest.mark.filterwarnings("ignore:Decoupled.join. this center begins without others")
LIMIT = 60  # seconds, after which a center counts as hung
A, B = Version(3, 9, 1), Version(4, 12, 2)
sent = lambda place, version=A: Contribution(version, 1.0, bytes([place]))
ports = lambda count: [f"127.0.0.1:{free_port()}" for _ in range(count)]


# Agreement without a network


def assembly(place=0, others=(1, 2)):
    made = Assembly(place, quorum=2, grace=5)
    made.advance(A)
    made.others = dict.fromkeys(others, A)
    return made


@pytest.mark.parametrize("all_have_sent", [False, True])
def test_a_round_waits_for_its_quorum_and_then_for_all_or_as_long_as_the_grace(all_have_sent):
    found = assembly()
    found.contribute(0, sent(0))
    assert not found.gathers(now=0) and found.decide(now=100) is None
    found.contribute(2, sent(2))
    assert found.gathers(now=100)
    assert found.decide(now=104.9) is None
    if all_have_sent:
        found.contribute(1, sent(1))
    members = [0, 1, 2] if all_have_sent else [0, 2]
    assert [place for place, _ in found.decide(now=104.9 if all_have_sent else 105).members] == members
    assert list(found.outcome()) == members
    assert found.decide(now=106) is None  # a round is decided only once


@pytest.mark.parametrize("behind", [1, 2])
def test_nobody_waits_for_a_center_that_has_gone_or_is_far_behind(behind):
    """A center that is one round behind is about to come, so it is waited for."""
    found = assembly(others=(1, 2, 3))
    del found.others[1]
    found.others[3] = Version(A.round - behind, 3, 7)
    found.contribute(0, sent(0))
    found.contribute(2, sent(2))
    if behind == 1:
        assert found.decide(now=0) is None
        found.contribute(3, sent(3))
    assert [place for place, _ in found.decide(now=0).members] == ([0, 2, 3] if behind == 1 else [0, 2])


def test_the_chair_is_the_center_with_the_most_contributions():
    found = assembly(place=1, others=(0, 2))
    assert found.chair == 0
    found.others[0] = Version(5, 5, 7)  # alone, it has done more rounds, but has fewer contributions
    assert found.chair == 1
    found.others[2] = B
    assert found.chair == 2
    for place in range(3):
        found.contribute(place, sent(place))
    assert found.decide(now=0) is None  # another center must decide this


def test_a_decision_counts_where_all_contributions_are_there():
    found = assembly(place=2, others=(0, 1))
    found.learn(Decision(A, ((0, sent(0).check), (1, sent(1).check))))
    found.contribute(0, sent(0))
    assert found.outcome() is None
    found.contribute(1, dataclasses.replace(sent(1), payload=b"other"))
    assert found.outcome() is None
    found.contribute(1, sent(1))
    assert list(found.outcome()) == [0, 1]


def test_a_center_that_cannot_follow_fetches():
    found = assembly(place=2, others=(0, 1))
    assert not found.must_fetch(now=0)
    found.others[0] = B
    assert not found.must_fetch(now=0) and not found.must_fetch(now=5) and found.must_fetch(now=5.1)
    found.advance(B)
    assert not found.must_fetch(now=20)
    found.others[0] = B._replace(digest=3)  # as many contributions, but different ones
    assert not found.must_fetch(now=20) and found.must_fetch(now=26)


def test_contributions_to_the_next_round_are_kept():
    found = assembly(place=2, others=(0, 1))
    found.contribute(0, sent(0, B))
    found.contribute(1, sent(1, Version(6, 20, 4)))  # too far ahead
    assert not found.present()
    found.advance(B)
    assert list(found.present()) == [0]


# Averages

SHAPES = {"w": (6, 4), "embed": (5, 3), "b": (4,)}
OUTER = [{name: np.float32(normal(shape, 10 + i)) for name, shape in SHAPES.items()} for i in range(4)]
mean = lambda name: (3 * OUTER[0][name] + OUTER[2][name]) / 4


def averaged(average, spoil=False):
    """Returns the average of OUTER[0] and OUTER[2] with weights 3 and 1. Center 1 doesn't take part."""
    packing = Packing.of("test", cgx.Plan(cgx.Raw()), {n: jnp.zeros(s) for n, s in SHAPES.items()}, average)
    rows = [packing.pack({name: jnp.asarray(x) for name, x in each.items()}, None)[0] for each in OUTER]
    if spoil:
        rows[3] = packing.pack({name: jnp.full(x.shape, jnp.nan) for name, x in OUTER[3].items()}, None)[0]
    means, some = jax.jit(packing.average)(jnp.stack(rows), jnp.float32([3, 0, 1, 5 if spoil else 0]))
    assert some
    return dict(zip(sorted(SHAPES), map(np.asarray, means)))


def test_radial_average():
    found = averaged("radial")
    for name in ("w", "b"):
        norms = [np.linalg.norm(each[name]) for each in OUTER]
        direction = (3 * OUTER[0][name] / norms[0] + OUTER[2][name] / norms[2]) / 4
        expected = (3 * norms[0] + norms[2]) / 4 * direction / np.linalg.norm(direction)
        np.testing.assert_allclose(found[name], expected, rtol=2e-6)
    np.testing.assert_allclose(found["embed"], mean("embed"), rtol=1e-6)


def test_an_outer_gradient_that_is_not_finite_does_not_count():
    assert_same_trees(averaged("mean", spoil=True), averaged("mean"))


# Centers as threads


def decoupled(count, **options):
    addresses, options = ports(count), dict(every=2, outer=SGD, quorum=count, grace=LIMIT) | options
    return [cgx.wan.Decoupled(addresses=addresses, place=place, **options) for place in range(count)]


def at_once(*functions):
    """Returns the results of functions that run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(LIMIT) for each in [pool.submit(f) for f in functions]]


def join(centers, params=PARAMS):
    """Returns the [(params, member)] of centers that begin together."""
    return at_once(*(functools.partial(center.join, params) for center in centers))


def learn(params, place):
    """Returns the parameters after a step of a center's inner optimizer."""
    return {"w": params["w"] - (params["w"] - TARGETS[place]) / 4, "b": params["b"] * 0.75}


def steps(params, member, place, count=2, tokens=1):
    for _ in range(count):
        params = member.step(learn(params, place), tokens)
    return params, member


def together(joined, tokens=(1, 1, 1)):
    """Returns the [(params, member)] after two steps of all centers at the same time."""
    return at_once(*(functools.partial(steps, *one, i, tokens=tokens[i]) for i, one in enumerate(joined)))


def leave(joined):
    at_once(*(member.leave for _, member in joined))


def assert_agree(joined):
    assert len({member._held.version for _, member in joined}) == 1
    for _, member in joined[1:]:
        assert_same_trees(member.params, joined[0][1].params)


def test_like_numpy():
    """There are three centers, and the outer SGD has Nesterov's momentum and weights by tokens."""
    outer, tokens, rounds = optax.sgd(0.5, momentum=0.5, nesterov=True), (1, 2, 1), 2
    joined = join(decoupled(3, outer=outer))
    for _ in range(rounds):
        joined = together(joined, tokens=tokens)
    shared = {name: np.array(x) for name, x in PARAMS.items()}
    velocity = {name: np.zeros_like(x) for name, x in shared.items()}
    for _ in range(rounds):
        own = [shared] * 3
        for _ in range(2):
            own = [learn(each, place) for place, each in enumerate(own)]
        weights = [(2 * t) ** 2 / 2 for t in tokens]  # 2, 8, 2
        for name in shared:
            total = sum(np.float32(w) * (shared[name] - each[name]) for w, each in zip(weights, own))
            moved = np.float32(total / np.float32(sum(weights)))
            velocity[name] = np.float32(0.5 * velocity[name] + moved)
            step = moved + np.float32(0.5) * velocity[name]
            shared = shared | {name: np.float32(shared[name] - np.float32(0.5) * step)}
    for params, member in joined:
        assert member.last == (2, (0, 1, 2))
        for name, x in shared.items():
            np.testing.assert_allclose(params[name], x, rtol=1e-6)
            np.testing.assert_array_equal(params[name], member.params[name])
    assert_agree(joined)
    leave(joined)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layouts_do_not_change_bits(kind):
    """One center has its parameters on one device, the other one has them sharded over four devices."""
    rows = jax.sharding.NamedSharding(mesh_with(kind, model=4), jax.sharding.PartitionSpec("model"))
    params = {"w": normal((64, 33), 5)}
    layouts = params, jax.device_put(params, rows)
    given = decoupled(2, outer="nesterov", average="radial", every=1, plan=cgx.MaxMin(4))
    joined = at_once(*(functools.partial(each.join, x) for each, x in zip(given, layouts)))
    learn = jax.jit(lambda params, place: {"w": params["w"] * (0.5 + place / 8)}, donate_argnums=0)
    step = lambda params, member, place: (member.step(learn(params, place)), member)
    for number in range(1, 4):
        joined = at_once(*(functools.partial(step, *each, place) for place, each in enumerate(joined)))
        assert_agree(joined)
        for (params, member), x in zip(joined, layouts):
            assert member.last == (number, (0, 1))
            for each in params["w"], member.params["w"]:
                assert jax.typeof(each) == jax.typeof(x["w"]) and each.sharding.is_equivalent_to(x["w"].sharding, 2)
    leave(joined)


def test_a_center_comes_late_dies_and_comes_back():
    """Its outer gradient is not lost, the others go on, and a new center gets their parameters."""
    given = decoupled(3, quorum=1, grace=1.0, plan=cgx.MaxMin(4, 8), average="radial")

    def rounds(joined, *members):
        """Each center steps until a new round has had these centers. All of them find the same round so."""
        number = max(member.last.number if member.last else 0 for _, member in joined)

        def train(params, member):
            def step():
                nonlocal params
                params = member.step(learn(params, member._given.place))
                return member.last

            until(lambda last: last and last.number > number and last.centers == members, step)
            return params, member

        return at_once(*(functools.partial(train, *each) for each in joined))

    joined = rounds(join(given), 0, 1, 2)
    assert_agree(joined)
    (own, late), two = joined[2], joined[:2]  # the third center is in a long step
    before, residuals = late.params, late.state.residuals
    two = together(two)
    until(lambda _: late._inbox.assembly.outcome())
    params = late.step(learn(own, 2))
    assert late.last.centers == (0, 1)
    for name, x in late.params.items():
        np.testing.assert_allclose(params[name], x + learn(own, 2)[name] - before[name], rtol=1e-5, atol=1e-6)
    assert_same_trees(late.state.residuals, residuals)
    late.leave()
    until(lambda _: all(member.centers == (0, 1) for _, member in two))
    two = rounds(two, 0, 1)
    params, member = given[2].join(jax.tree.map(jnp.zeros_like, PARAMS))
    assert_same_trees(params, two[0][1].params)
    joined = rounds([*two, (params, member)], 0, 1, 2)
    assert_agree(joined)
    (_, chair), *two = joined
    chair.leave()
    two = rounds(two, 1, 2)
    assert_agree(two)
    leave(two)


@pytest.mark.parametrize("lost", [False, True], ids=["included", "lost"])
def test_a_fetched_state_may_have_what_was_sent(lost, monkeypatch):
    """Then residuals are those of the outer gradient that was sent. Otherwise they stay as they were."""
    (own, chair), (params, member) = join(decoupled(2, quorum=1, grace=1.0, plan=cgx.MaxMin(4, 8)))
    monkeypatch.setattr(member._inbox.assembly, "outcome", lambda: None)  # so it must fetch
    peers, send = member._inbox.peers, member._inbox.peers.send_all
    if lost:
        monkeypatch.setattr(peers, "send_all", lambda frame: frame.kind == FrameKind.CONTRIBUTION or send(frame))
    fresh = residuals = member.state.residuals

    def step():
        nonlocal params, residuals
        params = member.step(learn(params, 1))
        residuals = member._sent.residuals if member._sent and not lost else residuals
        return member._held.version.round

    at_once(lambda: steps(own, chair, 0), lambda: until(lambda number: number == 1, step))
    assert chair.last.centers == ((0,) if lost else (0, 1))
    assert_agree([(own, chair), (params, member)])
    assert_same_trees(member.state.residuals, residuals)
    assert lost or any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (residuals, fresh))))
    leave([(own, chair), (params, member)])


SPARSE, DENSE = (cgx.TopK(0.01), 0.9, FrameKind.PATCHES), (cgx.Raw(), 1, FrameKind.STATE)


@pytest.mark.parametrize(("plan", "factor", "first"), [SPARSE, DENSE], ids=["sparse", "dense"])
def test_a_center_that_comes_back(plan, factor, first, monkeypatch):
    """It gets the few elements that sparse rounds have changed. With other parameters it gets the whole state."""
    params, frames = {"w": normal((64, 64), 5)}, []
    given = decoupled(2, quorum=1, grace=1.0, every=1, plan=plan)
    (own, chair), (_, late) = join(given, params)
    late.leave()
    peers, send = chair._inbox.peers, chair._inbox.peers.send
    monkeypatch.setattr(peers, "send", lambda place, frame: frames.append(frame) or send(place, frame))
    until(lambda _: chair.last and chair.last.number == 3, lambda: chair.step({"w": own["w"] * factor}))
    for start, kind in (params, first), ({"w": params["w"] + 1}, FrameKind.STATE):
        found, late = given[1].join(start)
        assert_same_trees(found, chair.params)
        assert late._held.version == chair._held.version
        (sent,) = (frame for frame in frames if frame.kind in (FrameKind.PATCHES, FrameKind.STATE))
        assert sent.kind == kind and (len(sent.body) < 4000) == (kind == FrameKind.PATCHES)
        late.leave()
        frames.clear()
    # Half a length of a patch, from a program that was cut off, does nothing.
    chair._inbox._got(1, Frame(FrameKind.PATCHES, chair._held.version, chair._held.merged.tobytes() + bytes(4)))
    chair.leave()


@ALONE
def test_a_quorum_is_needed():
    ((params, member),) = join(decoupled(2, grace=0.01)[:1])
    params, _ = steps(params, member, 0, count=6)
    assert member.last is None
    expected = PARAMS
    for _ in range(6):
        expected = learn(expected, 0)
    assert_same_trees(params, expected)  # it trains alone
    assert_same_trees(member.params, PARAMS)
    member.leave()


def alone(**options):
    """Returns the first of two centers. The other one never comes."""
    given, _ = decoupled(2, quorum=1, grace=0.01, overlap=1, **options)
    return given


def decided(member, params, count):
    """Returns the parameters after some steps, when the round for which they were sent is decided."""
    with member._inbox.changed:  # the round can't be decided before the steps end
        params, _ = steps(params, member, 0, count)
    until(lambda _: member._inbox.assembly.outcome())
    return params


@ALONE
def test_an_overlap():
    """A round ends while the center continues, and what it learns meanwhile is kept."""
    params, member = alone().join(PARAMS)
    own = learn(learn(PARAMS, 0), 0)
    params = decided(member, params, 2)
    params = member.step(learn(params, 0))
    assert_same_trees(member.params, own)  # SGD with rate 1, and one center
    assert member.last == (1, (0,))
    assert_same_trees(params, learn(own, 0))
    member.leave()


@ALONE
def test_a_training_goes_on_from_its_state():
    given = alone(outer="nesterov", plan=cgx.MaxMin(4))
    params, member = given.join(PARAMS)
    decided(member, params, 2)
    params = member.step(member._sent.own)
    outer, state = member.params, member.state
    params = decided(member, outer, 1)
    params = member.step(params)
    member.leave()
    again, other = given.join(outer, state)
    other.step(again)
    again = decided(other, again, 1)
    again = other.step(again)
    assert_same_trees(other.params, member.params)
    assert other.last == (2, (0,)) and other.state.round == 2
    other.leave()


@ALONE
def test_residuals_of_a_saved_state_follow_keep():
    """Without residuals in the state, they begin with zeros. Without feedback, those of the state are dropped."""
    given = alone(plan=cgx.MaxMin(2))
    params, member = given.join(PARAMS)
    member.leave()
    state, zeros = member.state, jax.tree.map(jnp.zeros_like, PARAMS)
    with pytest.warns(UserWarning, match=r"Decoupled\.join: argument 'state': it has no residuals"):
        _, other = given.join(params, state._replace(residuals=None))
    other.leave()
    assert_same_trees(other.state.residuals, zeros)
    with pytest.warns(UserWarning, match=r"Decoupled: argument 'keep': .*MaxMin\(bits=2.*write keep=True"):
        given = dataclasses.replace(given, keep=False)
    _, other = given.join(params, state)
    other.leave()
    assert other.state.residuals is None


WIDE = PARAMS | {"b": jnp.zeros(5)}
STATES = {
    "Decoupled.join": [
        (lambda state: {}, TypeError, "state", "{}"),
        (lambda state: state._replace(round=0.5), TypeError, "state.round", "0.5"),
        (lambda state: state._replace(optimizer=PARAMS), ValueError, "state.optimizer", "PyTreeDef", "outer"),
        (lambda state: state._replace(residuals=WIDE), ValueError, "state.residuals ['b']", "float32[5]"),
    ]
}


@ALONE
@pytest.mark.parametrize("row", rows(STATES))
def test_a_state_that_does_not_fit(row):
    given = alone(plan=cgx.MaxMin(4))
    params, member = given.join(PARAMS)
    member.leave()
    refused(*row, run=lambda change: given.join(params, change(member.state)))


@ALONE
def test_a_step_waits_for_one_round(monkeypatch):
    """Several rounds may end without this center. They don't delay its step, and it sends again in the next round."""
    ((params, member),) = join(decoupled(2, grace=0.01)[:1])
    rounds = []

    def of_the_other():
        if member._sent:
            rounds.append(member.last)
            assert len(rounds) < 10
            return {1: member._sent.contribution}
        return None

    monkeypatch.setattr(member._inbox.assembly, "outcome", of_the_other)
    params, _ = steps(params, member, 0, count=2)
    assert member.last.centers == (1,) and member.last.number == 1 and member._steps == 2 and not member._sent
    steps(params, member, 0, count=1)
    assert member.last.number == 2 and member._steps == 3
    with raises(ValueError, says("Member.step", "params", at="leaf ['w']", got="float32[6]")):
        member.step(params | {"w": params["w"][:, 0]})
    member.leave()


# Bad input


FROZEN, OTHERS = (PARAMS | {"frozen": jnp.int32([1, n])} for n in (2, 3))
TERMS = {
    "Decoupled.join": [
        (dict(params=FROZEN | {"w": jnp.zeros((6, 5))}), ValueError, "params 'w'", "float32[6, 5] in Raw()", "same"),
        # Frozen parameters are never sent.
        (dict(params=OTHERS), ValueError, "params 'frozen'", "int32[2], frozen", "same"),
        # Each round would undo what it has learnt, because its outer parameters would never be those of the others.
        (dict(outer=optax.sgd(0.5)), ValueError, "outer", "the optimizer with the digest", "same"),
    ]
}


@ALONE
@pytest.mark.parametrize("row", rows(TERMS))
def test_a_center_with_other_terms_is_told(row):
    first, second = decoupled(2, quorum=1, grace=0.1, plan=cgx.Plan(cgx.Raw(), [("frozen", cgx.Skip())]))
    own, member = first.join(FROZEN)

    def join(other):
        options = {"outer": second.outer, "params": FROZEN} | other
        dataclasses.replace(second, grace=LIMIT, outer=options["outer"]).join(options["params"])

    # The warning comes from a thread of the first center, maybe later.
    with pytest.warns(UserWarning, match="turned away") as warned:
        refused(*row, run=join)
        until(lambda _: member.last and len(warned), lambda: member.step(own))  # it continues
        member.leave()


def apart(*centers):
    """Returns what centers that don't meet are told about one another, after they have begun."""
    with pytest.warns(UserWarning, match="begins without others after") as warned:
        joined = join(centers)
    assert all(len(member.centers) == 1 for _, member in joined)
    leave(joined)
    return sorted(str(each.message).partition("(")[2] for each in warned)


def test_a_center_without_the_secret_is_a_stranger():
    first, second = decoupled(2, quorum=1, grace=2.0)
    told = apart(first, dataclasses.replace(second, secret="other"))
    assert told == [f"center {i} at {first.addresses[i]}: it has another secret)" for i in range(2)]


def test_centers_with_the_same_place_do_not_meet():
    """Each has its own address first, and waits for the other one's call."""
    first, _ = decoupled(2, quorum=1, grace=2.0)
    told = apart(first, dataclasses.replace(first, addresses=first.addresses[::-1]))
    assert told == sorted(f"center 1 at {each}: the center there has place=0)" for each in first.addresses)


def test_missing_centers_are_named():
    _, second, _ = given = decoupled(3, quorum=1, grace=0.5)
    with socket.create_server(("127.0.0.1", second.hosts[0][1])) as other:  # not a center: it says nothing
        other.settimeout(LIMIT)
        (told,) = apart(second)
    addresses = second.addresses
    assert told.startswith(f"center 0 at {addresses[0]}: not reached; center 2 at {addresses[2]}: not reac")
    (told,) = apart(given[2])
    assert "center 0" in told and "center 1" in told and "refused" in told


def test_another_list_of_addresses():
    first, second = decoupled(2, quorum=1, grace=LIMIT)
    other = dataclasses.replace(second, addresses=[first.addresses[0], f"localhost:{second.hosts[1][1]}"])
    with raises(ValueError, says("Decoupled.join", "addresses", remedy="the same")):
        join([first, other])


PER_RANK = optax.chain(cgx.compress_gradients("dc", cgx.MaxMin(4)), optax.sgd(1.0))
WITH_COUNT = PARAMS | {"n": jnp.array([1, 2**24 + 1])}  # in float32, an average of integers would round them
joining = lambda params=PARAMS, **given: lambda: decoupled(2, **given)[0].join(params)
BAD_INPUT = {
    "Decoupled": [
        (joining(outer=PER_RANK), ValueError, "outer", "one with", "plan"),
        (joining(plan=cgx.PowerSGD(2)), ValueError, "plan"),
        (joining(weights=[1.0, 2.0]), ValueError, "weights", "[1.0, 2.0]"),
        (joining(average=lambda path, x: "median"), ValueError, "average", "the function's answer 'median'"),
    ],
    "Decoupled.join": [(joining(WITH_COUNT), ValueError, "params ['n']", "int32[2]", "freeze it")],
}
test_bad_input = table(BAD_INPUT)


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"], ids=["port in use", "address of another machine"])
def test_an_address_that_is_not_free(host):
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = f"{host}:{used.getsockname()[1]}"
        with raises(OSError, says("Decoupled.join", "addresses", got=repr(address), remedy="'place'")):
            cgx.wan.Decoupled(addresses=[address, "127.0.0.1:1"], place=0).join(PARAMS)


# A center with several processes


def test_a_center_of_two_processes(monkeypatch):
    """It counts as one center and gets the parameters of the other one. Its processes always agree."""
    rank = load_script(RANK, monkeypatch)
    addresses = ports(3)
    port = addresses.pop().partition(":")[2]
    words = [(RANK, port, number, *addresses) for number in range(rank.RANKS)]
    with Processes(*words, limit=5 * LIMIT) as ranks:
        params, member = rank.join(addresses, 0, rank.PARAMS)
        with member:
            expected = rank.train(params, member)
        found = [process.communicate()[0].split()[-3:] for process in ranks.running]
    assert found == [["RESULT", expected, "True"]] * rank.RANKS

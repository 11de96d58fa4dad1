"""A center in decoupled training: the state that it holds, and the messages that it sends and applies."""

import enum
import math
import struct
import threading
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxcgx.checks import callers_level, check_integer, check_positive, spell_array, unexpected, wrong
from jaxcgx.optim.leaves import check_arrays, check_real
from jaxcgx.plan.leaves import spell_path
from jaxcgx.wan.assembly import Assembly, Contribution, Decision, Version
from jaxcgx.wan.contributions import WEIGHTS, Packing
from jaxcgx.wan.moves import Moves, number_of, on_auto_axes, on_axes_of, put_like, shardings_of
from jaxcgx.wan.outer import init_outer
from jaxcgx.wan.peers import Events, Frame, Kind, Peers, Terms

OP = "Decoupled.join"
WEIGHT = struct.Struct("!d")
NAMED = struct.Struct("!II")  # an entry of a decision: place, checksum
REMEDY = "give all centers the same model, frozen parameters, plan, optimizer and options"
TICK = 0.02  # seconds between two checks of a round that waits for further centers


class DecoupledState(NamedTuple):
    """The state that a center needs, besides `member.params`, to go on after all centers have stopped.

    Attributes:
      round: int32[]: the number of rounds until now.
      merged: int32[]: the number of outer gradients in them.
      optimizer: the state of the outer optimizer.
      residuals: the residuals of this center, like the parameters; None without feedback.
    """

    round: Any
    merged: Any
    optimizer: Any
    residuals: Any


class Round(NamedTuple):
    """A round that has ended.

    Attributes:
      number: the number of the round, from 1.
      centers: the places of the centers whose outer gradients are in it.
    """

    number: int
    centers: tuple[int, ...]


class _Held(NamedTuple):
    """The state that is the same in all centers with this version."""

    version: Version
    outer: Any
    optimizer: Any
    merged: np.ndarray  # uint64[centers, 2]: the last outer gradient of each center in it, as `_named`; zeros: none


class _Sent(NamedTuple):
    """The outer gradient that this center has sent for the next round, and its state at that time."""

    contribution: Contribution | None  # None in processes other than the first, which send nothing
    own: Any  # this center's parameters when it sent
    residuals: Any  # the new residuals, if the contribution counts
    steps: int
    tokens: float


class _Act(enum.IntEnum):
    """The next action of a step."""

    GO_ON = 0
    SEND = 1
    MOVE = 2
    ADOPT = 3


class Member:
    """A center in decoupled training. `Decoupled.join` makes it. A `with` statement calls `leave` at its end.

    Attributes:
      last: the last `Round` that this center applied, or None.
      waited: the seconds that the last `step` waited for other centers.
    """

    def __init__(self, given: Any, params: Any, state: DecoupledState | None) -> None:
        params = jax.tree_util.tree_map(jnp.asarray, check_arrays(OP, "params", params))
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
            if not (x.is_fully_addressable or x.is_fully_replicated):
                raise wrong(OP, "params", "parameters that every process has whole", "shards", path=path)
        check_real(OP, "params", params)
        self._given = given
        self._shardings = shardings_of(params)
        params = on_auto_axes(params)
        packing = Packing.of("Decoupled", given.plan, params, given.average)
        self._moves = Moves(packing, given.outer, given.seed % 2**32)
        outer = self._moves.copy(params)
        trained = packing.trained.take(outer)
        optimizer = jax.jit(lambda tree: init_outer("Decoupled", given.outer, tree))(trained)
        fresh = DecoupledState(0, 0, optimizer, self._moves.zeros(trained) if given.feedback else None)
        number, merged, optimizer, self._residuals = fresh if state is None else _checked(state, fresh)
        version = Version(number, merged, number_of(self._moves.checksums(trained, optimizer)))
        self._held = _Held(version, outer, optimizer, np.zeros((len(given.hosts), 2), np.uint64))
        self._compile()
        self._sent: _Sent | None = None
        self._waits = False
        self._steps, self._tokens = 0, 0.0  # since this center last took part
        self.last: Round | None = None
        self.waited: float = 0.0
        self._changed = threading.Condition()  # guards the attributes below
        # A round waits for half of the grace, so that its end reaches steps before they have waited for all of it.
        self._assembly = Assembly(given.place, given.quorum, given.grace / 2)
        self._assembly.advance(self._held.version)
        self._outcome: dict[int, Contribution] = {}  # of the round that ends
        self._arrived: Frame | None = None  # a STATE frame to adopt
        self._asked: int | None = None  # the place of the center that was asked for a STATE
        self._difference: Exception | None = None
        self._joined = self._closed = False
        self._peers: Any = None  # a Peers in the first process, None in the others
        terms = self._terms()  # in every process, because it computes checksums of their common arrays
        if jax.process_index() == 0:
            sizes = {
                Kind.BEAT: [0],
                Kind.CONTRIBUTION: [WEIGHT.size + packing.bytes],
                Kind.DECISION: [NAMED.size * count for count in range(1, len(given.hosts) + 1)],
                Kind.FETCH: [0],
                Kind.STATE: [self._state_bytes],
            }
            events = Events(self._beat, self._came, self._got, left=self._left, differs=self._differs)
            try:
                self._peers = Peers(
                    given.place, given.hosts, given.secret.encode(), terms=terms, sizes=sizes, events=events
                )
            except OSError as error:
                expected = f"an address of this machine, with a free port, at place {given.place}"
                remedy = "correct 'addresses' or 'place', or end the program that has the port"
                got = f"{given.addresses[given.place]!r}: {error}"
                raise wrong(OP, "addresses", expected, got, remedy, kind=OSError) from None
            self._peers.start()
            threading.Thread(target=self._preside, name="jaxcgx-preside", daemon=True).start()
        try:
            self._begin()
        except BaseException:
            self.leave()
            raise

    # The public methods.

    @property
    def params(self) -> Any:
        """The outer parameters, the same in all centers. Evaluate and save these."""
        return on_axes_of(self._shardings, self._moves.copy(self._held.outer))

    @property
    def state(self) -> DecoupledState:
        """The state that `join` needs, with `params`, to go on later."""
        version, _, optimizer, _ = self._held
        return DecoupledState(np.int32(version.round), np.int32(version.merged), optimizer, self._residuals)

    @property
    def centers(self) -> tuple[int, ...]:
        """The places of the connected centers and of this center."""
        with self._changed:
            return tuple(sorted([self._given.place, *self._assembly.others]))

    def step(self, params: Any, tokens: float = 1.0) -> Any:
        """Returns the parameters to go on with. Call it after each step of the inner optimizer.

        Args:
          params: this center's parameters after the step.
          tokens: the number of tokens, or examples, in the step's batch of the whole center.
        """
        _check_like("Member.step", "params", params, self._held.outer)
        check_positive("Member.step", "tokens", tokens)
        self._steps, self._tokens, self.waited = self._steps + 1, self._tokens + float(tokens), 0.0
        acts = {_Act.SEND: self._send, _Act.MOVE: self._move, _Act.ADOPT: self._adopt}
        params = jax.tree_util.tree_map(jnp.asarray, params)
        shardings, params = shardings_of(params), on_auto_axes(params)
        while (act := self._agreed(self._next())) != _Act.GO_ON:
            params = acts[act](params)
        return on_axes_of(shardings, params)

    def leave(self) -> None:
        """Ends this center's connections. The other centers go on without it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._peers:
            self._peers.close()

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # The actions of a step.

    def _next(self) -> _Act:
        """Returns the next action. First it waits for the other centers, if this step has to wait for the round."""
        if not self._peers:
            return _Act.GO_ON  # the first process decides
        given, assembly = self._given, self._assembly
        with self._changed:
            now = time.monotonic()
            if self._sent and self._waits and self._steps - self._sent.steps >= given.overlap:
                self._waits = False
                self._changed.wait_for(lambda: self._arrived or assembly.outcome(), given.grace - self.waited)
                self.waited += time.monotonic() - now
            if assembly.must_fetch(now):
                self._ask()
            if self._arrived:
                return _Act.ADOPT
            if outcome := assembly.outcome():
                self._outcome = outcome
                return _Act.MOVE
            due = self._steps >= given.every or (self._steps > 0 and assembly.gathers(now))
            # A step that has already waited sends nothing: a center that a round left out sends in its next step.
            return _Act.SEND if due and not (self._sent or self.waited) else _Act.GO_ON

    def _send(self, params: Any) -> Any:
        """Sends this center's outer gradient."""
        version, outer, *_ = self._held
        numbers = np.array([self._given.place, version.round], np.int32)
        row, own, residuals = self._moves.encode(outer, params, self._residuals, numbers)
        contribution, steps, tokens = None, self._steps, self._tokens
        if self._peers:
            weight = float(WEIGHTS[self._given.weights](tokens, steps))
            contribution = Contribution(version, weight, np.asarray(row).tobytes())
            with self._changed:
                self._assembly.contribute(self._given.place, contribution)
                self._peers.send_all(_contribution(contribution))
                self._changed.notify_all()
        self._sent, self._waits = _Sent(contribution, own, residuals, steps=steps, tokens=tokens), True
        return params

    def _move(self, params: Any) -> Any:
        """Moves the outer parameters by the average of a round, and this center's own parameters by as much."""
        (rows, weights), included = self._nothing(), False
        version, before, optimizer, merged = self._held
        merged = merged.copy()
        for place, each in self._outcome.items():
            rows[place], weights[place] = np.frombuffer(each.payload, np.uint8), each.weight
            merged[place] = _named(each)
        if self._sent and self._sent.contribution:
            included = self._outcome.get(self._given.place) is self._sent.contribution
        rows, weights, included = self._shared((rows, weights, included))
        outer, optimizer, checksums = self._moves.move(before, optimizer, rows, weights)
        base = before
        if self._sent and included:
            self._residuals, base = self._sent.residuals, self._sent.own
            self._steps, self._tokens = self._steps - self._sent.steps, self._tokens - self._sent.tokens
        # The center keeps its progress since the base, and sends it in the next round.
        params = self._moves.follow(params, outer, base) if self._steps else self._moves.copy(outer)
        members = tuple(int(place) for place in np.flatnonzero(weights))
        self.last = Round(version.round + 1, members)
        version = Version(version.round + 1, version.merged + len(members), number_of(checksums))
        self._hold(_Held(version, outer, optimizer, merged))
        return params

    def _adopt(self, params: Any) -> Any:
        """Goes on from the outer parameters and the optimizer's state that another center has sent."""
        _, outer, optimizer, merged = self._held
        words, body, included = np.zeros(6, np.uint32), np.zeros(self._state_bytes, np.uint8), False
        if self._peers and self._arrived:
            words[:] = [word for number in self._arrived.version for word in divmod(number, 2**32)]
            body[:] = np.frombuffer(self._arrived.body, np.uint8)
            merged = body[: merged.nbytes].view(merged.dtype).reshape(merged.shape).copy()
            if self._sent and self._sent.contribution:
                included = tuple(merged[self._given.place].tolist()) == _named(self._sent.contribution)
        words, body, included = self._shared((words, body, included))
        numbers: list[list[int]] = np.reshape(words, (3, 2)).tolist()
        version = Version(*(high << 32 | low for high, low in numbers))
        like = self._moves.packing.trained.take(outer), optimizer
        trained, optimizer = _from_bytes(like, np.asarray(body)[merged.nbytes :])
        outer = self._moves.packing.trained.put(outer, trained)
        if self._sent and included:
            self._residuals = self._sent.residuals
        self._steps, self._tokens, self._arrived = 0, 0.0, None
        self._hold(_Held(version, outer, optimizer, merged))
        return self._moves.copy(outer)

    def _hold(self, held: _Held) -> None:
        with self._changed:
            self._held, self._sent = held, None
            self._assembly.advance(held.version)
            if self._peers:
                self._peers.send_all(self._beat())
            self._changed.notify_all()

    def _compile(self) -> None:
        """Compiles the programs by running them, before other centers wait for this one."""
        _, outer, optimizer, _ = self._held
        self._moves.encode(outer, outer, self._residuals, np.array([self._given.place, 0], np.int32))
        self._moves.move(outer, optimizer, *self._nothing())
        self._moves.follow(outer, outer, outer)

    def _nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rows, weights) of a round without contributions, all zero."""
        count = len(self._given.addresses)
        return np.zeros((count, self._moves.packing.bytes), np.uint8), np.zeros(count, np.float32)

    # The agreement of the processes of a center.

    def _agreed(self, act: _Act) -> _Act:
        """Returns the first process's action, on all processes."""
        return _Act(int(self._shared(np.int32(act))))

    def _shared(self, tree: Any) -> Any:
        """Returns the first process's tree, on all processes."""
        return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)

    # The communication between centers.

    def _begin(self) -> None:
        """Meets the other centers, and adopts the chair's state if it differs from this center's."""
        if self._peers:
            self._meet()
        if self._agreed(_Act.ADOPT if self._arrived else _Act.GO_ON) == _Act.ADOPT:
            self._adopt(None)

    def _meet(self) -> None:
        """Waits for the other centers, and for the chair's state if it differs from this center's."""
        given = self._given
        with self._changed:
            met = lambda: self._difference or len(self._assembly.others) == len(given.addresses) - 1
            self._changed.wait_for(met, given.grace)
            self._changed.wait_for(self._ready)
            if self._difference:
                raise self._difference
            self._joined, here = True, {given.place, *self._assembly.others}
        if missing := [place for place in range(len(given.addresses)) if place not in here]:
            reasons = self._peers.why_missing(missing)
            each = "; ".join(f"center {place} at {given.addresses[place]}: {why}" for place, why in reasons.items())
            text = f"{OP}: this center begins without others after {given.grace} s ({each})"
            warnings.warn(text, stacklevel=callers_level())

    def _ready(self) -> bool:
        """Returns whether the wait for the chair's state is over, and asks the chair for its state otherwise.

        It is over if this center has the chair's version, if the state has arrived, or if another center has other
        terms.
        """
        assembly = self._assembly
        same = assembly.others.get(assembly.chair, assembly.version) == assembly.version
        if not same and not self._difference and not self._arrived:
            self._ask()
        return bool(same or self._difference or self._arrived)

    def _ask(self) -> None:
        """Asks the chair for its state, unless a request is already open."""
        assembly = self._assembly
        if self._asked is None:
            self._asked = assembly.chair
            assembly.fetching = assembly.others[assembly.chair].round
            self._peers.send(assembly.chair, Frame(Kind.FETCH, assembly.version))

    def _preside(self) -> None:
        """Decides rounds whenever this center is the chair. It runs in a thread until the center leaves."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if decision := self._assembly.decide(now):
                    named = b"".join(NAMED.pack(*each) for each in decision.members)
                    self._peers.send_all(Frame(Kind.DECISION, decision.version, named))
                    self._changed.notify_all()
                self._changed.wait(TICK if self._assembly.gathers(now) else None)

    def _terms(self) -> Terms:
        given, held, packing = self._given, self._held, self._moves.packing
        leaves = {
            leaf.name: f"{leaf.dtype}{list(leaf.shape)} in {leaf.codec}, average {'radial' if leaf.radial else 'mean'}"
            for leaf in packing.leaves
        }
        # Frozen parameters are never sent. So each center must begin with the same ones.
        for (path, x), at in zip(jax.tree_util.tree_flatten_with_path(held.outer)[0], packing.trained.rows):
            if at is None:
                check = number_of(self._moves.checksums(x, ()))
                leaves[spell_path(path)] = f"{spell_array(x)}, frozen, with the checksum {check:016x}"
        for path, x in jax.tree_util.tree_flatten_with_path(held.optimizer)[0]:
            leaves[f"outer state {jax.tree_util.keystr(path)}"] = spell_array(x)
        options = {
            "addresses": ", ".join(given.addresses),
            "weights": repr(given.weights),
            "outer": f"the optimizer with the digest {self._moves.rule(held.outer, held.optimizer)}",
        }
        return Terms(options, leaves)

    @property
    def _state_bytes(self) -> int:
        like = self._held.merged, self._moves.packing.trained.take(self._held.outer), self._held.optimizer
        return sum(x.nbytes for x in jax.tree_util.tree_leaves(like))

    # The events of `Peers`. They are called in its threads.

    def _beat(self) -> Frame:
        """Returns a frame that says that this center is alive, with its version."""
        return Frame(Kind.BEAT, self._held.version)

    def _came(self, place: int) -> None:
        """Handles the connection of a center."""
        with self._changed:
            self._asked = None if self._asked == place else self._asked  # a request over the old connection is lost
            self._peers.send(place, self._beat())
            if own := self._assembly.present().get(self._given.place):
                self._peers.send(place, _contribution(own))

    def _left(self, place: int) -> None:
        """Handles the loss of a center."""
        with self._changed:
            self._assembly.others.pop(place, None)
            self._asked = None if self._asked == place else self._asked
            self._changed.notify_all()

    def _differs(self, place: int, difference: tuple[str, str, str, str]) -> None:
        """Handles a center with other terms: an error while this center joins, a warning after that."""
        argument, leaf, mine, theirs = difference
        where = f"{OP}: argument '{argument}'" + (f", leaf {leaf!r}" if leaf else "")
        expected = f"{theirs}, which center {place} at {self._given.addresses[place]} has"
        error = unexpected(where, expected, mine, REMEDY)
        with self._changed:
            if self._joined:
                warnings.warn(f"a center was turned away: {error}", stacklevel=callers_level())
                return
            self._difference = error
            self._changed.notify_all()

    def _got(self, place: int, frame: Frame) -> None:
        """Handles a frame from a center."""
        kind, version, body = frame
        if kind == Kind.FETCH:
            held = self._held
            like = held.merged, self._moves.packing.trained.take(held.outer), held.optimizer
            state = b"".join(np.asarray(x).tobytes() for x in jax.tree_util.tree_leaves(like))
            self._peers.send(place, Frame(Kind.STATE, held.version, state))
        with self._changed:
            self._assembly.others[place] = version
            if kind == Kind.CONTRIBUTION:
                (weight,) = WEIGHT.unpack_from(body)
                if math.isfinite(weight) and weight > 0:
                    self._assembly.contribute(place, Contribution(version, weight, memoryview(body)[WEIGHT.size :]))
            elif kind == Kind.DECISION:
                self._assembly.learn(Decision(version, tuple(NAMED.iter_unpack(body))))
            elif kind == Kind.STATE:
                self._asked, own = None, self._assembly.version
                if version.merged >= own.merged and version != own:
                    self._arrived = frame
            self._changed.notify_all()


def _checked(state: DecoupledState, fresh: DecoupledState) -> DecoupledState:
    """Returns a state that a user gave, with residuals if `fresh`, the state of a new training, has residuals."""
    # not every caller is typed
    if not isinstance(state, DecoupledState):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong(OP, "state", "a DecoupledState, which member.state was", type(state).__name__, kind=TypeError)
    number, merged = (check_integer(OP, f"state.{name}", getattr(state, name), 0) for name in ("round", "merged"))
    residuals = state.residuals
    if fresh.residuals is None:
        residuals = None
    elif residuals is None:
        text = "it has no residuals, as it was saved with feedback=False; they start from zeros"
        warnings.warn(f"{OP}: argument 'state': {text}", stacklevel=callers_level())
        residuals = fresh.residuals
    remedy = "give Decoupled the same outer optimizer and plan, and join the parameters, as when the state was saved"
    _check_like(OP, "state.optimizer", state.optimizer, fresh.optimizer, remedy=remedy)
    _check_like(OP, "state.residuals", residuals, fresh.residuals, remedy=remedy)
    return DecoupledState(number, merged, *jax.tree_util.tree_map(jnp.asarray, (state.optimizer, residuals)))


def _check_like(function: str, argument: str, given: Any, wanted: Any, remedy: str = "") -> None:
    """Checks that an argument has the structure, shapes and dtypes of the tree `wanted`."""
    (found, structure), (right, expected) = map(jax.tree_util.tree_flatten_with_path, (given, wanted))
    if structure != expected:
        raise wrong(function, argument, f"the structure {expected}", structure, remedy)
    for (path, x), (_, y) in zip(found, right):
        if spell_array(x) != spell_array(y):
            raise wrong(function, argument, spell_array(y), spell_array(x), remedy, path=path)


def _named(contribution: Contribution) -> tuple[int, int]:
    """Returns the number of the round to which a contribution was sent, and its checksum."""
    return contribution.version.round + 1, contribution.check


def _contribution(contribution: Contribution) -> Frame:
    body = WEIGHT.pack(contribution.weight) + contribution.payload
    return Frame(Kind.CONTRIBUTION, contribution.version, body)


def _from_bytes(like: Any, body: np.ndarray) -> Any:
    """Returns a tree of arrays from their bytes, with the shapes, dtypes and shardings of the tree `like`."""
    leaves, structure = jax.tree_util.tree_flatten(like)
    found, at = [], 0
    for x in leaves:
        found.append(body[at : at + x.nbytes].view(x.dtype).reshape(x.shape))
        at += x.nbytes
    return put_like(like, structure.unflatten(found))

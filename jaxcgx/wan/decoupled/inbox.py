"""The agreement of decoupled centers on the contributions of a round.

Each center sends its contribution to all other centers. The chair decides which contributions count: the center that
has merged the most contributions and, among equals, has the lowest place. All centers apply a decision to the same
outer parameters. A center that can't, because it misses a contribution or has other outer parameters, fetches them from
the chair. `Assembly` is the state and the decisions of one center, without network I/O. `Inbox` hands it the messages
that threads receive, and steps look at it.
"""

import dataclasses
import functools
import math
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxcgx.checks import unexpected, warn, wrong
from jaxcgx.patch.trees import Patch, apply
from jaxcgx.transports.sockets import start_thread
from jaxcgx.typing import Params, PyTree
from jaxcgx.wan.decoupled.peers import Events, Frame, FrameKind, Peers, Terms, Version

OP = "Decoupled.join"
WEIGHT = struct.Struct("!d")
NAMED = struct.Struct("!II")  # an entry of a decision: place, checksum
SIZE = struct.Struct("!Q")  # of a patch
REMEDY = "give all centers the same model, frozen parameters, plan, optimizer and options"
TICK = 0.02  # seconds between two checks of a round that waits for further centers


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The message that a center sends in a round: its outer gradient and a weight."""

    version: Version  # of the outer parameters that the outer gradient starts from
    weight: float
    payload: bytes | memoryview

    @functools.cached_property
    def check(self) -> int:
        return zlib.crc32(self.payload)


class Decision(NamedTuple):
    """The contributions that move the outer parameters of this version to the next one."""

    version: Version
    members: tuple[tuple[int, int], ...]  # (place of a center, `check` of its contribution), by place


Patches = tuple[tuple[Version, bytes], ...]  # (an older version, the patch from there to the next one), in order


class CommonState(NamedTuple):
    """The state that is the same in all centers with this version. Other centers may fetch it."""

    version: Version
    outer: Params
    optimizer: PyTree  # the state of the outer optimizer
    arrays: list[Any]  # of both, without frozen parameters
    merged: np.ndarray[Any, Any]  # uint64[centers, 2]: the last outer gradient of each center in it; zeros: none
    patches: Patches = ()  # up to this version

    @property
    def nbytes(self) -> int:
        return self.merged.nbytes + sum(x.nbytes for x in self.arrays)


@dataclasses.dataclass
class Assembly:
    """The versions, contributions and decisions that a center knows."""

    # A round needs `quorum` contributions. After that it waits at most `grace` seconds for further ones. A center waits
    # as long before it fetches the chair's state.
    place: int
    quorum: int
    grace: float
    version: Version = dataclasses.field(default_factory=Version)
    others: dict[int, Version] = dataclasses.field(default_factory=dict)  # those of the connected centers, by place
    _sent: dict[int, dict[int, Contribution]] = dataclasses.field(default_factory=dict)  # by round and place
    _decided: dict[Version, Decision] = dataclasses.field(default_factory=dict)
    fetching: int | None = None  # the round of the state that this center has asked for
    _since: float | None = None  # when the quorum was reached
    _apart: float | None = None  # since when no known decision leads to the chair's version

    @property
    def chair(self) -> int:
        everyone = {**self.others, self.place: self.version}
        return min(everyone, key=lambda place: (-everyone[place].merged, place))

    def present(self) -> dict[int, Contribution]:
        found = self._sent.get(self.version.round, {})
        return {place: each for place, each in sorted(found.items()) if each.version == self.version}

    def contribute(self, place: int, contribution: Contribution) -> None:
        """Keeps a contribution of the center at `place`, if this center may need it."""
        if self._needs(contribution.version.round):
            self._sent.setdefault(contribution.version.round, {})[place] = contribution

    def learn(self, decision: Decision) -> None:
        """Keeps a decision, if this center may need it. Later decisions for the same version are ignored."""
        if self._needs(decision.version.round):
            self._decided.setdefault(decision.version, decision)

    def _needs(self, number: int) -> bool:
        """Returns whether this center may need messages of a round."""
        # These are its own round and the next one. While it fetches a state, the state's round and later ones, too.
        fetched = self.fetching is not None and number >= self.fetching
        return fetched or 0 <= number - self.version.round <= 1

    def gathers(self, now: float) -> bool:
        """Returns whether a quorum has sent. Centers that have not sent should then send soon."""
        if len(self.present()) < self.quorum:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None

    def decide(self, now: float) -> Decision | None:
        """Makes a decision if this center has to make one now. Returns None otherwise."""
        if not self.gathers(now) or self.chair != self.place or self.version in self._decided:
            return None
        present = self.present()
        # A center that is one round behind is about to catch up. A center further behind has to fetch first.
        expected = [place for place, version in self.others.items() if version.round >= self.version.round - 1]
        if self._since is not None and now < self._since + self.grace and not {self.place, *expected} <= present.keys():
            return None
        decision = Decision(self.version, tuple((place, each.check) for place, each in present.items()))
        self.learn(decision)
        return decision

    def outcome(self) -> dict[int, Contribution] | None:
        """Returns the contributions that the decision names, by place. None if one is missing, or without decision."""
        decision, present = self._decided.get(self.version), self.present()
        if decision is None:
            return None
        if any(place not in present or present[place].check != check for place, check in decision.members):
            return None
        return {place: present[place] for place, _ in decision.members}

    def advance(self, version: Version) -> None:
        """Goes on with the outer parameters of another version."""
        self.version, self.fetching, self._since, self._apart = version, None, None, None
        self._sent = {number: each for number, each in self._sent.items() if number >= version.round}
        self._decided = {base: each for base, each in self._decided.items() if base.round >= version.round}

    def must_fetch(self, now: float) -> bool:
        """Returns whether, for longer than `grace`, the chair has had another version and no outcome leads there."""
        chair = self.others.get(self.chair, self.version)
        if chair == self.version or self.outcome() is not None:
            self._apart = None
        elif self._apart is None:
            self._apart = now
        return self._apart is not None and now - self._apart > self.grace


class Inbox:
    """What a center knows of the other centers, and its connections to them."""

    # The condition `changed` guards all attributes that change. Threads call `state()`. `payload` is the number of
    # bytes of an outer gradient.
    def __init__(self, given: Any, terms: Terms, payload: int, state: Callable[[], CommonState]) -> None:
        self._given, self._state = given, state
        size, version = state().nbytes, state().version
        # A round waits for half of the grace, so that its end reaches steps before they have waited for all of it.
        self.assembly: Assembly = Assembly(given.place, given.quorum, given.grace / 2)
        self.assembly.advance(version)
        self._arrived: Frame | None = None  # a STATE frame to adopt
        self._asked: int | None = None  # the place of the center that was asked for a STATE
        self._difference: Exception | None = None
        self._joined = self._closed = False
        self.changed: threading.Condition = threading.Condition()
        sizes = {
            FrameKind.BEAT: [0],
            FrameKind.CONTRIBUTION: [WEIGHT.size + payload],
            FrameKind.DECISION: [NAMED.size * count for count in range(1, len(given.hosts) + 1)],
            FrameKind.FETCH: [0],
            FrameKind.STATE: [size],
            FrameKind.PATCHES: range(size),
        }
        events = Events(self._beat, self._came, self._got, left=self._left, differs=self._differs)
        try:
            self.peers: Peers = Peers(given.place, given.hosts, given.secret, terms=terms, sizes=sizes, events=events)
        except OSError as error:
            expected = f"an address of this machine, with a free port, at place {given.place}"
            remedy = "correct 'addresses' or 'place', or end the program that has the port"
            got = f"{given.addresses[given.place]!r}: {error}"
            raise wrong(OP, "addresses", expected, got, remedy, kind=OSError) from None
        self.peers.start()
        start_thread(self._preside)

    def meet(self) -> Frame | None:
        """Waits for the other centers. Returns the chair's state if it differs from this center's."""
        given, assembly = self._given, self.assembly
        with self.changed:
            met = lambda: self._difference or len(assembly.others) == len(given.addresses) - 1
            self.changed.wait_for(met, given.grace)
            self.changed.wait_for(self._ready)
            if self._difference:
                raise self._difference
            self._joined, here = True, {given.place, *assembly.others}
        if missing := [place for place in range(len(given.addresses)) if place not in here]:
            reasons = self.peers.why_missing(missing)
            each = "; ".join(f"center {place} at {given.addresses[place]}: {why}" for place, why in reasons.items())
            warn(f"{OP}: this center begins without others after {given.grace} s ({each})")
        return self._arrived

    @property
    def others(self) -> list[int]:
        with self.changed:
            return list(self.assembly.others)

    def wait(self, seconds: float) -> None:
        """Waits until `look` finds a state or a round."""
        with self.changed:
            self.changed.wait_for(lambda: self._arrived or self.assembly.outcome(), seconds)

    def look(self, now: float) -> tuple[Frame | None, dict[int, Contribution], bool]:
        """Returns (a state to adopt or None, the contributions of a round that ended or {}, whether others wait)."""
        with self.changed:
            if self.assembly.must_fetch(now):
                self._ask()
            return self._arrived, self.assembly.outcome() or {}, self.assembly.gathers(time.monotonic())

    def contribute(self, contribution: Contribution) -> None:
        with self.changed:
            self.assembly.contribute(self._given.place, contribution)
            self.peers.send_all(_frame(contribution))
            self.changed.notify_all()

    def advance(self, version: Version, adopted: bool) -> None:
        """Goes on with another version. `adopted` says whether it is that of the state that arrived."""
        with self.changed:
            self._arrived = None if adopted else self._arrived
            self.assembly.advance(version)
            self.peers.send_all(self._beat())
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self.peers.close()

    # The caller of these two holds the condition.

    def _ready(self) -> bool:
        """Returns whether this center need not wait for the chair's state. Otherwise, it asks the chair for it."""
        assembly = self.assembly
        same = assembly.others.get(assembly.chair, assembly.version) == assembly.version
        ready = same or self._difference is not None or self._arrived is not None
        if not ready:
            self._ask()
        return ready

    def _ask(self) -> None:
        """Asks the chair for its state, unless a request is already open."""
        assembly = self.assembly
        if self._asked is None:
            self._asked = assembly.chair
            assembly.fetching = assembly.others[assembly.chair].round
            self.peers.send(assembly.chair, Frame(FrameKind.FETCH, assembly.version))

    # The threads: one that decides, and those of `Peers`, which call the methods below it.

    def _preside(self) -> None:
        with self.changed:
            while not self._closed:
                now = time.monotonic()
                if decision := self.assembly.decide(now):
                    named = b"".join(NAMED.pack(*each) for each in decision.members)
                    self.peers.send_all(Frame(FrameKind.DECISION, decision.version, named))
                    self.changed.notify_all()
                self.changed.wait(TICK if self.assembly.gathers(now) else None)

    def _beat(self) -> Frame:
        return Frame(FrameKind.BEAT, self.assembly.version)

    def _came(self, place: int) -> None:
        with self.changed:
            self._asked = None if self._asked == place else self._asked  # a request over the old connection is lost
            self.peers.send(place, self._beat())
            if own := self.assembly.present().get(self._given.place):
                self.peers.send(place, _frame(own))

    def _left(self, place: int) -> None:
        with self.changed:
            self.assembly.others.pop(place, None)
            self._asked = None if self._asked == place else self._asked
            self.changed.notify_all()

    def _differs(self, place: int, difference: tuple[str, str, str, str]) -> None:
        """Handles a center with other terms: an error while this center joins, a warning after that."""
        argument, leaf, mine, theirs = difference
        where = f"{OP}: argument '{argument}'" + (f", leaf {leaf!r}" if leaf else "")
        expected = f"{theirs}, which center {place} at {self._given.addresses[place]} has"
        error = unexpected(where, expected, mine, REMEDY)
        with self.changed:
            if self._joined:
                warn(f"a center was turned away: {error}")
                return
            self._difference = error
            self.changed.notify_all()

    def _got(self, place: int, frame: Frame) -> None:
        kind, version, body = frame
        if kind == FrameKind.FETCH:
            self.peers.send(place, _frame_of(self._state(), version))
        patched = _patched(self._state(), body) if kind == FrameKind.PATCHES else body
        with self.changed:
            self.assembly.others[place] = version
            if kind == FrameKind.CONTRIBUTION:
                (weight,) = WEIGHT.unpack_from(body)
                if math.isfinite(weight) and weight > 0:
                    self.assembly.contribute(place, Contribution(version, weight, memoryview(body)[WEIGHT.size :]))
            elif kind == FrameKind.DECISION:
                self.assembly.learn(Decision(version, tuple(NAMED.iter_unpack(body))))
            elif kind in (FrameKind.STATE, FrameKind.PATCHES):
                self._asked, own = None, self.assembly.version
                if version.merged >= own.merged and version != own and patched is not None:
                    self._arrived = Frame(FrameKind.STATE, version, patched)
            self.changed.notify_all()


def _frame_of(state: CommonState, there: Version) -> Frame:
    """Returns what a center with the version `there` needs to have a state."""
    merged, known = state.merged.tobytes(), [version for version, _ in state.patches]
    if there in known:
        patches = [SIZE.pack(len(data)) + data for _, data in state.patches[known.index(there) :]]
        return Frame(FrameKind.PATCHES, state.version, b"".join([merged, *patches]))
    return Frame(FrameKind.STATE, state.version, b"".join([merged, *(np.asarray(x).tobytes() for x in state.arrays)]))


def _patched(state: CommonState, body: Any) -> bytes | None:
    """Returns the body of a STATE, from that of PATCHES. None: they are cut, or this center has another state."""
    at, arrays = state.merged.nbytes, [np.asarray(x) for x in state.arrays]
    merged = body[:at]
    while at < len(body):
        try:
            (size,) = SIZE.unpack_from(body, at)
            at += SIZE.size + size
            arrays = apply(arrays, Patch.frombytes(body[at - size : at]))
        except (ValueError, struct.error):
            return None
    return b"".join([merged, *(x.tobytes() for x in arrays)])


def _frame(contribution: Contribution) -> Frame:
    body = WEIGHT.pack(contribution.weight) + contribution.payload
    return Frame(FrameKind.CONTRIBUTION, contribution.version, body)

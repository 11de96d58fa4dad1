"""The agreement of decoupled centers on the contributions of a round: the state and decisions of one center.

Each center sends its contribution to all other centers. The chair decides which contributions count. The chair is the
center that has merged the most contributions; among equals, it is the center with the lowest place. All centers apply a
decision to the same outer parameters. A center that can't apply it, because it misses a contribution or has different
outer parameters, fetches the outer parameters from the chair. This module does no network I/O.
"""

import dataclasses
import functools
import zlib
from typing import NamedTuple


class Version(NamedTuple):
    """The version of a center's outer parameters."""

    round: int = 0  # the number of rounds that they have been through
    merged: int = 0  # the number of contributions in these rounds
    digest: int = 0  # of the bits of the parameters and of the outer optimizer's state


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The message that a center sends in a round: its outer gradient and a weight."""

    version: Version  # of the outer parameters that the outer gradient starts from
    weight: float
    payload: bytes | memoryview

    @functools.cached_property
    def check(self) -> int:
        """The checksum of the payload."""
        return zlib.crc32(self.payload)


class Decision(NamedTuple):
    """The contributions that move the outer parameters of this version to the next one."""

    version: Version
    members: tuple[tuple[int, int], ...]  # (place of a center, `check` of its contribution), by place


class Assembly:
    """The versions, contributions and decisions that a center knows.

    Args:
      place: the place of this center.
      quorum: the number of contributions that a round needs.
      grace: the most seconds that a round waits for further contributions after the quorum, and that a center waits
        before it fetches the chair's state.
    """

    def __init__(self, place: int, quorum: int, grace: float) -> None:
        self.place: int = place
        self.quorum: int = quorum
        self.grace: float = grace
        self.version: Version = Version()
        self.others: dict[int, Version] = {}  # the versions of the connected centers, by place
        self._sent: dict[int, dict[int, Contribution]] = {}  # by round and place
        self._decided: dict[Version, Decision] = {}
        self.fetching: int | None = None  # the round of the state that this center has asked for
        self._since: float | None = None  # when the quorum was reached
        self._apart: float | None = None  # since when no known decision leads to the chair's version

    @property
    def chair(self) -> int:
        """The place of the chair."""
        everyone = {**self.others, self.place: self.version}
        return min(everyone, key=lambda place: (-everyone[place].merged, place))

    def present(self) -> dict[int, Contribution]:
        """Returns the contributions to the next round, by place."""
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
        """Returns whether this center may need messages of a round.

        It needs the messages of its current round and of the next one. While it fetches a state, it also needs those of
        the state's round and of all later ones.
        """
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
        chosen = {place: present[place] for place, _ in decision.members if place in present}
        right = all(place in chosen and chosen[place].check == check for place, check in decision.members)
        return chosen if right else None

    def advance(self, version: Version) -> None:
        """Goes on with the outer parameters of another version."""
        self.version, self.fetching, self._since, self._apart = version, None, None, None
        self._sent = {number: each for number, each in self._sent.items() if number >= version.round}
        self._decided = {base: each for base, each in self._decided.items() if base.round >= version.round}

    def must_fetch(self, now: float) -> bool:
        """Returns whether this center must fetch the chair's outer parameters.

        It must if, for longer than `grace`, the chair has had another version and there was no outcome to apply.
        """
        chair = self.others.get(self.chair, self.version)
        if chair == self.version or self.outcome() is not None:
            self._apart = None
        elif self._apart is None:
            self._apart = now
        return self._apart is not None and now - self._apart > self.grace

"""How decoupled centers agree on the contributions of a round: what one of them knows and decides. No network in here.

Each center sends its contribution to all others. The chair names those that count: it is the center that has merged the
most contributions, and among equals the one of the lowest place. Everyone applies a decision to the same outer
parameters. A center that can't, because it misses a contribution or has other ones, fetches them from the chair.
"""

import dataclasses
import functools
import zlib
from typing import NamedTuple


class Version(NamedTuple):
    """Which outer parameters a center has."""

    round: int = 0  # how many rounds they have had
    merged: int = 0  # how many contributions
    digest: int = 0  # of their bits and those of the outer optimizer's state


@dataclasses.dataclass(frozen=True)
class Contribution:
    """What a center sends in a round."""

    version: Version  # from which it started
    weight: float
    payload: bytes | memoryview

    @functools.cached_property
    def check(self) -> int:
        """The checksum of the payload."""
        return zlib.crc32(self.payload)


class Decision(NamedTuple):
    """Which contributions make the next outer parameters of this version."""

    version: Version
    members: tuple[tuple[int, int], ...]  # (place, `check` of its contribution), in order


class Assembly:
    """What a center knows of all.

    Args:
      place: its own.
      quorum: the number of contributions after which a round waits no longer than `grace`.
      grace: seconds.
    """

    def __init__(self, place: int, quorum: int, grace: float) -> None:
        self.place: int = place
        self.quorum: int = quorum
        self.grace: float = grace
        self.version: Version = Version()
        self.others: dict[int, Version] = {}  # that are connected
        self._sent: dict[int, dict[int, Contribution]] = {}  # by round and place
        self._decided: dict[Version, Decision] = {}
        self.fetching: int | None = None  # the round whose outer parameters it has asked for
        self._since: float | None = None  # when the quorum was there
        self._apart: float | None = None  # since when the chair's version can't be reached

    @property
    def chair(self) -> int:
        """The place of the center that decides."""
        everyone = {**self.others, self.place: self.version}
        return min(everyone, key=lambda place: (-everyone[place].merged, place))

    def present(self) -> dict[int, Contribution]:
        """The contributions to the next round, by place."""
        found = self._sent.get(self.version.round, {})
        return {place: each for place, each in sorted(found.items()) if each.version == self.version}

    def contribute(self, place: int, contribution: Contribution) -> None:
        """Keeps what a center has sent, if this one may need it."""
        if self._needs(contribution.version.round):
            self._sent.setdefault(contribution.version.round, {})[place] = contribution

    def learn(self, decision: Decision) -> None:
        """Keeps a decision, if this center may need it. The first one of a version counts."""
        if self._needs(decision.version.round):
            self._decided.setdefault(decision.version, decision)

    def _needs(self, number: int) -> bool:
        """Whether a round is this one or the next one, or comes after the one that is being fetched."""
        fetched = self.fetching is not None and number >= self.fetching
        return fetched or 0 <= number - self.version.round <= 1

    def gathers(self, now: float) -> bool:
        """Whether a quorum has sent and the round waits for others, who should hurry."""
        if len(self.present()) < self.quorum:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None

    def decide(self, now: float) -> Decision | None:
        """A decision, if this center has to make one now."""
        if not self.gathers(now) or self.chair != self.place or self.version in self._decided:
            return None
        present = self.present()
        # A center one round behind is about to apply it. One further behind fetches first.
        expected = [place for place, version in self.others.items() if version.round >= self.version.round - 1]
        if self._since is not None and now < self._since + self.grace and not {self.place, *expected} <= present.keys():
            return None
        decision = Decision(self.version, tuple((place, each.check) for place, each in present.items()))
        self.learn(decision)
        return decision

    def outcome(self) -> dict[int, Contribution] | None:
        """The contributions that count, by place, if they are decided and all here."""
        decision, present = self._decided.get(self.version), self.present()
        if decision is None:
            return None
        chosen = {place: present[place] for place, _ in decision.members if place in present}
        right = all(place in chosen and chosen[place].check == check for place, check in decision.members)
        return chosen if right else None

    def advance(self, version: Version) -> None:
        """Goes on with other outer parameters."""
        self.version, self.fetching, self._since, self._apart = version, None, None, None
        self._sent = {number: each for number, each in self._sent.items() if number >= version.round}
        self._decided = {base: each for base, each in self._decided.items() if base.round >= version.round}

    def must_fetch(self, now: float) -> bool:
        """Whether this center has had no way to the chair's outer parameters for longer than `grace`."""
        chair = self.others.get(self.chair, self.version)
        if chair == self.version or self.outcome() is not None:
            self._apart = None
        elif self._apart is None:
            self._apart = now
        return self._apart is not None and now - self._apart > self.grace

"""Decoupled: every center is a separate program. Centers exchange outer gradients without waiting for a slow one."""

import contextlib
import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxcgx.checks import (
    as_array,
    check_flag,
    check_integer,
    check_number,
    check_positive,
    check_real,
    check_type,
    spell_array,
    warn,
    wrong,
)
from jaxcgx.codecs.raw import Raw
from jaxcgx.patch.trees import encode
from jaxcgx.plan.leaves import check_floating, spell_path
from jaxcgx.transports.sockets import as_host
from jaxcgx.typing import Params, PyTree
from jaxcgx.wan.decoupled.inbox import OP, CommonState, Contribution, Inbox, Patches
from jaxcgx.wan.decoupled.moves import WEIGHTS, Moves, Packing, number_of, on_auto_axes, put_like
from jaxcgx.wan.decoupled.peers import Frame, Terms, Version
from jaxcgx.wan.diloco.fragments import wide_zeros
from jaxcgx.wan.diloco.outer import as_optimizer, as_outer_plan, init_outer

OF = "Decoupled"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoupled:
    """Low-communication training (DiLoCo) of centers that start, stop and die on their own.

        train = cgx.make_train_step(loss_fn, optimizer, mesh, cgx.Raw())  # or any other step
        decoupled = cgx.wan.Decoupled(addresses=["a.example:7000", "b.example:7000"], place=0, every=100)
        params, member = decoupled.join(params)
        state = train.init(params)
        for batch in batches:
            state, metrics = train.step(state, batch)
            state = state.replace(params=member.step(state.params))

    Every center is a separate JAX program: one process, or several processes that `jax.distributed` connects. It can
    train any model with any optimizer. After `every` steps a center sends its outer gradient, outer parameters - own
    parameters, to all other centers. A round ends when all connected centers have sent their outer gradients, or half
    of `grace` seconds after a `quorum` of centers has. Then every center moves the outer parameters by the average of
    the outer gradients. The outer parameters, `member.params`, are the same in all centers.

    Args:
      addresses: "host:port" of every center that may ever take part. The list is the same in all centers. Each center
        listens at its address.
      place: the index of this center in `addresses`.
      outer: the outer optimizer, as in `Diloco`.
      every: the number of steps after which a center sends its outer gradient. As soon as a quorum has sent, the other
        centers send at the end of their current step.
      plan: a codec or a Plan, for outer gradients.
      quorum: the number of outer gradients that a round needs.
      grace: the longest time that a step waits for a round, in seconds. After the quorum has sent, a round waits for
        further centers for half of this time.
      overlap: the number of steps, less than `every`, that a center makes after it has sent and before it waits for the
        round. The progress of these steps counts in the next round.
      weights: the weight of a center in the average. "tokens": tokens^2 / steps, both since the center last took part.
        "steps": the steps since then. None: all centers have the same weight.
      average: "mean", "radial", or a function (path, parameter) that returns "mean" or "radial". The radial average is
        the mean of the norms times the direction of the mean of the directions. With "radial", parameters with "embed"
        in their path still have the mean.
      keep: whether residuals, the compression errors of outer gradients, are kept and sent later.
      seed: the seed of the noise of codecs that round stochastically.
      secret: a secret that all centers share. A program without the secret is turned away. Nothing is encrypted.
    """

    addresses: Sequence[str]
    place: int
    outer: Any = "nesterov"
    every: int = 500
    plan: Any = Raw()  # Codec | Plan; later a Plan
    quorum: int = 1
    grace: float = 10.0
    overlap: int = 0
    weights: str | None = "tokens"
    average: str | Callable[[str, Any], str] = "mean"
    keep: bool = True
    seed: int = 0
    secret: str = ""

    def __post_init__(self) -> None:
        count = len(self.hosts)
        check_integer(OF, "place", self.place, 0, count - 1)
        object.__setattr__(self, "outer", as_optimizer(OF, self.outer))
        check_integer(OF, "every", self.every, 1)
        check_integer(OF, "quorum", self.quorum, 1, count)
        check_number(OF, "grace", self.grace, lambda x: x >= 0, "seconds, at least 0")
        check_integer(OF, "overlap", self.overlap, 0)
        if self.overlap >= self.every:
            remedy = f"pass overlap={self.every - 1}"
            raise wrong(OF, "overlap", f"less than every = {self.every} steps", self.overlap, remedy)
        if self.weights not in list(WEIGHTS):  # a dict would hash it
            raise wrong(OF, "weights", "'tokens', 'steps' or None", repr(self.weights))
        if self.average not in ("mean", "radial") and not callable(self.average):
            raise wrong(OF, "average", "'mean', 'radial' or a function", repr(self.average))
        check_flag(OF, "keep", self.keep)
        check_integer(OF, "seed", self.seed)
        check_type(OF, "secret", self.secret, str, "a string")
        object.__setattr__(self, "plan", as_outer_plan(OF, self.plan, self.keep))

    @property
    def hosts(self) -> list[tuple[str, int]]:
        """The (host, port) of every center."""
        expected = "a list of 'host:port', one for each of several centers"
        # not every caller is typed
        typed = isinstance(self.addresses, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not typed or isinstance(self.addresses, str) or len(self.addresses) < 2:
            kind = ValueError if typed else TypeError
            raise wrong(OF, "addresses", expected, repr(self.addresses), kind=kind)
        found = [as_host(OF, "addresses", address, expected) for address in self.addresses]
        if len(set(found)) < len(found):
            raise wrong(OF, "addresses", "another address for each center", repr(list(self.addresses)))
        return found

    def join(self, params: Params, state: "DecoupledState | None" = None) -> tuple[Params, "Member"]:
        """Returns (parameters to go on with, this center's `Member`).

        It waits up to `grace` seconds for the other centers. If a round has ended, this center gets the outer
        parameters and the outer optimizer's state from one of them. Before that, all take the parameters of the center
        that comes first in `addresses`. If another center has other shapes or options, this is an error. If centers are
        missing then, a warning names them and says why.

        Args:
          params: the parameters. Every process of this center has them whole.
          state: to go on with a saved training, its `member.state`. Its `member.params` are then the `params`. Without
            residuals in it, these begin with zeros. With keep=False, its residuals are dropped.
        """
        member = Member(self, params=params, state=state)
        return member.params, member


class DecoupledState(NamedTuple):
    """The state that a center needs, besides `member.params`, to go on after all centers have stopped.

    Attributes:
      round: int32[]: the number of rounds until now.
      merged: int32[]: the number of outer gradients in them.
      optimizer: the state of the outer optimizer.
      residuals: the residuals of this center, like the parameters; None without feedback.
    """

    round: np.ndarray[Any, Any] | np.integer[Any] | int
    merged: np.ndarray[Any, Any] | np.integer[Any] | int
    optimizer: PyTree
    residuals: PyTree


class Round(NamedTuple):
    """A round that has ended.

    Attributes:
      number: the number of the round, from 1.
      centers: the places of the centers whose outer gradients are in it.
    """

    number: int
    centers: tuple[int, ...]


class _Sent(NamedTuple):
    """The outer gradient that this center has sent for the next round, and its state at that time."""

    contribution: Contribution | None  # None in processes other than the first, which send nothing
    own: Params  # this center's parameters when it sent
    residuals: PyTree  # the new residuals, if the contribution counts
    steps: int
    tokens: float


class _Act(enum.IntEnum):
    """The next action of a step."""

    GO_ON = 0
    SEND = 1
    MOVE = 2
    ADOPT = 3


class Member(contextlib.AbstractContextManager["Member"]):
    """A center in decoupled training. `Decoupled.join` makes it. A `with` statement calls `leave` at its end.

    Attributes:
      last: the last `Round` that this center applied, or None.
      waited: the seconds that the last `step` waited for other centers.
    """

    def __init__(self, given: Decoupled, params: Params, state: DecoupledState | None) -> None:
        params = jax.tree.map_with_path(lambda path, x: as_array(OP, "params", x, path), params)
        check_real(OP, "params", params)
        for path, x in jax.tree.flatten_with_path(params)[0]:
            if not (x.is_fully_addressable or x.is_fully_replicated):
                raise wrong(OP, "params", "parameters that every process has whole", "shards", path=path)
        self._given = given
        params, self._placed = on_auto_axes(params)
        packing = Packing.of(OF, given.plan, params, given.average)
        check_floating(OP, packing.trained.take(params))
        self._moves = Moves(packing, given.outer, given.seed % 2**32)
        outer = self._moves.copy(params)
        trained = packing.trained.take(outer)
        optimizer = jax.jit(lambda tree: init_outer(OF, given.outer, tree))(trained)
        fresh = DecoupledState(0, 0, optimizer, jax.jit(wide_zeros)(trained) if given.keep else None)
        number, merged, optimizer, self._residuals = fresh if state is None else _checked(state, fresh)
        version = Version(int(number), int(merged), number_of(self._moves.checksums(trained, optimizer)))
        self._held = self._common(version, outer, optimizer, np.zeros((len(given.hosts), 2), np.uint64))
        self._compile()
        self._sent: _Sent | None = None
        self._waits = False
        self._steps, self._tokens = 0, 0.0  # since this center last took part
        self.last: Round | None = None
        self.waited: float = 0.0
        self._arrived: Frame | None = None  # the state to adopt
        self._outcome: dict[int, Contribution] = {}  # of the round that has ended
        terms = self._terms()  # in every process, because it computes checksums of their common arrays
        # The other processes follow the first one.
        self._inbox = Inbox(given, terms, packing.bytes, lambda: self._held) if jax.process_index() == 0 else None
        try:
            if self._inbox:
                self._arrived = self._inbox.meet()
            if self._agreed(_Act.ADOPT if self._arrived else _Act.GO_ON) == _Act.ADOPT:
                self._adopt(None)
        except BaseException:
            self.leave()
            raise

    @property
    def params(self) -> PyTree:
        """The outer parameters, the same in all centers. Evaluate and save these."""
        return self._placed(self._moves.copy(self._held.outer))

    @property
    def state(self) -> DecoupledState:
        """The state that `join` needs, with `params`, to go on later."""
        version, optimizer = self._held.version, self._held.optimizer
        return DecoupledState(np.int32(version.round), np.int32(version.merged), optimizer, self._residuals)

    @property
    def centers(self) -> tuple[int, ...]:
        """The places of the connected centers and of this center."""
        return tuple(sorted([self._given.place, *(self._inbox.others if self._inbox else ())]))

    def step(self, params: Params, tokens: float = 1.0) -> PyTree:
        """Returns the parameters to go on with. Call it after each step of the inner optimizer.

        Args:
          params: this center's parameters after the step.
          tokens: the number of tokens, or examples, in the step's batch of the whole center.
        """
        _check_like("Member.step", "params", params, self._held.outer)
        check_positive("Member.step", "tokens", tokens)
        self._steps, self._tokens, self.waited = self._steps + 1, self._tokens + float(tokens), 0.0
        acts = {_Act.SEND: self._send, _Act.MOVE: self._move, _Act.ADOPT: self._adopt}
        params, placed = on_auto_axes(jax.tree.map(jnp.asarray, params))
        while (act := self._agreed(self._next())) != _Act.GO_ON:
            params = acts[act](params)
        return placed(params)

    def leave(self) -> None:
        """Ends this center's connections. The other centers go on without it."""
        if self._inbox:
            self._inbox.close()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _next(self) -> _Act:
        """Returns the next action. First it waits for the other centers, if this step has to wait for the round."""
        if not self._inbox:
            return _Act.GO_ON  # the first process decides
        given, now = self._given, time.monotonic()
        if self._sent and self._waits and self._steps - self._sent.steps >= given.overlap:
            self._waits = False
            self._inbox.wait(given.grace - self.waited)
            self.waited += time.monotonic() - now
        self._arrived, self._outcome, gathers = self._inbox.look(now)
        if self._arrived:
            return _Act.ADOPT
        if self._outcome:
            return _Act.MOVE
        due = self._steps >= given.every or (self._steps > 0 and gathers)
        # A step that has already waited sends nothing: a center that a round left out sends in its next step.
        return _Act.SEND if due and not (self._sent or self.waited) else _Act.GO_ON

    def _send(self, params: Params) -> PyTree:
        version, outer, *_ = self._held
        numbers = np.array([self._given.place, version.round], np.int32)
        row, own, residuals = self._moves.encode(outer, params, self._residuals, numbers)
        contribution, steps, tokens = None, self._steps, self._tokens
        if self._inbox:
            weight = float(WEIGHTS[self._given.weights](tokens, steps))
            contribution = Contribution(version, weight, np.asarray(row).tobytes())
            self._inbox.contribute(contribution)
        self._sent, self._waits = _Sent(contribution, own, residuals, steps=steps, tokens=tokens), True
        return params

    def _move(self, params: Params) -> PyTree:
        """Moves the outer parameters by the average of a round, and this center's own parameters by as much."""
        (rows, weights), included = self._nothing(), False
        version, before, optimizer, _, merged, _ = self._held
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
        self._hold(self._common(version, outer, optimizer, merged))
        return params

    def _adopt(self, params: Params) -> PyTree:
        """Goes on from the outer parameters and the optimizer's state that another center has sent."""
        _, outer, optimizer, _, merged, _ = self._held
        size = self._held.nbytes
        words, body, included = np.zeros(6, np.uint32), np.zeros(size, np.uint8), False
        if self._arrived:
            words[:] = np.array(self._arrived.version, np.uint64).view(np.uint32)
            body[:] = np.frombuffer(self._arrived.body, np.uint8)
            merged = body[: merged.nbytes].view(merged.dtype).reshape(merged.shape).copy()
            if self._sent and self._sent.contribution:
                included = tuple(merged[self._given.place].tolist()) == _named(self._sent.contribution)
        words, body, included = self._shared((words, body, included))
        version = Version(*np.asarray(words).view(np.uint64).tolist())
        like = self._moves.packing.trained.take(outer), optimizer
        trained, optimizer = _from_bytes(like, np.asarray(body)[merged.nbytes :])
        outer = self._moves.packing.trained.put(outer, trained)
        if self._sent and included:
            self._residuals = self._sent.residuals
        self._steps, self._tokens = 0, 0.0
        self._hold(self._common(version, outer, optimizer, merged), adopted=True)
        return self._moves.copy(outer)

    def _hold(self, held: CommonState, adopted: bool = False) -> None:
        before, self._held, self._sent = self._held, held, None
        if self._inbox:
            self._inbox.advance(held.version, adopted)
            if not adopted and self._moves.packing.sparse:  # else rounds change nearly all bits
                self._held = held._replace(patches=_longer(before, held))

    def _common(self, version: Version, outer: Params, optimizer: PyTree, merged: np.ndarray) -> CommonState:
        arrays = jax.tree.leaves((self._moves.packing.trained.take(outer), optimizer))
        return CommonState(version, outer, optimizer, arrays=arrays, merged=merged)

    def _terms(self) -> Terms:
        given, held, packing = self._given, self._held, self._moves.packing
        leaves = {
            leaf.name: f"{leaf.dtype}{list(leaf.shape)} in {leaf.codec}, average {'radial' if leaf.radial else 'mean'}"
            for leaf in packing.leaves
        }
        # Frozen parameters are never sent. So each center must begin with the same ones.
        for (path, x), at in zip(jax.tree.flatten_with_path(held.outer)[0], packing.trained.rows):
            if at is None:
                check = number_of(self._moves.checksums(x, ()))
                leaves[spell_path(path)] = f"{spell_array(x)}, frozen, with the checksum {check:016x}"
        for path, x in jax.tree.flatten_with_path(held.optimizer)[0]:
            leaves[f"outer state {jax.tree_util.keystr(path)}"] = spell_array(x)
        options = {
            "addresses": ", ".join(given.addresses),
            "weights": repr(given.weights),
            "outer": f"the optimizer with the digest {self._moves.rule(held.outer, held.optimizer)}",
        }
        return Terms(options, leaves)

    def _compile(self) -> None:
        """Compiles the programs by running them, before other centers wait for this one."""
        _, outer, optimizer, *_ = self._held
        self._moves.encode(outer, outer, self._residuals, np.array([self._given.place, 0], np.int32))
        self._moves.move(outer, optimizer, *self._nothing())
        self._moves.follow(outer, outer, outer)

    def _nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rows, weights) of a round without contributions, all zero."""
        count = len(self._given.addresses)
        return np.zeros((count, self._moves.packing.bytes), np.uint8), np.zeros(count, np.float32)

    def _agreed(self, act: _Act) -> _Act:
        """Returns the first process's action, on all processes."""
        return _Act(int(self._shared(np.int32(act))))

    def _shared(self, tree: PyTree) -> PyTree:
        """Returns the first process's tree, on all processes."""
        return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def _checked(state: DecoupledState, fresh: DecoupledState) -> DecoupledState:
    """Returns a state that a user gave, with residuals if `fresh`, the state of a new training, has residuals."""
    check_type(OP, "state", state, DecoupledState, "a DecoupledState, which member.state was")
    number, merged = (check_integer(OP, f"state.{name}", getattr(state, name), 0) for name in ("round", "merged"))
    residuals = state.residuals
    if fresh.residuals is None:
        residuals = None
    elif residuals is None:
        text = "it has no residuals, as it was saved with keep=False; they start from zeros"
        warn(f"{OP}: argument 'state': {text}")
        residuals = fresh.residuals
    remedy = "give Decoupled the same outer optimizer and plan, and join the parameters, as when the state was saved"
    _check_like(OP, "state.optimizer", state.optimizer, fresh.optimizer, remedy=remedy)
    _check_like(OP, "state.residuals", residuals, fresh.residuals, remedy=remedy)
    return DecoupledState(number, merged, *jax.tree.map(jnp.asarray, (state.optimizer, residuals)))


def _check_like(function: str, argument: str, given: PyTree, wanted: PyTree, remedy: str = "") -> None:
    """Checks that an argument has the structure, shapes and dtypes of the tree `wanted`."""
    (found, structure), (right, expected) = map(jax.tree.flatten_with_path, (given, wanted))
    if structure != expected:
        raise wrong(function, argument, f"the structure {expected}", structure, remedy)
    for (path, x), (_, y) in zip(found, right):
        if spell_array(x) != spell_array(y):
            raise wrong(function, argument, spell_array(y), spell_array(x), remedy, path=path)


def _longer(before: CommonState, after: CommonState) -> Patches:
    """Returns the patches from older versions to the state `after`, as many as have fewer bytes than half of it."""
    old, new = ([np.asarray(x) for x in each.arrays] for each in (before, after))
    patches = *before.patches, (before.version, encode(old, new).tobytes())
    while 2 * sum(len(data) for _, data in patches) > sum(x.nbytes for x in new):
        patches = patches[1:]
    return patches


def _named(contribution: Contribution) -> tuple[int, int]:
    return contribution.version.round + 1, contribution.check


def _from_bytes(like: PyTree, body: np.ndarray) -> PyTree:
    """Returns a tree of arrays from their bytes, with the shapes, dtypes and shardings of the tree `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(body, np.cumsum([x.nbytes for x in leaves])[:-1])
    arrays = [part.view(x.dtype).reshape(x.shape) for x, part in zip(leaves, parts)]
    return put_like(like, structure.unflatten(arrays))

"""Decoupled: every center is a separate program. Centers exchange outer gradients without waiting for a slow one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxcgx.checks import check_flag, check_integer, check_number, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import check_phases
from jaxcgx.wan.contributions import WEIGHTS
from jaxcgx.wan.diloco.diloco import warn_of_few_bits
from jaxcgx.wan.diloco.outer import check_outer
from jaxcgx.wan.member import DecoupledState, Member

OP = "Decoupled"


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
      outer: the outer optimizer, as in `diloco`.
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
      feedback: whether residuals, the compression errors of outer gradients, are kept and sent later.
      seed: the seed of the noise of codecs that round stochastically.
      secret: a secret that all centers share. A program without the secret is turned away. Nothing is encrypted.
    """

    addresses: Sequence[str]
    place: int
    outer: Any = "nesterov"
    every: int = 500
    plan: Codec | Plan = Raw()
    quorum: int = 1
    grace: float = 10.0
    overlap: int = 0
    weights: str | None = "tokens"
    average: str | Callable[[str, Any], str] = "mean"
    feedback: bool = True
    seed: int = 0
    secret: str = ""

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        count = len(self.hosts)
        check_integer(OP, "place", self.place, 0, count - 1)
        put("outer", check_outer(OP, self.outer))
        check_integer(OP, "every", self.every, 1)
        check_integer(OP, "quorum", self.quorum, 1, count)
        check_number(OP, "grace", self.grace, lambda x: x >= 0, "seconds, at least 0")
        check_integer(OP, "overlap", self.overlap, 0)
        if self.overlap >= self.every:
            remedy = f"pass overlap={self.every - 1}"
            raise wrong(OP, "overlap", f"less than every = {self.every} steps", self.overlap, remedy)
        if self.weights not in WEIGHTS:
            raise wrong(OP, "weights", "'tokens', 'steps' or None", repr(self.weights))
        if self.average not in ("mean", "radial") and not callable(self.average):
            raise wrong(OP, "average", "'mean', 'radial' or a function", repr(self.average))
        check_flag(OP, "feedback", self.feedback)
        check_integer(OP, "seed", self.seed)
        # not every caller is typed
        if not isinstance(self.secret, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong(OP, "secret", "a string", repr(self.secret), kind=TypeError)
        phase, *others = check_phases(OP, self.plan)
        if others:
            raise wrong(OP, "plan", "one plan for the whole training", "a schedule of plans", "pass one of them")
        put("plan", phase.plan)
        if not self.feedback:
            warn_of_few_bits(OP, "feedback", phase.plan)

    @property
    def hosts(self) -> list[tuple[str, int]]:
        """The (host, port) of every center."""
        expected = "a list of 'host:port', one for each of several centers"
        # not every caller is typed
        typed = isinstance(self.addresses, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not typed or isinstance(self.addresses, str) or len(self.addresses) < 2:
            kind = ValueError if typed else TypeError
            raise wrong(OP, "addresses", expected, repr(self.addresses), kind=kind)
        found = list[tuple[str, int]]()
        for address in self.addresses:
            if not isinstance(address, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise wrong(OP, "addresses", expected, repr(address), kind=TypeError)
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise wrong(OP, "addresses", expected, repr(address))
            found.append((host.strip("[]"), int(port)))
        if len(set(found)) < len(found):
            raise wrong(OP, "addresses", "another address for each center", repr(list(self.addresses)))
        return found

    def join(self, params: Any, state: DecoupledState | None = None) -> tuple[Any, Member]:
        """Returns (parameters to go on with, this center's `Member`).

        It waits up to `grace` seconds for the other centers. If they are already training, this center gets the outer
        parameters and the outer optimizer's state from one of them. If all centers start together, all take the
        parameters of the first one. If another center has other shapes or options, this is an error. If centers are
        missing then, a warning names them and says why.

        Args:
          params: the parameters. Every process of this center has them whole.
          state: to go on with a saved training, its `member.state`. Its `member.params` are then the `params`. Without
            residuals in it, these begin with zeros. With feedback=False, its residuals are dropped.
        """
        member = Member(self, params=params, state=state)
        return member.params, member

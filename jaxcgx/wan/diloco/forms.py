"""Forms of Diloco: GeoMX's HFA, SparseLoCo, PULSELoCo, MuLoCo and Pier. They take its other fields, too."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from jaxcgx.checks import check_integer, check_number, check_positive, wrong
from jaxcgx.codecs import MaxMin, Raw, TopK
from jaxcgx.train.exchange import AnyExchange, At
from jaxcgx.train.rounds import Act, Acted
from jaxcgx.train.state import ExchangeState
from jaxcgx.train.update import import_optax
from jaxcgx.transports.xla import Axes
from jaxcgx.typing import Params
from jaxcgx.wan.diloco.diloco import Diloco


@dataclasses.dataclass(frozen=True)
class HFA(Diloco):
    """Rounds of hierarchical averaging of parameters (HFA), for `make_train_step`.

        hfa = cgx.wan.HFA(cgx.MaxMin(4), k1=20, k2=10)
        train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, hfa, sharding=cgx.Sharding(("dc", "local")))

    Every rank trains its own parameters. Every `k1` steps the ranks of a center average their parameters, uncompressed.
    After `k2` such averages, the centers average the changes of their parameters since the last exchange, as with
    `Diloco` and an outer SGD of rate 1. In other steps, nothing is sent. `state.params` are the parameters after the
    last exchange, the same on every rank: evaluate and save these.

    Args:
      plan: a codec, {axis: codec} or a Plan, for the changes that centers exchange.
      k1: the number of steps between two averages inside a center.
      k2: the number of averages inside a center between two exchanges between centers.
      fragments: as in `Diloco`. It must divide `k2`: an exchange follows every k2 / fragments averages.
      overlap, alpha, eager, decay, telemetry, keep, forward, seed: as in `Diloco`.
    """

    every: int = dataclasses.field(init=False)
    k1: int = 20
    k2: int = 10
    inside: AnyExchange = dataclasses.field(default=Raw(), init=False, repr=False)
    outer: Any = dataclasses.field(default="sgd", init=False, repr=False)
    _every: ClassVar[str] = "k1 * k2"
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("k1", "k2"):
            check_integer(self.op, name, getattr(self, name), 1)
        object.__setattr__(self, "every", self.k1 * self.k2)
        super().__post_init__()

    def _check_fragments(self) -> None:
        k2, fragments = self.k2, self.fragments
        if k2 % fragments:  # the ranks of a center would have different parameters at some exchanges
            expected = f"a divisor of k2={k2}, so that each exchange follows an average"
            remedy = f"pass fragments=1, or k2={-(-k2 // fragments) * fragments}"
            raise wrong(self.op, "fragments", expected, fragments, remedy)

    @property
    def turns(self) -> Sequence[Sequence[Act]]:
        return [[Act("average", -1, first=self.k1, every=self.k1)], *super().turns]

    def settings(self, params: Params) -> dict[str, str]:
        found = super().settings(params)
        del found["every"]  # the user gave k1 and k2
        return {"k1": str(self.k1), "k2": str(self.k2)} | found

    def act(self, act: Act, outer: Params, own: Params, state: ExchangeState | None, at: At) -> Acted:
        if act.part >= 0:
            return super().act(act, outer, own, state=state, at=at)
        inside = Axes(at.net.names[1:])  # the ranks of a center
        return outer, jax.tree.map(inside.plain_pmean, own), state


@dataclasses.dataclass(frozen=True)
class SparseLoCo(Diloco):
    """SparseLoCo, a form of `Diloco`. Centers send the largest elements of their outer gradients at few bits.

    Feedback takes the place of outer momentum.

    Args:
      plan: as in `Diloco`. By default, it sends the largest 1 % of each parameter's elements, with values of 2 bits.
        Their indices take further bits.
      every, decay: as in `Diloco`.
      rate: the learning rate of the outer SGD.
    """

    plan: Any = TopK(0.01, values=MaxMin(2))
    every: int = 30
    _: dataclasses.KW_ONLY
    outer: Any = dataclasses.field(init=False, repr=False, compare=False)
    rate: float = 1.0
    decay: float = 0.95

    def __post_init__(self) -> None:
        check_positive(self.op, "rate", self.rate)
        object.__setattr__(self, "outer", import_optax(self.op).sgd(self.rate))
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class PULSELoCo(Diloco):
    """PULSELoCo, a form of `Diloco` for fine-tuning with small learning rates.

    Centers send only those elements of their outer gradients that change the outer parameters in the dtype of the
    forward pass. The other elements add up in the residuals until they do.

    Args:
      plan: as in `Diloco`. By default, up to 5 % of each parameter's elements, in float32. A message always has this
        length. If the forward pass sees more elements, the largest of them are sent, and the others in later rounds.
      every, forward: as in `Diloco`.
    """

    plan: Any = TopK(0.05)
    every: int = 8
    forward: str | None = "bfloat16"


@dataclasses.dataclass(frozen=True)
class MuLoCo(Diloco):
    """MuLoCo, a form of `Diloco` whose inner optimizer is Muon (optax.contrib.muon).

    Args:
      plan: as in `Diloco`. By default, 2 bits for each element.
      every: as in `Diloco`.
    """

    plan: Any = MaxMin(2)
    every: int = 30


@dataclasses.dataclass(frozen=True)
class Pier(Diloco):
    """Pier, a form of `Diloco` whose outer optimizer has Nesterov's momentum.

    The momentum rises linearly from 0 at the beginning of the training, and falls linearly to 0 at the end.

    Args:
      plan, every: as in `Diloco`.
      rounds: the number of exchanges in the whole training, steps / `every`.
      rate: the learning rate of the outer SGD.
      momentum: the largest momentum, from 0 to below 1.
      warmup: the share of the rounds in which momentum rises, at the beginning.
      decay_from: the share of the rounds after which momentum falls.
    """

    _: dataclasses.KW_ONLY
    outer: Any = dataclasses.field(init=False, repr=False, compare=False)
    rounds: int
    rate: float = 0.7
    momentum: float = 0.9
    warmup: float = 0.1
    decay_from: float = 0.8

    def __post_init__(self) -> None:
        op = self.op
        rounds = check_integer(op, "rounds", self.rounds, 1)
        check_positive(op, "rate", self.rate)
        check_number(op, "momentum", self.momentum, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        check_number(op, "warmup", self.warmup, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        check_number(op, "decay_from", self.decay_from, lambda x: self.warmup <= x <= 1, "a number from warmup to 1")
        optax, rises, falls = import_optax(op), round(self.warmup * rounds), round(self.decay_from * rounds)
        rising = optax.linear_schedule(0.0, self.momentum, rises)
        falling = optax.linear_schedule(self.momentum, 0.0, rounds - falls)
        momenta = optax.join_schedules([rising, optax.constant_schedule(self.momentum), falling], [rises, falls])
        sgd = optax.inject_hyperparams(optax.sgd, static_args=("learning_rate", "nesterov"))
        object.__setattr__(self, "outer", sgd(self.rate, momentum=momenta, nesterov=True))
        super().__post_init__()

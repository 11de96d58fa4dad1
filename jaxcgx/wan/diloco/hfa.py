"""HFA: local steps, averages inside each center, and rare compressed exchanges between centers (GeoMX's HFA)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxcgx.checks import check_integer, wrong
from jaxcgx.codecs.raw import Raw
from jaxcgx.train.exchange import At
from jaxcgx.train.rounds import Act
from jaxcgx.train.state import ExchangeState
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
      overlap, alpha, eager, decay, telemetry, keep, seed: as in `Diloco`.
    """

    every: int = dataclasses.field(init=False)
    k1: int = 20
    k2: int = 10
    inside: Any = dataclasses.field(default=Raw(), init=False, repr=False)
    outer: Any = dataclasses.field(default="sgd", init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("k1", "k2", "fragments"):
            check_integer(self.op, name, getattr(self, name), 1)
        object.__setattr__(self, "every", self.k1 * self.k2)
        super().__post_init__()

    @property
    def alone(self) -> bool:
        return True

    def _check_rhythm(self) -> None:
        k2, fragments = self.k2, self.fragments
        if k2 % fragments:  # the ranks of a center would have different parameters at some exchanges
            expected = f"a divisor of k2={k2}, so that each exchange follows an average"
            remedy = f"pass fragments=1, or k2={-(-k2 // fragments) * fragments}"
            raise wrong(self.op, "fragments", expected, fragments, remedy)
        if self.overlap >= self.period:
            expected = f"less than k1 * k2 / fragments = {self.period} steps, as a fragment ends before the next begins"
            remedy = "pass a smaller one, fewer fragments, or a larger k1 or k2"
            raise wrong(self.op, "overlap", expected, self.overlap, remedy)

    @property
    def turns(self) -> Sequence[Sequence[Act]]:
        return [[Act("average", -1, first=self.k1, every=self.k1)], *super().turns]

    def settings(self, params: Params) -> dict[str, str]:
        found = super().settings(params)
        del found["every"]  # the user gave k1 and k2
        return {"k1": str(self.k1), "k2": str(self.k2)} | found

    def act(
        self, act: Act, outer: Params, own: Params, state: ExchangeState | None, at: At
    ) -> tuple[Params, Params, ExchangeState | None]:
        if act.part >= 0:
            return super().act(act, outer, own, state=state, at=at)
        inside = Axes(at.net.names[1:])  # the ranks of a center
        return outer, jax.tree_util.tree_map(inside.plain_pmean, own), state

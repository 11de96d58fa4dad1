"""hfa: local steps, averages inside each center, and rare compressed exchanges between centers (GeoMX's HFA)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from jaxcgx.checks import check_integer, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.optim.placement import Placement
from jaxcgx.optim.ranks import MeshRanks
from jaxcgx.optim.training import Training
from jaxcgx.plan import Plan
from jaxcgx.transports.axes import axis_names
from jaxcgx.typing import AxisName
from jaxcgx.wan.between import Between
from jaxcgx.wan.centers import Centers, check_several
from jaxcgx.wan.diloco import Diloco, diloco_with
from jaxcgx.wan.rounds import Both, Exchange

if TYPE_CHECKING:
    import optax

OP = "hfa"


def hfa(
    inner: "optax.GradientTransformation",
    *,
    k1: int = 20,
    k2: int = 10,
    axis_name: AxisName = "dc",
    plan: Codec | Plan | dict[Any, Any] = Raw(),
    **options: Any,
) -> "Hfa":
    """Makes the settings of hierarchical averaging of parameters (HFA), for `make_train_step(..., diloco=)`.

        inner = optax.sgd(0.1)
        hfa = cgx.wan.hfa(inner, k1=20, k2=10, plan=cgx.MaxMin(4))
        train = cgx.make_train_step(loss_fn, inner, mesh, data_axis=("dc", "local"), diloco=hfa)

    Every rank trains its own parameters. Every `k1` steps the ranks of a center average their parameters, uncompressed.
    After `k2` such averages, the centers average the changes of their parameters since the last exchange. In other
    steps, nothing is sent. `params` are the parameters after the last exchange, the same on every rank: evaluate and
    save these.

    Args:
      inner: the optimizer of a rank, the same object that make_train_step gets. Its state is never averaged.
      k1: the number of steps between two averages inside a center.
      k2: the number of averages inside a center between two exchanges between centers.
      axis_name: the axis of the centers, the outermost axis of `data_axis`. It may be a `Tcp`.
      plan: a codec, {axis: codec} or a Plan, for the changes that centers exchange.
      **options: other options of `diloco`, such as feedback=False or seed=. `fragments` must divide `k2`: after every
        k2 / fragments averages the next fragment is exchanged.
    """
    for name, value in (("k1", k1), ("k2", k2)):
        check_integer(OP, name, value, 1)
    for name in ("every", "outer"):
        if name in options:
            expected = "none: k1 and k2 say when centers exchange, and the outer parameters become the mean"
            raise wrong(OP, name, expected, repr(options[name]), "leave it out", kind=TypeError)
    fragments = check_integer(OP, "fragments", options.get("fragments", 1), 1)
    if k2 % fragments:  # the ranks of a center would have different parameters at some exchanges
        expected = f"a divisor of k2={k2}, so that each exchange follows an average"
        raise wrong(OP, "fragments", expected, fragments, f"pass fragments=1, or k2={-(-k2 // fragments) * fragments}")
    period, overlap = k1 * k2 // fragments, check_integer(OP, "overlap", options.get("overlap", 0), 0)
    if overlap >= period:
        expected = f"less than k1 * k2 / fragments = {period} steps, as a fragment ends before the next begins"
        raise wrong(OP, "overlap", expected, overlap, "pass a smaller one, fewer fragments, or a larger k1 or k2")
    given = diloco_with(OP, inner, dict(outer="sgd", every=k1 * k2, axis_name=axis_name, plan=plan), options)
    return Hfa(**{field.name: getattr(given, field.name) for field in dataclasses.fields(given)}, k1=k1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Hfa(Diloco):
    """The checked arguments of `hfa`. Centers exchange as with `diloco` and an outer SGD of rate 1.

    Attributes:
      k1: the steps after which the ranks of a center average their parameters.
    """

    k1: int

    def shared(self, fragments: Any) -> dict[str, str]:
        """Returns the settings that all processes must share, {argument: text}.

        Args:
          fragments: as in `Diloco`, the shapes of the parameters of all fragments.
        """
        found = super().shared(fragments)
        del found["every"]  # the user gave k1 and k2
        return {"k1": str(self.k1), "k2": str(self.every // self.k1)} | found

    def over(self, placement: Any, optimizer: Any, data_axis: Any) -> Any:
        """Returns the `Workers` of a mesh, from the `placement`, `optimizer` and `data_axis` of make_train_step."""
        name = axis_names(self.axis_name)[0]
        if isinstance(placement, Placement):
            if name not in placement.mesh.shape:
                axes = ", ".join(map(repr, placement.mesh.shape))
                raise wrong(OP, "axis_name", f"an axis of the mesh, {axes}", repr(name))
            check_several(OP, f"centers along {name!r}", placement.mesh.shape[name])
        found = super().over(placement, optimizer, data_axis)
        return Workers(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})

    def between(self, axis: Any, params: Any) -> Between:
        """Returns the exchange of parts of these params between the centers of a mesh, over these axes: `axis`."""
        return dataclasses.replace(super().between(axis, params), own_residuals=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers(Centers):
    """The ranks of a mesh. Each rank has its own parameters, like a center with a single rank."""

    @property
    def name(self) -> Any:
        return self.placement.names

    @property
    def inner(self) -> tuple[Any, ...]:
        return ()

    @property
    def why_none(self) -> str:
        return "the ranks of a center average parameters, uncompressed, and exchange no gradients"

    @property
    def _inside(self) -> tuple[Any, ...]:
        """The axes of a center's ranks, which average their parameters."""
        return self.placement.names[1:]

    def _averages(self, count: Any) -> Any:
        return count % self.diloco.k1 == 0

    def all_acts(self) -> list[tuple[Callable[..., Any], int]]:
        return [(_average, 0)] * bool(self._inside) + super().all_acts()

    def acts(self, count: int) -> list[tuple[Callable[..., Any], int]]:
        return [(_average, 0)] * bool(self._inside and self._averages(count)) + super().acts(count)

    def _act(
        self, training: Training, act: Callable[..., Any], p: int, both: Both, *, exchange: Exchange, count: Any
    ) -> tuple[Both, Exchange]:
        if act is _average:
            return both._replace(own=_average(self._inside, both.own)), exchange
        return super()._act(training, act, p, both, exchange=exchange, count=count)

    def _exchange(self, training: Training, count: Any, both: Both, exchanges: tuple[Exchange, ...]) -> Any:
        if self._inside:
            average = functools.partial(_average, self._inside)
            both = both._replace(own=lax.cond(self._averages(count), average, lambda params: params, both.own))
        return super()._exchange(training, count, both, exchanges)


def _average(names: tuple[Any, ...], params: Any) -> Any:
    """Returns the mean of the parameters over the ranks of a center."""
    return jax.tree_util.tree_map(MeshRanks(OP, names).net().plain_pmean, params)

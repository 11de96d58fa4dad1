"""Reads GeoMX's environment variables, so that a program can keep the variables that it had under GeoMX."""

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxcgx.checks import is_integer, unexpected, warn, wrong
from jaxcgx.codecs import Codec, Raw
from jaxcgx.plan import Plan
from jaxcgx.plan.environment import FLAG, Texts, parse
from jaxcgx.plan.overlay import Overlay
from jaxcgx.plan.plan import as_phases
from jaxcgx.train.batch import axes_over
from jaxcgx.train.exchange import AnyExchange, Exchange, ForMesh
from jaxcgx.train.feedback import as_exchange
from jaxcgx.train.rounds import Rounds
from jaxcgx.train.state import Priority
from jaxcgx.transports.axes import each_axis
from jaxcgx.typing import AxisName
from jaxcgx.wan.diloco.forms import HFA
from jaxcgx.wan.geomx.differential import LOST, Differential
from jaxcgx.wan.overlays.topology import Topology

OP = "wan.from_env"
RESTS = {1: LOST, 2: "defer", 3: "quantize"}  # by the value of ENABLE_DGT


# {variable: (default, the texts that it may have, as `parse` takes them)}
VARIABLES: dict[str, tuple[Any, Texts]] = {
    "MXNET_KVSTORE_USE_HFA": (False, FLAG),
    "MXNET_KVSTORE_HFA_K1": (20, 1),
    "MXNET_KVSTORE_HFA_K2": (10, 1),
    "MXNET_KVSTORE_SIZE_LOWER_BOUND": (200_000, 0),
    "ENABLE_DGT": (0, {"0": 0, "1": 1, "2": 2, "3": 3}),
    "DMLC_UDP_CHANNEL_NUM": (3, 1),
    "DMLC_K": (0.8, 1.0),
    "ADAPTIVE_K_FLAG": (False, FLAG),
    "ENABLE_INTER_TS": (False, FLAG),
    "ENABLE_INTRA_TS": (False, FLAG),
    "MAX_GREED_RATE_TS": (0.9, 1.0),
    "ENABLE_P3": (False, FLAG),
    "DMLC_NUM_GLOBAL_SERVER": (1, 1),
    "DMLC_NUM_SERVER": (1, 1),
}
REMEDY = "unset it for GeoMX's default"
# {variable: why a value other than its default changes no training step}
UNUSED = {
    "ENABLE_INTRA_TS": "only the outermost axis takes an overlay",
    "DMLC_NUM_SERVER": "only the outermost axis takes an overlay",
}


# Pairs of variables that don't combine, and why
CLASHES = {
    ("MXNET_KVSTORE_USE_HFA", "ENABLE_DGT"): "HFA exchanges parameters, and DGT gradients",
    ("MXNET_KVSTORE_USE_HFA", "ENABLE_P3"): "HFA exchanges parameters, and P3 gradients",
}


@dataclasses.dataclass(frozen=True)
class Overlaid(ForMesh):
    """An exchange, or rounds, whose messages travel along an overlay of the outermost axis of the mesh."""

    exchange: Exchange | Rounds
    owners: int | None  # the number of ranks that own sums, the first ones (MultiGPS); None: no limit
    greed: float | None  # that of the `Topology` that chooses the overlay (TSEngine); None: owners in equal parts

    def steps(self, mesh: Any, axis: AxisName, make: Callable[[Any], Any]) -> Any:
        ranks = mesh.shape[axes_over("make_train_step", mesh, axis, "sharding.axis")[0]]
        if self.owners is not None and self.owners > ranks:
            expected = f"1 to {ranks}, the number of centers"
            raise unexpected(f"{OP}: variable DMLC_NUM_GLOBAL_SERVER", expected, repr(str(self.owners)), REMEDY)
        if self.greed is None:
            return make(self._along(Overlay.owners(ranks, self.owners)))
        topology = Topology(mesh, each_axis(axis)[0], greed=self.greed)
        return topology.steps(lambda overlay: make(self._along(overlay.rooted(self.owners or ranks))))

    def _along(self, overlay: Overlay) -> Any:
        exchange: Any = self.exchange
        if hasattr(exchange, "schedule"):  # it makes its plan itself
            return dataclasses.replace(exchange, schedule=overlay)
        plans = {start: dataclasses.replace(plan, schedule=overlay) for start, plan in as_phases(OP, exchange.plan)}
        return dataclasses.replace(exchange, plan=plans if len(plans) > 1 else plans[0])


class GeoMX(NamedTuple):
    """The arguments of make_train_step that GeoMX's environment variables describe.

    Attributes:
      exchange: the exchange or the rounds.
      overlap: a `Priority`; None without P3.
      connections: those of a `Tcp` between two centers: with DGT, the channels and one more.
    """

    exchange: Any  # Exchange | Rounds | Overlaid
    overlap: Priority | None
    connections: int = 1


def from_env(environ: Mapping[str, str] | None = None, exchange: AnyExchange = Raw()) -> GeoMX:
    """Reads GeoMX's environment variables.

        env = cgx.wan.from_env(exchange=cgx.MaxMin(4))
        how = dict(sharding=cgx.Sharding(cgx.Tcp("dc", connections=env.connections)), overlap=env.overlap)
        train = cgx.make_train_step(loss_fn, optimizer, mesh, env.exchange, **how)

    A value that GeoMX doesn't have is an error. So is a variable whose name is nearly that of one of GeoMX's variables,
    and two techniques that don't combine. A value of which nothing in jaxcgx makes use is a warning. All ranks must
    have the same variables.

    Args:
      environ: the variables; None: those of this process.
      exchange: how gradients are exchanged, for what GeoMX has no variables: a codec, {axis: codec} or a Plan, or an
        exchange such as `jaxcgx.BSC`. With HFA, it is how parameters are exchanged.
    """
    environ = os.environ if environ is None else environ
    said = _read(environ)
    is_plan = isinstance(exchange, Codec | Plan | dict)
    for name in ("MXNET_KVSTORE_USE_HFA", "ENABLE_DGT"):
        if said[name] and not is_plan:
            raise unexpected(f"{OP}: variable {name}", f"a plan with {name}", type(exchange).__name__, "unset one")
    if "MXNET_KVSTORE_SIZE_LOWER_BOUND" in environ:
        exchange = _bounded(exchange, said["MXNET_KVSTORE_SIZE_LOWER_BOUND"])
    if said["MXNET_KVSTORE_USE_HFA"]:
        found: Any = HFA(exchange, said["MXNET_KVSTORE_HFA_K1"], said["MXNET_KVSTORE_HFA_K2"])
    elif said["ENABLE_DGT"]:
        k = said["DMLC_K"]
        # GeoMX has no variable for the smallest share. It uses 0.2 with its default k of 0.8.
        adaptive = k / 4 if said["ADAPTIVE_K_FLAG"] else None
        found = Differential(exchange, k, rest=RESTS[said["ENABLE_DGT"]], adaptive=adaptive)
    else:
        found = as_exchange(exchange, OP, "exchange")
    owners = said["DMLC_NUM_GLOBAL_SERVER"] if said["DMLC_NUM_GLOBAL_SERVER"] > 1 else None
    greed = said["MAX_GREED_RATE_TS"] if said["ENABLE_INTER_TS"] else None
    if owners is not None or greed is not None:
        _check_overlaid(found)
        found = Overlaid(found, owners, greed)
    connections = 1 + said["DMLC_UDP_CHANNEL_NUM"] if said["ENABLE_DGT"] else 1
    return GeoMX(found, Priority() if said["ENABLE_P3"] else None, connections)


def _read(environ: Mapping[str, str]) -> dict[str, Any]:
    for name in environ:
        near = difflib.get_close_matches(name, VARIABLES, 1, cutoff=0.9)
        if near and name not in VARIABLES:
            raise unexpected(f"{OP}: variable {name}", "one of GeoMX's", "none of these", f"it may be {near[0]}")
    said = {
        name: parse(OP, environ[name], name, values=values, remedy=REMEDY) if name in environ else default
        for name, (default, values) in VARIABLES.items()
    }
    for name, why in UNUSED.items():
        if said[name] != VARIABLES[name][0]:
            warn(f"{OP}: variable {name}: {environ[name]!r} has no effect on training: {why}")
    for (one, other), why in CLASHES.items():
        if said[one] and said[other]:
            raise unexpected(f"{OP}: variable {one}", f"{one} or {other}", f"both, but {why}", "unset one")
    return said


def _check_overlaid(exchange: Any) -> None:
    where = "where ENABLE_INTER_TS or MultiGPS chooses the overlay"
    taken = {field.name for field in dataclasses.fields(exchange) if field.init} & {"plan", "schedule"}
    if not taken:
        expected = f"a codec, a plan or an exchange that takes one, {where}"
        raise wrong(OP, "exchange", expected, type(exchange).__name__, "unset the variables")
    plans = [exchange] if "schedule" in taken else [plan for _, plan in as_phases(OP, exchange.plan)]
    for plan in plans:
        if plan.schedule != "auto":
            expected = f'the schedule "auto", {where}'
            raise wrong(OP, "exchange", expected, repr(plan.schedule), "leave the schedule out")


def _bounded(exchange: Any, bound: int) -> Any:
    """Returns the exchange that compresses only leaves of more than `bound` elements."""
    if hasattr(exchange, "size_bound"):
        return dataclasses.replace(exchange, size_bound=bound)
    if isinstance(exchange, Codec) or (isinstance(exchange, dict) and not any(map(is_integer, exchange))):
        return Plan.every(exchange, min_size=bound + 1)
    why = f"{type(exchange).__name__} says which leaves it compresses"
    warn(f"{OP}: variable MXNET_KVSTORE_SIZE_LOWER_BOUND: {str(bound)!r} has no effect on training: {why}")
    return exchange

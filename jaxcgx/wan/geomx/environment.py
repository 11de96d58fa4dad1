"""Reads GeoMX's environment variables, so that a program can keep the variables that it had under GeoMX."""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from jaxcgx.checks import unexpected, warn
from jaxcgx.plan.environment import FLAG, Texts, parse
from jaxcgx.train.exchange import Exchange
from jaxcgx.train.feedback import Feedback
from jaxcgx.train.state import Priority
from jaxcgx.wan.diloco.forms import HFA
from jaxcgx.wan.geomx.differential import Differential

OP = "wan.from_env"
RESTS = {1: "drop", 2: "defer", 3: "quantize"}  # by the value of ENABLE_DGT


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
    "DMLC_UDP_CHANNEL_NUM": "deferred blocks are kept in the state of the exchange, not in channels",
    "ENABLE_INTRA_TS": "only the outermost axis takes an overlay",
    "DMLC_NUM_SERVER": "only the outermost axis takes an overlay",
}


@dataclasses.dataclass(frozen=True)
class GeoMX:
    """The settings in GeoMX's environment variables, as arguments of jaxcgx. docs/wan.md has a table of the variables.

    Attributes:
      differential: the fields of a `Differential` that the variables set; None without DGT.
      hfa: the fields of an `HFA` that the variables set; None without HFA.
      overlap: the `overlap` of make_train_step: a `Priority`; None without P3.
      greed: {"dc": rate, "local": rate}, the `greed` of a `Topology`. It has only the axes that TSEngine routes.
      owners: {"dc": n, "local": n}, the number of ranks of an axis that own sums (MultiGPS). Axes with GeoMX's default
        of 1 are left out: they have no limit.
      size_bound: the `size_bound` of `jaxcgx.BSC` and `jaxcgx.MPQ`.
    """

    differential: dict[str, Any] | None
    hfa: dict[str, int] | None
    overlap: Priority | None
    greed: dict[str, float]
    owners: dict[str, int]
    size_bound: int

    def exchange(self, plan: Any) -> Exchange | HFA:
        """Returns the exchange, or the rounds, that the variables turn on, with this plan: for make_train_step."""
        if self.hfa is not None:
            return HFA(plan, self.hfa["k1"], self.hfa["k2"])
        return Feedback(plan) if self.differential is None else Differential(plan, **self.differential)


def from_env(environ: Mapping[str, str] | None = None) -> GeoMX:
    """Reads GeoMX's environment variables.

        geomx = cgx.wan.from_env()
        train = cgx.make_train_step(loss_fn, optimizer, mesh, geomx.exchange(plan), overlap=geomx.overlap)

    A value that GeoMX doesn't have is an error. So is a variable whose name is nearly that of one of GeoMX's variables.
    A value of which nothing in jaxcgx makes use is a warning. All ranks must have the same variables.

    Args:
      environ: the variables; None: those of this process.
    """
    environ = os.environ if environ is None else environ
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
    k, dgt = said["DMLC_K"], said["ENABLE_DGT"]
    # GeoMX has no variable for the smallest share. It uses 0.2 with its default k of 0.8.
    adaptive = k / 4 if said["ADAPTIVE_K_FLAG"] else None
    servers = {"dc": said["DMLC_NUM_GLOBAL_SERVER"], "local": said["DMLC_NUM_SERVER"]}
    routed = {"dc": said["ENABLE_INTER_TS"], "local": said["ENABLE_INTRA_TS"]}
    averages = {"k1": said["MXNET_KVSTORE_HFA_K1"], "k2": said["MXNET_KVSTORE_HFA_K2"]}
    return GeoMX(
        differential=dict(k=k, rest=RESTS[dgt], adaptive=adaptive) if dgt else None,
        hfa=averages if said["MXNET_KVSTORE_USE_HFA"] else None,
        overlap=Priority() if said["ENABLE_P3"] else None,
        greed={axis: said["MAX_GREED_RATE_TS"] for axis, on in routed.items() if on},
        owners={axis: number for axis, number in servers.items() if number > 1},
        size_bound=said["MXNET_KVSTORE_SIZE_LOWER_BOUND"],
    )

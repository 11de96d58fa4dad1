"""Techniques for training over wide-area networks."""

from jaxcgx.plan.overlay import Overlay, Tree
from jaxcgx.wan.decoupled.decoupled import Decoupled, DecoupledState, Member
from jaxcgx.wan.demo import Demo
from jaxcgx.wan.diloco.diloco import Diloco
from jaxcgx.wan.diloco.forms import HFA, MuLoCo, Pier, PULSELoCo, SparseLoCo
from jaxcgx.wan.diloco.outer import matched_nesterov
from jaxcgx.wan.geomx.differential import Differential
from jaxcgx.wan.geomx.environment import GeoMX, from_env
from jaxcgx.wan.geomx.mixed_sync import MixedSync
from jaxcgx.wan.overlays.topology import Topology

__all__ = [
    "HFA",
    "Decoupled",
    "DecoupledState",
    "Demo",
    "Differential",
    "Diloco",
    "GeoMX",
    "Member",
    "MixedSync",
    "MuLoCo",
    "Overlay",
    "PULSELoCo",
    "Pier",
    "SparseLoCo",
    "Topology",
    "Tree",
    "from_env",
    "matched_nesterov",
]

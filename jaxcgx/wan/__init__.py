"""Techniques for training over wide-area networks."""

from jaxcgx.plan.overlay import Overlay, Tree
from jaxcgx.wan.centers import DilocoMetrics, DilocoState
from jaxcgx.wan.decoupled import Decoupled
from jaxcgx.wan.demo import DemoState, demo
from jaxcgx.wan.differential import Differential, DifferentialState
from jaxcgx.wan.diloco import Diloco, diloco
from jaxcgx.wan.environment import GeoMX, from_env
from jaxcgx.wan.forms import muloco, pier, sparseloco
from jaxcgx.wan.hfa import hfa
from jaxcgx.wan.member import DecoupledState, Member
from jaxcgx.wan.mixed_sync import mixed_sync
from jaxcgx.wan.outer import matched_nesterov
from jaxcgx.wan.topology import Topology

__all__ = [
    "Decoupled",
    "DecoupledState",
    "DemoState",
    "Differential",
    "DifferentialState",
    "Diloco",
    "DilocoMetrics",
    "DilocoState",
    "GeoMX",
    "Member",
    "Overlay",
    "Topology",
    "Tree",
    "demo",
    "diloco",
    "from_env",
    "hfa",
    "matched_nesterov",
    "mixed_sync",
    "muloco",
    "pier",
    "sparseloco",
]

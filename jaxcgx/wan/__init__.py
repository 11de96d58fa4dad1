"""Techniques for training over wide-area networks."""

from jaxcgx.wan.centres import DilocoMetrics, DilocoState
from jaxcgx.wan.demo import DemoState, demo
from jaxcgx.wan.diloco import Diloco, diloco
from jaxcgx.wan.forms import muloco, pier, sparseloco
from jaxcgx.wan.outer import matched_nesterov

__all__ = [
    "DemoState",
    "Diloco",
    "DilocoMetrics",
    "DilocoState",
    "demo",
    "diloco",
    "matched_nesterov",
    "muloco",
    "pier",
    "sparseloco",
]

"""Techniques for training over wide-area networks."""

from jaxcgx.exchange.overlay import Overlay, Tree
from jaxcgx.wan.topology import Topology

__all__ = ["Overlay", "Topology", "Tree"]

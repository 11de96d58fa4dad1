"""Techniques for training over wide-area networks."""

from jaxcgx.wan.differential import Differential, DifferentialState
from jaxcgx.wan.environment import GeoMX, from_env

__all__ = ["Differential", "DifferentialState", "GeoMX", "from_env"]

"""Networks of virtual hosts on one machine, for measurements: `Lab` and its links."""

from jaxcgx.lab.network import Lab, Link, signals_raise, why_not

__all__ = ["Lab", "Link", "signals_raise", "why_not"]

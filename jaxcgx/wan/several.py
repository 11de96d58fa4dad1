"""Exchanges between centers need several of them."""

from jaxcgx.checks import wrong
from jaxcgx.transports.base import Transport


def check_centers(op: str, net: Transport) -> None:
    """Checks that the outermost axis of the ranks has several places, because `op` needs several centers."""
    name, outer = next(iter(net.parts.items()), (net.names[0] if net.names else "", net))
    check_several(op, f"centers along {name!r}" if name else "processes", outer.size)


def check_several(op: str, what: str, count: int) -> None:
    """Checks that there is more than one center. `count` is their number, and `what` describes them in the error."""
    if count == 1:
        raise wrong(op, "axis", f"several {what}", "one", f"leave {op} out, or make a mesh of several centers")

"""Networks of virtual hosts on one machine, for measurements: `Lab` and its links."""

from jaxcgx.lab.network import Lab as Lab
from jaxcgx.lab.network import Link as Link
from jaxcgx.lab.network import signals_raise as signals_raise
from jaxcgx.lab.network import why_not as why_not

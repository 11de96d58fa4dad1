"""GeoMX's sparsification of large leaves, as the fields of a plan."""

from typing import Any

from jaxcgx.checks import MOST, check_integer, check_number
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.topk import TopK, check_pull, check_select
from jaxcgx.plan.by_axis import by_axis
from jaxcgx.plan.rules import Rule
from jaxcgx.transports.axes import check_axis_names
from jaxcgx.typing import AxisName


def sparsification(
    function: str, threshold: Any, size_bound: Any, axis_name: AxisName, *, pull: Any, select: Any, tiny: Codec = Raw()
) -> dict[str, Any]:
    """Returns the fields of the plan `Plan.bsc`, whose docstring explains the arguments.

    Errors name the function `function`. `tiny` is the codec of leaves with up to `size_bound` elements, over all axes.
    """
    remedy = "with 0, large leaves would never be sent; 0.01 is GeoMX's, and 1 sends every element"
    check_number(function, "threshold", threshold, lambda x: 0 < x <= 1, "a number above 0 and up to 1", remedy)
    select, pull = check_select(function, "select", select), check_pull(function, "pull", pull)
    # If every element is sent, momentum must not be masked. Raw() masks nothing.
    codec = Raw() if threshold == 1 else TopK(threshold, select=select, pull=pull)
    names = check_axis_names(function, axis_name, optional=True)
    rule = Rule(by_axis(names, tiny, tiny), max_size=check_integer(function, "size_bound", size_bound, 0, MOST))
    return dict(default=by_axis(names, codec, Raw()), rules=[rule], min_size=0, skip_1d=False, prefer="bytes")

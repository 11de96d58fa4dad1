"""Plans, which give each leaf its codec. plan.py has the class `Plan`.

rules.py and assignment.py choose the codecs. by_axis.py has values that differ by axis. leaves.py has functions on
leaves, for plans and collectives. forecast.py explains a plan, file.py saves and loads plans, environment.py reads
CGX's variables, and sparsification.py makes GeoMX's plan for large leaves. statistics.py measures the errors of codecs
on gradients, adapt.py chooses codecs by these errors, and bits.py computes that choice on plain numbers.
"""

from jaxcgx.plan.leaves import messages, why_raw
from jaxcgx.plan.plan import SCHEDULES, Plan
from jaxcgx.plan.rules import Rule
from jaxcgx.plan.statistics import GradientStatistics

__all__ = ["SCHEDULES", "GradientStatistics", "Plan", "Rule", "messages", "why_raw"]

"""Which leaf gets which codec. plan.py has the plan.

Its parts: rules.py and assignment.py choose codecs, by_axis.py has values that differ by axis, leaves.py answers what
plans and collectives ask of leaves, forecast.py explains a plan, file.py saves one, environment.py reads CGX's
variables. statistics.py measures gradients, adapt.py chooses bits by what was measured, bits.py computes that choice on
plain numbers.
"""

from jaxcgx.plan.leaves import messages, why_raw
from jaxcgx.plan.plan import SCHEDULES, Plan
from jaxcgx.plan.rules import Rule
from jaxcgx.plan.statistics import GradientStatistics, gradient_statistics

__all__ = ["SCHEDULES", "GradientStatistics", "Plan", "Rule", "gradient_statistics", "messages", "why_raw"]

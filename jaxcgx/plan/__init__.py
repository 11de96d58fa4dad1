"""Plans, which give each leaf its codec. plan.py has the class `Plan`.

assignment.py has the rules, which choose the codecs. leaves.py has functions on leaves and their codecs, for plans and
collectives. overlay.py has trees along which messages travel. forecast.py explains a plan, file.py saves and loads
plans, environment.py reads CGX's variables. adapt.py chooses codecs by their measured errors, and bits.py computes that
choice on plain numbers.
"""

from jaxcgx.plan.adapt import GradientStatistics
from jaxcgx.plan.assignment import Rule
from jaxcgx.plan.leaves import messages, why_raw
from jaxcgx.plan.plan import SCHEDULES, Plan

__all__ = ["SCHEDULES", "GradientStatistics", "Plan", "Rule", "messages", "why_raw"]

"""Plans, which give each leaf its codec."""

from jaxcgx.plan.adapt import GradientStatistics
from jaxcgx.plan.assignment import Rule
from jaxcgx.plan.leaves import messages, why_raw
from jaxcgx.plan.plan import SCHEDULES, Plan

__all__ = ["SCHEDULES", "GradientStatistics", "Plan", "Rule", "messages", "why_raw"]

"""Which leaf gets what: the plan in base.py, its rules, what it knows of leaves, CGX's variables, the choice of
bits."""

from jaxcgx.plan.base import SCHEDULES, Plan
from jaxcgx.plan.leaves import messages, why_raw
from jaxcgx.plan.rules import Rule

__all__ = ["SCHEDULES", "Plan", "Rule", "messages", "why_raw"]

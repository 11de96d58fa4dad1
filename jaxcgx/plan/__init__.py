"""Plans, which give each leaf its codec."""

from jaxcgx.plan.adapt import GradientStatistics as GradientStatistics
from jaxcgx.plan.assignment import Rule as Rule
from jaxcgx.plan.leaves import messages as messages
from jaxcgx.plan.leaves import why_raw as why_raw
from jaxcgx.plan.plan import SCHEDULES as SCHEDULES
from jaxcgx.plan.plan import Plan as Plan

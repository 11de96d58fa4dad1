"""Schedules of plans, {first step: plan}, and the choice of a step's plan inside one compiled program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import is_integer, wrong
from jaxcgx.plan.by_axis import check_codecs
from jaxcgx.plan.plan import Plan


class Phase(NamedTuple):
    """A phase of a schedule. Its plan is used from step `start` on, until the next phase starts."""

    start: int
    plan: Plan


def check_phases(function: str, plan: Any) -> tuple[Phase, ...]:
    """Returns the phases in order: one for a plan, or one for each entry of {first step: plan}."""
    plans = {0: plan}
    if isinstance(plan, dict) and any(map(is_integer, plan)):
        if 0 not in plan or not all(is_integer(step) and step >= 0 for step in plan):
            expected = "a schedule {first step: plan} that begins with step 0"
            raise wrong(function, "plan", expected, f"steps {list(plan)}")
        plans = plan
    return tuple(Phase(start, check_plan(function, plans[start])) for start in sorted(plans))


def check_plan(function: str, plan: Any, argument: str = "plan") -> Plan:
    """Returns a plan. A codec, or {axis: codec}, becomes a plan without guards."""
    return plan if isinstance(plan, Plan) else Plan.every(check_codecs(function, argument, plan))


def switch(
    phases: Sequence[Phase], count: jax.Array | None, branches: Sequence[Callable[..., Any]], *operands: Any
) -> Any:
    """Calls the branch of the phase to which step `count` belongs. `branches` has one function for each phase.

    `count` is None only if no plan compresses anything. Then all branches do the same.
    """
    if len(branches) == 1 or count is None:
        return branches[0](*operands)
    now = sum((count >= phase.start).astype(jnp.int32) for phase in phases[1:])
    return lax.switch(now, branches, *operands)

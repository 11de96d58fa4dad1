from jaxcgx.plan.phases import Phase, check_phases, check_plan, switch  # noqa: F401

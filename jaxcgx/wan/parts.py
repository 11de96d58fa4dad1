"""Plans of parts of leaves: the fragments of DiLoCo, the blocks of differential transmission."""

import dataclasses
import functools
from typing import Any

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw, Skip
from jaxcgx.exchange.routes import Routes
from jaxcgx.plan import Plan, Rule
from jaxcgx.plan.by_axis import ByAxis, Codecs, by_axis
from jaxcgx.plan.leaves import spell_path


@functools.lru_cache(maxsize=64)
def plan_of_parts(routes: Routes, names: tuple[Any, ...] = ()) -> Plan:
    """Returns a plan that gives parts of leaves the codecs of the whole leaves.

    The plan itself can't do so, because its conditions and guards are for the shapes of whole leaves. With several axes
    `names`, a codec that isn't given by axis is for the first one. Arrays travel raw over the others.
    """
    chosen: dict[Codecs, set[str]] = {}
    for route in routes.leaves:
        codec = Skip() if route.skipped else route.codec
        if len(names) > 1 and isinstance(codec, Codec) and not codec.skips:
            codec = ByAxis(by_axis(names, codec, Raw()))
        chosen.setdefault(codec, set()).add(spell_path(route.path))
    rules = [
        Rule(codec, where=lambda path, _, own=frozenset(own): path in own, optional=True)
        for codec, own in chosen.items()
    ]
    return dataclasses.replace(routes.plan, default=Raw(), rules=rules, min_size=0, skip_1d=False)

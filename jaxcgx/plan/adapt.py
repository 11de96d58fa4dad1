"""The errors of each codec on the gradients of each leaf, and Plan.adapt, which chooses codecs by these errors."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import check_choice, check_number, check_type, unexpected, wrong
from jaxcgx.codecs import Codec, MaxMin
from jaxcgx.codecs.base import spell
from jaxcgx.codecs.checks import check_codec
from jaxcgx.plan import bits
from jaxcgx.plan.assignment import Assignment, Rule
from jaxcgx.plan.leaves import compressing
from jaxcgx.typing import STATIC


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientStatistics:
    """Statistics of gradients: sums over ranks and, if statistics were added, over steps.

    They are a pytree, so a jitted step can return them.

    Attributes:
      errors: float32[leaves, codecs]: the squared error of one encoding.
      norms: float32[leaves]: the squared norm.
      tops: float32[leaves]: the squared norm of the 100 largest magnitudes.
      paths: the paths of the leaves that codecs can take, in the form that rules match.
      shapes: the shapes of these leaves.
      dtypes: the names of their dtypes.
      codecs: the codecs.
    """

    errors: jax.Array
    norms: jax.Array
    tops: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata=STATIC)
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata=STATIC)
    dtypes: tuple[str, ...] = dataclasses.field(metadata=STATIC)
    codecs: tuple[Codec, ...] = dataclasses.field(metadata=STATIC)

    def __add__(self, other: "GradientStatistics") -> "GradientStatistics":
        # not every caller is typed
        if not isinstance(other, GradientStatistics):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        if jax.tree.structure(self) != jax.tree.structure(other):
            sizes = [f"those of {len(x.paths)} leaves and {len(x.codecs)} codecs" for x in (self, other)]
            expected = "statistics of the same leaves and codecs to add"
            raise unexpected("GradientStatistics", expected, " and ".join(sizes))
        return jax.tree.map(lambda a, b: a + b, self, other)


_OP = "Plan.adapt"
_BUCKETS = {2: 128, 3: 256, 4: None}  # {bits: bucket size} of the clusters, as in CGX; None: the reference's size


def adapt(
    plan: Assignment, statistics: Any, method: str, budget: str, alpha: float, reference: Codec | None
) -> list[Rule]:
    check_type(_OP, "statistics", statistics, GradientStatistics, "what jaxcgx.gradient_statistics returns")
    check_choice(_OP, "method", method, _METHODS)
    check_choice(_OP, "budget", budget, bits.BUDGETS)
    reference = _as_reference(plan, reference)
    ids = _adaptable(plan, statistics)
    chosen = _METHODS[method](statistics, ids, reference, budget, alpha)
    default, rules = plan.default, list[Rule]()
    for codec in dict.fromkeys(chosen):
        paths = "|".join(re.escape(statistics.paths[i]) for i, found in zip(ids, chosen) if found == codec)
        by_axis = isinstance(default, dict)
        given = {axis: old if old.raw else codec for axis, old in default.items()} if by_axis else codec
        rules.append(Rule(given, path=f"^({paths})$", optional=True))
    return rules


def _as_reference(plan: Assignment, reference: Codec | None) -> Codec:
    found = compressing(plan.default)
    if not found:
        raise unexpected(_OP, "a plan whose default codec compresses", spell(plan.default))
    if reference is not None:
        return check_codec(_OP, reference, "reference")
    if len(found) > 1:
        expected = f"a codec, as the plan's default {spell(plan.default)} has several"
        raise wrong(_OP, "reference", expected, None)
    return found[0]


def _adaptable(plan: Assignment, statistics: GradientStatistics) -> list[int]:
    """Returns the numbers of the leaves in the statistics that get the plan's default codec."""
    ids = list[int]()
    for i, (path, shape, dtype) in enumerate(zip(statistics.paths, statistics.shapes, statistics.dtypes)):
        leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        if not plan.why_guarded(leaf) and not any(rule.matches(_OP, path, leaf) for rule in plan.rules):
            ids.append(i)
    if not ids:
        expected, got = "a leaf that gets the plan's default codec", "none: guards and rules decide them all"
        raise wrong(_OP, "statistics", expected, got, "adapt the plan without the rules of an earlier adaptation")
    return ids


def _lgreco(
    statistics: GradientStatistics, ids: Sequence[int], reference: Codec, budget: str, alpha: float
) -> list[Codec]:
    check_number(_OP, "alpha", alpha, lambda x: 0 < x < math.inf, "a positive number")
    codecs = statistics.codecs
    names = ", ".join(map(spell, codecs))
    if reference not in codecs:
        remedy = "pass gradient_statistics codecs that it is among"
        raise wrong(_OP, "reference", f"one of the statistics' codecs, {names}", spell(reference), remedy)
    errors = _finite(statistics, ids, statistics.errors)
    wire = [[codec.wire_bytes(statistics.shapes[i], statistics.dtypes[i]) for codec in codecs] for i in ids]
    chosen = bits.lgreco(wire, errors, reference=codecs.index(reference), alpha=alpha, budget=budget)
    if chosen is None:
        more = "more bits" if budget == "error" else "fewer bytes"
        remedy = f"pass a larger one, or gradient_statistics codecs with {more}"
        raise wrong(_OP, "alpha", f"a factor that some choice of {names} can keep to", alpha, remedy)
    return [codecs[c] for c in chosen]


def _kmeans(
    statistics: GradientStatistics, ids: Sequence[int], reference: Codec, budget: str, alpha: float
) -> list[Codec]:
    for name, value, default in (("budget", budget, "error"), ("alpha", alpha, 1.0)):
        if value != default:
            raise wrong(_OP, name, f'{default!r} with method="kmeans", which has no budget', repr(value))
    if not isinstance(reference, MaxMin):
        raise wrong(_OP, "reference", 'a MaxMin with method="kmeans"', spell(reference))
    tops = _finite(statistics, ids, statistics.tops)
    points = [(_log2(math.prod(statistics.shapes[i])), _log2(top)) for i, top in zip(ids, tops)]
    places = bits.kmeans(points, len(_BUCKETS))
    widths = [max(_BUCKETS) - max(places) + place for place in places]
    return [dataclasses.replace(reference, bits=b, bucket_size=_BUCKETS[b] or reference.bucket_size) for b in widths]


_METHODS: dict[str, Callable[[GradientStatistics, Sequence[int], Codec, str, float], list[Codec]]] = {
    "lgreco": _lgreco,
    "kmeans": _kmeans,
}


def _finite(statistics: GradientStatistics, ids: Sequence[int], measured: jax.Array) -> list[Any]:
    """Returns the rows `ids` of a measured array as Python floats, after a check that they are finite."""
    rows = np.asarray(measured, np.float64)
    for i in ids:
        if not np.isfinite(rows[i]).all():
            place = f"{_OP}: argument 'statistics', leaf {statistics.paths[i]!r}"
            remedy = "leave out the steps whose gradients overflowed"
            raise unexpected(place, "finite numbers", rows[i].tolist(), remedy)
    return rows[list(ids)].tolist()


def _log2(x: float) -> float:
    """Returns log2(x), at least -150, linear between powers of two: the same on all machines, unlike math.log2."""
    fraction, exponent = math.frexp(max(x, 2.0**-150))
    return exponent + 2 * fraction - 2

"""Tests the choice of bits from the errors of gradients: it keeps its budget, is optimal, and the same everywhere."""

import dataclasses
import functools
import itertools
import math
import random
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from helpers import normal
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx
from jaxcgx.plan import bits

FOUR, BITS = cgx.MaxMin(4), tuple(cgx.MaxMin(bits) for bits in range(2, 9))


def gradients(scales):
    kernels = [normal((64, 128), i, scale=scale) for i, scale in enumerate(scales)]
    return {f"layer/{i}": {"kernel": kernel, "bias": jnp.ones(128)} for i, kernel in enumerate(kernels)}


GRADS = gradients([1, 0.1, 0.01, 0.001])


def codecs(plan, tree=GRADS):
    return [row.codec for row in plan.explain(tree, 2).rows if row.leaf.endswith("kernel")]


def errors(plan, statistics):
    rows = [i for i, path in enumerate(statistics.paths) if path.endswith("kernel")]
    return np.float64(statistics.errors)[rows, [*map(statistics.codecs.index, codecs(plan))]].sum()


def test_lgreco_of_gradients():
    statistics = cgx.gradient_statistics(GRADS)
    plan = cgx.Plan(FOUR)
    for alpha in (0.1, 1.0, 3.0):
        adapted = plan.adapt(statistics, alpha=alpha)
        assert errors(adapted, statistics) <= alpha * errors(plan, statistics)
        assert codecs(adapted)[0].bits > codecs(adapted)[3].bits
    assert plan.adapt(statistics).explain(GRADS, 2).bytes < plan.explain(GRADS, 2).bytes
    # Guards are unchanged.
    guarded = [row.why for row in plan.adapt(statistics).explain(GRADS, 2).rows if row.leaf.endswith("bias")]
    assert guarded == ["it has 128 elements, fewer than the plan's min_size=1024"] * 4
    # Statistics of two steps count equally.
    more = statistics + cgx.gradient_statistics(gradients([1e-4, 1e-4, 1e-4, 100]))
    assert codecs(plan.adapt(more))[3].bits > codecs(plan.adapt(more))[1].bits


def test_the_reference_sets_the_budget():
    statistics = cgx.gradient_statistics(GRADS)
    adapted = cgx.Plan(FOUR).adapt(statistics, reference=cgx.MaxMin(6))
    assert errors(adapted, statistics) <= errors(cgx.Plan(cgx.MaxMin(6)), statistics)
    assert adapted.rules == cgx.Plan(cgx.MaxMin(6)).adapt(statistics).rules


def test_candidates_of_any_kind():
    """Their errors don't follow from the bits, and are measured under jit. Within a budget, the choice is the best."""
    rng = np.random.default_rng(0)
    draws = dict(normal=rng.standard_normal, heavy=functools.partial(rng.standard_t, 2), even=rng.random)
    tree = {name: jnp.asarray(draw(size=(2, 64, 128)), jnp.float32) for name, draw in draws.items()}
    candidates = [FOUR, cgx.MaxMin(3, rounding="stochastic"), cgx.AbsMax(5), cgx.Float8(), cgx.Sign(), cgx.TopK(0.1)]
    candidates += [cgx.Eden(3), cgx.Micro("nvfp4")]
    spec = dict(mesh=mesh(2), in_specs=P("a"), out_specs=P())

    @jax.jit
    @functools.partial(jax.shard_map, **spec)
    def measure(tree):
        return cgx.gradient_statistics(tree, "a", candidates, key=jax.random.key(0))

    statistics = measure(tree)
    leaf = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), tree)
    lost = np.asarray(statistics.errors, np.float64)
    sent = [codec.wire_bytes((1, 64, 128), jnp.float32) for codec in candidates]
    error, size = lambda choice: sum(lost[range(3), choice]), lambda choice: sum(sent[c] for c in choice)
    choices = list(itertools.product(range(len(candidates)), repeat=len(tree)))
    for budget, alpha, limited, rest in ("error", 2.0, error, size), ("bytes", 1.2, size, error):
        adapted = cgx.Plan(FOUR).adapt(statistics, budget=budget, alpha=alpha)
        rows = {row.leaf: row.codec for row in adapted.explain(leaf, 2).rows}
        found = tuple(candidates.index(rows[path]) for path in statistics.paths)
        within = [choice for choice in choices if limited(choice) <= alpha * limited((0, 0, 0))]
        assert found in within and rest(found) == min(map(rest, within))
        assert len(set(found)) > 1


def test_kmeans_of_gradients():
    plan = cgx.Plan.cgx(5, 1024, "stochastic").adapt(cgx.gradient_statistics(GRADS, codecs=[FOUR]), method="kmeans")
    of = lambda bits, size: cgx.MaxMin(bits, size, "stochastic")
    assert codecs(plan) == [of(4, 1024), of(3, 256), of(3, 256), of(2, 128)]

    def chosen(**leaves):
        adapted = cgx.Plan(FOUR).adapt(cgx.gradient_statistics(leaves, codecs=[FOUR]), method="kmeans")
        return [row.codec for row in adapted.explain(leaves, 2).rows]

    zeros, ones = jnp.zeros((64, 64)), jnp.ones((64, 64))
    assert chosen(w=GRADS["layer/0"]["kernel"]) == [FOUR]
    assert chosen(v=zeros, w=ones) == [cgx.MaxMin(3, 256), FOUR]
    twin, other, *rest = chosen(a=ones, b=ones, c=zeros, d=jnp.ones((64, 65)))
    assert twin == other and max(codec.bits for codec in (twin, *rest)) == 4


@pytest.mark.parametrize("method", ["lgreco", "kmeans"])
def test_rules_stay(method):
    rules = [("layer/0", cgx.Raw()), cgx.Rule(cgx.MaxMin(8), path="layer/1/kernel", priority=2)]
    adapted = cgx.Plan(FOUR, rules).adapt(cgx.gradient_statistics(GRADS), method=method)
    assert codecs(adapted)[:2] == [cgx.Raw(), cgx.MaxMin(8)]
    assert adapted.rules[:2] == cgx.Plan(FOUR, rules).rules and len(adapted.rules) > 2


def test_an_adapted_plan_is_for_parts_of_the_tree_too():
    plan = cgx.Plan(FOUR).adapt(cgx.gradient_statistics(GRADS))
    for name, codec in zip(GRADS, codecs(plan), strict=True):
        assert codecs(plan, {name: GRADS[name]}) == [codec]

    def loss(params):  # layer by layer
        synced = [cgx.sync_in_backward({name: layer}, "a", plan) for name, layer in params.items()]
        return sum(leaf.sum() for leaf in jax.tree.leaves(synced))

    exchange = jax.shard_map(jax.grad(loss), mesh=mesh(2), in_specs=P(), out_specs=P())
    assert jax.tree.map(jnp.shape, jax.eval_shape(exchange, GRADS)) == jax.tree.map(jnp.shape, GRADS)
    masked = optax.masked(cgx.compress_gradients("a", plan, axis_size=2), {name: name == "layer/2" for name in GRADS})
    assert [x.shape for x in jax.tree.leaves(masked.init(GRADS).inner_state.own.residuals)] == [(2, 64, 128)]


def test_codecs_by_axis_where_they_compress():
    plan = cgx.Plan({"node": FOUR, "local": cgx.Raw()}).adapt(cgx.gradient_statistics(GRADS))
    flat = cgx.Plan(FOUR).adapt(cgx.gradient_statistics(GRADS))
    rows = [row for row in plan.explain(GRADS, {"node": 2, "local": 2}).rows if not row.why]
    assert [row.codec for row in rows if row.axes == ("node",)] == codecs(flat)
    assert {row.codec for row in rows if row.axes == ("local",)} == {cgx.Raw()}


def test_paths_are_taken_literally():
    tree = dict.fromkeys(("a.b", "a+b(", "axb", ""), jnp.ones((64, 64)))
    plan = cgx.Plan(FOUR).adapt(cgx.gradient_statistics(tree))
    assert {row.codec for row in plan.explain(tree, 2).rows} == {cgx.MaxMin(2)}  # constant buckets decode exactly


statistics = functools.cache(functools.partial(cgx.gradient_statistics, GRADS))


def others():
    return statistics(codecs=(cgx.MaxMin(2), cgx.MaxMin(8)))


def spoiled(field, at, value):
    return dataclasses.replace(statistics(), **{field: getattr(statistics(), field).at[at].set(value)})


adapt = cgx.Plan(FOUR).adapt
BAD_INPUT = {
    "Plan.adapt": [
        (lambda: adapt(GRADS), TypeError, "statistics", "{'layer/0'"),
        (lambda: adapt(statistics(), method="bayes"), ValueError, "method", "'bayes'"),
        (lambda: adapt(statistics(), budget="time"), ValueError, "budget", "'time'"),
        (lambda: adapt(statistics(), method="kmeans", budget="bytes"), ValueError, "budget", "'bytes'"),
        (lambda: adapt(statistics(), budget="bytes", alpha=0.1), ValueError, "alpha", "0.1", "fewer"),
        (lambda: adapt(statistics(), alpha=0), ValueError, "alpha", "0"),
        (lambda: adapt(statistics(), alpha=math.nan), ValueError, "alpha", "nan"),
        (lambda: adapt(statistics(), alpha="1"), TypeError, "alpha", "'1'"),
        (lambda: adapt(statistics(), alpha=1e-06), ValueError, "alpha", "1e-06"),
        (lambda: adapt(statistics(), method="kmeans", alpha=2.0), ValueError, "alpha", "2.0"),
        (lambda: adapt(statistics(), reference="raw"), TypeError, "reference", "'raw'"),
        (lambda: adapt(others()), ValueError, "reference", "MaxMin(bits=4)", "gradient_statistics"),
        (lambda: cgx.Plan(cgx.AbsMax()).adapt(others(), method="kmeans"), ValueError, "reference", "AbsMax(bits=8)"),
        (lambda: cgx.Plan(cgx.Raw()).adapt(statistics()), ValueError, "", "Raw()"),
        (lambda: cgx.Plan({"a": FOUR, "b": cgx.MaxMin(8)}).adapt(statistics()), ValueError, "reference", "None"),
        (lambda: adapt(statistics()).adapt(statistics()), ValueError, "statistics", "none"),
        (lambda: adapt(spoiled("errors", (1, 2), jnp.nan)), ValueError, "statistics 'layer/0/kernel'", "["),
        (lambda: adapt(spoiled("tops", 1, jnp.inf), method="kmeans"), ValueError, "statistics 'layer/0/kernel'", "inf"),
    ]
}
test_bad_input = table(BAD_INPUT)


def total(rows, choice):
    return sum(row[c] for row, c in zip(rows, choice))


def exact(rows, choice):
    return total([list(map(Fraction, row)) for row in rows], choice)


def drawn(seed):
    """Returns arguments of lgreco with so few choices that a test can try all."""
    rng = random.Random(seed)
    leaves, candidates = rng.randint(1, 5), rng.randint(1, 4)
    wire = [[rng.randint(0, 60) for _ in range(candidates)] for _ in range(leaves)]
    error = lambda: float(np.float32(rng.random() * 10.0 ** rng.randint(-6, 3)))
    errors = [[error() for _ in range(candidates)] for _ in range(leaves)]
    reference, alpha = rng.randrange(candidates), rng.choice([0.25, 0.5, 1.0, 1.5])
    return wire, errors, reference, alpha


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("budget", ["error", "bytes"])
def test_lgreco_is_as_good_as_trying_everything(budget, seed):
    """Of what the budget limits, no choice has more, and of the rest no choice has less."""
    wire, errors, reference, alpha = drawn(seed if budget == "error" else 1000 + seed)
    leaves, candidates = len(wire), len(wire[0])
    limited, rest = (errors, wire) if budget == "error" else (wire, errors)
    most = Fraction(alpha) * exact(limited, [reference] * leaves)
    possible = [c for c in itertools.product(range(candidates), repeat=leaves) if exact(limited, c) <= most]
    found = bits.lgreco(wire, errors, reference, alpha, budget=budget)
    if not possible:
        assert found is None
        return
    least = min(exact(rest, c) for c in possible)
    assert tuple(found) in possible and exact(rest, found) == least
    assert exact(limited, found) == min(exact(limited, c) for c in possible if exact(rest, c) == least)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_lgreco_with_many_leaves(alpha):
    """There are more bytes than steps. The budget is kept, and the bytes are near a lower bound (Lagrange's)."""
    rng = random.Random(7)
    sizes = [rng.randint(1000, 3_000_000) for _ in range(300)]
    wire = [[codec.wire_bytes((n,), "float32") for codec in BITS] for n in sizes]
    errors = [[n * 10.0 ** rng.uniform(-6, 0) * 4.0**-bits for bits in range(2, 9)] for n in sizes]
    reference = [2] * len(sizes)
    budget = Fraction(alpha) * exact(errors, reference)
    found = bits.lgreco(wire, errors, 2, alpha)
    assert exact(errors, found) <= budget
    bound = max(
        sum(min(w + 2.0**k * e for w, e in zip(*rows)) for rows in zip(wire, errors)) - 2.0**k * float(budget)
        for k in np.arange(-10, 30, 0.25)
    )
    step = sum(max(row) - min(row) for row in wire) / bits.STEPS
    assert bound - 1 <= total(wire, found) <= bound + 2 * len(sizes) * step
    if alpha == 1:
        assert total(wire, found) < total(wire, reference)
    # With a margin for the steps, the least error for these bytes is not larger.
    most = total(wire, found) + len(sizes) * step
    turned = bits.lgreco(wire, errors, 2, most / total(wire, reference), budget="bytes")
    assert total(wire, turned) <= most
    assert float(exact(errors, turned)) <= (1 + 1e-9) * float(exact(errors, found))


def test_lgreco_at_the_edges():
    assert bits.lgreco([], [], 0, 1.0) == []
    assert bits.lgreco([[10, 20]], [[0.0, 0.0]], 1, 1.0) == [0]
    assert bits.lgreco([[10, 20]], [[1.0, 0.5]], 1, 1.0) == [1]
    assert bits.lgreco([[10, 20]], [[1.0, 0.5]], 1, 1e300) == [0]
    assert bits.lgreco([[10, 20]], [[1e-45, 1e-46]], 0, 0.5) == [1]
    assert bits.lgreco([[10, 20]], [[3e38, 2e38]], 1, 0.9) is None
    # Errors that are tiny compared with the largest one count, too, because they are rounded up.
    tiny = [[10, 20, 30], [10, 20, 30]], [[1.0, 0.0, 0.0], [1e-30, 1e-30, 0.0]], 1
    assert bits.lgreco(*tiny, 1.0) == [1, 0] and bits.lgreco(*tiny, 0.5) == [1, 2]


def test_kmeans():
    rng = random.Random(3)
    centers = [(0, 5), (5, 0), (-5, -5)]
    points = [tuple(x + rng.uniform(-1, 1) for x in centers[i % 3]) for i in range(60)]
    found = bits.kmeans(points, 3)
    assert found == [(2, 1, 0)[i % 3] for i in range(60)]
    shuffled = list(range(60))
    rng.shuffle(shuffled)
    assert bits.kmeans([points[i] for i in shuffled], 3) == [found[i] for i in shuffled]


def test_kmeans_of_points_that_are_equal():
    """As many clusters as different points, up to three. The highest norm has the last number."""
    assert bits.kmeans([(4, 3), (2, 1), (2, 0), (4, 3)], 3) == [2, 1, 0, 2]
    for seed in range(200):
        rng = random.Random(seed)
        points = [(rng.randint(0, 3), rng.randint(0, 3)) for _ in range(rng.randint(1, 9))]
        assert set(bits.kmeans(points, 3)) == set(range(min(3, len(set(points)))))

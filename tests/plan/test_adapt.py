"""Tests the choice of bits from the errors of gradients: it keeps its budget, is optimal, and the same everywhere."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from jax.sharding import PartitionSpec as P
from ranks import mesh

import jaxcgx as cgx

FOUR, BITS = cgx.MaxMin(4), tuple(cgx.MaxMin(bits) for bits in range(2, 9))


def gradients(scales):
    return {
        f"layer/{i}": {
            "kernel": jnp.asarray(np.random.RandomState(i).standard_normal((64, 128)) * scale, jnp.float32),
            "bias": jnp.ones(128),
        }
        for i, scale in enumerate(scales)
    }


GRADS = gradients([1, 0.1, 0.01, 0.001])


def codecs(plan, tree=GRADS):
    return [row.codec for row in plan.explain(tree, 2).rows if row.leaf.endswith("kernel")]


def errors(plan, statistics):
    names = [path for path in statistics.paths if path.endswith("kernel")]
    table = np.asarray(statistics.errors, np.float64)
    return sum(
        table[statistics.paths.index(name), statistics.codecs.index(codec)] for name, codec in zip(names, codecs(plan))
    )


def test_lgreco_of_gradients():
    statistics = cgx.gradient_statistics(GRADS)
    plan = cgx.Plan(FOUR)
    for alpha in (0.1, 1.0, 3.0):
        adapted = plan.adapt(statistics, alpha=alpha)
        assert errors(adapted, statistics) <= alpha * errors(plan, statistics)
        assert codecs(adapted)[0].bits > codecs(adapted)[3].bits
    assert plan.adapt(statistics).explain(GRADS, 2).bytes < plan.explain(GRADS, 2).bytes
    # Guards are unchanged.
    assert [row.why for row in plan.adapt(statistics).explain(GRADS, 2).rows if row.leaf.endswith("bias")] == [
        "it has 128 elements, fewer than the plan's min_size=1024"
    ] * 4
    # Statistics of two steps count equally.
    more = statistics + cgx.gradient_statistics(gradients([1e-4, 1e-4, 1e-4, 100]))
    assert codecs(plan.adapt(more))[3].bits > codecs(plan.adapt(more))[1].bits


def test_the_reference_sets_the_budget():
    statistics = cgx.gradient_statistics(GRADS)
    adapted = cgx.Plan(FOUR).adapt(statistics, reference=cgx.MaxMin(6))
    assert errors(adapted, statistics) <= errors(cgx.Plan(cgx.MaxMin(6)), statistics)
    assert adapted.rules == cgx.Plan(cgx.MaxMin(6)).adapt(statistics).rules


@pytest.mark.parametrize("alpha", [0.8, 1.0])
def test_a_budget_of_bytes(alpha):
    statistics = cgx.gradient_statistics(GRADS)
    plan = cgx.Plan(FOUR)
    adapted = plan.adapt(statistics, budget="bytes", alpha=alpha)
    rows = {row.leaf: row for row in adapted.explain(GRADS, 2).rows if not row.why}
    sizes = [codec.wire_bytes((64, 128), jnp.float32) for codec in BITS]
    lost = np.asarray(statistics.errors, np.float64)[[statistics.paths.index(path) for path in rows]]
    choices = itertools.product(range(len(BITS)), repeat=len(rows))
    within = [c for c in choices if sum(sizes[i] for i in c) <= alpha * len(rows) * sizes[BITS.index(FOUR)]]
    found = tuple(BITS.index(row.codec) for row in rows.values())
    error = lambda c: sum(lost[range(len(rows)), c])
    assert found in within and error(found) == min(map(error, within))
    assert errors(adapted, statistics) < errors(plan, statistics)


def test_candidates_of_any_kind():
    """Their errors don't follow from the bits, and are measured under jit. The choice is the best of all."""
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
    rows = {row.leaf: row.codec for row in cgx.Plan(FOUR).adapt(statistics, alpha=2.0).explain(leaf, 2).rows}
    lost = np.asarray(statistics.errors, np.float64)
    sent = [codec.wire_bytes((1, 64, 128), jnp.float32) for codec in candidates]
    choices = list(itertools.product(range(len(candidates)), repeat=len(tree)))
    within = [c for c in choices if sum(lost[range(3), c]) <= 2 * sum(lost[:, 0])]
    found = tuple(candidates.index(rows[path]) for path in statistics.paths)
    assert found in within and sum(sent[c] for c in found) == min(sum(sent[c] for c in choice) for choice in within)
    assert len(set(found)) > 1


def test_kmeans_of_gradients():
    plan = cgx.Plan.cgx(5, 1024, "stochastic").adapt(cgx.gradient_statistics(GRADS, codecs=[FOUR]), method="kmeans")
    assert codecs(plan) == [
        cgx.MaxMin(4, 1024, "stochastic"),
        *[cgx.MaxMin(3, 256, "stochastic")] * 2,
        cgx.MaxMin(2, 128, "stochastic"),
    ]
    one = {"w": GRADS["layer/0"]["kernel"]}
    assert [
        row.codec
        for row in cgx.Plan(FOUR)
        .adapt(cgx.gradient_statistics(one, codecs=[FOUR]), method="kmeans")
        .explain(one, 2)
        .rows
    ] == [FOUR]
    nothing = {"v": jnp.zeros((64, 64)), "w": jnp.ones((64, 64))}
    found = cgx.Plan(FOUR).adapt(cgx.gradient_statistics(nothing, codecs=[FOUR]), method="kmeans").explain(nothing, 2)
    assert [row.codec for row in found.rows] == [cgx.MaxMin(3, 256), FOUR]
    twins = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64)), "c": jnp.zeros((64, 64)), "d": jnp.ones((64, 65))}
    found = cgx.Plan(FOUR).adapt(cgx.gradient_statistics(twins, codecs=[FOUR]), method="kmeans").explain(twins, 2)
    assert max(row.codec.bits for row in found.rows) == 4 and found.rows[0].codec == found.rows[1].codec


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
    tree = {"a.b": jnp.ones((64, 64)), "a+b(": jnp.ones((64, 64)), "axb": jnp.ones((64, 64)), "": jnp.ones((64, 64))}
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

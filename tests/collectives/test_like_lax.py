"""Tests that shapes, dtypes and values are those of lax's collectives, wherever a named axis can be bound."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FULL, normal, planned
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ranks import CASES, EXACT, assert_same, mesh, on_ranks, twins, whole_numbers

import jaxcgx as cgx
from jaxcgx.plan.overlay import Overlay

ONE_EACH = {op: kwargs[1:2] or kwargs for op, kwargs in CASES.items()}
X = whole_numbers((4, 4, 8, 12))
PAIRS = whole_numbers((2, 4, 8, 16, 24))
CODECS = [EXACT, {"a": EXACT, "b": EXACT}, {"a": EXACT, "b": cgx.Raw()}, {"a": cgx.Raw(), "b": EXACT}]  # of PAIRS


@functools.lru_cache
def expected(two=False):
    """Returns lax's results for X on a mesh of one axis, or for PAIRS on a mesh of two axes."""
    names, sizes, x = (("a", "b"), (2, 4), PAIRS) if two else ("a", (4,), X)
    return on_ranks(twins(names, None)[1], mesh(*sizes), check_vma=False)(x)


@pytest.mark.short
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    assert_same(on_ranks(twins("a", EXACT)[0], mesh(4), check_vma)(X), expected())


def test_eager_shard_map():
    assert_same(on_ranks(twins("a", EXACT, ONE_EACH)[0], mesh(4), jit=False)(X), expected())


def test_explicit_mesh():
    explicit = mesh(4, axis_type=AxisType.Explicit)
    sharded = jax.device_put(X, NamedSharding(explicit, P("a")))
    assert_same(on_ranks(twins("a", EXACT)[0], explicit)(sharded), expected())


@pytest.mark.short
def test_pmap():
    assert_same(jax.pmap(twins("a", EXACT)[0], axis_name="a", devices=jax.devices()[:4])(X), expected())


@pytest.mark.short
def test_vmap_with_an_axis_name():
    assert_same(jax.jit(jax.vmap(twins("a", EXACT)[0], axis_name="a"))(X), expected())
    assert_same(jax.vmap(twins("a", EXACT, ONE_EACH)[0], axis_name="a", in_axes=2)(jnp.moveaxis(X, 0, 2)), expected())


@pytest.mark.parametrize(("codec", "check_vma"), [(EXACT, False), *zip(CODECS, (True, True, False, True))], ids=str)
def test_tuples_of_axes(codec, check_vma):
    assert_same(on_ranks(twins(("a", "b"), codec)[0], mesh(2, 4), check_vma)(PAIRS), expected(two=True))


def test_three_axes():
    x = whole_numbers((2, 2, 2, 8, 16, 24))
    for codec in (EXACT, {"a": EXACT, "b": EXACT, "c": cgx.Raw()}):
        compressed, plain = twins(("a", "b", "c"), codec, ONE_EACH)
        assert_same(on_ranks(compressed, mesh(2, 2, 2))(x), on_ranks(plain, mesh(2, 2, 2))(x))


# Under check_vma JAX has no collectives over an axis of vmap.
@pytest.mark.parametrize("codec", [EXACT, cgx.Raw(), {"a": EXACT, "b": cgx.Raw()}], ids=str)
def test_axes_of_vmap(codec):
    compressed = twins(("a", "b"), codec)[0]
    assert_same(jax.jit(jax.vmap(jax.vmap(compressed, axis_name="b"), axis_name="a"))(PAIRS), expected(two=True))
    assert_same(on_ranks(jax.vmap(compressed, axis_name="b"), mesh(2), check_vma=False)(PAIRS), expected(two=True))


def test_vmap_is_one_exchange():
    total = lambda x: cgx.compressed_psum(x, "a", planned(EXACT, schedule="two_shot"))
    run = on_ranks(jax.vmap(jax.vmap(total, in_axes=2)), mesh(4))
    x = whole_numbers((4, 2, 5, 6, 3))
    np.testing.assert_array_equal(run(x)[0], jnp.moveaxis(x.sum(0), 3, 1))
    program = run.lower(x).compile().as_text()
    assert program.count(" all-to-all(") == program.count(" all-gather(") == 1


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrap", ["while", "cond"])
def test_control_flow(wrap, check_vma):
    """test_derivatives.py has lax.scan and jax.checkpoint."""

    def around(f):
        zeros = lambda x: jax.tree.map(lambda y: 0 * y, f(x))
        if wrap == "cond":
            return lambda x: lax.cond(jnp.bool_(True), f, zeros, x)
        return lambda x: lax.fori_loop(0, 2, lambda i, y: f(x), zeros(x))

    assert_same(on_ranks(around(twins("a", EXACT, ONE_EACH)[0]), mesh(4), check_vma)(X), expected())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_manual_over_one_axis_of_two(axis_type):
    """Nothing is sharded along 'b', so the compiler is free there."""
    both = mesh(4, 2, axis_type=axis_type)
    x = jax.device_put(X, NamedSharding(both, P("a")))
    body = lambda x: jax.tree.map(lambda y: y[None], twins("a", EXACT)[0](x[0]))
    got = jax.jit(jax.shard_map(body, mesh=both, axis_names={"a"}, in_specs=P("a"), out_specs=P("a")))(x)
    assert_same(got, expected())


@pytest.mark.parametrize("schedule", ["auto", "two_shot", "one_shot", "ring", "gather"])
def test_schedules_and_the_leader_form(schedule):
    """One program has all of them: one axis, two axes together, a codec for each, shards and leaders."""
    plans = [planned(codec, schedule=schedule) for codec in CODECS]
    led = plans + [planned(plan, leader=True) for plan in plans[1:]]

    def body(x):
        sums = [f(x, ("a", "b"), plan) for f in (cgx.compressed_psum, cgx.compressed_pmean) for plan in led]
        slices = [] if schedule == "gather" else plans
        return sums, [cgx.compressed_psum_scatter(x, ("a", "b"), plan, tiled=True) for plan in slices]

    sums, scattered = on_ranks(body, mesh(2, 4), check_vma=schedule != "two_shot")(PAIRS)
    assert len(sums) == 14
    for i, got in enumerate(sums):
        np.testing.assert_array_equal(got, expected(two=True)["psum {}" if i < 7 else "pmean {}"])
    for got in scattered:
        np.testing.assert_array_equal(got, expected(two=True)["psum_scatter {'scatter_dimension': 0, 'tiled': True}"])


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
def test_leaders_of_three_axes_one_of_which_has_one_rank(sizes):
    names, x = ("a", "b", "c"), whole_numbers((*sizes, 50))
    codec = dict(a=EXACT, b=EXACT, c=cgx.Raw())
    plans = [planned(codec, leader=True, schedule=schedule) for schedule in ("two_shot", "one_shot")]
    body = lambda x: [cgx.compressed_psum(x, names, plan) for plan in plans]
    for got in on_ranks(body, mesh(*sizes), check_vma=False)(x):
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum((0, 1, 2)), x.shape))


# Those that are not their own inverse find what the others find.
@pytest.mark.parametrize("names", [*itertools.permutations("abc")][slice(None) if FULL else slice(3, 5)], ids="".join)
def test_ranks_are_numbered_by_the_names_whatever_the_order_of_the_mesh(names):
    """lax.ppermute numbers them in the order of the mesh. Each codec has the ranks of two or of three axes."""
    x = whole_numbers((8, 24))
    levels = {names[0]: EXACT, names[1]: cgx.Raw(), names[2]: cgx.Raw()}
    outer, inner = dict(levels, **{names[1]: EXACT}), Overlay.owners(8, [1, 0, 3, 2, 1, 1, 0, 1])

    def body(x):
        sums = [cgx.compressed_psum(x, names, planned(EXACT, schedule=s)) for s in ("two_shot", "ring", "tree", inner)]
        sums += [cgx.compressed_psum(x, names, planned(codecs, leader=True)) for codecs in (levels, outer)]
        scattered = cgx.compressed_psum_scatter(x, names, planned(EXACT, schedule="ring"), tiled=True)
        return lax.psum(x, names), sums, lax.psum_scatter(x, names, tiled=True), scattered

    spec = P(("a", "b", "c"))
    of_ranks = jax.shard_map(lambda x: body(x[0]), mesh=mesh(2, 2, 2), in_specs=spec, out_specs=spec, check_vma=False)
    total, sums, part, scattered = jax.jit(of_ranks)(x)
    for found in sums:
        np.testing.assert_array_equal(found, total)
    np.testing.assert_array_equal(scattered, part)


def test_schedules_under_vmap():
    x, forms = whole_numbers((2, 3, 50)), [(EXACT, False), (CODECS[1], False), (CODECS[1], True)]
    schedules = "two_shot", "one_shot", "ring", "gather", "tree"
    of_two = [planned(codec, schedule=schedule, leader=leader) for schedule in schedules for codec, leader in forms]
    body = lambda x: [cgx.compressed_psum(x, ("a", "b"), plan) for plan in of_two]
    for got in jax.jit(jax.vmap(jax.vmap(body, axis_name="b"), axis_name="a"))(x):
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum((0, 1)), x.shape))
    # Over one axis, whose ranks may not all send.
    plans = [planned(EXACT, schedule=schedule) for schedule in ("ring", "tree", Overlay.owners(3, [1, 0, 2]))]
    each = lambda x: [cgx.compressed_psum(x, "b", plan) for plan in plans]
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh(2, 4))):  # whose axes have the same names
        with context:
            for got in jax.jit(jax.vmap(each, axis_name="b"))(x[0]):
                np.testing.assert_array_equal(got, np.broadcast_to(x[0].sum(0), x[0].shape))


@pytest.mark.short
def test_what_is_the_same_everywhere_may_leave_so():
    """psum, pmean and all_gather(to="invarying") have the type of a value that all ranks share. Nothing else has it."""
    leave = lambda f: jax.jit(jax.shard_map(lambda x: f(x[0]), mesh=mesh(4), in_specs=P("a"), out_specs=P()))(X)
    gather = functools.partial(cgx.compressed_all_gather, axis_name="a", plan=EXACT)
    mean = lambda x: cgx.compressed_pmean(x, "a", planned(EXACT, schedule="ring"))
    np.testing.assert_array_equal(leave(lambda x: cgx.compressed_psum(x, "a", EXACT)), X.sum(0))
    np.testing.assert_array_equal(leave(mean), X.mean(0))
    np.testing.assert_array_equal(leave(lambda x: gather(x, to="invarying")), X)
    scatter, swap = cgx.compressed_psum_scatter, cgx.compressed_all_to_all
    for f in gather, lambda x: scatter(x, "a", EXACT), lambda x: swap(x, "a", 0, 0, EXACT):
        with pytest.raises(ValueError, match="out_specs"):
            leave(f)


def test_a_leaf_varies_over_what_it_did_whatever_else_is_in_its_message():
    """'w' differs along 'b' and 'n' doesn't. So the sum of 'n' over 'a' may be returned as the same on all ranks."""
    codec, specs = cgx.MaxMin(4, rounding="stochastic"), {"n": P("a"), "w": P("a", "b")}

    @functools.partial(jax.shard_map, mesh=mesh(2, 4), in_specs=(specs,), out_specs={"n": P(), "w": P(None, "b")})
    def run(tree):
        return cgx.compressed_psum(tree, "a", planned(codec, own="encoded"), key=jax.random.key(0))

    out = jax.jit(run)({"n": normal((4, 30)), "w": normal((4, 8))})
    copies = [np.asarray(shard.data) for shard in out["n"].addressable_shards]
    assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.short
def test_trees():
    """Leaves keep their dtypes and sizes. Leaves that can't be compressed are summed by lax."""
    tree = {
        "w": whole_numbers((4, 3, 100)),
        "b": [whole_numbers((4, 17), 1, jnp.bfloat16), whole_numbers((4, 3), 2, jnp.float16)],
        "scalar": whole_numbers((4,), 3),
        "count": whole_numbers((4, 5), 4, jnp.int32),
        "empty": jnp.zeros((4, 2, 0)),
        "nothing": None,
        "complex": whole_numbers((4, 2), 5).astype(jnp.complex64),
    }
    schedules = ("auto", "two_shot", "one_shot", "ring", "gather")
    of = lambda s: planned(EXACT, schedule=s)
    sums = lambda t: [(cgx.compressed_psum(t, "a", of(s)), cgx.compressed_pmean(t, "a", of(s))) for s in schedules]
    got = on_ranks(sums, mesh(4))(tree)
    plain = on_ranks(lambda t: [(lax.psum(t, "a"), lax.pmean(t, "a"))] * len(schedules), mesh(4))(tree)
    leaves = lambda tree: dict(enumerate(jax.tree.leaves(tree)))
    assert jax.tree.structure(got) == jax.tree.structure(plain)
    assert_same(leaves(got), leaves(plain))


def test_empty_trees():
    empty = [{}, [], None, (None, {})]
    got = on_ranks(lambda x: (x, [cgx.compressed_psum(tree, "a", EXACT) for tree in empty]), mesh(4))(X)
    assert got[1] == empty


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("codec", [EXACT, cgx.Raw()], ids=str)
def test_empty_leaves_of_tiled_exchanges(codec, check_vma):
    shapes = {"none": (4, 0, 3), "wide": (4, 8, 0), "some": (4, 8, 3)}
    tree = {name: jnp.zeros(shape) for name, shape in shapes.items()} | {"count": jnp.zeros((4, 0), jnp.int32)}
    for run, size in (cgx.compressed_all_gather, 32), (cgx.compressed_psum_scatter, 2):
        got = on_ranks(lambda t, run=run: run(t, "a", codec, tiled=True), mesh(4), check_vma)(tree)
        shapes = {"none": (0, 3), "wide": (size, 0), "some": (size, 3), "count": (0,)}
        assert {name: x.shape[1:] for name, x in got.items()} == shapes
        assert got["count"].dtype == jnp.int32

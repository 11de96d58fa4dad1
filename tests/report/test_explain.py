"""Tests that explain lists what a compiled program sends: exact bytes, codecs, axes, and why a leaf is raw."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import names
from gradients import mesh_of
from helpers import Halves, normal, planned
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.exchange import scopes
from jaxcgx.native.layout import Layout

CODEC, FINE = cgx.MaxMin(4, 64), cgx.MaxMin(8, 64)
SPELLED, SPELLED_FINE = "MaxMin(bits=4, bucket_size=64)", "MaxMin(bits=8, bucket_size=64)"
TREE = {"a": jnp.zeros((300, 7)), "b": jnp.zeros(40, jnp.bfloat16)}
SIZE = 4 * 2100 + 2 * 40  # its bytes
mesh = functools.partial(mesh_of, AxisType.Auto)


def on(f, mesh, spec=P(), **options):
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **{"check_vma": False, **options})


def psum(plan=CODEC, axes="data", where=None, **fields):
    return on(lambda x: cgx.compressed_psum(x, axes, planned(plan, **fields)), where or FLAT)


def quiet(fn, *args, **kwargs):
    return cgx.explain(fn, *args, show=False, **kwargs)


def chunk(codec, tree, chunks):
    return Layout.of(codec, jax.tree.leaves(tree), chunks).chunk_bytes


def what(explanation):
    return [(c.operation, c.axes, c.dtype, c.bytes, c.codec, c.schedule) for c in explanation.collectives]


FLAT, NODES = mesh(("data", 8)), mesh(("node", 2), ("local", 4))


def test_axes_of_two_meshes_of_the_same_devices():
    both = lambda x: (psum()(x), psum(axes="model", where=mesh(("model", 8)))(2 * x))
    found = {(c.operation, c.axes) for c in quiet(both, np.zeros(3000, np.float32)).collectives}
    assert {axes for _, axes in found} == {("data",), ("model",)} and len({name for name, _ in found}) * 2 == len(found)


@pytest.mark.parametrize(("codec", "jnp"), [(Halves(), True), (CODEC, False)], ids=["jnp", "kernels"])
def test_what_runs_without_kernels(codec, jnp):
    key = jax.random.key(0) if codec.stochastic else None
    found = quiet(on(lambda x: cgx.compressed_psum(x, "data", codec, key=key), FLAT), np.zeros(3000, np.float32))
    assert found.jnp == jnp == ("in plain jnp, which gives the same bytes" in str(found))


def test_what_auto_saves():
    """For few elements and many ranks one_shot is faster, although it sends more bytes than lax.psum."""
    x, half = jnp.zeros(3000), cgx.Plan(cgx.Cast("float16"), min_size=0, skip_1d=False)
    plain = quiet(on(lambda x: lax.psum(x, "data"), FLAT), x)
    assert repr(plain) == f"<Explanation of collectives: 1, raw leaves: 0, bytes: {plain.bytes:,}>"
    sent = lambda plan: quiet(on(lambda x: cgx.compressed_psum(x, "data", plan), FLAT), x)
    fast, least = sent(half), sent(dataclasses.replace(half, prefer="bytes"))
    assert least.bytes < plain.bytes < fast.bytes
    assert 'prefer="bytes"' in str(fast) and 'prefer="bytes"' not in str(least)


@pytest.mark.short
@pytest.mark.parametrize("schedule", ["two_shot", "one_shot", "ring", "gather"])
def test_bytes_of_schedules(schedule):
    found = quiet(on(lambda x: cgx.compressed_pmean(x, "data", planned(CODEC, schedule=schedule)), FLAT), TREE)
    part, whole = chunk(CODEC, TREE, 8), chunk(CODEC, TREE, 1)
    shares = [jnp.zeros(-(-x.size // 8)) for x in TREE.values()]
    added = ("reduce-scatter", ("data",), "float32", 7 * 4 * sum(x.size for x in shares), "Raw()", "gather")
    expected = {
        "gather": [("all-gather", 7 * chunk(CODEC, shares, 1))],
        "two_shot": [("all-to-all", 7 * part), ("all-gather", 7 * part)],
        "one_shot": [("all-gather", 7 * whole)],
        "ring": [*[("collective-permute", part)] * 7, ("all-gather", 7 * part)],
    }[schedule]
    first = [added] * (schedule == "gather")
    assert what(found) == first + [(name, ("data",), "uint8", size, SPELLED, schedule) for name, size in expected]
    facts = {(c.function, c.leaves, c.ranks, c.times, c.branch) for c in found.collectives}
    assert facts == {("compressed_pmean", ("['a']", "['b']"), 8, 1, False)}
    assert found.raw == ()
    assert found.bytes == sum(size for *_, size, _, _ in first) + sum(size for _, size in expected)
    assert found.raw_bytes == pytest.approx(2 * 7 / 8 * SIZE, abs=8)  # what lax.psum sends
    assert found.ratio == found.raw_bytes / found.bytes


@pytest.mark.parametrize("inner", [cgx.Raw(), FINE], ids=repr)
def test_hierarchy_names_the_codec_of_each_axis(inner):
    x, spelled = jnp.zeros(4096), {cgx.Raw(): "Raw()", FINE: SPELLED_FINE}[inner]
    found = quiet(psum({"node": CODEC, "local": inner}, ("node", "local"), NODES, schedule="two_shot"), x)
    shard = x[: 4096 // 4]
    inner_bytes, part = 3 * inner.wire_bytes(shard.shape, x.dtype), chunk(CODEC, [shard], 2)
    got, within, between = what(found), (("local",), inner_bytes, spelled), (("node",), part, SPELLED)
    assert [(axes, size, codec) for _, axes, _, size, codec, _ in got] == [within, between, between, within]
    assert [g[0] for g in got[1:3]] == ["all-to-all", "all-gather"] and got[3][0] == "all-gather"
    # In float32: 3 of 4 shards of 4096 bytes in each direction inside, and a psum of one shard over two nodes.
    assert found.totals == {("local",): (2 * inner_bytes, 2 * 3 * 4096), ("node",): (2 * part, 4096)}
    assert str(found).splitlines()[-1].split()[2:] == [f"{found.bytes:,}", f"{found.raw_bytes:,}", f"{found.ratio:.2f}"]


@pytest.mark.parametrize("schedule", ["two_shot", "one_shot", "ring"])
def test_leaders(schedule):
    x = jnp.zeros(4096)
    codecs = {"node": CODEC, "local": cgx.Raw()}
    found = quiet(psum(codecs, ("node", "local"), NODES, schedule=schedule, leader=True), x)
    first, *between, last = found.collectives
    assert what(found)[0] == ("all-reduce", ("local",), "float32", 6 * 4096, "Raw()", first.schedule)
    row = chunk(CODEC, [x], 1 if schedule == "one_shot" else 2)
    assert {(c.operation, c.codec, c.schedule) for c in between} == {("collective-permute", SPELLED, schedule)}
    # In XLA's collective, a rank also "sends" to itself, but no bytes travel.
    assert sorted((c.axes, c.bytes) for c in set(between)) == [((), 0), (("node",), row)]
    assert sum(c.bytes for c in between) == row * (1 if schedule == "one_shot" else 2)
    assert what(found)[-1][:4] == ("all-reduce", ("local",), "uint8", 2 * 3 * 2 * row // 4)
    assert last.raw_bytes == 6 * 4096


@pytest.mark.short
def test_raw_leaves_say_why():
    x = {"e": jnp.zeros((0, 3)), "k/1": {'"odd" (name)': jnp.zeros((3, 2), jnp.int32)}}
    x |= {"n": jnp.zeros(5, jnp.int8), "w": jnp.zeros(100)}
    found = quiet(psum(), x)
    # Rows are in the order of the leaves, with their own sizes, however XLA has changed them.
    assert [(leaf.function, leaf.path, leaf.dtype, leaf.bytes, leaf.reason) for leaf in found.raw] == [
        ("compressed_psum", "['e']", "float32", 0, "it has no elements"),
        ("compressed_psum", "['k/1']['\"odd\" (name)']", "int32", 24, "int32 is not float32, bfloat16 or float16"),
        ("compressed_psum", "['n']", "int8", 5, "int8 is not float32, bfloat16 or float16"),
    ]
    plain = [c for c in found.collectives if c.codec == "Raw()"]
    assert {path for c in plain for path in c.leaves} == {"['k/1']['\"odd\" (name)']", "['n']"}
    assert {(c.operation, c.function) for c in plain} == {("all-reduce", "compressed_psum")}
    assert all(c.bytes == c.raw_bytes > 0 for c in plain)
    assert {c.leaves for c in found.collectives if c not in plain} == {("['w']",)}


def test_raw_leaves_inside_everything():
    """The functions are pjit, scan, while, cond, remat and custom_vjp, each with its own leaf."""

    def leaf(n):
        return lambda x: cgx.compressed_psum({n: x}, "data", CODEC)[n]

    @jax.custom_vjp
    def custom(x):
        return leaf("custom")(x)

    custom.defvjp(lambda x: (leaf("unused")(x), None), lambda _, ct: (ct,))

    def f(x):
        x = jax.jit(leaf("pjit"))(x)
        x = lax.scan(lambda c, _: (leaf("scan")(c), None), x, None, length=3)[0]
        x = lax.while_loop(lambda c: c.sum() > 0, leaf("while"), x)
        x = lax.cond(x.sum() > 0, leaf("cond"), lambda x: x, x)
        return custom(jax.checkpoint(leaf("remat"))(x))

    found = quiet(on(f, FLAT), jnp.zeros(4, jnp.int32))
    assert [raw.path for raw in found.raw] == [f"['{n}']" for n in ("pjit", "scan", "while", "cond", "remat", "custom")]
    listed = {c.leaves[0][2:-2]: (c.times, c.branch) for c in found.collectives}
    expected = dict(pjit=(1, False), scan=(3, False), cond=(1, True), remat=(1, False), custom=(1, False))
    assert listed == expected | {"while": (None, False)}
    text = str(found)
    assert "1 in a loop" in text and "1 at most" in text
    assert text.endswith("What is in a loop of unknown length counts once.\n\nEvery branch of a conditional counts.")


def test_plain_collectives_are_listed_too():
    def f(x):
        return (
            lax.psum_scatter(x, "local", tiled=True),
            lax.all_gather(x, "node"),
            lax.all_to_all(x, ("node", "local"), 0, 0, tiled=True),
            lax.psum(x, "node"),
            lax.ppermute(x, "local", [(0, 1), (1, 0)]),
            cgx.compressed_psum(x, "node", CODEC),
        )

    found = quiet(on(f, NODES), normal(1600))
    size, wire = 6400, CODEC.wire_bytes((1600,), jnp.float32)
    assert sorted((c.operation, c.axes, c.bytes, c.function, c.codec) for c in found.collectives) == [
        ("all-gather", ("node",), wire, "compressed_psum", SPELLED),
        ("all-gather", ("node",), size, "", ""),
        ("all-reduce", ("node",), size, "", ""),
        ("all-to-all", ("node", "local"), size * 7 // 8, "", ""),
        ("collective-permute", ("local",), size, "", ""),
        ("reduce-scatter", ("local",), size * 3 // 4, "", ""),
    ]
    assert all(c.raw_bytes == c.bytes for c in found.collectives if not c.function)
    assert found.raw == ()
    assert str(found).count("not jaxcgx") == 5


def test_three_axes_and_an_axis_of_one():
    cube = mesh(("a", 2), ("one", 1), ("b", 2), ("c", 2))
    subsets = [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")]
    # These differ, because XLA would merge equal ones.
    found = quiet(on(lambda x: [lax.psum(x[: 8 + i], names) for i, names in enumerate(subsets)], cube), jnp.zeros(64))
    assert {c.axes for c in found.collectives} == set(subsets)
    ring = [(r, (r + 1) % 4) for r in range(4)]
    found = quiet(on(lambda x: lax.ppermute(x, ("a", "c"), ring), cube), jnp.zeros(64))
    assert [(c.axes, c.ranks, c.bytes) for c in found.collectives] == [(("a", "c"), 4, 256)]


def test_groups_that_are_no_axis():
    f = on(lambda x: lax.psum(x, "data", axis_index_groups=[[0, 3, 5, 6], [1, 2, 4, 7]]), FLAT)
    found = quiet(f, jnp.zeros(64))
    assert [(c.axes, c.ranks, c.bytes) for c in found.collectives] == [(None, 4, 384)]
    assert "groups of no axis" in str(found)


def test_what_the_partitioner_inserts_is_not_ours():
    """A gradient that is sharded over another axis is gathered in float32 first, and this is listed."""
    both = mesh(("data", 2), ("model", 4))
    x = jax.device_put(jnp.zeros((1024, 64)), NamedSharding(both, P(None, "model")))
    f = lambda x: cgx.compressed_psum(x * 2, "data", planned(CODEC, schedule="two_shot"))
    found = quiet(jax.jit(on(f, both, axis_names={"data"})), x)
    size, part = x.size * 4, chunk(CODEC, [x], 2)
    assert what(found) == [
        ("all-gather", ("model",), "float32", size * 3 // 4, "", ""),
        ("all-to-all", ("data",), "uint8", part, SPELLED, "two_shot"),
        ("all-gather", ("data",), "uint8", part, SPELLED, "two_shot"),
    ]
    assert found.collectives[0].function == "" and found.collectives[0].raw_bytes == found.collectives[0].bytes


def test_residuals_that_become_replicated():
    """They are gathered in every step, if a framework builds the shardings of a state itself."""
    train = cgx.make_train_step(lambda params, x: (x @ params["w"]).mean(), optax.sgd(0.1), FLAT, CODEC)
    given = train.init({"w": jnp.ones((40, 30))}), jnp.ones((8, 40))
    whole = jax.tree.map(lambda _: NamedSharding(FLAT, P()), given[0])
    found = quiet(jax.jit(train.step, out_shardings=(whole, None)), *given)
    (gathered,) = (c for c in found.collectives if c.operation == "all-gather" and c.dtype == "float32")
    assert gathered.bytes == 7 * 4 * 1200
    assert "residuals" in gathered.name and "out_shardings" in str(found)


def test_fully_automatic_jit():
    x = jax.device_put(jnp.zeros((16, 32)), NamedSharding(NODES, P("node", "local")))
    w = jax.device_put(jnp.zeros((32, 16)), NamedSharding(NODES, P("local")))
    found = [(c.operation, c.axes, c.bytes) for c in quiet(lambda x, w: (x @ w).sum(0), x, w).collectives]
    assert found == [("all-reduce", ("local",), 768), ("all-reduce", ("node",), 64)]


def test_shapes_keywords_pmap_and_static_arguments():
    x = jax.ShapeDtypeStruct((100,), jnp.float32)
    expected = [("all-gather", ("data",), "uint8", 7 * CODEC.wire_bytes((100,), jnp.float32), SPELLED, "one_shot")]
    f = psum(schedule="one_shot")
    assert what(quiet(f, x)) == expected
    assert what(quiet(lambda *, x: f(x), x=x)) == expected
    assert what(quiet(functools.partial(jax.jit, static_argnums=0)(lambda n, x: f(x) * n), 2, x)) == expected
    mapped = jax.pmap(lambda x: cgx.compressed_psum(x, "data", planned(CODEC, schedule="one_shot")), axis_name="data")
    assert what(quiet(mapped, jax.ShapeDtypeStruct((8, 100), jnp.float32))) == expected


def test_names_that_mean_something_else_elsewhere():
    """Paths have characters that names can't have, and some are long."""
    tree = {'a/b(c:d) "e" \n\\': jnp.zeros(70), "ü" * 100: jnp.zeros(3, jnp.int32), "x" * 300: jnp.zeros(3, jnp.int32)}
    found = quiet(psum(), tree)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    compressed = [path for c in found.collectives if c.dtype == "uint8" for path in c.leaves]
    assert sorted(compressed + [leaf.path for leaf in found.raw]) == sorted(paths)
    assert all(re.fullmatch(r"[\w<>()/:.+-]{0,300}", c.name) for c in found.collectives)


def test_a_program_that_was_traced_elsewhere(monkeypatch):
    f = jax.jit(psum())
    f.trace(jnp.zeros(100))
    monkeypatch.setattr(scopes, "_meaning", {})
    (c,) = quiet(f, jnp.zeros(100)).collectives
    sent = 7 * CODEC.wire_bytes((100,), jnp.float32)
    assert (c.function, c.codec, c.leaves, c.bytes) == ("compressed_psum", "unknown", (), sent)
    assert "one_shot.MaxMin_bits_4" in c.name


def test_check_replicas():
    (c,) = quiet(on(lambda x: cgx.check_replicas(x, "data").agree, FLAT), TREE).collectives
    assert (c.function, c.codec, c.bytes, c.leaves) == ("check_replicas", "Raw()", 7 * 16, ("['a']", "['b']"))


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="JAX keeps all names of joined collectives from 0.10 on")
def test_a_loss_that_xla_sums_with_factors():
    step = lambda x: (cgx.compressed_pmean({"w": x}, "data", cgx.PowerSGD(2)), lax.pmean(x.sum(), "data"))
    found = quiet(on(step, FLAT), jnp.zeros((64, 96)))
    assert [c.dtype for c in found.collectives] == ["float32"] * 2
    assert found.raw_bytes == 7 * 4 * (64 * 96 + 1) // 4


def test_nothing():
    found = quiet(lambda x: x + 1, jnp.zeros(3))
    assert (found.collectives, found.raw, found.bytes, found.ratio) == ((), (), 0, 1)
    assert str(found).split()[-5:] == ["in", "all", "0", "0", "1.00"]


@pytest.mark.parametrize(
    ("fn", "words"),
    [(None, "fn None"), (jnp.zeros(2), "fn Array("), (jax.jit(jnp.sin).lower(1.0), "args 1 behind Lowered")],
)
def test_bad_input(fn, words):
    with names(TypeError, f"explain {words}"):
        cgx.explain(fn, jnp.zeros(3))


@pytest.mark.parametrize("way", ["lowered", "compiled", "nnx", "nnx lowered", "equinox", "equinox compiled"])
def test_functions_and_programs_of_any_kind(way):
    """explain gets the sent bytes of jax.jit's functions, and of what libraries make of them."""

    f = lambda t: cgx.compressed_pmean(t, ("a", "b"), {"a": cgx.MaxMin(4), "b": cgx.Raw()})
    f = jax.shard_map(f, mesh=mesh(("a", 2), ("b", 2)), in_specs=P(("a", "b")), out_specs=P())
    x = {"n": jnp.ones((4, 3), jnp.int32), "w": normal((4, 500))}
    expected = quiet(jax.jit(f), x)
    assert expected.bytes and len(expected.raw) == 1
    libraries = {"nnx": ("flax.nnx", "jit"), "equinox": ("equinox", "filter_jit")}
    library, jit = libraries.get(way.split()[0], ("jax", "jit"))
    jitted = getattr(pytest.importorskip(library, reason="needs the extra `test`"), jit)(f)
    lowered = jitted.lower(x) if way.split()[-1] in ("lowered", "compiled") else None
    found = quiet(lowered.compile() if "compiled" in way else lowered) if lowered else quiet(jitted, x)
    assert found.totals == expected.totals and found.raw == expected.raw
    assert [c.leaves for c in found.collectives] == [c.leaves for c in expected.collectives]


def test_a_bare_array_has_the_name_of_its_parameter():
    loss = lambda w, x: (cgx.sync_in_backward(w, "a", cgx.MaxMin(4)) * x).sum()
    step = jax.shard_map(jax.grad(loss), mesh=mesh(("a", 2)), in_specs=(P(), P("a")), out_specs=P())
    assert "sync_in_backward  MaxMin(bits=4)  one_shot  params" in str(quiet(step, normal((500,)), normal((1000,))))

"""Tests that check_replicas finds any different bit, and that all ranks agree on whether gradients are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from helpers import mesh_with
from jax import lax
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx

RANKS = 4
MESH, AXES = mesh_with(a=2, b=2), ("a", "b")
FLOATS = ["float32", "bfloat16", "float16", "complex64", "float8_e4m3fn", "float4_e2m1fn"]
DTYPES = [*FLOATS, "int32", "uint8", "int16", "bool", "int4"]
TREE = {d: jnp.asarray(np.arange(60).reshape(5, 12) % 2, d) for d in DTYPES}


def check(change, tree=TREE, check_vma=True):
    """Runs check_replicas on `change(tree, rank)`."""
    step = lambda tree: cgx.check_replicas(change(tree, lax.axis_index(AXES)), AXES)
    return jax.jit(jax.shard_map(step, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=check_vma))(tree)


@pytest.mark.short
@pytest.mark.parametrize("check_vma", [True, False])
def test_agreement(check_vma):
    found = check(lambda tree, rank: tree, check_vma=check_vma)
    assert found.agree and not found.differs.any() and found.differs.shape == (len(DTYPES), RANKS)
    assert str(found) == "All ranks of ('a', 'b') agree on all 11 leaves."
    found.check()


@pytest.mark.parametrize("name", TREE)
def test_one_element_of_one_rank(name):
    def change(tree, rank):
        x = tree[name]
        other = jnp.ones((), x.dtype) if name != "bool" else jnp.array(True)
        return {**tree, name: jnp.where((rank == 2) & (jnp.arange(x.size).reshape(x.shape) == 30), other, x)}

    found = check(change)
    np.testing.assert_array_equal(found.differs, [[k == name and r == 2 for r in range(RANKS)] for k in sorted(TREE)])
    assert not found.agree
    with pytest.raises(ValueError, match=rf"check_replicas: Leaf \['{name}'\] of rank 2 of \('a', 'b'\) differs"):
        found.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, rank: jnp.where(rank == 1, -x, x),  # zeros of the other sign
        lambda x, rank: jnp.where(rank == 1, jnp.roll(x, 1), x),  # the same numbers at other places
        lambda x, rank: x * jnp.where(rank == 1, jnp.float32(1 + 2**-20), 1),
        lambda x, rank: jnp.where(rank == 1, jnp.nan, x),
    ],
)
def test_bits_count(change):
    found = check(lambda t, rank: {"x": change(t["x"], rank)}, {"x": jnp.asarray([0.0, 1, 2, 3, 1e-40])})
    assert found.differs.tolist() == [[False, True, False, False]]


def test_over_one_axis():
    """Shards of a tensor-parallel leaf differ over 'b'. Its replicas over 'a' agree."""
    step = lambda x: cgx.check_replicas(x, "a").agree[None]
    assert jax.jit(jax.shard_map(step, mesh=MESH, in_specs=P("b"), out_specs=P("b")))(jnp.arange(8.0)).all()


def test_same_nans_and_no_elements_agree():
    for tree in {"x": jnp.asarray([jnp.nan, jnp.inf])}, {}, {"x": jnp.zeros((0, 3))}:
        assert check(lambda tree, rank: tree, tree).agree


def test_random_keys():
    assert check(lambda tree, rank: tree, {"key": jax.random.key(0)}).agree
    folded = check(lambda t, rank: {"key": jax.random.fold_in(t["key"], rank // 3)}, {"key": jax.random.key(0)})
    assert folded.differs.tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("bad", [None, np.nan, -np.inf])
def test_all_ranks_get_one_answer(bad, check_vma):
    x = np.ones((4, 3), np.float32)
    x[2, 1] = x[2, 1] if bad is None else bad
    tree = {"x": jnp.asarray(x), "count": jnp.ones((4, 2), jnp.int32)}
    assert (on_ranks(lambda tree: cgx.all_finite(tree, "a"), mesh(4), check_vma)(tree) == (bad is None)).all()
    nothing = lambda x: (cgx.all_finite({}, "a"), cgx.all_finite({"same": jnp.full(3, jnp.nan)}, "a"))
    empty, same = on_ranks(nothing, mesh(4), check_vma)(x)
    assert empty.all() and not same.any()


@pytest.mark.parametrize("overflows", [True, False])
def test_flax_dynamic_scale(overflows):
    scaling = pytest.importorskip("flax.training.dynamic_scale", reason="needs the extra `test`")
    names = pages.given() | dict(plan=cgx.MaxMin(4))
    exec(pages.programs("docs/training")[11], names)
    x, y = names["batch"]
    batch = x.at[5, 0].set(jnp.inf) if overflows else x, y  # of rank 1
    of_rank = lambda *given: jax.tree.map(lambda x: x[None], names["step"](*given))
    specs = dict(in_specs=(P(), P(), P("data")), out_specs=P("data"), check_vma=False)
    step = jax.shard_map(of_rank, mesh=pages.make_mesh(), **specs)
    params, scale, _ = jax.jit(step)(names["params"], scaling.DynamicScale(scale=8.0), batch)
    assert (scale.scale == (4 if overflows else 8)).all() and (scale.fin_steps == (0 if overflows else 1)).all()
    for name, x in params.items():
        assert (x == x[0]).all() and bool((x[0] == names["params"][name]).all()) == overflows

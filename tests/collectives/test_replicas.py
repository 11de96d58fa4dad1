"""Tests that check_replicas finds any different bit, and says where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

RANKS = 4
MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:RANKS])
AXES = ("a", "b")
DTYPES = [
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    jnp.int32,
    jnp.uint8,
    jnp.int16,
    jnp.bool_,
    jnp.int4,
    jnp.float4_e2m1fn,
    jnp.complex64,
    jnp.float8_e4m3fn,
]
TREE = {str(jnp.dtype(d)): jnp.asarray(np.arange(60).reshape(5, 12) % 2, d) for d in DTYPES}


def check(change, tree=TREE, check_vma=True, axes=AXES):
    """Runs check_replicas on `change(tree, rank)`."""

    def step(tree):
        return cgx.check_replicas(change(tree, lax.axis_index(AXES)), axes)

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
    x = jnp.asarray([0.0, 1, 2, 3, 1e-40])
    assert check(lambda t, r: jax.tree.map(lambda x: change(x, r), t), {"x": x}).differs.tolist() == [
        [False, True, False, False]
    ]


def test_same_nans_agree():
    assert check(lambda tree, rank: tree, {"x": jnp.asarray([jnp.nan, jnp.inf])}).agree


def test_over_one_axis():
    """Shards of a tensor-parallel leaf differ over 'b'. Its replicas over 'a' agree."""

    def step(x):
        return cgx.check_replicas(x, "a").agree[None]

    x = jnp.arange(8.0)
    run = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=P("b"), out_specs=P("b")))
    assert run(x).all()


def test_nothing_to_check():
    assert check(lambda tree, rank: tree, {}).agree
    assert check(lambda tree, rank: tree, {"x": jnp.zeros((0, 3))}).agree


def test_random_keys():
    assert check(lambda tree, rank: tree, {"key": jax.random.key(0)}).agree
    folded = check(
        lambda tree, rank: jax.tree.map(lambda k: jax.random.fold_in(k, rank // 3), tree), {"key": jax.random.key(0)}
    )
    assert folded.differs.tolist() == [[False, False, False, True]]

"""Tests what jit leaves sharded by itself, on Auto and Explicit meshes, and that the bits are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bytes, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

X = normal((16, 2048), 0)
GRID, STOCHASTIC = cgx.MaxMin(4), cgx.MaxMin(4, rounding="stochastic")
MESHES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)


def sharded(axis_type, spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    return jax.device_put(X, NamedSharding(mesh, spec))


def check(function, x, gathers):
    """Checks that `function` gives the bits of one device, and whether its program gathers x."""
    run = jax.jit(function)
    y = run(x)
    assert_same_bytes(np.asarray(y), np.asarray(run(X)))
    assert ("all-gather" in run.lower(x).compile().as_text()) == gathers
    return y


@MESHES
@pytest.mark.parametrize(
    "spec, codec, stays",
    [
        (P("a"), GRID, True),
        (P("a", "b"), GRID, True),
        (P(("a", "b")), cgx.Cast(), True),
        (P(None, "b"), cgx.Float8(), True),
        (P("a"), cgx.MaxMin(4, 2048), True),
        (P("a", "b"), cgx.MaxMin(4, 2048), False),  # a bucket would be cut
        (P("a"), cgx.MaxMin(4, 1000), False),
        (P("a"), cgx.ByteGrad(), False),  # the only bucket would be cut
        (P("a"), STOCHASTIC, False),  # the noise of an element depends on its place in the whole leaf
    ],
    ids=str,
)
def test_roundtrip(axis_type, spec, codec, stays):
    key = jax.random.key(1) if codec.stochastic else None
    x = sharded(axis_type, spec)
    y = check(lambda x: cgx.roundtrip(2 * x, codec, key), x, gathers=not stays)
    assert y.sharding.is_equivalent_to(x.sharding, x.ndim)


@MESHES
@pytest.mark.parametrize("codec", [GRID, STOCHASTIC], ids=str)
def test_messages_stay_where_they_are(axis_type, codec):
    key = jax.random.key(1) if codec.stochastic else None
    x = sharded(axis_type, P("a"))
    encode = jax.vmap(lambda x: cgx.encode(x, codec, key))
    payload = check(encode, x, gathers=False)
    assert payload.sharding.is_equivalent_to(x.sharding, x.ndim)
    decode = jax.jit(jax.vmap(lambda p: cgx.decode(p, codec, (2048,), jnp.float32)))
    assert decode(payload).sharding.is_equivalent_to(x.sharding, x.ndim)
    assert "all-gather" not in decode.lower(payload).compile().as_text()
    assert_same_bytes(np.asarray(decode(payload)), np.asarray(decode(jax.jit(encode)(X))))


@pytest.fixture
def same_addresses():
    """Makes JAX's compilation cache see programs as if partitioned operations in all of them had the same address."""
    option = "jax_remove_custom_partitioning_ptr_from_cache_key"
    jax.config.update(option, True)
    yield
    jax.config.update(option, False)


@pytest.mark.usefixtures("same_addresses")
def test_cached_programs_are_told_apart():
    x = sharded(AxisType.Auto, P("a"))
    for codec in (GRID, cgx.MaxMin(4, 1024), cgx.MaxMin(8)):
        check(lambda x, codec=codec: cgx.roundtrip(3 * x, codec), x, gathers=False)
        check(lambda x, codec=codec: cgx.decode(cgx.encode(3 * x, codec), codec, x.shape, x.dtype), x, gathers=True)


@MESHES
def test_a_message_is_whole(axis_type):
    x = sharded(axis_type, P("a", "b"))
    payload = check(lambda x: cgx.encode(x, GRID), x, gathers=True)
    check(lambda x: cgx.decode(cgx.encode(x, GRID), GRID, x.shape, x.dtype), x, gathers=True)
    assert payload.sharding.is_fully_replicated

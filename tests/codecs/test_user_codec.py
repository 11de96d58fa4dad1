"""Tests that a user's codec in jnp works wherever a built-in codec does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Halves, Truncate, assert_same_bytes, custom_calls, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.codecs.grid import GridCodec


@pytest.mark.parametrize("codec", (Halves(), Truncate()), ids=repr)
def test_a_users_codec(codec):
    key = jax.random.key(0) if codec.stochastic else None
    x = normal((5, 47))
    payload = cgx.encode(x, codec, key)
    assert payload.shape == (codec.wire_bytes(x.shape, x.dtype),)
    y = cgx.decode(payload, codec, x.shape, x.dtype)
    assert float(jnp.abs(x - y).max()) < 1
    assert_same_bytes(y, cgx.roundtrip(x, codec, key))
    assert_same_bytes(y, jax.jit(lambda x: cgx.roundtrip(x, codec, key))(x))
    assert custom_calls(lambda x: cgx.roundtrip(x, codec, key), x) == dict(encode=0, decode=0, reduce=0)
    np.testing.assert_array_equal(jax.grad(lambda x: cgx.roundtrip(x, codec, key).sum())(x), np.ones_like(x))
    assert_same_bytes(jax.vmap(lambda x: cgx.encode(x, codec, key))(x)[2], cgx.encode(x[2], codec, key))
    assert cgx.roundtrip(x.astype(jnp.bfloat16), codec, key).dtype == jnp.bfloat16


@pytest.mark.short
@pytest.mark.parametrize("codec", (Halves(), Truncate()), ids=repr)
def test_a_users_codec_on_an_explicit_mesh(codec):
    key = jax.random.key(0) if codec.stochastic else None
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    x = normal((8, 30))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: cgx.roundtrip(x, codec, key))(jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert_same_bytes(np.asarray(y), np.asarray(cgx.roundtrip(x, codec, key)))


def test_what_a_subclass_of_a_built_in_codec_changes_counts():
    @dataclasses.dataclass(frozen=True)
    class Coarse(cgx.MaxMin):
        def quantize(self, x, grid, noise):
            return super().quantize(x, grid, noise) & ~1

    x = normal(100)
    codes = np.asarray(cgx.encode(x, Coarse(4, 64)))[16:]
    assert not (codes & 0x11).any() and (np.asarray(cgx.encode(x, cgx.MaxMin(4, 64)))[16:] & 0x11).any()


def test_a_codec_without_its_methods_or_code_bits_says_so():
    class Nothing(cgx.Codec):
        pass

    class Widthless(GridCodec):
        bucket_size = 8

    with pytest.raises(NotImplementedError, match="Nothing.code_bytes"):
        cgx.encode(jnp.zeros(3), Nothing())
    with pytest.raises(ValueError, match="Widthless.code_bits: expected the number of bits .* got 0; set it"):
        cgx.encode(jnp.zeros(3), Widthless())

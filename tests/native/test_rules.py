"""Tests the number that ranks compare, and primitives outside jit, which stay compiled under `jax.disable_jit`."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from helpers import KEY, assert_same_trees, normal
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout
from jaxcgx.native.rules import digest

LAYOUT = Layout(cgx.MaxMin(4), ((3, 5), (7,)), (jnp.dtype("float32"), jnp.dtype("bfloat16")))


@pytest.mark.parametrize(
    "change",
    [
        dict(codec=cgx.MaxMin(5)),
        dict(codec=cgx.AbsMax(4)),
        dict(codec=cgx.MaxMin(4, rounding="stochastic")),
        dict(shapes=((5, 3), (7,))),
        dict(dtypes=(jnp.dtype("float32"), jnp.dtype("float16"))),
        dict(chunks=2),
        dict(ids=(1, 0)),
    ],
    ids=str,
)
def test_everything_in_a_layout_counts(change):
    assert digest(dataclasses.replace(LAYOUT, **change)) != digest(LAYOUT)


def test_other_values_count():
    assert len({int(digest(each)) for each in (1, 2, 1.0, "1", None, (1,), {"a": 1}, ((1,),), True)}) == 9


# The value is fixed, because processes of any Python on any machine must get the same.
def test_it_is_the_same_everywhere():
    assert digest("two_shot", cgx.MaxMin(4), 0.25, (1, None)) == 6852365331673576535


def test_what_has_no_plain_form_counts_as_its_type():
    @dataclasses.dataclass(frozen=True)
    class Own:
        function: Callable[[int], int]
        bits: int

    assert digest(Own(lambda x: x, 1)) == digest(Own(lambda x: x, 1)) != digest(Own(lambda x: x, 2))


CODEC, TOPK = cgx.MaxMin(4, 64, "stochastic"), cgx.TopK(0.1)
X = normal((4, 300))


def operations(x):
    """Runs every native operation."""
    layout, sparse = (Layout.of(codec, [x]) for codec in (CODEC, TOPK))
    key = jax.random.key_data(KEY)
    payload, residuals = ops.encode_fed(layout, [x], [x], key)
    total = ops.reduce_encoded(layout, payload, key=key)
    cleared = ops.clear(sparse, ops.encode(sparse, [x]), [x])
    return payload, residuals, ops.decode(layout, payload), total, cleared, cgx.roundtrip(x, CODEC, KEY)


def collectives(x):
    fed = cgx.compressed_psum(x, "a", CODEC, key=KEY, carry=cgx.Carry(residuals=jnp.zeros_like(x)))
    return fed, cgx.compressed_all_gather(x, "a", CODEC, key=KEY)


@pytest.mark.parametrize(
    "f",
    [operations, on_ranks(collectives, mesh(4), jit=False), jax.vmap(collectives, axis_name="a")],
    ids=["operations", "mesh", "vmap"],
)
def test_without_jit(f):
    expected = jax.jit(f)(X)
    with jax.disable_jit():
        assert_same_trees(f(X), expected)
    assert_same_trees(f(X), expected)

"""Meshes and programs for the tests of the collectives, and each collective next to its counterpart in lax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from helpers import as_bits, mesh_with
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx._compat import all_gather as gather
from jaxcgx._compat import tracked_axes, vary

NAMES = ("a", "b", "c")
EXACT = cgx.Cast("bfloat16")  # represents whole numbers up to 256 exactly


def mesh(*sizes, axis_type=AxisType.Auto):
    """Returns a mesh with axes 'a', 'b', 'c' of these sizes."""
    return mesh_with(axis_type, **dict(zip(NAMES, sizes)))


def on_ranks(f, mesh, check_vma=True, jit=True, **kwargs):
    """Returns f on every rank.

    Arguments and results begin with the axes of the mesh, so the results have those of all ranks.
    """
    n, spec = mesh.devices.ndim, P(*mesh.axis_names)

    def body(*args):
        out = f(*jax.tree.map(lambda x: x.reshape(x.shape[n:]), args))
        return jax.tree.map(lambda x: x.reshape((1,) * n + x.shape), out)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma, **kwargs)
    return jax.jit(mapped) if jit else mapped


def whole_numbers(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.RandomState(seed).randint(-4, 5, shape)).astype(dtype)


def ring(size):
    return [(rank, (rank + 1) % size) for rank in range(size)]


def pipeline(size):
    return ring(size)[:-1]


# The options of each collective in the tests, for leaves [size, 2 size, 3 size]. lax itself mistakes negative
# dimensions. Functions get the number of ranks.
CASES = {
    "psum": [{}],
    "pmean": [{}],
    "psum_scatter": [dict(scatter_dimension=d, tiled=True) for d in (0, 1, -1)] + [{}, dict(scatter_dimension=-3)],
    "all_gather": [dict(axis=d) for d in (0, 1, -1, -2)] + [dict(axis=d, tiled=True) for d in (0, 2, -2)],
    "all_to_all": [dict(split_axis=s, concat_axis=c, tiled=True) for s, c in ((0, 0), (0, 1), (1, 0), (-1, 1))]
    + [dict(split_axis=s, concat_axis=c) for s, c in ((0, 0), (0, 2), (-3, -1))],
    "ppermute": [dict(perm=pipeline), dict(perm=ring)],
    "pbroadcast": [dict(source=0, to="invarying"), dict(source=1)],
}
WHOLE = ("ppermute", "pbroadcast")  # those that take one codec over all axes


def pbroadcast(x, axes, source, to="varying"):
    """What lax.pbroadcast, which needs a GPU, is equivalent to."""
    total = lax.psum(jnp.where(lax.axis_index(axes) == source, x, 0), axes)
    return total if to == "invarying" else vary(total, tracked_axes(axes if isinstance(axes, tuple) else (axes,)))


def twins(axes, plan, cases=CASES):
    """Returns two functions of a leaf that run all cases, compressed and with lax. Each returns {case: result}."""

    def each(run):
        def of_leaf(x):
            found = {}
            for op in cases:
                for kwargs in cases[op]:
                    given = {k: v(lax.axis_size(axes)) if callable(v) else v for k, v in kwargs.items()}
                    found[f"{op} {kwargs}"] = run(x, op, given)
            return found

        return of_leaf

    def compressed(x, op, kwargs):
        codec = EXACT if op in WHOLE and isinstance(plan, dict) else plan
        return getattr(cgx, f"compressed_{op}")(x, axes, plan=codec, **kwargs)

    def plain(x, op, kwargs):
        if op in WHOLE:
            return (pbroadcast if op == "pbroadcast" else lax.ppermute)(x, axes, **kwargs)
        ndim = x.ndim + ("axis" in kwargs and "tiled" not in kwargs)
        positive = {k: v if k in ("tiled", "to") else v % ndim for k, v in kwargs.items()}
        return (gather if "to" in kwargs else getattr(lax, op))(x, axes, **positive)

    return each(compressed), each(plain)


def assert_same(got, expected):
    """Checks that all cases have the same values, shapes and dtypes."""
    assert got, "no cases to compare"
    for case, y in got.items():
        assert y.dtype == expected[case].dtype, case
        np.testing.assert_array_equal(np.asarray(y), np.asarray(expected[case]), err_msg=str(case))


def total(x, axes):
    """Returns the sum over all ranks, in float64."""
    return np.asarray(x, np.float64).sum(tuple(range(axes)))


def assert_conserved(x, before, results, after, axes=1, weight=1, near=3e-7, least=1e-12):
    """Checks that, over all ranks, x + residuals before = results * weight + residuals after.

    Results are those of all ranks. `near` is how far off the larger side may be, relative to the magnitudes of x.
    """
    assert x
    for name in x:
        have = total(x[name], axes) + total(before[name], axes)
        got = weight * np.asarray(results[name], np.float64)[(0,) * axes] + total(after[name], axes)
        size = total(np.abs(x[name]), axes).max()
        np.testing.assert_allclose(got, have, rtol=0, atol=near * size * 2 + (least if near else 0), err_msg=name)


def assert_same_on_all_ranks(tree, axes=1):
    assert jax.tree.leaves(tree)
    for x in jax.tree.leaves(tree):
        bits = as_bits(x).reshape(math.prod(x.shape[:axes]), -1 if x.size else 0)
        assert (bits == bits[0]).all()

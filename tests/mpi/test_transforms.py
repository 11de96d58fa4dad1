"""Tests jit, vmap, grad, scan, cond, while and remat for the collectives over MPI and their parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import names
from helpers import normal, planned

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")

from processes import COMM, mine

from jaxcgx.mpi import ranks

pytestmark = pytest.mark.skipif(COMM.size != 2, reason="a matter of programs, not of ranks: mpirun -n 2 runs these")
N, KEY, CODEC = COMM.size, jax.random.key(7), cgx.MaxMin(8, 64)
NET = ranks.over("test", COMM)
SLICES = np.arange(2), np.ones(2, int), np.full(2, NET.rank), np.ones(2, int)
COLLECTIVES = {
    "psum": lambda x: cgx.compressed_psum(
        x, COMM, planned(cgx.MaxMin(8, 64, "stochastic"), schedule="two_shot"), key=KEY
    ),
    "psum_scatter": lambda x: cgx.compressed_psum_scatter(x, COMM, CODEC, tiled=True),
    "all_gather": lambda x: cgx.compressed_all_gather(x, COMM, CODEC, axis=1),
    "all_to_all": lambda x: cgx.compressed_all_to_all(x, COMM, 0, 0, CODEC, tiled=True),
    "ppermute": lambda x: cgx.compressed_ppermute(x, COMM, [(0, 1), (1, 0)], CODEC),
    "pbroadcast": lambda x: cgx.compressed_pbroadcast(x, COMM, 1, CODEC),
    "parts": lambda x: cgx.compressed_all_gather(x, COMM, cgx.AbsMax(8, 35), axis=1, as_parts=True).dequantize(),
    "ragged": lambda x: cgx.compressed_ragged_all_to_all(x, x, *SLICES, axis_name=COMM, plan=CODEC),
}
PLAIN = {"plain pmean": NET.plain_pmean, "plain ppermute": lambda x: NET.plain_ppermute(x, [(0, 1)])}
X = mine(normal((N, 2 * N, 70)))


def each(functions):
    return pytest.mark.parametrize("f", functions.values(), ids=functions)


def equal(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@each(COLLECTIVES | PLAIN)
def test_jit_and_vmap(f):
    """A batch is one exchange. It has what each of its members would exchange alone."""
    expected = f(X)  # without jit
    equal(jax.jit(f)(X), expected)
    batch = jnp.stack([X, 2 * X, X - 1], 2)
    got = jax.jit(jax.vmap(f, in_axes=2, out_axes=2))(batch)
    equal(got[:, :, 0], expected)
    equal(got[:, :, 2], f(X - 1))
    nested = jax.vmap(jax.vmap(f))(jnp.stack([X, 2 * X, X, X - 1]).reshape(2, 2, *X.shape))
    equal(nested[1, 1], got[:, :, 2])
    either = lambda first, x: jax.lax.cond(first, f, lambda x: f(2 * x), x)
    chosen = jax.jit(jax.vmap(either))(jnp.array([True, False]), jnp.stack([X, X]))
    equal(chosen[0], expected)
    equal(chosen[1], got[:, :, 1])


@pytest.mark.parametrize("comm", [COMM, cgx.mpi.hierarchy()], ids=["mpi", "memory"])
def test_ahead_of_time_and_without_jit(comm):
    f = lambda x: cgx.compressed_psum(x, comm, CODEC)
    expected, compiled = f(X), jax.jit(f).lower(X).compile()
    for _ in range(3):  # JAX handles the second call differently
        equal(compiled(X), expected)
    with jax.disable_jit():
        equal(f(X), expected)
        equal(cgx.mpi.broadcast(X, 1, comm), COMM.bcast(X, 1))


@each({name: COLLECTIVES[name] for name in ("psum", "all_to_all")})
def test_control_flow(f):
    """Control flow is a scan's steps, a branch that all ranks take, a while loop, and the gradient through a scan."""

    def step(total, scale):
        return total + jax.lax.cond(scale > 1, f, lambda x: f(2 * x), X * scale).sum(), None

    looped = jax.jit(lambda: jax.lax.scan(step, 0.0, jnp.arange(1.0, 4))[0])()
    np.testing.assert_allclose(looped, 7 * f(X).sum(), rtol=1e-3, atol=0.5)
    grown = jax.jit(
        lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + f(x).sum()), (0, 0.0))
    )(X)[1]
    np.testing.assert_allclose(grown, 3 * f(X).sum(), rtol=1e-5, atol=1e-2)
    scanned = jax.jit(jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x).sum(), None), 0.0, None, length=3)[0]))(X)
    np.testing.assert_allclose(scanned, 3 * jax.grad(lambda x: f(x).sum())(X), rtol=1e-5)


@each(COLLECTIVES | PLAIN)
def test_derivatives(f):
    """Collectives are linear. Both modes of derivatives agree, and remat sends again."""
    tangent = normal(X.shape, 5)
    value, moved = jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(X, tangent)
    equal(value, f(X))
    equal(moved, f(tangent))
    weight = normal(value.shape, 6 + COMM.rank)
    loss = lambda x: (jnp.sin(f(jnp.sin(x))) * weight).sum()
    slope = jax.jit(jax.grad(loss))(X)
    equal(jax.jit(jax.grad(jax.checkpoint(loss)))(X), slope)
    # Summed over all ranks, <weight, f(tangent)> = <transposed f(weight), tangent>, except for rounding.
    back = jax.vjp(f, X)[1](weight)[0]
    there, here = (COMM.allreduce(float((a * b).sum())) for a, b in ((weight, f(tangent)), (back, tangent)))
    assert abs(there - here) < 0.02 * N * float(jnp.linalg.norm(weight)) * float(jnp.linalg.norm(tangent))


def test_every_dtype():
    dtypes = [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.complex64, jnp.bool_]
    dtypes += [jnp.int4, jnp.uint4, jnp.int8, jnp.uint32]
    given = [(np.arange(N * 6).reshape(N, 6) % 2).astype(dtype) for dtype in dtypes]
    f = lambda x: (NET.plain_psum(x), NET.all_to_all(x), NET.all_gather(x), NET.broadcast(x, 0))
    for x, (total, swapped, gathered, root) in zip(given, jax.jit(lambda given: list(map(f, given)))(given)):
        assert total.dtype == (jnp.int32 if x.dtype == jnp.bool_ else x.dtype)
        equal(np.asarray(total).astype(complex), N * x.astype(complex))
        for y, expected in (
            (swapped, np.broadcast_to(x[COMM.rank], x.shape)),
            (gathered, np.broadcast_to(x, (N, *x.shape))),
            (root, x),
        ):
            assert y.dtype == x.dtype
            equal(np.asarray(y).astype(complex), expected.astype(complex))


def test_a_transport_is_static_under_jit():
    same, other = ranks.over("test", COMM), ranks.over("test", COMM.Dup())
    assert same == NET and hash(same) == hash(NET) and other != NET
    assert NET.comm != COMM and NET.comm.size == N


def test_arrays_that_mpi_cannot_count():
    words = "jaxcgx.mpi - 2147483648 cut the leaf"
    with names(ValueError, words):
        jax.jit(NET.all_gather).lower(jax.ShapeDtypeStruct((2**31,), jnp.uint8))

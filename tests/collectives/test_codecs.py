"""Codecs of little error per bit, on every schedule and with residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from helpers import each_codec, normal, planned, vnmse
from jax import lax
from pages import programs
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange.errors import Losses, drawn

RANKS, SIZE = 3, 5000
CODECS = [
    cgx.Eden(4, 1024),
    *map(cgx.Micro, ("nvfp4", "mxfp4", "mxfp8")),
    *(cgx.Micro("nvfp4", rounding) for rounding in ("stochastic", "eden")),
    cgx.Lossless(),
    cgx.MaxMin(4, 512, rotate=True),
    cgx.AbsMax(4, 512, rotate=True),
    cgx.MaxMin(4, 512, "correlated", rotate=True),
]
FED = "two_shot", "one_shot", "gather", "tree"  # a ring takes no residuals


@pytest.mark.parametrize("codec", **each_codec(CODECS))
def test_every_schedule(codec):
    """Replicas agree, errors are those that the planner predicts, and residuals have what is lost."""
    x, alike = (drawn("laplace", RANKS, SIZE, seed=seed) for seed in (1, 2))
    options = dict(key=jax.random.key(11) if codec.stochastic else None)

    def run(x):
        mean = lambda s, **kept: cgx.compressed_pmean(x, "a", planned(codec, schedule=s), **options, **kept)
        fed = {s: mean(s, carry=cgx.Carry(residuals=x / 8)) for s in FED}
        return {s: mean(s) for s in (*FED, "ring")}, fed

    means, fed = jax.tree.map(np.asarray, on_ranks(run, mesh(RANKS), check_vma=False)(x))
    exact, losses = x.mean(0, dtype=np.float64), Losses(alike, codec, cut=RANKS)
    for schedule, mean in means.items():
        assert (mean == mean[0]).all(), schedule
        error = np.square(mean[0] - exact).sum() / np.square(exact).sum()
        assert error == pytest.approx(losses.error(schedule, RANKS), rel=0.25, abs=1e-12), schedule
    for schedule, (mean, kept) in fed.items():
        got = mean[0].astype(np.float64) + kept.residuals.mean(0, dtype=np.float64)
        np.testing.assert_allclose(got, 1.125 * exact, rtol=0, atol=1e-5, err_msg=schedule)


@functools.cache
def every_operation(codec, dtype):
    """Returns {operation: results of all ranks} on a hierarchy."""
    options = dict(key=jax.random.key(11) if codec.stochastic else None)
    total = lambda x: cgx.compressed_psum(x, ("a", "b"), {"a": codec, "b": cgx.Raw()}, **options)

    def run(x):
        return dict(
            total=total(x),
            share=cgx.compressed_psum_scatter(x, "b", codec, **options),
            gathered=cgx.compressed_all_gather(x, "b", codec, **options),
            exchanged=cgx.compressed_all_to_all(x, "b", 0, 0, codec, **options),
            gradient=jax.grad(lambda x: jnp.square(total(x).astype(np.float32)).sum())(x),
        )

    x = jnp.asarray(drawn("laplace", 4, SIZE), dtype).reshape(2, 2, 2, -1)
    return on_ranks(run, mesh(2, 2), check_vma=False)(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("codec", **each_codec(CODECS))
def test_every_operation(codec, dtype):
    """Numbers of 16 bits, over a hierarchy and in all other collectives, against `Raw`."""
    exact = every_operation(cgx.Raw(), dtype)
    for name, found in every_operation(codec, dtype).items():
        assert found.dtype == dtype
        found, whole = np.asarray(found, np.float64), np.asarray(exact[name], np.float64)
        # Raw numbers of 16 bits are rounded after each axis of a hierarchy.
        most = 0.05 if codec != cgx.Lossless() else 1e-5 if name in ("total", "gradient") else 0
        assert np.square(found - whole).sum() <= most * np.square(whole).sum(), name
        assert name != "total" or (found == found[0, 0]).all()


PARTS = {
    cgx.Float8("e4m3", 32): (jnp.float8_e4m3fn, jnp.float32, 32),
    cgx.Float8("e5m2", 16): (jnp.float8_e5m2, jnp.float32, 16),
    cgx.AbsMax(8, 96): (jnp.int8, jnp.float32, 96),
    cgx.AbsMax(3, 32): (jnp.int8, jnp.float32, 32),
    cgx.Micro("mxfp8"): (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32),
    cgx.Micro("mxfp4"): (jnp.float4_e2m1fn, jnp.float8_e8m0fnu, 32),
    cgx.Micro("nvfp4"): (jnp.float4_e2m1fn, jnp.float8_e4m3fn, 16),
}
EXCHANGES = {  # x is [4, 8, 96] on each rank
    "rows": functools.partial(cgx.compressed_all_gather, tiled=True),
    "columns": functools.partial(cgx.compressed_all_gather, axis=-1, tiled=True),
    "stacked": functools.partial(cgx.compressed_all_gather, axis=1, to="invarying"),
    "swapped": functools.partial(cgx.compressed_all_to_all, split_axis=0, concat_axis=1),
    "cut": functools.partial(cgx.compressed_all_to_all, split_axis=1, concat_axis=2, tiled=True),
}
LAX = dict(
    rows=lambda x: lax.all_gather(x, "a", tiled=True),
    columns=lambda x: lax.all_gather(x, "a", axis=2, tiled=True),
    stacked=lambda x: lax.all_gather(x, "a", axis=1),
    swapped=lambda x: lax.all_to_all(x, "a", 0, 1),
    cut=lambda x: lax.all_to_all(x, "a", 1, 2, tiled=True),
)


@pytest.mark.parametrize("codec", **each_codec(PARTS))
def test_parts(codec):
    """Their product has the bits and the derivative of the call without as_parts. Quantizing and gathering commute.

    Each codec has the first exchange, and one of the others in turn.
    """
    values, scales, block = PARTS[codec]
    first, *others = EXCHANGES.items()
    exchanges = first, others[list(PARTS).index(codec) % len(others)]
    dtype = jnp.bfloat16 if values in (jnp.float4_e2m1fn, jnp.int8) else jnp.float32

    def run(x):
        found = {}
        for name, exchange in exchanges:
            parts = exchange(x, axis_name="a", plan=codec, as_parts=True)
            assert (parts.values.dtype, parts.scales.dtype) == (values, scales)
            assert all(jnp.issubdtype(x.dtype, jnp.unsignedinteger) for x in jax.tree.leaves(parts.sent))
            assert parts.scales.shape == (*parts.values.shape[:-1], parts.values.shape[-1] // block)
            whole = cgx.Quantized.of(LAX[name](x), codec)
            loss = lambda x, exchange=exchange, **parts: exchange(x, axis_name="a", plan=codec, **parts)
            square = lambda y: (y.astype(jnp.float32) ** 2).sum()
            decoded = lambda x: loss(x, as_parts=True).dequantize()
            of_all = lambda q: jax.tree.map(lambda a: a.astype(jnp.float32), (q.values, q.scales))
            found[name] = [
                (decoded(x), loss(x)),
                (jax.grad(lambda x: square(decoded(x)))(x), jax.grad(lambda x: square(loss(x)))(x)),
                (jax.vmap(decoded)(x[None])[0], loss(x)),
                (whole.dequantize(), cgx.roundtrip(LAX[name](x), codec)),
                *([] if parts.factors is not None else [(of_all(parts), of_all(whole))]),
            ]
        return found

    x = (normal((4, 4, 8, 96)) * np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1, 1)).astype(dtype)
    for name, pairs in on_ranks(run, mesh(4), check_vma=block == 32)(x).items():
        for got, expected in pairs:
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, name), got, expected)


def test_parts_of_trees_and_of_one_rank():
    """Leaves that travel raw are arrays. The bytes are those without as_parts. One rank quantizes, too."""
    plan, tree = cgx.Plan(cgx.Float8(), min_size=100), {"w": normal((4, 2, 256)), "b": normal((4, 128), 1)}
    gather = lambda **options: lambda x: cgx.compressed_all_gather(x, "a", plan, tiled=True, **options)
    program = on_ranks(gather(as_parts=True), mesh(4))
    found, expected = program(tree), on_ranks(gather(), mesh(4))(tree)
    np.testing.assert_array_equal(found["b"], expected["b"])
    assert found["w"].scales.shape == (4, 8, 2)
    bytes_of = lambda f: [(c.operation, c.dtype, c.bytes) for c in cgx.explain(f, tree, show=False).collectives]
    assert bytes_of(program) == bytes_of(on_ranks(gather(), mesh(4)))
    one = on_ranks(gather(as_parts=True), mesh(1))({"w": tree["w"][:1], "b": tree["b"][:1]})
    np.testing.assert_array_equal(one["w"].values[0].astype(jnp.float32), found["w"].values[0, :2].astype(jnp.float32))
    codec, key = cgx.Micro("nvfp4", "stochastic"), jax.random.key(3)
    x = cgx.Quantized.of(tree["w"], codec, key).dequantize()
    np.testing.assert_array_equal(x, cgx.roundtrip(tree["w"], codec, key))
    for ranks in (1, 2):
        gather = lambda x: cgx.compressed_all_gather(x, "a", codec, key=key, as_parts=True).dequantize()
        assert vnmse(x[:ranks], on_ranks(gather, mesh(ranks))(x[:ranks])[0]) < 0.05


def parts(exchange, codec, shape=(4, 8, 96)):
    run = on_ranks(lambda x: exchange(x, axis_name="a", plan=codec, as_parts=True), mesh(4))
    return lambda: run(jnp.zeros((4, *shape)))


def differentiated(derive, use, codec):
    """Returns the call of a derivative of what is made of parts, once of a gather and once of an array."""
    gathered = lambda x: use(EXCHANGES["rows"](x, axis_name="a", plan=codec, as_parts=True)).astype(jnp.float32).sum()
    loss = lambda x: gathered(x) + use(jax.jit(cgx.Quantized.of, static_argnums=1)(x, codec)).astype(jnp.float32).sum()
    return lambda: on_ranks(derive(loss), mesh(4))(normal((4, 8, 96)))


forward = lambda loss: lambda x: jax.jvp(loss, (x,), (x,))
FLOAT8 = cgx.Float8(bucket_size=32)
PRODUCT = lambda q: q.values.astype(jnp.float32) * q.scales.astype(jnp.float32).repeat(32, -1)


def test_parts_are_constants_where_no_gradient_is_wanted():
    """And dequantize() has its derivative, as jax.jvp takes it, too."""
    stopped = differentiated(jax.grad, lambda q: q.dequantize() * PRODUCT(lax.stop_gradient(q)), FLOAT8)()
    assert np.asarray(stopped).any()
    (value, tangent), x = differentiated(forward, lambda q: q.dequantize(), FLOAT8)(), normal((4, 8, 96))
    for found in value, tangent:
        np.testing.assert_allclose(found, x.sum() + x.sum((1, 2)), rtol=0.02)
    with pytest.raises(TypeError, match="got uint8"):
        jax.grad(lambda q: q.dequantize().sum())(cgx.Quantized.of(x, FLOAT8))


ERRORS = {
    "Quantized": [
        (differentiated(derive, use, codec), TypeError, "", "one that is", "dequantize jax.lax.stop_gradient")
        for derive, use, codec in (
            (jax.grad, PRODUCT, FLOAT8),
            (forward, lambda q: q.values, cgx.Micro("mxfp8")),
            (lambda f: jax.grad(jax.checkpoint(f)), lambda q: q.scales, cgx.AbsMax(8, 32)),
            (jax.grad, lambda q: q.dequantize() * q.factors.mean(), cgx.Micro("nvfp4")),
        )
    ],
    "Quantized.of": [
        (lambda: cgx.Quantized.of(jnp.zeros((0, 32)), cgx.Micro()), ValueError, "x", "float32[0, 32]"),
        (lambda: cgx.Quantized.of(jnp.zeros(32, jnp.int32), cgx.Micro()), TypeError, "x", "int32"),
        (lambda: cgx.Quantized.of(jnp.zeros(32), cgx.MaxMin(4)), ValueError, "codec", "MaxMin(", "parts"),
        (lambda: cgx.Quantized.of(jnp.zeros(32), cgx.Micro("nvfp4", "stochastic")), ValueError, "key", "None"),
    ],
    "compressed_all_gather": [
        (parts(EXCHANGES["rows"], cgx.MaxMin(8)), ValueError, "plan", "MaxMin(", "parts Float8"),
        (parts(EXCHANGES["rows"], cgx.AbsMax(8, 128, rotate=True)), ValueError, "plan", "AbsMax(", "rotate"),
        (parts(EXCHANGES["rows"], cgx.Float8()), ValueError, "x", "float32[4, 8, 96]", "blocks 128 smaller"),
        (parts(functools.partial(EXCHANGES["stacked"], axis=3), cgx.Micro()), ValueError, "axis", "3", "last"),
    ],
    "compressed_all_to_all": [
        (parts(EXCHANGES["cut"], cgx.Micro(), (4, 4, 24)), ValueError, "x", "float32[4, 4, 24]", "blocks"),
        (parts(functools.partial(EXCHANGES["swapped"], concat_axis=2), cgx.Micro()), ValueError, "concat_axis", "2"),
        (parts(EXCHANGES["cut"], {"a": cgx.Micro()}), ValueError, "plan", "{'a': Micro("),
    ],
}
test_errors_of_parts = table(ERRORS)


@pytest.mark.parametrize("codec", [cgx.Micro("mxfp8"), cgx.Micro("nvfp4"), cgx.Float8("e4m3", 32)], ids=str)
def test_scaled_products(codec, monkeypatch):
    """The program of the docs. jax.nn.scaled_matmul is compiled for GPUs, and on CPUs, lax multiplies in bfloat16."""
    if not hasattr(lax, "scaled_dot"):
        pytest.skip("this JAX has no lax.scaled_dot")
    (program,) = (each for each in programs("docs/collectives") if "scaled_matmul" in each)
    program, found = program.replace('cgx.Micro("mxfp8")', "codec").replace("data", "a"), []
    real = jax.nn.scaled_matmul

    def product(x, y, *scales):
        found[:] = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, y, *scales)]
        how = dict(dimension_numbers=(((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        return lax.scaled_dot(x, y, lhs_scale=scales[0], rhs_scale=scales[1], **how)

    monkeypatch.setattr(jax.nn, "scaled_matmul", product)

    def run(shard, examples):
        names = dict(cgx=cgx, jax=jax, codec=codec, shard=shard, examples=examples)
        exec(program, names)
        x, weights, products = names["x"], names["weights"], names["products"]
        if weights.factors is not None:
            products *= x.factors * weights.factors.T.repeat(len(shard), 1)
        return products, x.dequantize() @ weights.dequantize().T

    products, exact = on_ranks(run, mesh(4))(normal((4, 16, 64)), normal((4, 8, 64), 1))
    assert np.abs(products - exact).max() < 0.02 * np.abs(exact).max()
    for_gpus = jax.jit(real).trace(*found).lower(lowering_platforms=("cuda",)).as_text()
    assert "@__op$block_scaled_dot(" in for_gpus

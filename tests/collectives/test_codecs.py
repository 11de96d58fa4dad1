"""Codecs of little error per bit, on every schedule and with residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import each_codec, planned
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange.errors import Losses, drawn

RANKS, SIZE = 3, 5000
CODECS = [
    cgx.Eden(4, 1024),
    *map(cgx.Micro, ("nvfp4", "mxfp4", "mxfp8")),
    cgx.Lossless(),
    cgx.MaxMin(4, 512, rotate=True),
    cgx.AbsMax(4, 512, rotate=True),
    cgx.MaxMin(4, 512, "correlated", rotate=True),
]
FED = "two_shot", "one_shot", "tree"  # a ring takes no residuals


@pytest.mark.parametrize("codec", **each_codec(CODECS))
def test_every_schedule(codec):
    """Replicas agree, errors are those that the planner predicts, and residuals have what is lost."""
    x, alike = (drawn("laplace", RANKS, SIZE, seed=seed) for seed in (1, 2))
    options = dict(key=jax.random.key(11) if codec.stochastic else None)

    def run(x):
        means = {s: cgx.compressed_pmean(x, "a", planned(codec, schedule=s), **options) for s in (*FED, "ring")}
        return means, {
            s: cgx.compressed_pmean(x, "a", planned(codec, schedule=s), carry=cgx.Carry(residuals=x / 8), **options)
            for s in FED
        }

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

"""Tests Demo (decoupled momentum) against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import PartitionSpec as P
from training import PARAMS, mesh_of

import jaxcgx as cgx
from jaxcgx.train.state import ExchangeState
from jaxcgx.wan.demo import CosineBlocks

ROWS = ExchangeState(P("data"), P())


def test_the_cosine_transform_of_blocks():
    """The transform is that of each block. Its inverse restores the input, of any shape."""
    x = normal((30, 40))
    blocks = CosineBlocks(x.shape, 16)
    assert blocks.block == (15, 10)
    found = blocks.coefficients(x)
    expected = jax.scipy.fft.dctn(x[15:, 10:20], norm="ortho")  # the second row of blocks, and the second block in it
    np.testing.assert_allclose(found[5].reshape(15, 10), expected, atol=1e-5)
    for shape in (), (7,), (2, 3, 40), (1, 131):
        x, blocks = normal(shape), CosineBlocks(shape, 64)
        np.testing.assert_allclose(blocks.restore(blocks.coefficients(x)), x, atol=1e-5)


def numpy_step(gradients, momenta, k):
    """Returns the step for a matrix of one block: (the common update of all ranks, momenta)."""
    cosines = CosineBlocks(gradients[0].shape, 64)
    sent, kept, senders = [], [], np.full(gradients[0].size, len(gradients))
    for g, m in zip(gradients, momenta):
        m = 0.9 * m + g
        c = np.array(cosines.coefficients(jnp.asarray(m))).reshape(-1)
        c[rest := np.argsort(-np.abs(c))[k:]] = 0
        sent.append(c)
        senders[rest] -= 1
        kept.append(m - np.asarray(cosines.restore(jnp.asarray(c))))
    return np.asarray(cosines.restore(jnp.asarray(np.float32(sum(sent) / np.maximum(senders, 1))))), kept


def test_as_its_paper_has_it():
    """A coefficient is the mean over the ranks that send it, not over all ranks. Sent parts leave the momentum."""
    optimizer = cgx.compress_gradients("data", cgx.wan.Demo(decay=0.9, k=20))
    gradients = normal((2, 30, 40), 3)
    state = jax.jit(jax.shard_map(lambda: optimizer.init(PARAMS["w"]), mesh=mesh_of(2), in_specs=(), out_specs=ROWS))()
    update = lambda g, state: optimizer.update(g[0], state)
    specs = dict(in_specs=(P("data"), ROWS), out_specs=(P(), ROWS))
    step = jax.jit(jax.shard_map(update, mesh=mesh_of(2), **specs))
    momenta = [np.zeros((30, 40), np.float32)] * 2
    for scale in 1.0, 0.5:
        found, state = step(scale * gradients, state)
        expected, momenta = numpy_step(scale * np.asarray(gradients), momenta, 20)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        np.testing.assert_allclose(state.own.momentum, momenta, atol=1e-5)


@pytest.mark.parametrize("values", [cgx.Raw(), cgx.AbsMax(4)], ids=str)
def test_a_coefficient_of_zero_counts_if_it_is_sent(values):
    """If all coefficients are sent, the update is the mean over all ranks of what left their momenta."""
    gradients = normal((4, 5, 13), 1).at[1].set(0.0)

    def step(g):
        optimizer = cgx.compress_gradients("data", cgx.wan.Demo(k=65, values=values))
        tree = {"w": g[0], "b": g[0, 0, 0], "empty": jnp.zeros((0, 3))}
        return optimizer.update(tree, optimizer.init(tree))

    found, state = jax.jit(jax.shard_map(step, mesh=mesh_of(4), in_specs=P("data"), out_specs=(P(), ROWS)))(gradients)
    np.testing.assert_allclose(found["w"], (gradients - state.own.momentum["w"]).mean(0), atol=1e-5)
    np.testing.assert_allclose(found["b"], (gradients[:, 0, 0] - state.own.momentum["b"]).mean(), atol=1e-5)
    assert values == cgx.Raw() or np.any(state.own.momentum["w"])

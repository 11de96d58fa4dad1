"""Tests patches of arrays on a device: the same bytes as on the host, in jnp here and by kernels on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import patches

from jaxcgx.patch import device, words
from jaxcgx.patch.words import BLOCK


@pytest.mark.parametrize("width, size", [(1, 300), (2, 300), (4, 300), (8, 300), (2, 2 * BLOCK + 13)])
def test_same_bytes_as_words(width, size):
    rng, cpu = np.random.default_rng(width), jax.devices("cpu")[0]
    kinds = ["ones", "small", "any", "mixed"] if size == 300 else ["mixed"]
    for kind in kinds:
        for share in (0, 0.01, 0.1, 0.45, 1) if size == 300 else (0.01, 0.3):
            old = rng.integers(0, 256, size * width, np.uint8).view(f"u{width}")
            new = patches.change(rng, old, share, kind)
            (part,) = words.encode([old], [new])
            with jax.enable_x64(True):
                before, after = jnp.asarray(old), jnp.asarray(new)
            assert device.encode(before, after, cpu) == part
            got, *digests = device.apply(before, part.heads, part.blocks, cpu, donate=share == 0.45)
            np.testing.assert_array_equal(got, new)
            assert digests == [0 if share == 0.45 else part.old, part.new] and before.is_deleted() == (share == 0.45)


def test_bytes_that_no_encoder_wrote():
    """The host refuses the same ones, and makes the same words of the others."""
    rng, cpu, refused = np.random.default_rng(0), jax.devices("cpu")[0], 0
    old = rng.integers(0, 256, 600, np.uint8).view(np.uint16)
    (part,) = words.encode([old], [patches.change(rng, old, 0.2, "mixed")])
    for number in range(100):
        heads, blocks = bytearray(part.heads), bytearray(part.blocks)
        if number % 4 == 0:
            blocks = bytearray(rng.bytes(len(blocks)))
        data = heads if number % 8 == 1 else blocks
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        expected = np.empty_like(old)
        try:
            words.apply([heads], [blocks], [old], [expected])
        except ValueError:
            refused += 1
            if words.block_sizes(np.frombuffer(heads, words.HEAD), 300, 2).sum() == len(blocks):
                with pytest.raises(ValueError, match="blocks as jaxcgx.patch.encode writes them"):
                    device.apply(jnp.asarray(old), heads, blocks, cpu, donate=False)
        else:
            got, *_ = device.apply(jnp.asarray(old), heads, blocks, cpu, donate=False)
            np.testing.assert_array_equal(got, expected)
    assert 30 < refused < 100

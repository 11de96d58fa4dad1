"""Random keys of an exchange, as two words. No two encodings of an element share their noise.

Correlated rounding (Suresh et al., 2022) is the exception. Rank r of N ranks rounds with the noise
u_r = (pi_r + u) / N, where u is uniform in [0, 1) and pi is a random permutation of 0, ..., N - 1. So u_r is uniform as
well, and each rank's rounding is unbiased. But the ranks' noise is evenly spread in [0, 1), so that their errors
cancel.

Here u_r = (U + s_r / N) mod 1. U is drawn from the key for each element, and is the same on all ranks. s is a random
permutation of the ranks, one per message. Each element has the distribution above: the integer part of N U rotates s,
and the fraction of N U is u. Errors of different elements are uncorrelated, because they are unbiased for each s.
Kernels only add the offset s_r / N, which is the third word of the key.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.codecs.base import Codec
from jaxcgx.exchange.message import Stage
from jaxcgx.transports.base import Transport

# Numbers that are folded into keys: for the first encoding, the encoding of a sum, the hops of a ring or a tree, and
# the backward pass, whose number no stage of a hierarchy has.
FIRST, SUM, HOP, BACK = 0, 1, 3, 2**16


def fold(key: jax.Array | None, *numbers: Any) -> jax.Array | None:
    """Returns the key folded with the numbers, as two words. No key gives None. An offset is kept as the third word."""
    if key is None:
        return None
    folded = jax.random.wrap_key_data(key[:2], impl="threefry2x32")
    for n in numbers:
        folded = jax.random.fold_in(folded, n)
    words = jax.random.key_data(folded)
    return words if key.shape == (2,) else jnp.concatenate([words, key[2:]])


def back(key: jax.Array | None, dimensions: int = 0) -> jax.Array | None:
    """Returns the key of the backward pass. vmap has added `dimensions` in front of the key."""
    make: Any = lambda words: fold(words, BACK)
    for _ in range(dimensions if key is not None else 0):
        make = jax.vmap(make)
    return make(key)


def first(key: jax.Array | None, codec: Codec, net: Transport) -> jax.Array | None:
    """Returns the key of a rank's first encoding.

    It is the rank's own key or, for correlated rounding, a common key with the rank's offset.
    """
    if key is None or not codec.correlated:
        return fold(key, FIRST, net.rank)
    order: Any = fold(key, FIRST, 0)
    words: Any = fold(key, FIRST, 1)
    offsets = np.uint32(2**16 * np.arange(net.size) // net.size)
    shares = jax.random.permutation(jax.random.wrap_key_data(order, impl="threefry2x32"), offsets)
    return jnp.append(words, shares[net.rank])


def fold_stage(key: jax.Array | None, number: int, others: Sequence[Stage]) -> jax.Array | None:
    """Returns the key of stage `number` of a hierarchy.

    Ranks with different places along the stages `others` draw different noise.
    """
    rank = 0
    for stage in others if key is not None else ():
        rank = rank * stage.net.size + stage.net.rank
    return fold(key, number, rank)

"""Random keys of an exchange, as two words. No two encodings of an element share their noise."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxcgx.exchange.message import Stage

# Keys are folded with these numbers: the first encoding, the encoding of a sum, the backward pass, the hops of a ring.
FIRST, SUM, BACK, HOP = 0, 1, 2, 3


def fold(key: jax.Array | None, *numbers: Any) -> jax.Array | None:
    """Two words that depend on the key's two words and the numbers. None for no key."""
    if key is None:
        return None
    folded = jax.random.wrap_key_data(key, impl="threefry2x32")
    for n in numbers:
        folded = jax.random.fold_in(folded, n)
    return jax.random.key_data(folded)


def fold_stage(key: jax.Array | None, number: int, others: Sequence[Stage]) -> jax.Array | None:
    """The key of stage `number` of a hierarchy.

    Ranks that differ in their place along `others` draw different noise.
    """
    rank = 0
    for stage in others if key is not None else ():
        rank = rank * stage.net.size + stage.net.rank
    return fold(key, number, rank)

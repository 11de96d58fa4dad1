"""Hypothesis strategies for messages and their numbers. Tests compare the kernels with the reference over them."""

import jax.numpy as jnp
import numpy as np
from helpers import CODECS
from hypothesis import strategies as st

from jaxcgx.native.layout import Layout

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
SIZES = (0, 1, 2, 7, 8, 17, 127, 128, 129, 300, 511, 513, 1500)

# Programs of the reference compile slowly, so there are few layouts and many values.
LAYOUTS = [
    Layout(codec, shapes, dtypes[: len(shapes)], chunks, ids)
    for codec, (shapes, dtypes, chunks, ids) in zip(
        CODECS,
        [
            (((300,),), DTYPES, 1, None),
            (((7, 9), (), (200,)), DTYPES, 2, (5, 0, 1)),
            (((513,), (0,)), (jnp.bfloat16, jnp.float32), 3, None),
        ]
        * len(CODECS),
    )
]


def values(layout, seed, exponent, special):
    """Returns leaves of numbers around 2^exponent, some of which are replaced by special values."""
    rng = np.random.RandomState(seed)
    leaves = []
    for shape, dtype in zip(layout.shapes, layout.dtypes):
        with np.errstate(over="ignore", under="ignore"):
            x = np.ldexp(rng.standard_normal(shape), exponent).astype(np.float32)
        if special != "none" and x.size:
            at = rng.randint(0, x.size, 1 + x.size // 50)
            choice = dict(
                nan=np.nan, inf=-np.inf, zeros=0.0, negative_zero=-0.0, denormal=1e-41, huge=3e38, constant=None
            )[special]
            x = x.copy().reshape(-1)
            if choice is None:
                x[:] = x[0]
            else:
                x[at] = choice
            x = x.reshape(shape)
        leaves.append(jnp.asarray(x).astype(dtype))
    return leaves


spaces = dict(
    seed=st.integers(0, 2**31 - 1),
    exponent=st.integers(-150, 127) | st.integers(-12, 3),
    special=st.sampled_from(("none", "nan", "inf", "zeros", "negative_zero", "denormal", "huge", "constant")),
)


@st.composite
def layouts(draw):
    codec = draw(st.sampled_from(CODECS))
    shapes = tuple((n,) for n in draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    dtypes = tuple(jnp.dtype(draw(st.sampled_from(DTYPES))) for _ in shapes)
    return Layout(
        codec, shapes, dtypes, draw(st.sampled_from((1, 2, 5))), tuple(draw(st.integers(0, 2**31 - 1)) for _ in shapes)
    )

"""A network of dense layers."""

import itertools
import math

import jax
from checks import check_least
from data import Dataset
from flax import nnx

HE = nnx.initializers.he_normal()


class Mlp(nnx.Module):
    """Dense layers with ReLU between them."""

    def __init__(self, data: Dataset, rngs: nnx.Rngs, *, hidden: tuple[int, ...]) -> None:
        check_least(1, size=min(hidden, default=1))
        sizes = math.prod(data.shape), *hidden, data.classes
        self.layers = nnx.List([nnx.Linear(m, n, kernel_init=HE, rngs=rngs) for m, n in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        for layer in list(self.layers)[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)

"""A transformer that predicts the next token, with the layers and the initialization of GPT-2."""

import jax
import jax.numpy as jnp
from checks import check_least, check_shares
from data import Dataset
from flax import nnx

NORMAL = nnx.initializers.normal


class Layer(nnx.Module):
    """Attention and a dense network. Each has a norm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int, deep: float, *, dropout: float, rngs: nnx.Rngs) -> None:
        """deep: the initial standard deviation of the weights whose outputs are added to the input of the layer."""
        self.heads = heads
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, kernel_init=NORMAL(0.02), rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=NORMAL(deep), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, kernel_init=NORMAL(0.02), rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=NORMAL(deep), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3 * self.heads, -1)
        seen = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
        x = x + self.dropout(self.out(seen.reshape(x.shape)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Gpt(nnx.Module):
    """Maps tokens to the logits of the next tokens. The first and the last layer share their weights."""

    def __init__(self, data: Dataset, rngs: nnx.Rngs, *, layers: int, width: int, heads: int, dropout: float) -> None:
        check_least(1, layers=layers, width=width, heads=heads)
        check_shares(dropout=dropout)
        if width % heads:
            raise ValueError(f"expected a width that {heads} heads divide, got {width}")
        self.tokens = nnx.Embed(data.classes, width, embedding_init=NORMAL(0.02), rngs=rngs)
        self.positions = nnx.Embed(data.shape[0], width, embedding_init=NORMAL(0.01), rngs=rngs)
        deep = 0.02 / (2 * layers) ** 0.5
        self.layers = nnx.List([Layer(width, heads, deep, dropout=dropout, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.dropout(self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.tokens.attend(self.norm(x))

"""BERT with the head for question answering: the first and the last token of an answer in a text."""

import jax
import jax.numpy as jnp
from checks import check_least, check_shares
from data import Dataset
from data.squad import PADDING, TEXT
from flax import nnx

from models.gpt import NORMAL


class Layer(nnx.Module):
    """Attention and a dense network, each with a residual connection around it and a norm after it."""

    def __init__(self, width: int, heads: int, *, dropout: float, rngs: nnx.Rngs) -> None:
        linear = lambda *sizes: nnx.Linear(*sizes, kernel_init=NORMAL(0.02), rngs=rngs)
        self.heads = heads
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, visible: jax.Array) -> jax.Array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3 * self.heads, -1)
        seen = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), mask=visible[:, None, None])
        x = self.norm1(x + self.dropout(self.out(seen.reshape(x.shape))))
        return self.norm2(x + self.dropout(self.down(nnx.gelu(self.up(x)))))


class Bert(nnx.Module):
    """Maps [tokens and their kinds] to the logits of each token as an answer's first one, and as its last one."""

    def __init__(self, data: Dataset, rngs: nnx.Rngs, *, layers: int, width: int, heads: int, dropout: float) -> None:
        check_least(1, layers=layers, width=width, heads=heads)
        check_shares(dropout=dropout)
        if width % heads:
            raise ValueError(f"expected a width that {heads} heads divide, got {width}")
        if data.shape[1:] != (2,):
            raise ValueError(f"expected a data set of questions, as squad, got {data.name}")
        embed = lambda count: nnx.Embed(count, width, embedding_init=NORMAL(0.02), rngs=rngs)
        self.tokens, self.positions, self.kinds = embed(data.classes), embed(data.shape[0]), embed(2)
        self.norm, self.dropout = nnx.LayerNorm(width, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, dropout=dropout, rngs=rngs) for _ in range(layers)])
        self.ends = nnx.Linear(width, 2, kernel_init=NORMAL(0.02), rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        tokens, kinds = inputs[..., 0], inputs[..., 1]
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])) + self.kinds(kinds % 2)
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, kinds != PADDING)
        return jnp.where(kinds[:, None] == TEXT, self.ends(x).swapaxes(1, 2), -1e9)

    @staticmethod
    def scores(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Returns, for each question, whether both ends are right, and F1 of the answer's tokens."""
        found = logits.argmax(-1)
        (first, last), (begin, end) = found.T, labels.T
        both = jnp.maximum(jnp.minimum(last, end) - jnp.maximum(first, begin) + 1, 0)
        f1 = 2 * both / (jnp.maximum(last - first + 1, 0) + end - begin + 1)
        return {"accuracy": (found == labels).all(-1), "f1": f1}

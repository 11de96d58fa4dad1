"""Transformer-XL: a transformer that also sees the segment of text before, and whose attention sees distances."""

import jax
import jax.numpy as jnp
from checks import check_least, check_shares
from data import Dataset
from flax import nnx

from models.gpt import NORMAL


class Attention(nnx.Module):
    """Attention to the tokens before, where a score depends on two contents, and on a content and a distance."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        linear = lambda size: nnx.Linear(width, size, use_bias=False, kernel_init=NORMAL(0.02), rngs=rngs)
        bias = lambda: nnx.Param(NORMAL(0.02)(rngs.params(), (heads, width // heads)))
        self.heads = heads
        self.query, self.key_value, self.distance, self.out = (
            linear(width),
            linear(2 * width),
            linear(width),
            linear(width),
        )
        self.to_content, self.to_distance = bias(), bias()
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, before: jax.Array) -> jax.Array:
        """before: the inputs of this layer for the tokens before x."""
        seen = jnp.concatenate([before, x], 1)
        in_heads = lambda y: y.reshape(*y.shape[:-1], -1, x.shape[-1] // self.heads)
        query, key_value = in_heads(self.query(x)), in_heads(self.key_value(seen))
        key, value = jnp.split(key_value, 2, axis=2)
        distance = in_heads(self.distance(waves(seen.shape[1], x.shape[-1])))
        scores = jnp.einsum("bthd,bshd->bhts", query + self.to_content[...], key)
        scores += shift(jnp.einsum("bthd,shd->bhts", query + self.to_distance[...], distance))
        visible = jnp.tri(x.shape[1], seen.shape[1], before.shape[1], bool)
        scores = jnp.where(visible, scores / query.shape[-1] ** 0.5, -jnp.inf)
        found = jnp.einsum("bhts,bshd->bthd", self.dropout(jax.nn.softmax(scores)), value)
        return self.out(found.reshape(x.shape))


def waves(size: int, width: int) -> jax.Array:
    """Returns sines and cosines of the distances from size - 1 to 0, [size, width]."""
    angles = jnp.arange(size - 1, -1, -1.0)[:, None] / 10_000 ** (jnp.arange(0, width, 2.0) / width)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def shift(scores: jax.Array) -> jax.Array:
    """Returns scores [..., tokens, seen] by place from scores by distance. Those of later tokens are meaningless."""
    *front, tokens, seen = scores.shape
    padded = jnp.pad(scores, [(0, 0)] * (len(front) + 1) + [(1, 0)])
    return padded.reshape(*front, seen + 1, tokens)[..., 1:, :].reshape(scores.shape)


class Layer(nnx.Module):
    """Attention and a dense network, each with a residual connection around it and a norm after it."""

    def __init__(self, width: int, heads: int, inner: int, *, dropout: float, rngs: nnx.Rngs) -> None:
        self.attention = Attention(width, heads, dropout, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, inner, kernel_init=NORMAL(0.02), rngs=rngs)
        self.down = nnx.Linear(inner, width, kernel_init=NORMAL(0.02), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, before: jax.Array) -> jax.Array:
        x = self.norm1(x + self.dropout(self.attention(x, before)))
        return self.norm2(x + self.dropout(self.down(self.dropout(nnx.relu(self.up(x))))))


class TransformerXl(nnx.Module):
    """Maps tokens to the logits of the next tokens, segment after segment.

    A segment sees the inputs of all layers for the segment before, without their gradients. The first and the last
    layer share their weights.
    """

    def __init__(
        self,
        data: Dataset,
        rngs: nnx.Rngs,
        *,
        layers: int,
        width: int,
        heads: int,
        inner: int,
        segment: int,
        dropout: float,
    ) -> None:
        check_least(1, layers=layers, width=width, heads=heads, inner=inner, segment=segment)
        check_shares(dropout=dropout)
        if width % heads or width % 2:
            raise ValueError(f"expected an even width that {heads} heads divide, got {width}")
        if data.shape[0] % segment:
            raise ValueError(f"expected a segment that divides data.context={data.shape[0]}, got {segment}")
        self.segment = segment
        self.tokens = nnx.Embed(data.classes, width, embedding_init=NORMAL(0.02), rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, inner, dropout=dropout, rngs=rngs) for _ in range(layers)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedded = self.dropout(self.tokens(tokens) * self.tokens.features**0.5)
        found = []
        memory = [embedded[:, :0]] * len(self.layers)
        for x in jnp.split(embedded, tokens.shape[1] // self.segment, 1):
            inputs = []
            for layer, before in zip(self.layers, memory):
                inputs.append(jax.lax.stop_gradient(x))
                x = layer(x, before)
            memory = inputs
            found.append(self.tokens.attend(self.dropout(x)))
        return jnp.concatenate(found, 1)

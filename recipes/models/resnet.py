"""Residual networks, as in "Deep Residual Learning for Image Recognition"."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from data import Dataset
from flax import nnx

HE = nnx.initializers.he_normal()  # "Delving Deep into Rectifiers"
Conv = functools.partial(nnx.Conv, use_bias=False, kernel_init=HE)
BatchNorm = functools.partial(nnx.BatchNorm, momentum=0.9, epsilon=1e-5)


class Block(nnx.Module):
    """Two 3 x 3 convolutions. The shortcut has no weights: it leaves out pixels and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        self.stride, self.more = stride, outputs - inputs
        self.conv1 = Conv(inputs, outputs, (3, 3), stride, rngs=rngs)
        self.norm1 = BatchNorm(outputs, rngs=rngs)
        self.conv2 = Conv(outputs, outputs, (3, 3), rngs=rngs)
        self.norm2 = BatchNorm(outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        short = x[:, :: self.stride, :: self.stride]
        return nnx.relu(y + jnp.pad(short, ((0, 0), (0, 0), (0, 0), (0, self.more))))


class Bottleneck(nnx.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions. If the shape changes, the shortcut is a 1 x 1 convolution."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs) -> None:
        outputs = 4 * width
        self.conv1 = Conv(inputs, width, (1, 1), rngs=rngs)
        self.norm1 = BatchNorm(width, rngs=rngs)
        self.conv2 = Conv(width, width, (3, 3), stride, rngs=rngs)
        self.norm2 = BatchNorm(width, rngs=rngs)
        self.conv3 = Conv(width, outputs, (1, 1), rngs=rngs)
        # With a scale of 0, a block starts as its shortcut ("Accurate, Large Minibatch SGD").
        self.norm3 = BatchNorm(outputs, scale_init=nnx.initializers.zeros, rngs=rngs)
        self.short = projection(inputs, outputs, stride, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        return nnx.relu(self.norm3(self.conv3(y)) + (x if self.short is None else self.short(x)))


class Basic(nnx.Module):
    """Two 3 x 3 convolutions. If the shape changes, the shortcut is a 1 x 1 convolution."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = Conv(inputs, width, (3, 3), stride, rngs=rngs)
        self.norm1 = BatchNorm(width, rngs=rngs)
        self.conv2 = Conv(width, width, (3, 3), rngs=rngs)
        self.norm2 = BatchNorm(width, scale_init=nnx.initializers.zeros, rngs=rngs)
        self.short = projection(inputs, width, stride, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + (x if self.short is None else self.short(x)))


def projection(inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> nnx.Module | None:
    """Returns the shortcut of a block: None if the shape stays."""
    if inputs == outputs and stride == 1:
        return None
    return nnx.Sequential(Conv(inputs, outputs, (1, 1), stride, rngs=rngs), BatchNorm(outputs, rngs=rngs))


class ResNet(nnx.Module):
    """The network for small images (section 4.2): three stages of (depth - 2) / 6 blocks."""

    def __init__(self, data: Dataset, rngs: nnx.Rngs, *, depth: int) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"expected a depth of 6 n + 2, as 20 or 56, got {depth}")
        self.stem, self.norm = Conv(data.shape[-1], 16, (3, 3), rngs=rngs), BatchNorm(16, rngs=rngs)
        blocks, inputs = [], 16
        for stage, outputs in enumerate((16, 32, 64)):
            for i in range((depth - 2) // 6):
                blocks.append(Block(inputs, outputs, 2 if stage and not i else 1, rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, data.classes, kernel_init=HE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class ResNet50(nnx.Module):
    """ResNet-50, with the stride in the 3 x 3 convolutions."""

    block: ClassVar[Any] = Bottleneck
    counts: ClassVar[tuple[int, ...]] = 3, 4, 6, 3

    def __init__(self, data: Dataset, rngs: nnx.Rngs) -> None:
        self.stem, self.norm = Conv(data.shape[-1], 64, (7, 7), 2, rngs=rngs), BatchNorm(64, rngs=rngs)
        blocks, inputs = [], 64
        for stage, count in enumerate(self.counts):
            width = 64 * 2**stage
            for i in range(count):
                blocks.append(self.block(inputs, width, 2 if stage and not i else 1, rngs))
                inputs = self.block.expansion * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, data.classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class ResNet18(ResNet50):
    """ResNet-18."""

    block = Basic
    counts = 2, 2, 2, 2

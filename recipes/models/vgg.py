"""VGG-16, as in "Very Deep Convolutional Networks for Large-Scale Image Recognition", configuration D."""

import jax
from checks import check_least, check_shares
from data import Dataset
from flax import nnx

HE = nnx.initializers.he_normal()  # so no smaller network has to be trained first, as in the paper
STAGES = (64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)


class Vgg16(nnx.Module):
    """Five stages of 3 x 3 convolutions, with batch norm if `norm`, and two hidden layers with dropout."""

    def __init__(self, data: Dataset, rngs: nnx.Rngs, *, hidden: int, dropout: float, norm: bool = False) -> None:
        check_least(1, hidden=hidden)
        check_shares(dropout=dropout)
        stages, inputs, side = [], data.shape[-1], data.shape[0]
        for widths in STAGES:
            convs = []
            for width in widths:
                conv = nnx.Conv(inputs, width, (3, 3), kernel_init=HE, rngs=rngs)
                convs.append(nnx.Sequential(conv, nnx.BatchNorm(width, momentum=0.9, rngs=rngs)) if norm else conv)
                inputs = width
            stages.append(nnx.List(convs))
            side //= 2
        if not side:
            raise ValueError(f"expected images of at least 32 x 32 pixels, got {data.shape[0]} x {data.shape[1]}")
        self.stages = nnx.List(stages)
        self.hidden1 = nnx.Linear(side * side * inputs, hidden, kernel_init=HE, rngs=rngs)
        self.hidden2 = nnx.Linear(hidden, hidden, kernel_init=HE, rngs=rngs)
        self.head = nnx.Linear(hidden, data.classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in self.stages:
            for conv in stage:
                x = nnx.relu(conv(x))
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for layer in (self.hidden1, self.hidden2):
            x = self.dropout(nnx.relu(layer(x)))
        return self.head(x)

"""The models of training_speed.py in JAX, a byte-level transformer and ResNet-20, as functions of a dict of weights."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

HEADS = 4  # of the transformer's attention
GROUPS = 8  # of ResNet's group norms


def transformer(w, tokens):
    """Returns the logits [n, length, 256] of the next bytes."""

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}_scale"] + w[f"{name}_bias"]

    def dense(x, name):
        return x @ w[f"{name}_w"] + w[f"{name}_bias"]

    x = w["embed"][tokens] + w["position"]
    for i in range(sum(name.endswith("_qkv_w") for name in w)):
        heads = dense(norm(x, f"{i}_norm1"), f"{i}_qkv").reshape(*x.shape[:2], 3 * HEADS, -1)
        seen = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
        x = x + dense(seen.reshape(x.shape), f"{i}_out")
        x = x + dense(jax.nn.gelu(dense(norm(x, f"{i}_norm2"), f"{i}_up")), f"{i}_down")
    return norm(x, "last_norm") @ w["head"]


def resnet(w, images):
    """Returns the logits [n, 10] of the classes.

    Shortcuts have no weights. They drop pixels and add channels of zeros.
    """

    def conv(x, name, stride=1):
        x = lax.conv_general_dilated(
            x, w[f"{name}_w"], (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        groups = x.reshape(len(x), -1, GROUPS, x.shape[-1] // GROUPS)
        groups = groups - groups.mean((1, 3), keepdims=True)
        groups = groups * lax.rsqrt(jnp.square(groups).mean((1, 3), keepdims=True) + 1e-5)
        return groups.reshape(x.shape) * w[f"{name}_scale"] + w[f"{name}_bias"]

    x = jax.nn.relu(conv(images, "stem"))
    for name in [name.removesuffix("_a_w") for name in w if name.endswith("_a_w")]:
        stride = w[f"{name}_a_w"].shape[-1] // x.shape[-1]
        short = jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, x.shape[-1] * (stride - 1))))
        x = jax.nn.relu(short + conv(jax.nn.relu(conv(x, f"{name}_a", stride)), f"{name}_b"))
    return x.mean((1, 2)) @ w["head_w"] + w["head_bias"]


PREDICT = {"transformer": transformer, "ResNet-20": resnet}


def make_loss(model):
    """Returns the loss of a model: a function of its weights and of (inputs, targets)."""

    def loss(w, batch):
        inputs, targets = batch
        return optax.softmax_cross_entropy_with_integer_labels(PREDICT[model](w, inputs), targets).mean()

    return loss

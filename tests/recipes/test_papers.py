"""Tests that models and trainings have the numbers of the papers that their configs follow."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CONFIGS = pathlib.Path(__file__).parents[2] / "recipes/configs"


@pytest.fixture
def load(train):
    """A function that returns the config of a name, and its data set's synthetic stand-in."""

    def of(name):
        config = train.config.parse([f"--config={CONFIGS}/{name}.py", "--config.data=synthetic"]).config
        return config, importlib.import_module("data").load(**config.data.to_dict())

    return of


WEIGHTS = "query", "key_value", "distance", "out"


def make(dataset, name, **options):
    return importlib.import_module("models").make(dataset, 0, name, **options)


# The papers have 0.27 and 0.85 million ("Deep Residual Learning") and 138 million ("Very Deep Convolutional Networks").
# ResNet-50 has the 25.6 million of other implementations. Transformers have the tokens and the context of GPT-2, of
# Transformer-XL on WikiText-103 (151 million with the biases of its softmax) and of BERT without its pooling layer.
@pytest.mark.parametrize(
    "name, of_data, of_model, parameters",
    [
        ("cifar/resnet20", {}, {}, 269_722),
        ("cifar/resnet56", {}, {}, 853_018),
        ("imagenet/resnet50", {}, {}, 25_557_032),
        ("imagenet/vgg16", {}, {}, 138_357_544),
        ("text/gpt", dict(classes=50_257, shape=(1024,)), dict(layers=12, width=768, heads=12), 124_439_808),
        ("text/transformer_xl", dict(classes=267_735, shape=(150,)), {}, 150_850_870),
        ("qa/bert", dict(classes=30_522, shape=(512, 2)), {}, 108_893_186),
    ],
)
def test_parameters(name, of_data, of_model, parameters, load):
    """of_data, of_model: what differs from the config and its data set."""
    config, dataset = load(name)
    found = jax.eval_shape(lambda: make(dataset._replace(**of_data), **config.model.to_dict() | of_model).params)
    assert sum(x.size for x in jax.tree.leaves(found)) == parameters


def test_attention_of_transformer_xl(load):
    """Scores are the four terms of the paper's equation, and a segment sees the segment before."""
    _, dataset = load("text/transformer_xl")
    options = dict(layers=2, width=8, heads=2, inner=16, segment=3, dropout=0.0)
    nnx, xl = (importlib.import_module(name) for name in ("flax.nnx", "models.transformer_xl"))
    one = xl.Attention(8, 2, 0.0, rngs=nnx.Rngs(0))
    x, before = (np.asarray(jax.random.normal(jax.random.key(i), (1, n, 8))) for i, n in enumerate((3, 2)))
    seen, weights = np.concatenate([before, x], 1)[0], {k: np.asarray(getattr(one, k).kernel[...]) for k in WEIGHTS}
    query, key, value = x[0] @ weights["query"], *np.split(seen @ weights["key_value"], 2, 1)
    expected = np.zeros((3, 8))
    for head in (slice(4), slice(4, 8)):
        u, v = (np.asarray(bias[...])[(head.start or 0) // 4] for bias in (one.to_content, one.to_distance))
        for i in range(3):
            places = range(i + 3)
            away = [np.asarray(xl.waves(i + 2 - j + 1, 8))[0] @ weights["distance"] for j in places]
            scores = [(query[i, head] + u) @ key[j, head] + (query[i, head] + v) @ away[j][head] for j in places]
            shares = np.exp(np.array(scores) / 2)
            expected[i, head] = shares / shares.sum() @ value[: i + 3, head]
    found = one(jnp.asarray(x), jnp.asarray(before))[0]
    np.testing.assert_allclose(found, expected @ weights["out"], rtol=1e-4, atol=1e-6)
    model = make(dataset._replace(shape=(6,), classes=5), "transformer_xl", **options)
    logits = lambda tokens: model.predict(model.params, model.state, jnp.array([tokens]))[0]
    same = np.isclose(logits([0, 1, 2, 3, 4, 0]), logits([0, 1, 3, 3, 4, 0])).all(1)
    assert same.tolist() == [True] * 2 + [False] * 4


def test_initial_weights(load):
    """Those of ResNets are He's, and those of the transformer GPT-2's."""
    config, dataset = load("cifar/resnet20")
    params = make(dataset, **config.model.to_dict()).params
    for layer in params["stem"], *(params["blocks"][i][name] for i in (0, 4, 8) for name in ("conv1", "conv2")):
        high, wide, inputs, _ = layer["kernel"].shape
        assert np.std(layer["kernel"]) == pytest.approx((2 / (high * wide * inputs)) ** 0.5, rel=0.1)
    config, dataset = load("text/gpt")
    params = make(dataset, **config.model.to_dict()).params
    expected = {"tokens": 0.02, "positions": 0.01}
    assert {name: np.std(params[name]["embedding"]) for name in expected} == pytest.approx(expected, rel=0.05)
    expected = {"qkv": 0.02, "up": 0.02, "out": 0.02 / 8**0.5, "down": 0.02 / 8**0.5}  # 4 layers add 8 times
    assert {name: np.std(params["layers"][3][name]["kernel"]) for name in expected} == pytest.approx(expected, rel=0.05)


RESNET = 128, 164, {0: 0.1, 81.9: 0.1, 82.1: 0.01, 122.9: 0.01, 123.1: 0.001, 163.9: 0.001}
WARM = {1: 0.02, 2.5: 0.05, 5: 0.1}


@pytest.mark.parametrize(
    "name, batch_size, epochs, rates",
    [
        *((f"cifar/resnet{depth}", *RESNET) for depth in (20, 56)),
        ("imagenet/resnet50", 256, 90, WARM | {29.9: 0.1, 30.1: 0.01, 59.9: 0.01, 60.1: 1e-3, 79.9: 1e-3, 80.1: 1e-4}),
        ("imagenet/vgg16", 256, 74, {0: 0.01, 24.9: 0.01, 25.1: 1e-3, 49.9: 1e-3, 50.1: 1e-4, 64.9: 1e-4, 65.1: 1e-5}),
        ("text/gpt", 32, 10, {0.25: 5e-4, 0.5: 1e-3, 5.25: 5e-4, 10: 0}),
    ],
)
def test_rates(name, batch_size, epochs, rates, load):
    """rates: the learning rate after so many epochs."""
    config, dataset = load(name)
    assert (config.train.batch_size, config.train.num_epochs) == (batch_size, epochs)
    each = len(dataset.train) // batch_size
    optimizers = importlib.import_module("optimizers")
    schedule = optimizers.make_schedule(optimizers.Length(each, epochs, 1), **config.schedule.to_dict())
    assert {epoch: float(schedule(int(epoch * each))) for epoch in rates} == pytest.approx(rates, rel=0.01, abs=1e-9)


@pytest.mark.parametrize(
    "name, nesterov, decay, decay_1d",
    [
        *((f"cifar/resnet{depth}", False, 1e-4, 1e-4) for depth in (20, 56)),
        ("imagenet/resnet50", True, 1e-4, 0),  # batch norm has no weight decay
        ("imagenet/vgg16", False, 5e-4, 5e-4),
    ],
)
def test_sgd(name, nesterov, decay, decay_1d, load):
    """SGD has a momentum of 0.9."""
    config, _ = load(name)
    section = config.optimizer.to_dict()
    optimizers = importlib.import_module("optimizers")
    optimizer, _ = optimizers.make(lambda step: 0.1, optimizers.Applied(momentum=False, clip=False), **section)
    params = dict(matrix=jnp.ones((2, 2)), norm=jnp.ones(2))
    state, trace = optimizer.init(params), 0
    for _ in range(2):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        trace = 1 + 0.9 * trace
        factor = 1 + 0.9 * trace if nesterov else trace
        for key, each in dict(matrix=decay, norm=decay_1d).items():
            np.testing.assert_allclose(updates[key], np.full(params[key].shape, -0.1 * factor * (1 + each)), rtol=2e-6)


def test_adam(load):
    """Its options are GPT-3's: b1 = 0.9, b2 = 0.95, a weight decay of 0.1 for matrices, gradients of at most norm 1."""
    optimizers, section = importlib.import_module("optimizers"), load("text/gpt")[0].optimizer.to_dict()
    optimizer, moved = optimizers.make(lambda step: 0.1, optimizers.Applied(momentum=False, clip=False), **section)
    params = dict(matrix=jnp.ones((2, 2)), norm=jnp.ones(2))
    state, mean, square = optimizer.init(params), 0.0, 0.0
    for step, size in enumerate((4.0, 0.1), 1):  # the first gradient has a norm above 1
        updates, state = optimizer.update(jax.tree.map(lambda x: size * jnp.ones_like(x), params), state, params)
        clipped = size / max(size * 6**0.5, 1)
        mean, square = 0.9 * mean + 0.1 * clipped, 0.95 * square + 0.05 * clipped**2
        moved_by = mean / (1 - 0.9**step) / (square / (1 - 0.95**step)) ** 0.5
        for key, decay in dict(matrix=0.1, norm=0).items():
            np.testing.assert_allclose(updates[key], np.full(params[key].shape, -0.1 * (moved_by + decay)), rtol=1e-5)
    assert not moved

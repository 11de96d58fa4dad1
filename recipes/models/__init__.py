"""The models: Flax NNX modules as pure functions of pytrees."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from checks import call, choose
from data import Dataset
from flax import nnx

from models import bert, gpt, mlp, resnet, transformer_xl, vgg

MODELS = {
    "bert": bert.Bert,
    "gpt": gpt.Gpt,
    "mlp": mlp.Mlp,
    "resnet": resnet.ResNet,
    "resnet18": resnet.ResNet18,
    "resnet50": resnet.ResNet50,
    "transformer_xl": transformer_xl.TransformerXl,
    "vgg16": vgg.Vgg16,
}


class Model(NamedTuple):
    """A model and its initial weights."""

    params: Any
    state: Any  # statistics of batch norm, and random streams
    loss: Callable[..., Any]  # (params, state, batch) -> (mean loss, new state), in training
    score: Callable[..., Any]  # (params, state, batch) -> {"loss": ..., "accuracy": ..., ...}, each per example
    predict: Callable[..., Any]  # (params, state, inputs) -> logits, in tests


def make(data: Dataset, seed: int, name: str, **section: Any) -> Model:
    """Returns the model of a config's section `model` for a data set."""
    module = call(choose(MODELS, name, "config.model.name"), "config.model", data, nnx.Rngs(seed), **section)
    graph, params, state = nnx.split(module, nnx.Param, ...)

    def losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        module = nnx.merge(graph, params, state)
        inputs, labels = batch
        return losses(module(inputs), labels).mean(), nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

    def predict(params: Any, state: Any, inputs: jax.Array) -> jax.Array:
        fixed = dict(deterministic=True, use_running_average=True)
        return nnx.view(nnx.merge(graph, params, state), **fixed, raise_if_not_found=False)(inputs)

    scores = getattr(module, "scores", lambda logits, labels: {"accuracy": logits.argmax(-1) == labels})

    def score(params: Any, state: Any, batch: Any) -> dict[str, jax.Array]:
        inputs, labels = batch
        logits = predict(params, state, inputs)
        found = {"loss": losses(logits, labels)} | scores(logits, labels)
        return {name: x.reshape(len(x), -1).mean(1) for name, x in found.items()}

    return Model(nnx.to_pure_dict(params), nnx.to_pure_dict(state), loss, score, predict)

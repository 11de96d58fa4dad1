"""The numbers for which errors.py measures errors: random numbers, and gradients of two models."""

import jax
import numpy as np
import optax
from training_speed_data import MAKERS, MODELS
from training_speed_models import make_loss

from jaxcgx.exchange.errors import drawn

RANDOM = "normal", "laplace", "student"
SHAPE = 256, 512  # of a rank's random numbers
STEPS = 40  # of training, before the gradients are taken
LEAST = 1024  # the least elements of a leaf that is measured; smaller leaves travel raw
PART = {"transformer": "2_", "ResNet-20": ""}  # the leaves that are measured have names that begin with this


def gradients(model, ranks):
    """Returns the gradients of the leaves, each [ranks, ...], with a batch per rank."""
    make_weights, make_batches = MAKERS[model]
    rng = np.random.default_rng(0)
    weights = make_weights(rng)
    batches, _ = make_batches(rng, (STEPS + ranks, MODELS[model].batch), 1)
    rate = MODELS[model].rate
    optimizer = optax.adam(rate) if model == "transformer" else optax.sgd(rate, momentum=0.9)
    gradient = jax.jit(jax.grad(make_loss(model)))
    state, found = optimizer.init(weights), []
    for step, batch in enumerate(zip(*batches)):
        grads = gradient(weights, batch)
        if step < STEPS:
            updates, state = optimizer.update(grads, state)
            weights = optax.apply_updates(weights, updates)
        else:
            names = [name for name, g in grads.items() if name.startswith(PART[model]) and g.size >= LEAST]
            found.append([np.asarray(grads[name]) for name in names])
    return [np.stack(leaf) for leaf in zip(*found)]


def numbers(kind, ranks):
    """Returns the leaves for a kind of numbers, each [ranks, ...]."""
    if kind in RANDOM:
        return [drawn(kind, ranks, SHAPE[0] * SHAPE[1]).reshape(ranks, *SHAPE)]
    return gradients(kind, ranks)

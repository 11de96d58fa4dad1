"""Steps of exchanges alone, for the tests of train."""

import functools

import jax
import jax.numpy as jnp
from helpers import normal
from jax.sharding import PartitionSpec as P
from model import State
from training import mesh_of, place

import jaxcgx as cgx
from jaxcgx.train.state import ExchangeState

RANKS = 4
GRADS = {"w": normal((RANKS, 30, 40), 3), "b": normal((RANKS, 40), 4)}


def compress(exchange, ranks=RANKS):
    return cgx.compress_gradients("data", exchange, axis_size=ranks)


def run(exchange, steps=1, grads=GRADS, state=None, params=None, check_vma=True):
    """Returns the [(mean, state)] of some steps with the same gradients, whose leading axis is the rank."""
    ranks = len(next(iter(grads.values()), range(RANKS)))
    transformation, found = compress(exchange, ranks), []
    state = transformation.init(jax.tree.map(lambda g: g[0], grads)) if state is None else state
    specs = cgx.state_specs(state, "data")
    mesh = mesh_of(ranks)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs), check_vma=check_vma
    )
    def step(grads, state):
        return transformation.update(jax.tree.map(lambda g: g[0], grads), state, params)

    state = place(state, specs, ranks)  # where a step leaves it, so that it is compiled once
    for _ in range(steps):
        mean, state = step(grads, state)
        found.append((mean, state))
    return found


def pmean(plan, grads=GRADS, residuals=None, key=None):
    """Returns the (mean, residuals) of compressed_pmean."""
    residuals = jax.tree.map(jnp.zeros_like, grads) if residuals is None else residuals

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh_of(RANKS), in_specs=P("data"), out_specs=(P(), P("data")))
    def step(grads, residuals):
        grads, residuals = jax.tree.map(lambda x: x[0], (grads, residuals))
        mean, carry = cgx.compressed_pmean(grads, "data", plan, key=key, carry=cgx.Carry(residuals))
        return mean, jax.tree.map(lambda x: x[None], carry.residuals)

    return step(grads, residuals)


def exchange_state(state):
    """Returns the ExchangeState in an optimizer's state."""
    is_state = lambda node: isinstance(node, ExchangeState)
    (found,) = filter(is_state, jax.tree.leaves(state, is_leaf=is_state))
    return found


def exchange_of(model, plans):
    """Returns the exchange with the options of a `model.Model`."""
    beta = None if model.beta == 1 else model.beta
    options = dict(beta=beta, reset_every=model.reset_every, keep=model.feedback, skip_nonfinite=model.skip_nonfinite)
    if model.momentum is None:
        return cgx.Feedback(plans, **options)
    options |= dict(nesterov=model.nesterov, masking=model.momentum_masking, weight_decay=model.weight_decay)
    return cgx.Momentum(plans, model.momentum, **options)


def fields_of(state):
    """Returns the fields of a `model.State`, each of which may be None."""
    own, shared = (found := exchange_state(state)).own, found.shared
    return State(own.residuals, own.momentum, shared.trace, shared.factors)

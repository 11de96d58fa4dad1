"""Steps of compress_gradients alone, for the tests of optim."""

import functools

import jax
import jax.numpy as jnp
from helpers import normal, planned
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx

RANKS = 4
GRADS = {"w": normal((RANKS, 30, 40), 3), "b": normal((RANKS, 40), 4)}
compress = functools.partial(cgx.compress_gradients, "data", axis_size=RANKS)


def run(transformation, steps=1, grads=GRADS, state=None, check_vma=True):
    """Returns the [(mean, state)] of some steps with the same gradients, whose leading axis is the rank."""
    state = transformation.init(jax.tree.map(lambda g: g[0], grads)) if state is None else state
    specs = cgx.state_specs(state, "data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh_of(RANKS), in_specs=(P("data"), specs), out_specs=(P(), specs), check_vma=check_vma
    )
    def step(grads, state):
        return transformation.update(jax.tree.map(lambda g: g[0], grads), state)

    found = []
    for _ in range(steps):
        mean, state = step(grads, state)
        found.append((mean, state))
    return found


def pmean(plan, grads=GRADS, residuals=None, key=None, **fields):
    """Returns the (mean, residuals) of compressed_pmean."""
    residuals = jax.tree.map(jnp.zeros_like, grads) if residuals is None else residuals
    plan = planned(plan, **fields)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh_of(RANKS), in_specs=P("data"), out_specs=(P(), P("data")))
    def step(grads, residuals):
        grads, carry = jax.tree.map(lambda x: x[0], (grads, cgx.Carry(residuals=residuals)))
        mean, kept = cgx.compressed_pmean(grads, "data", plan, key=key, carry=carry)
        return mean, jax.tree.map(lambda x: x[None], kept.residuals)

    return step(grads, residuals)

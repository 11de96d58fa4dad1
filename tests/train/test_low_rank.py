"""Tests PowerSGD in exchanges: its factors in the state, in schedules, specs and skipped steps."""

import jax
import pytest
from exchanging import compress
from helpers import normal
from jax.sharding import PartitionSpec as P
from training import PARAMS, mesh_of

import jaxcgx as cgx

GRADS = {"w": normal((2, 30, 40), 3), "b": normal((2, 40), 4)}


def test_the_state():
    """Factors are replicated, don't depend on the number of ranks, exist without feedback, and only where needed."""
    state = compress(cgx.PowerSGD(2)).init(PARAMS)
    assert state.shared.factors["w"].shape == (2, 40) and state.shared.factors["b"] is None
    specs = cgx.state_specs(state, "data")
    assert (specs.shared.factors, specs.own.residuals) == ({"w": P(), "b": None}, {"w": P("data"), "b": None})
    with pytest.warns(UserWarning, match=r"Feedback: argument 'keep': PowerSGD\(rank=2\) may lose too much"):
        forgetful = cgx.Feedback(cgx.PowerSGD(2), keep=False)
    assert forgetful.init(PARAMS).shared.factors["w"].shape == (2, 40)
    for codec in cgx.MaxMin(4), cgx.PowerSGD(20):  # the factors of the latter are not smaller than the leaves
        assert compress(codec).init(PARAMS).shared.factors is None


def test_three_sums_whatever_the_leaves():
    """Gloo sums one array at a time, so leaves that the codec refuses also travel together."""
    grads = GRADS | {"c": GRADS["b"], "d": GRADS["w"]}
    transformation = compress(cgx.PowerSGD(2), 2)
    state = transformation.init(jax.tree.map(lambda g: g[0], grads))
    specs = cgx.state_specs(state, "data")
    mapped = jax.shard_map(transformation.update, mesh=mesh_of(2), in_specs=(P("data"), specs), out_specs=(P(), specs))
    rows = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads)
    assert jax.jit(mapped).lower(rows, state).as_text().count("stablehlo.all_reduce") == 3

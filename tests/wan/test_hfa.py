"""Tests HFA against NumPy, bit for bit, and what it holds back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import assert_same_trees, mesh_with
from ranks import whole_numbers
from training import save

import jaxcgx as cgx

K1, K2, STEPS, RATE = 2, 2, 9, 0.25
INNER = optax.sgd(RATE)
PARAMS = {"w": jnp.asarray(whole_numbers((6, 4), 1)), "s": jnp.float32(0.5)}
X = np.asarray(whole_numbers((STEPS, 8, 6), 3))  # batches of 8 examples, 2 per rank


def quadratic(params, x):
    """A loss with exact gradients."""
    return ((params["w"] - x.mean(0)[:, None]) ** 2).sum() / 2 + params["s"] ** 2 / 2


def mesh_of(*sizes):
    return mesh_with(**dict(zip(("dc", "local"), sizes)))


def trainer(mesh, loss=quadratic, plan=cgx.Raw(), **options):
    hfa, sharding = cgx.wan.HFA(plan, **options), cgx.Sharding(mesh.axis_names)
    return cgx.make_train_step(loss, INNER, mesh, hfa, sharding=sharding, donate=False)


def transcribed():
    """Returns (the outer parameters, those of each rank) after each step."""
    start = {name: np.array(x) for name, x in PARAMS.items()}
    milestone, ranks, found = start, [[dict(start) for _ in range(2)] for _ in range(2)], []
    mean = lambda trees: {name: np.float32(sum(tree[name] for tree in trees) / len(trees)) for name in PARAMS}
    for t in range(STEPS):
        for place, params in enumerate(ranks[0] + ranks[1]):
            target = X[t].reshape(4, 2, 6)[place].mean(0)
            gradients = {"w": params["w"] - target[:, None], "s": params["s"]}
            params.update({name: np.float32(params[name] - RATE * g) for name, g in gradients.items()})
        if (t + 1) % K1 == 0:
            ranks = [[mean(center)] * 2 for center in ranks]
        if (t + 1) % (K1 * K2) == 0:
            moved = mean([{name: milestone[name] - center[0][name] for name in PARAMS} for center in ranks])
            milestone = {name: milestone[name] - moved[name] for name in PARAMS}
            ranks = [[milestone] * 2] * 2
        ranks = [[dict(params) for params in center] for center in ranks]
        found.append((milestone, [dict(params) for center in ranks for params in center]))
    return found


def test_to_the_bit():
    """The ranks of a center have the same parameters after each average, and those of all centers after an exchange."""
    train = trainer(mesh_of(2, 2), k1=K1, k2=K2)
    state = train.init(PARAMS)
    for x, (expected, ranks) in zip(X, transcribed()):
        state, _ = train.step(state, x)
        for name in PARAMS:
            np.testing.assert_array_equal(state.params[name], expected[name])
            own = np.asarray(state.exchange.params.rows[name])
            np.testing.assert_array_equal(own, [params[name] for params in ranks])
    traced, other = jax.jit(lambda *args: train.step(*args)), train.init(PARAMS)
    for x in X:
        other, _ = traced(other, x)
    assert_same_trees(state, other)


def linear(params, x):
    """A loss whose gradients are 0 if the batch is."""
    return (params["w"] * x.mean(0)[:, None] * jnp.arange(4.0)).sum() + params["s"] * x.sum()


def test_other_centers_and_ranks_send_what_was_held_back(tmp_path):
    """Residuals count once, however many ranks a center has. With batches of zeros, nothing else is sent."""
    options = dict(k1=1, k2=1, plan=cgx.Plan(cgx.MaxMin(2, 8), min_size=0))
    state = trainer(mesh_of(2, 2), linear, **options).init(PARAMS)
    state, _ = trainer(mesh_of(2, 2), linear, **options).step(state, X[0])
    save(tmp_path / "state", state)
    held = lambda state: np.asarray(state.exchange.parts[0].own.residuals["w"]).sum(0)
    assert np.abs(held(state)).max() > 0.01
    for sizes in (2, 2), (2, 4), (4, 1), (3,):
        train = trainer(mesh_of(*sizes), linear, **options)
        start = cgx.restore_state(tmp_path / "state", train.init(PARAMS))
        after, _ = train.step(start, np.zeros((24, 6), np.float32))
        moved = sizes[0] * (np.asarray(start.params["w"]) - np.asarray(after.params["w"]))
        np.testing.assert_allclose(moved + held(after), held(state), atol=1e-5)

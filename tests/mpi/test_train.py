"""Training between the processes of mpirun: the parameters and the state of a mesh with as many devices, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, says
from helpers import assert_same_trees
from jax.sharding import AxisType
from training import CODEC, PARAMS, STOCHASTIC, X, loss_fn, mesh_of

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from mpi4py import MPI
from processes import COMM, same_everywhere

N, R, STEPS = COMM.size, COMM.rank, 4
MINE = np.asarray(X)[R * len(X) // N : (R + 1) * len(X) // N]
OPTIMIZER = optax.sgd(0.2, momentum=0.5)
GRID = (2, 2) if N == 4 else (1, N)


@functools.cache
def nodes():
    """A hierarchy of GRID[0] nodes."""
    return cgx.mpi.hierarchy(COMM, COMM.Split(R // GRID[1], R))


def run(train, x, params=PARAMS, keys=None):
    """(parameters, state, the last step's metrics)."""
    params, state = train.init(params)
    for i in range(STEPS):
        params, state, metrics = train.step(params, state, x, None if keys is None else jax.random.fold_in(keys, i))
    return params, state, metrics


def on_mesh(make, sizes=(N,)):
    """`run` of make(mesh=..., data_axis=...) on a mesh of `sizes`, as this rank sees it. The first rank computes it."""
    found = None
    if R == 0:
        names, types = ("data", "inner")[: len(sizes)], (AxisType.Auto,) * len(sizes)
        mesh = jax.make_mesh(sizes, names, axis_types=types, devices=jax.devices()[:N])
        found = jax.tree.map(np.asarray, make(mesh=mesh, data_axis=names if len(names) > 1 else "data"))
    params, state, metrics = COMM.bcast(found)
    own = lambda field: jax.tree.map(lambda rows: rows[R : R + 1], field)
    sent = state[0]._replace(residuals=own(state[0].residuals), momentum=own(state[0].momentum))
    return params, (sent, state[1]), metrics


def per_level(cross, inner):
    """A codec for each level, as a function of their names."""
    return lambda names: dict(zip(names, (cross, inner)))


DGC = dict(compress=cgx.dgc, ratio=0.1, skip_1d=False, momentum=0.9)
CASES = {
    "feedback": dict(plan=STOCHASTIC, seed=3, momentum=0.5, telemetry=True),
    "accumulated": dict(plan=CODEC, accumulate=2, skip_nonfinite=True),
    "scheduled": dict(plan={0: cgx.MaxMin(8), 2: cgx.PowerSGD(2)}),
    "dgc": dict(DGC, warmup_epochs=2, warmup_coeff=0.5, steps_per_epoch=1, clip_global_norm=1.0, weight_decay=1e-3),
    "bsc": dict(compress=cgx.bsc, threshold=0.1, size_bound=0, pull="top"),
}


@pytest.mark.parametrize("case", CASES)
def test_as_on_a_mesh(case):
    options = CASES[case]
    make = lambda **where: cgx.make_train_step(loss_fn, OPTIMIZER, **where, **options)
    params, state, metrics = run(make(data_axis=COMM), MINE)
    expected = on_mesh(lambda **where: run(make(**where), X))
    assert_same_trees((params, state[0]._replace(telemetry=None), state[1]),
                      (expected[0], expected[1][0]._replace(telemetry=None), expected[1][1]))
    np.testing.assert_allclose(metrics.loss, expected[2].loss, rtol=1e-6)
    if metrics.telemetry:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), metrics.telemetry, expected[2].telemetry)
    assert same_everywhere((params, state[1], metrics))
    assert state[0].residuals["w"].shape == (1, 30, 40)

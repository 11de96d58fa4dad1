"""The Python programs of README and docs that run between the processes of mpirun."""

import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from helpers import assert_same_trees

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
from processes import COMM, same_everywhere

pytestmark = pytest.mark.usefixtures("promotion")  # of users


def names_of():
    """The ranks have other gradients."""
    names = pages.given() | dict(comm=COMM, codec=cgx.MaxMin(4, rounding="stochastic"))
    return names | dict(grads=jax.tree.map(lambda x: x * (COMM.rank + 1), names["params"]))


def mean(tree):
    return jax.tree.map(lambda x: x * ((COMM.size + 1) / 2), tree)


def assert_close(got, expected):
    """Up to the error of 4 bits."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(a - b).max() < 0.15 * jnp.abs(b).max()


def test_readme():
    exec(pages.programs("README")[-1], names := names_of())
    check_training(names)


def test_migration():
    (program,) = pages.programs("docs/migration")
    names = names_of()
    names |= dict(init=lambda key: names["params"])
    before = names["loss_fn"](names["params"], names["batch"])
    exec(program, names)
    assert names["metrics"].loss < before and same_everywhere(names["state"].params)


def check_training(names):
    state = names["train"].init(names["params"])
    for _ in range(2):
        state, metrics = names["train"].step(state, names["batch"])
    assert metrics.loss < names["loss_fn"](names["params"], names["batch"]) and same_everywhere(state.params)


def test_steps_by_hand():
    """The first program of the page is that of test_launch.py, and so is its last one."""
    compressed, alone = pages.programs("docs/mpi")[1:3]
    names = names_of()
    exec(compressed, names)
    state = names["optimizer"].init(names["params"])
    params, _, loss = names["step"](names["params"], state, names["batch"])
    assert jnp.isfinite(loss) and same_everywhere(params)
    exec(alone, names)
    assert_close(names["grads"], mean(names["params"]))


def test_a_gpu_for_each_rank(monkeypatch):
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, str(COMM.rank))
    exec(pages.programs("docs/mpi")[3], {})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(COMM.rank)


def test_checkpoints():
    orbax = pytest.importorskip("orbax", reason="needs the extra `test`")
    pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
    save, restore = pages.programs("docs/mpi")[4:6]
    names = names_of()
    train = cgx.make_train_step(names["loss_fn"], names["optimizer"], COMM, names["plan"])
    state, _ = train.step(train.init(names["params"]), names["batch"])
    with tempfile.TemporaryDirectory() as folder:
        path = COMM.bcast(pathlib.Path(folder) / "saved")
        names |= dict(orbax=orbax, path=path, train=train, state=state)
        exec(save, names)
        exec(restore, names)
        COMM.Barrier()  # the folder is the first rank's
    assert_same_trees(names["state"], state)


def test_ranks_with_batches_of_different_sizes():
    names = names_of() | dict(n=COMM.rank)
    (program,) = pages.programs("docs/mpi")[6:7]
    exec(program, names)
    counts = np.arange(COMM.size)
    weight = (counts * (counts + 1)).sum() / max(counts.sum(), 1)
    if COMM.size > 1:
        assert_close(names["grads"], jax.tree.map(lambda x: x * weight, names["params"]))


@pytest.mark.parametrize("which", [7, 8])
def test_nodes(which):
    exec(pages.programs("docs/mpi")[which], names := names_of())
    assert_close(names["grads"], mean(names["params"]))

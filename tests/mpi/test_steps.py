"""Tests training between the processes of mpirun: parameters and state are those of a mesh, bit for bit."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pages
import pytest
from errors import names
from helpers import assert_same_trees, assert_trees, mesh_with
from jax.sharding import PartitionSpec as P
from training import CODEC, PARAMS, STOCHASTIC, X, loss_fn, mesh_of

import jaxcgx as cgx

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
import mpi4jax
from mpi4py import MPI
from processes import COMM, same_everywhere

N, R, STEPS = COMM.size, COMM.rank, 3
MINE = np.asarray(X)[R * len(X) // N : (R + 1) * len(X) // N]
OPTIMIZER = optax.sgd(0.2, momentum=0.5)
GRID = (2, 2) if N == 4 else (N, 1)  # nodes, and ranks per node


@functools.cache
def nodes():
    return cgx.mpi.hierarchy(COMM, COMM.Split(R // GRID[1], R))


def make(exchange=CODEC, loss=loss_fn, optimizer=OPTIMIZER, comm=COMM, **options):
    return cgx.make_train_step(loss, optimizer, comm, exchange, **options)


def run(train, x, params=PARAMS, key=None):
    """Returns (state, the last step's metrics). Steps donate their states."""
    state = train.init(params)
    for _ in range(STEPS):
        before = state
        state, metrics = train.step(before, x, key)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.exchange.own)))
    return state, metrics


def on_mesh(run_there, *sizes):
    """Returns this rank's part of run_there(mesh, axes). The first rank computes it for all."""
    found = None
    if R == 0:
        axes = dict(zip(("data", "inner"), sizes))
        found = jax.tree.map(np.asarray, run_there(mesh_with(**axes), tuple(axes)))
    state, metrics = COMM.bcast(found)
    own = jax.tree.map(lambda rows: rows[R : R + 1], state.exchange.own)
    return state.replace(exchange=dataclasses.replace(state.exchange, own=own)), metrics


FED = {0: cgx.MaxMin(8), 1: STOCHASTIC}
DGC = dict(momentum=0.9, skip_1d=False)
CASES = {
    "feedback": (cgx.Momentum(FED, 0.5, seed=3, telemetry=True), {}),
    "frozen": (cgx.Plan(CODEC, [("b", cgx.Skip())], min_size=0, skip_1d=False), dict(accumulate=2)),
    "dgc": (cgx.DGC(0.1, warm_up=cgx.WarmUp(2, 1, 0.5), clip_global_norm=1.0, weight_decay=1e-3, **DGC), {}),
    "bsc": (cgx.BSC(0.1, size_bound=0, pull="top"), {}),
    "dgc between nodes": (cgx.DGC(0.1, **DGC), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_as_on_a_mesh(case):
    """All bits agree, except for the means of loss and telemetry, which MPI and XLA add up in different orders."""
    exchange, options = CASES[case]
    sizes, comm = (GRID, nodes()) if "nodes" in case else ((N,), COMM)
    got, metrics = run(make(exchange, optimizer=optax.sgd(0.2), comm=comm, **options), MINE)

    def there(mesh, names):
        sharding = cgx.Sharding(names)
        return run(cgx.make_train_step(loss_fn, optax.sgd(0.2), mesh, exchange, sharding=sharding, **options), X)

    expected, there_metrics = on_mesh(there, *sizes)
    without = lambda state: state.replace(exchange=(state.exchange.own, state.exchange.shared._replace(telemetry=None)))
    assert_same_trees(without(got), without(expected))
    assert_trees(functools.partial(np.testing.assert_allclose, rtol=1e-5), metrics, there_metrics)
    assert same_everywhere((got.params, got.opt_state, got.exchange.shared, metrics))
    assert got.exchange.own.residuals["w"].shape == (1, 30, 40)


@pytest.mark.parametrize("keep", [False, True])
def test_the_variables_alone(keep):
    """They are as the plan of the variables, on one node and on several. Residuals need CGX's other reduction there."""
    environ = {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}
    environ |= {"CGX_CROSS_REDUCTION_TYPE": "SRA", "CGX_INTRA_COMPRESS": "0"} if keep and GRID[0] > 1 else {}
    plan = cgx.Plan.from_env(("cross", "inner"), environ)
    for comm in nodes(), cgx.mpi.hierarchy(COMM, COMM):
        expected, _ = run(make(cgx.Feedback(plan, keep=keep), comm=comm), MINE)
        found, _ = run(make(cgx.from_env(environ, keep=keep), comm=comm), MINE)
        assert_same_trees((found.params, found.opt_state), (expected.params, expected.opt_state))
        assert same_everywhere(found.params)


def test_as_by_hand():
    """Training starts from the first rank's parameters, whatever the other ranks pass."""
    optimizer = optax.chain(cgx.compress_gradients(COMM, CODEC), OPTIMIZER)

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(STEPS):
        params, state = step(params, state, MINE)
    found, _ = run(make(), MINE, jax.tree.map(lambda x: x + R, PARAMS))
    assert_same_trees((found.params, found.exchange, found.opt_state), (params, *state))


def test_the_pair_of_the_guide():
    page = pathlib.Path(__file__).parents[2] / "docs/convert.md"
    before, after = pages.pairs(page.read_text())["mpirun"]
    names = dict(jax=jax, optax=optax, cgx=cgx, mpi4jax=mpi4jax, MPI=MPI, optimizer=optax.adam(3e-3))

    def losses(source, codec=None):
        exec(source, found := dict(names, codec=codec, loss_fn=lambda params, x, y: loss_fn(params, x)))
        args, each = (PARAMS, names["optimizer"].init(PARAMS)), []
        for _ in range(50):
            *args, loss = found["step"](*args, MINE, None)
            each.append(COMM.allreduce(float(loss)) / N)
        return np.array(each)

    with jax.numpy_dtype_promotion("standard"):
        plain, raw, compressed = losses(before), losses(after, cgx.Raw()), losses(after, cgx.MaxMin(4, 64))
    np.testing.assert_allclose(raw, plain, rtol=1e-4)
    assert plain[-1] < 0.9 * plain[0] and abs(compressed[-1] / plain[-1] - 1) < 0.02


def test_keys_and_auxiliary_outputs():
    def loss(params, x, key):
        return (params * x).sum(), {"drawn": jax.random.normal(key, (3,)), "key": key, "rank": R, "two": 2, "x": x}

    specs = {"drawn": None, "key": None, "rank": "first", "two": "sum", "x": P("ranks")}
    key = jax.random.key(5)
    aux = run(make(loss=loss, has_aux=True, aux_specs=specs), jnp.ones(30), jnp.zeros(30), key)[1].aux
    drawn = [jax.random.normal(jax.random.fold_in(key, rank), (3,)) for rank in range(N)]
    np.testing.assert_allclose(aux["drawn"], np.mean(drawn, 0), rtol=1e-5, atol=1e-6)
    assert aux["key"] == key and aux["two"] == 2 * N
    np.testing.assert_array_equal(aux["x"], jnp.ones(30))
    assert aux["rank"] == 0


def test_auxiliary_outputs_of_batches_of_different_sizes():
    """Rows are the process's own, and means are over all processes. Integers that depend on the batch are refused."""
    mine = X[R : 2 * R + 2]

    def loss(params, x):
        out = x @ params
        return (out**2).mean(), {"rows": 2 * x, "large": x > 0, "mean": x.mean(), "count": (x > 0).sum()}

    specs = {"rows": None, "large": None, "mean": None, "count": "sum"}
    aux = run(make(cgx.Raw(), loss, has_aux=True, aux_specs=specs), mine, jnp.ones(30))[1].aux
    np.testing.assert_array_equal(aux["rows"], 2 * mine)
    np.testing.assert_array_equal(aux["large"], mine > 0)
    np.testing.assert_allclose(aux["mean"], np.mean(COMM.allgather(float(mine.mean()))), rtol=1e-5, atol=1e-6)
    assert aux["count"] == COMM.allreduce(int((mine > 0).sum()))
    words = "make_train_step loss_fn leaf ['count'] int32[]"
    with names(ValueError, words):
        run(make(cgx.Raw(), loss, has_aux=True), mine, jnp.ones(30))


def test_weighted_means():
    """Means are over all ranks and micro-batches, and share an array."""

    def sums(w, batch):
        return (((batch["x"] @ w) * batch["shared"]) ** 2 * batch["mask"]).sum(), batch["mask"].sum()

    mask = jnp.linspace(0.0, 1.0, len(X)).at[len(X) // N * (N - 1) :].set(0.0)  # the last rank has no examples
    of_rank = {"x": MINE, "mask": mask.reshape(N, -1)[R], "shared": 2 * jnp.ones(1)}
    w, options = jnp.ones(30), dict(weighted=True, accumulate=2)
    specs = {"x": P("rows"), "mask": P("rows"), "shared": P()}
    train = make(cgx.Raw(), sums, optax.sgd(1.0), sharding=cgx.Sharding(batch=specs), **options)
    state, metrics = train.step(train.init(w), of_rank)
    value, grads = jax.value_and_grad(lambda w: jnp.divide(*sums(w, {**of_rank, "x": X, "mask": mask})))(w)
    np.testing.assert_allclose(metrics.loss, value, rtol=1e-5)
    np.testing.assert_allclose(state.params, w - grads, rtol=1e-4, atol=1e-5)
    train = make(cgx.Raw(), sums, optax.sgd(1.0), **options)
    with names(ValueError, "train.step batch leaves Sharding(batch=...)"):
        train.step(train.init(w), of_rank)


@pytest.mark.parametrize("mode", ["mean", "per_rank"])
def test_model_states(mode, tmp_path):
    """Results are those of a mesh. They start from the first rank's state, also from a checkpoint."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")

    def loss(params, state, x):
        noise = jax.random.uniform(state["key"])
        return loss_fn(params, x + noise), {**state, "n": state["n"] + 1, "mean": x.mean()}

    def step(fill, x, comm):
        train = make(loss=loss, comm=comm, model_state=mode)
        state, metrics = train.step(train.init(PARAMS, {"key": jax.random.key(fill), "n": fill, "mean": 0.0}), x)
        return train, state, metrics.loss

    words = lambda tree: jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )
    train, state, value = step(R, MINE, COMM)
    found = jax.tree.map(np.asarray, words(step(0, X, mesh_of(N))[1:])) if R == 0 else None
    expected, same = COMM.bcast(found)
    assert_same_trees(state.params, expected.params)
    np.testing.assert_allclose(value, same, rtol=1e-6)
    own = lambda tree: jax.tree.map(lambda rows: rows[R : R + 1], tree) if mode == "per_rank" else tree
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    assert_trees(close, words(state.model_state), own(expected.model_state))
    gathered, path = cgx.gather_state(state, COMM), COMM.bcast(tmp_path) / "here"
    if R == 0:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, gathered)
    COMM.Barrier()
    template = train.init(PARAMS, {"key": jax.random.key(0), "n": 0, "mean": 0.0})
    assert_same_trees(words(cgx.restore_state(path, template, comm=COMM)), words(state))
    COMM.Barrier()  # before the folder is removed


def test_checkpoints(tmp_path):
    """With as many ranks, all bits return. With one more rank, residuals keep their sum over the ranks."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
    train = make(cgx.Momentum(CODEC, 0.5), optimizer=optax.sgd(0.2))
    state, _ = run(train, MINE)
    whole, path = cgx.gather_state(state, COMM), COMM.bcast(tmp_path)
    if R == 0:
        assert whole.exchange.own.residuals["w"].shape == (N, 30, 40)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "same", whole)
            checkpointer.save(path / "more", cgx.reshard_state(whole, N + 1))
    else:
        assert whole is None
    COMM.Barrier()
    assert_same_trees(cgx.restore_state(path / "same", train.init(PARAMS), comm=COMM), state)
    if N > 1:
        words = "restore_state comm None MPI.COMM_SELF"
        with names(ValueError, words):
            cgx.restore_state(path / "same", train.init(PARAMS))
    more = cgx.restore_state(path / "more", train.init(PARAMS), comm=COMM)
    total = lambda state: COMM.allreduce(np.asarray(state.exchange.own.residuals["w"]))
    assert total(more).shape == (1, 30, 40)
    np.testing.assert_allclose(total(more), total(state), rtol=1e-5, atol=1e-6)
    COMM.Barrier()  # before the folder is removed


def of_all_ranks():
    """Returns a state with the rows of two ranks."""
    optimizer = cgx.compress_gradients(COMM, CODEC)
    state = jax.tree.map(lambda x: jnp.concatenate([x, x]) if x.ndim > 2 else x, optimizer.init(PARAMS))
    return optimizer.update(PARAMS, state)


LEVELS = {"cross": CODEC, "inner": CODEC}
STEP, GRADIENTS, VALUE, TYPE = "make_train_step", "compress_gradients", ValueError, TypeError


def compress(comm=COMM, **options):
    return cgx.compress_gradients(comm, CODEC, **options)


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda: make(sharding=cgx.Sharding(params=jax.P())), VALUE, f"{STEP} sharding.params P()"),
        (lambda: make(comm=None), TYPE, f"{STEP} mesh_or_comm None"),
        (lambda: make(comm=MPI.COMM_NULL), TYPE, f"{STEP} mesh_or_comm MPI.COMM_NULL"),
        (lambda: make(overlap=cgx.Priority()), VALUE, f"{STEP} overlap Priority wait for one another"),
        (lambda: make(overlap="backward"), VALUE, f"{STEP} overlap 'backward' wait for one another"),
        (lambda: compress((COMM,)), TYPE, f"{GRADIENTS} axis_name a communicator communicator alone"),
        (lambda: compress(axis_size=N).init(PARAMS), VALUE, f"{GRADIENTS} axis_size {N} leave it out"),
        (lambda: run(make(LEVELS), MINE), VALUE, f"{STEP} exchange {{'cross' jaxcgx.mpi.hierarchy()"),
        (of_all_ranks, VALUE, f"{GRADIENTS} state leaf .own.residuals['w'] float32[2, 30, 40] row own rank"),
        (lambda: cgx.state_specs(compress().init(PARAMS), COMM), TYPE, "state_specs axis_name a communicator no specs"),
    ],
)
def test_errors(f, error, words):
    with names(error, words):
        f()

"""The Python programs of README and docs run: page by page, in their order, each with what those before it left.

Those of convert.md, frameworks.md and the pages for users of other systems have tests of their own (test_convert.py,
test_frameworks.py, test_from.py), and so do those between the processes of mpirun (tests/mpi/test_pages.py).
"""

import inspect
import os
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pages
import pytest
from helpers import python, run
from jax.sharding import PartitionSpec as P
from started import Processes, free_port
from training import NESTED

import jaxcgx as cgx
from jaxcgx.lab import why_not
from jaxcgx.report import machine

pytestmark = pytest.mark.usefixtures("promotion")  # of users
TUTORIALS = "docs/first-step", "docs/two-centers"
BETWEEN_PROCESSES = "docs/collectives", "docs/overlap", "docs/wan"


def walk(page, names, changes=None):
    """Runs the programs of a page in `names`. changes: {which program: names that are others from there on}."""
    for i, program in enumerate(pages.programs(page)):
        names |= (changes or {}).get(i, {})
        exec(program, names)
    return names


def on_ranks(program, names, begin=lambda params: {}):
    """Runs a program in a shard_map, on each rank's part of the batch. begin: what else it has there."""

    def local(params, batch):
        found = names | dict(params=params, batch=batch) | begin(params)
        exec(program, found)
        return found["grads"]

    mapped = jax.shard_map(local, mesh=names["mesh"], in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(names["params"], names["batch"])


def names_of(*sizes, axes=("data",)):
    return pages.given(pages.make_mesh(sizes or (4,), axes))


def step_of(names, **options):
    """A training step and its state, as pages have one from before."""
    train = cgx.make_train_step(names["loss_fn"], names["optimizer"], names["mesh"], cgx.MaxMin(4), **options)
    return dict(train=train, state=train.init(names["params"]))


def test_every_page_with_programs_has_a_test():
    text = "".join((pages.ROOT / "tests" / name).read_text() for name in ("test_pages.py", "mpi/test_pages.py"))
    docs = [f"docs/{path.stem}" for path in (pages.ROOT / "docs").glob("*.md")]
    for page in ["README", "CONTRIBUTING", "benchmarks/README", *docs]:
        if pages.programs(page) and not re.match("docs/(convert|frameworks|from-.*)$", page):
            assert f'"{page}"' in text, page


@pytest.mark.parametrize("page", TUTORIALS)
def test_tutorials(page):
    program = "\n".join(program for program in pages.programs(page) if not program.startswith("# centers.py"))
    python(program, timeout=600)


def printed_by_two(folder, page, *words):
    """Runs the last program of a page in two processes. Yields what each one prints."""
    (folder / "program.py").write_text(pages.programs(page)[-1])
    address = f"127.0.0.1:{free_port()}"
    with Processes(*([folder / "program.py", address, place, *words] for place in "01")) as both:
        for process in both.running:
            printed, _ = process.communicate()
            assert process.returncode == 0, printed
            yield printed


@pytest.mark.parametrize("technique", ["4bits", "dgt", "diloco"])
def test_two_centers(tmp_path, technique):
    """The program of the page, in two processes, with each of its techniques."""
    for printed in printed_by_two(tmp_path, "docs/two-centers", technique):
        losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if ": loss " in line]
        assert len(losses) == 4 and losses[-1] < 0.5, printed


def test_gpus_on_ethernet(tmp_path):
    """The program of the page, in two processes on CPUs."""
    ways = ["float32", "nccl", "tcp"]
    for printed in printed_by_two(tmp_path, "docs/gpu-ethernet", *ways):
        lines = re.findall(r"^(\w+): [\d.]+ ms a step, loss ([\d.]+)$", printed, re.MULTILINE)
        assert [way for way, _ in lines] == ways and all(float(loss) < 0.6 for _, loss in lines), printed


@pytest.mark.parametrize("what", [BETWEEN_PROCESSES, ["dgt", "channels"], ["hfa"]], ids=["pages", "dgt", "hfa"])
def test_pages_of_several_processes(what):
    processes, port = 2 if what == BETWEEN_PROCESSES else 4, free_port()
    with Processes(*([pages.__file__, port, rank, *what] for rank in range(processes)), limit=600) as ranks:
        assert [rank.wait() for rank in ranks.running] == [0] * processes


def test_readme():
    whole, jit, shard_map, _ = pages.programs("README")  # the last one is of mpirun
    printed = python(f"{whole}\ncgx.explain(train.step, state, batch)").stdout
    assert float(re.match(r"loss ([\d.]+)\n", printed)[1]) < 0.1 and "MaxMin(bits=4)" in printed
    names = names_of()
    with jax.set_mesh(names["mesh"]):
        exec(jit, names)
    compressed, grads = names["grads"], on_ranks(shard_map, names)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), compressed, grads)


def test_bfloat16():
    whole, by_hand = pages.programs("docs/bfloat16")
    names = names_of()
    exec(whole, names)
    assert names["train"].init(names["params"])
    found, expected = on_ranks(by_hand, names), jax.grad(pages.loss_fn)(names["params"], names["batch"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-3), found, expected)


def test_matrices():
    names, losses = names_of(), []
    for program in pages.programs("docs/matrices"):
        exec(program.replace("embed|head", "v"), names)
        stacked = names.pop("stacked", None)
        state, _ = names["train"].step(names["train"].init(stacked or names["params"]), names["batch"])
        losses.append(pages.loss_fn(names["stacks"].unstack(state.params) if stacked else state.params, names["batch"]))
    assert len(losses) == 3 and max(losses) < pages.loss_fn(names["params"], names["batch"])


def test_checkpoints(tmp_path):
    orbax = pytest.importorskip("orbax", reason="needs the extra `test`")
    pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
    names, more = names_of(4), names_of(6)
    names |= step_of(names) | dict(orbax=orbax, path=tmp_path / "saved", folder=tmp_path)
    before = names["state"]
    changed = {1: dict(optimizer_state=before.opt_state), 2: step_of(more), 3: dict(state=before, mesh=more["mesh"])}
    names = walk("docs/checkpoints", names, changed)
    residuals = [state.exchange.own.residuals for state in (before, names["state"])]
    assert [jax.tree.leaves(x)[0].shape[0] for x in residuals] == [4, 6]


def test_codecs():
    first, own = pages.programs("docs/codecs")
    exec(first, names := {})
    np.testing.assert_array_equal(names["y"], names["z"])
    exec(own, names)
    x = np.asarray(names["x"])
    assert np.abs(np.asarray(names["y"]) - x).max() <= 0.51 / 127 * np.abs(x).max()
    mesh = pages.make_mesh()
    body = lambda x: jax.lax.pcast(cgx.compressed_psum(x, "data", names["Bytes"]()), "data", to="varying")
    total = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(x)
    expected = x.reshape(4, 250, 1000).sum(0)
    np.testing.assert_allclose(np.asarray(total).reshape(4, 250, 1000)[2], expected, atol=0.2)
    assert np.isnan(cgx.roundtrip(jnp.array([1.0, jnp.inf, 0.0]), names["Bytes"]())).all()


@pytest.mark.filterwarnings("ignore:Decoupled.join. this center begins without others")
def test_diloco():
    names = names_of(4, axes=("dc",))
    *centers, decoupled, demo = pages.programs("docs/diloco")
    for program in centers:
        exec(program, names := names | dict(params=pages.given()["params"]))
    assert names["train"].init(names["params"])

    port = free_port()
    alone = decoupled.replace("a.example:7000", f"127.0.0.1:{port}").replace("place=0,", "place=0, grace=0.1,")
    step = lambda params, state, batch: (jax.tree.map(lambda x: 0.9 * x, params), state, 0.0)
    exec(alone, found := names | dict(step=step, opt_state=(), batches=jnp.ones((2, 4))))
    found["member"].leave()

    exec(demo, found := names_of())
    assert found["train"].init(found["params"])


def test_explain(capsys):
    """And it prints what the page shows."""
    program, check = pages.programs("docs/explain")
    params = {name: jnp.ones((1024, 1024)) for name in ("up", "down")}
    loss = lambda params, x: jnp.square(x @ params["up"] @ params["down"]).mean()
    names = names_of(2, 4, axes=("node", "local"))
    exec(program, names | dict(params=params, batch=jnp.ones((8, 1024)), loss=loss))
    shown = (pages.ROOT / "docs/explain.md").read_text().split("```text\n")[1].split("\n```")[0]
    rows = lambda text: [line.split() for line in text.splitlines()]
    # XLA chooses the order of collectives, and JAX's versions name their origins otherwise.
    printed = {tuple(row[:5]) for row in rows(capsys.readouterr().out)}
    assert {tuple(row[:5]) for row in rows(shown)} <= printed

    step = step_of(names, sharding=cgx.Sharding(("node", "local")))
    exec(check, dict(found=cgx.explain(step["train"].step, step["state"], names["batch"], show=False)))


@pytest.fixture
def initialize(monkeypatch):
    """The arguments that jax.distributed.initialize got; it starts nothing."""
    got, signature = [], inspect.signature(jax.distributed.initialize)
    initialize = lambda *args, **kwargs: got.append(signature.bind(*args, **kwargs))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return got


def test_failures(initialize, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", None)
    step = jax.jit(lambda state: state + 1)
    names = walk("docs/failures", names_of() | dict(train=types.SimpleNamespace(step=step)))
    assert names["step"](1) == 2
    assert sys.excepthook is names["end"] and len(initialize) == 1


@pytest.mark.short  # on the newest JAX
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="JAX has mutual TLS from 0.11.2 on")
def test_security(initialize):
    walk("docs/security", names_of())
    assert len(initialize) == 2


def test_fsdp(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
    whole, restored, by_hand, again = pages.programs("docs/fsdp")
    names = names_of()
    exec(whole, names)
    saved = names["train"].init(names["params"])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
        exec(restored, found := names | dict(checkpointer=checkpointer, path=tmp_path / "saved"))
    jax.tree.map(np.testing.assert_array_equal, found["state"], saved)

    def local(shards, batch):
        found = names | dict(shards=shards, batch=batch)
        exec(by_hand, found)
        once = found["local_loss"]
        exec(again, found)
        return found["grads"], jax.grad(found["local_loss"])(shards, batch), jax.grad(once)(shards, batch)

    mapped = jax.shard_map(local, mesh=names["mesh"], in_specs=P("data"), out_specs=P("data"), check_vma=False)
    mean, gathered_again, gathered_once = jax.jit(mapped)(names["params"], names["batch"])
    assert jax.tree.map(jnp.shape, mean) == jax.tree.map(jnp.shape, names["params"])
    jax.tree.map(np.testing.assert_array_equal, gathered_again, gathered_once)


def test_hierarchies():
    names = walk("docs/hierarchies", names_of())
    found = cgx.explain(names["train"].step, names["train"].init(names["params"]), names["batch"], show=False)
    compressed = [collective.axes for collective in found.collectives if collective.codec.startswith("MaxMin")]
    assert set(compressed) == {("node",)}


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_lab(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "train.py").write_text("")
    assert len(walk("docs/lab", {})["ranks"]) == 2


@NESTED
def test_meshes():
    names = names_of(2, 4, axes=("data", "model"))
    x = jax.random.normal(names["key"], (16, 32))
    params = {"up": jax.random.normal(names["key"], (32, 64)), "down": jnp.ones((64, 32))}
    loss_fn = lambda params, x: (jnp.tanh(x @ params["up"]) @ params["down"]).var()
    names = walk("docs/meshes", names | dict(loss_fn=loss_fn))
    assert jax.tree.map(jnp.shape, jax.jit(names["step"])(params, x)) == jax.tree.map(jnp.shape, params)


def test_patches():
    """Between the first two lines, the page leaves a step to the reader."""
    first, second = pages.programs("docs/patches")
    names = pages.given()
    trains = "params = jax.tree.map(lambda p: p * 1.002, params)"
    published = jax.tree.map(lambda p: p.astype(jnp.bfloat16), names["params"])
    exec(re.sub(r"^\.\.\. .*$", trains, first, flags=re.MULTILINE), names)
    exec(second, names | dict(received=published))
    assert names["patch"].nbytes < sum(p.nbytes for p in jax.tree.leaves(published)) / 3


def test_planner(monkeypatch):
    monkeypatch.setattr(machine, "kernels", lambda codec, again=False: machine.Kernels(20e9, 10e9, 10e9, 20e9))
    names = walk("docs/planner", names_of())
    assert names["found"].rows and names["plan"].network.latency == 1e-3


def test_plans(tmp_path, monkeypatch, capsys):
    """What the page prints of a plan is what comes out."""
    monkeypatch.chdir(tmp_path)
    rules, explained, measured, adapted, saved = pages.programs("docs/plans")
    names = names_of()
    shapes = {"embed": (64, 64), "conv": (3, 3, 8, 64), "head": {"kernel": (64, 32)}}
    grads = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    on_ranks(rules, names, lambda params: dict(grads=grads))

    plan = cgx.Plan({"node": cgx.MaxMin(4), "local": cgx.Raw()})
    init = lambda key: {"block": {"s": jnp.float32(0), "w": jnp.zeros((512, 512))}}
    line, _, shown = explained.partition("\n")
    exec(line.removeprefix(">>> "), names | dict(plan=plan, init=init))
    assert capsys.readouterr().out == shown

    exec(measured, names)
    assert (names["statistics"].norms > 0).all()
    assert [rule.path for rule in names["plan"].rules] == ["^(v)$", "^(w)$"]
    names |= step_of(names)
    exec(adapted, names)
    assert jnp.isfinite(names["metrics"].loss)
    exec(saved, names | dict(grads=grads))
    assert set(np.load("grads.npz")) == {"embed", "conv", "head/kernel"}


def test_publishing():
    port = free_port()
    trainer, sampler = (program.replace("7500", str(port)) for program in pages.programs("docs/publishing"))
    exec(trainer, names := names_of())
    exec(sampler, found := names_of() | dict(generate=jax.tree.leaves))
    jax.tree.map(np.testing.assert_array_equal, found["params"], names["state"].params)
    found["subscriber"].close()
    names["publisher"].close()


def test_sparse():
    names = walk("docs/sparse", names_of())
    assert jax.eval_shape(names["train"].init, names["params"])
    with jax.set_mesh(names_of(2, 2, axes=("dc", "local"))["mesh"]):
        assert names["optimizer"].init(names["params"])


def test_training_with_optax():
    flax = pytest.importorskip("flax", reason="needs the extra `test`")
    from flax.training.train_state import TrainState

    chain, by_hand, pmap, masked = pages.programs("docs/training")[:4]
    names, devices = names_of(), len(jax.devices())
    start, batch = jax.tree.map(jnp.copy, names["params"]), names["batch"]  # the step donates its arguments
    exec(chain, names)
    exec(by_hand, names)
    *_, loss = names["step"](names["params"], names["state"], batch)
    np.testing.assert_allclose(loss, pages.loss_fn(start, batch), rtol=1e-5)

    names |= dict(flax=flax, TrainState=TrainState, model=flax.linen.Dense(1), params=start)
    exec(pmap, names)
    _, losses = names["step"](names["state"], jax.tree.map(lambda x: x.reshape(devices, -1, x.shape[-1]), batch))
    np.testing.assert_allclose(losses, loss, rtol=1e-5)

    exec(f"optimizer = {masked}", names | dict(labels={"w": "few bits", "v": "raw"}))


def test_training_losses():
    weighted, whole, stateful, frozen, warm_up = pages.programs("docs/training")[4:9]
    names = names_of()
    start, batch = names["params"], names["batch"]
    losses = lambda params, batch: jnp.square(pages.predict(params, batch[0]) - batch[1]).mean(-1)
    names |= dict(token_losses=lambda params, batch: (losses(params, batch), jnp.float32(batch[0][:, 0] > 0)))
    exec(weighted, names)
    state = names["train"].init(start)
    found = names["train"].step(state, batch)[1].loss
    np.testing.assert_allclose(found, losses(start, batch)[batch[0][:, 0] > 0].mean(), rtol=1e-5)

    noisy = lambda params, batch, key: (pages.loss_fn(params, batch), jax.random.normal(key))
    exec(whole, names | dict(loss_fn=noisy))

    class model:
        apply = staticmethod(lambda params, state, batch: (pages.loss_fn(params, batch), state + batch[0].mean()))

    exec(stateful, found := names | dict(params=start, model_state=jnp.float32(0), model=model))
    np.testing.assert_allclose(found["state"].model_state, 2 * batch[0].mean(), rtol=1e-4)

    exec(frozen, names)
    exec(warm_up, names)


def test_training_steps_that_are_skipped():
    chain, scaling, _, keeping = pages.programs("docs/training")[9:13]  # collectives/test_replicas.py has the third
    names = names_of()
    exec(chain, names)
    names |= dict(transformation=cgx.compress_gradients("data", names["exchange"]), inner=optax.sgd(0.1))

    def begin(params):
        compress, inner = names["transformation"].init(params), names["inner"].init(params)
        return dict(compress=compress, inner_state=inner, scale=jnp.float32(8))

    scaled = on_ranks(scaling, names, begin)
    expected = jax.tree.map(lambda g: 8 * g, jax.grad(pages.loss_fn)(names["params"], names["batch"]))
    assert jax.tree.map(jnp.shape, scaled) == jax.tree.map(jnp.shape, expected)
    run(sys.executable, "-P", "-W", "error", "-c", keeping, timeout=600)


def test_training_models():
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `test`")
    split, optimizer = pages.programs("docs/training")[13:]
    names = names_of()

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(8, 256, rngs=rngs), nnx.BatchNorm(256, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    compute_loss = lambda model, batch: model(batch[0]).var()
    names |= dict(nnx=nnx, model=Model(nnx.Rngs(0)), compute_loss=compute_loss)
    exec(split, names)
    train = cgx.make_train_step(names["loss_fn"], optax.sgd(0.1), names["mesh"], names["plan"], model_state="mean")
    model, x = names["model"], names["batch"][0]
    state, _ = train.step(train.init(names["params"], names["rest"]), names["batch"])
    moved = 0.99 * model.norm.mean[...] + 0.01 * model.linear(x).mean(0)
    np.testing.assert_allclose(state.model_state["norm"]["mean"][...], moved, rtol=1e-4, atol=1e-6)

    names |= dict(model=nnx.Linear(8, 256, rngs=nnx.Rngs(0)), loss_fn=compute_loss)
    exec(optimizer, names)
    assert names["step"](names["model"], names["optimizer"], names["batch"]).shape == ()
    residuals = names["optimizer"].opt_state[0].own.residuals["kernel"][...]
    assert residuals.sharding.spec == P("data") and residuals.any()

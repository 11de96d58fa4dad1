"""Tests that a resumed run has the bits of one that was never interrupted.

Also tests that a bad checkpoint harms no good one.
"""

import contextlib
import fcntl
import importlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FULL, load_script

import jaxcgx as cgx
from jaxcgx.train.rounds import StepOfCenters
from jaxcgx.train.step import Step

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"
ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `recipes`")

# Dropout has random streams. DGC has residuals, momentum and a warm-up.
TINY = {"model.layers": 1, "model.width": 32, "data.context": 16}
GPT = TINY | {"compression": "dgc", "compression.warmup_epochs": 1, "train.log_every": 1, "train.save_every": 5}


def checkpoint(folder, step):
    # Orbax warns that there is no template.
    with ocp.PyTreeCheckpointer() as checkpointer, warnings.catch_warnings(action="ignore"):
        return checkpointer.restore(next(folder.glob("*/checkpoints")) / str(step))


def words(x):
    """Returns the words of an array, also of random keys."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def assert_same_bits(ours, theirs):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(words(x), words(y))


def metrics(folder):
    return [json.loads(line) for line in next(folder.glob("*/metrics.jsonl")).read_text().splitlines()]


def lines(folder):
    found = [line for line in metrics(folder) if "bytes" not in line]
    return [{k: v for k, v in line.items() if k != "examples_per_second"} for line in found]


def test_same_bits(run, train, tmp_path, monkeypatch):
    """A run that is interrupted by Ctrl-C, killed while it writes, and interrupted by SIGTERM."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    long = GPT | {"train.steps": 20}
    run("text/gpt", long, runs=whole)
    signals, write = {7: signal.SIGINT, 12: signal.SIGTERM}, train.RunFolder.write

    def interrupt(self, step, **values):
        write(self, step, **values)
        if "loss" in values and step in signals:
            os.kill(os.getpid(), signals.pop(step))

    before = [signal.getsignal(number) for number in train.launch.Signals.NUMBERS]
    with monkeypatch.context() as patch:
        patch.setattr(train.RunFolder, "write", interrupt)
        with pytest.raises(train.Interrupted):
            run("text/gpt", long, runs=parts)
        folder = next(parts.glob("*"))
        log = lambda: (folder / "log.txt").read_text()
        assert log().endswith("interrupted: step 7 of 20 is saved, and the same command goes on from there\n")
        # Killed while it wrote step 7: the checkpoint of step 5 is the last, and metrics have a half line.
        (folder / "checkpoints/7").rename(folder / "checkpoints/7.orbax-checkpoint-tmp")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "lo')
        with pytest.raises(train.Interrupted):
            run("text/gpt", long, runs=parts)
        assert "goes on from step 5 of 20" in log() and "interrupted: step 12 of 20" in log()
    assert before == [signal.getsignal(number) for number in train.launch.Signals.NUMBERS]
    run("text/gpt", long, runs=parts)
    assert "goes on from step 12 of 20" in log()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["15", "20"]
    assert lines(parts) == lines(whole)
    assert_same_bits(checkpoint(parts, 20), checkpoint(whole, 20))


def test_a_sampler_beside_a_fine_tuning(run, tmp_path, monkeypatch, capsys):
    """The fine-tuning begins with the weights of another run, in each center of DiLoCo, whose round is at its end.

    The sampler has its last ones, in bfloat16.
    """
    first, second, weights = (tmp_path / name for name in ("first", "second", "weights"))
    small = TINY | {"train.steps": 2, "compression": "diloco", "compression.every": 2}
    run("text/gpt", small, runs=first)
    more = f"--init={next(first.iterdir())}", f"--publish={weights}"
    run("text/gpt", small | {"schedule.rate": 1e-9, "train.seed": 1}, runs=second, more=more)
    params = [checkpoint(folder, 2)["params"] for folder in (first, second)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *params)
    sampler, seen = load_script(RECIPES / "sample.py", monkeypatch), []
    latest = cgx.patch.Subscriber.latest
    monkeypatch.setattr(cgx.patch.Subscriber, "latest", lambda self: seen.append(latest(self)) or seen[-1])
    arguments = [str(next(second.iterdir())), str(weights), "--count=2", "--prompt=The"]
    sampler.main(arguments)
    text = capsys.readouterr().out.splitlines()[-2:]
    assert text[0].startswith("version 2, waited ") and ": 'The" in text[1]
    assert_same_bits(seen[1], jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16), params[1]))
    with pytest.raises(SystemExit, match=r"sample\.py: .*No such file"):
        sampler.main([str(tmp_path), *arguments[1:]])


@pytest.mark.parametrize(
    "name, changes",
    [
        ("digits/resnet20", {} if FULL else {"model.depth": 8}),  # batch norm has means and variances
        ("digits/mlp", {"compression": "bsc"}),  # residuals of ranks and of owners
        ("digits/mlp", {"compression": "cgx4"}),  # random numbers of stochastic rounding
        ("digits/mlp", {"compression": "powersgd"}),  # factors
        # By default "bsc" has the state of "mpq". The next test has ranks whose weights differ.
        *[("digits/mlp", {"compression": "mpq"})] * FULL,
    ],
)
def test_same_bits_of_each_state(name, changes, run, tmp_path):
    """Steps 7 to 9 have the same bits again after the checkpoint of step 6."""
    changes = changes | {"train.steps": 9, "train.save_every": 6, "train.log_every": 1}
    run(name, changes)
    state, metrics = checkpoint(tmp_path, 9), lines(tmp_path)
    folder = next(tmp_path.glob("*"))
    shutil.rmtree(folder / "checkpoints/9")
    run(name, changes)
    assert "goes on from step 6 of 9" in (folder / "log.txt").read_text()
    assert lines(tmp_path) == metrics
    assert_same_bits(checkpoint(tmp_path, 9), state)


def test_exchanges_that_are_programs_of_their_own(run, tmp_path, monkeypatch):
    """With DiLoCo, a run has the bits of a step that is one program, also if it is continued between two exchanges."""
    changes = {"compression": "diloco", "compression.every": 3, "train.steps": 9, "train.save_every": 5}
    changes |= {"train.log_every": 1, "train.test_every": 0.001}
    ours, one = tmp_path / "ours", tmp_path / "one"
    run("digits/mlp", changes, runs=ours)
    shutil.rmtree(next(ours.glob("*/checkpoints/9")))
    results = run("digits/mlp", changes, runs=ours)
    assert "goes on from step 5 of 9" in next(ours.glob("*/log.txt")).read_text()
    for name in ("__call__", "programs"):
        monkeypatch.setattr(StepOfCenters, name, getattr(Step, name))
    # What one program sends is counted for each of its steps, also for those that don't exchange.
    assert run("digits/mlp", changes, runs=one)["bytes"] == 3 * results["bytes"]
    assert lines(ours) == lines(one)
    assert_same_bits(checkpoint(ours, 9), checkpoint(one, 9))


def test_other_ranks_and_bad_checkpoints(run, train, tmp_path, monkeypatch, refuses):
    small = {"model.hidden": "(16,)", "compression": "dgc-wm0", "train.save_every": 2}
    go = lambda steps, devices=2, **more: run("digits/mlp", small | {"train.steps": steps} | more, devices=devices)
    go(4)
    folder = next(tmp_path.glob("*"))
    saved = lambda: sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    assert saved() == [2, 4]

    def broken(*args):
        raise OSError("no space")

    # With half a checkpoint, the previous one is restored, here on 3 ranks with the sum of the residuals of 2. It stays
    # until there are two others that are whole.
    shutil.rmtree(folder / "checkpoints/4/d")
    shutil.copytree(folder / "checkpoints/4", tmp_path / "broken")
    before = checkpoint(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(train.Checkpoints, "_begin", broken)
        refuses(r"of step 5: no space; the last good one is that of step 2$", go, 5, **{"train.save_every": 5})
    assert go(5, **{"train.save_every": 5})["step"] == 5 and saved() == [2, 5]
    refuses(r"config\.train\.steps: expected at least 5, the step of .*, got 3", go, 3)
    shutil.rmtree(folder / "checkpoints/5")
    (tmp_path / "broken").rename(folder / "checkpoints/4")
    template = []
    restore = train.Checkpoints.restore
    monkeypatch.setattr(train.Checkpoints, "restore", lambda *a: template.append(restore(*a)) or template[-1])
    assert go(6, devices=3)["step"] == 6
    assert "checkpoint of step 4 can't be read" in (folder / "log.txt").read_text() and saved() == [4, 6]
    assert (folder / "checkpoints/4.unreadable").is_dir()  # a later start doesn't try it again
    assert len(jax.tree.leaves(before)) == len(jax.tree.leaves(template[0][1]))

    assert go(8, devices=3)["step"] == 8 and saved() == [6, 8]

    # Another config can't continue, or there is nothing to continue from.
    refuses(r"config\.train\.seed: the run in .* has 0, got 1; start another run", go, 8, **{"train.seed": 1})
    # Without metadata no array is read, so no read could still be running in another test.
    for step in saved():
        (folder / f"checkpoints/{step}/_METADATA").unlink()
    refuses(r"no checkpoint can be read \(.+\); to begin anew, remove", go, 10)


def test_processes_agree_on_a_checkpoint(train, tmp_path, monkeypatch, refuses):
    """They use the last one that all can read. One may not yet see the newest, and another may fail to read one."""
    tried = []

    def restore(path, template, comm):
        tried.append(path.name)
        return pathlib.Path(path, "state").read_text()

    monkeypatch.setattr(train.launch.cgx, "restore_state", restore)
    for step in "24":
        (tmp_path / step).mkdir()
        (tmp_path / step / "state").write_text(f"state {step}")
    quiet = [bytes(train.launch.LINE)]
    others = iter([[6], [True], [4], [False], [2], [True], quiet])  # what the other process answers
    comm = types.SimpleNamespace(allgather=lambda mine: [mine, *next(others)])
    said = []
    checkpoints = train.Checkpoints(tmp_path, train.launch.World(2, 0, 1, None, comm), said.append)
    assert checkpoints.restore("state") == (2, "state 2")
    assert tried == ["6", "4", "2"] and re.match(r"the checkpoint of step 6 can't be read \(.*No such file", said[0])
    assert said[1:] == ["the checkpoint of step 4 can't be read (another process can't read it): trying the one before"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4.unreadable"]
    # A host that doesn't see the folder: nothing is renamed, and nothing should be removed.
    others = iter([[0], [False], [0], [False], quiet])
    refuses(r"\(another process can't read it\); all hosts must see --runs$", checkpoints.restore, "state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4.unreadable"]
    (tmp_path / "2/state").unlink()
    others = iter([[0], [False], [0], [False], quiet])
    refuses(r"\(No such file or directory\); to begin anew, remove this folder$", checkpoints.restore, "state")


def test_a_process_that_does_not_see_the_folder_ends_a_save(train, tmp_path, monkeypatch, refuses):
    """Otherwise, it would wait for minutes. A process with the folder goes on at once."""
    checkpoints = importlib.import_module("checkpoints")
    monkeypatch.setattr(checkpoints, "SEEN", 0)
    checkpoints._wait(tmp_path)
    world = types.SimpleNamespace(comm=None, speaks=False, together=contextlib.nullcontext)
    words = r"can't save .* step 3: a process doesn't see .*; all hosts must see --runs"
    refuses(words, train.Checkpoints(tmp_path, world, print).save, 3, {})


def test_an_old_checkpoint_that_can_not_be_removed(run, tmp_path, monkeypatch):
    """The run goes on, and what is left of the checkpoint doesn't count as one."""
    monkeypatch.setattr(shutil, "rmtree", lambda *args, ignore_errors: None)
    run("digits/mlp", {"train.steps": 3, "train.save_every": 1})
    assert {"2", "3", "1.orbax-checkpoint-tmp"} == {path.name for path in tmp_path.glob("*/checkpoints/*")}


def test_other_data(run, train, tmp_path, refuses):
    """A run can't continue with it, and processes can't have it."""
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 25)
    changes = TINY | {"data": "text", "train.steps": 5, "data.files": f"{tmp_path}/*.txt"}
    go = lambda: run("text/gpt", changes, runs=tmp_path / "runs")
    go()
    (tmp_path / "a.txt").write_text("To be or not to be, that is the question. " * 25)
    refuses(r"data\.\w+\.checksum: the run in .* has \d+, got \d+; start another run", go)


def test_two_runs_in_a_folder(run, train, tmp_path, monkeypatch, refuses):
    """The second one ends before it writes anything."""
    module = sys.modules[train.RunFolder.__module__]
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    run("digits/mlp", {"train.steps": 2})
    folder = next(tmp_path.glob("*"))
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    with (folder / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refuses(f"{folder}: another process trains in this folder; .* --suffix=", run, "digits/mlp", {"train.steps": 3})
    assert before == {path: path.read_bytes() for path in folder.glob("*.*")}
    assert run("digits/mlp", {"train.steps": 3})["step"] == 3

    def wait(*args):  # until the other run ends, which has another seed
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"seed": 0', '"seed": 1'))

    monkeypatch.setattr(module.fcntl, "flock", wait)
    refuses(r"config\.train\.seed: the run in .* has 1, got 0", run, "digits/mlp", {"train.steps": 4})


def test_a_folder_whose_files_are_damaged(run, tmp_path, refuses):
    run("digits/mlp", {"train.steps": 2})
    folder = next(tmp_path.glob("*"))
    (folder / "metrics.jsonl").unlink()
    words = "the results of this run, which has ended, aren't"
    refuses(f"{folder}/metrics.jsonl: {words}", run, "digits/mlp", {"train.steps": 2})
    for name, text in ("metrics.jsonl", "\0\n"), ("config.json", ""):
        (folder / name).write_text(text)
        refuses(f"{folder}/{name}: .*; mend the file, or remove the folder", run, "digits/mlp", {"train.steps": 3})


def test_no_checkpoint_of_a_loss_that_is_not_finite(run, tmp_path, refuses):
    changes = {"schedule.rate": 1e9, "train.log_every": 500, "train.save_every": 5, "train.test_every": 9}
    refuses(r"step \d+: the loss is (nan|inf); try a lower config\.schedule\.rate", run, "digits/mlp", changes)
    for step in (path.name for path in tmp_path.glob("*/checkpoints/*")):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(checkpoint(tmp_path, step)) if x.dtype.kind == "f")


def test_processes_with_other_data(train):
    """All of them end, with the same line."""
    for mine, says in ((90, None), (80, r"process 0 has other data than process 1: train\.examples is 90 and 80; all")):
        others = iter([[90, 5], bytes(train.launch.LINE)])
        comm = types.SimpleNamespace(allgather=lambda given: [next(others), given])
        world = train.launch.World(2, 1, 1, None, comm)
        with pytest.raises(train.Wrong, match=says) if says else contextlib.nullcontext():
            train.check_same({"train.examples": mine, "train.checksum": 5}, world)


def test_speed_is_that_of_steps(run, train, tmp_path, monkeypatch):
    """The speed excludes compiling, tests and checkpoints. Here the clock ticks once between two readings."""
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
    often = {"train.log_every": 3, "train.save_every": 1, "train.test_every": 0.01}
    run("digits/mlp", often | {"train.steps": 7, "train.batch_size": 8}, devices=3)
    assert [line["examples_per_second"] for line in metrics(tmp_path) if "examples_per_second" in line] == [6.0] * 3

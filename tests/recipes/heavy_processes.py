"""Tests runs in several processes that continue with another number of processes and another launcher.

`make test-recipes` runs these tests.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import AS_ROOT, run
from started import free_port

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"
TRAIN = (RECIPES / "train.py",)
PROBE = pathlib.Path(__file__).with_name("full_probe.py")
LIMIT = 300  # seconds
PATH = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"


def start(before, steps, runs, *changes, script=TRAIN, **more):
    config = [f"--config={RECIPES}/configs/digits/mlp.py", "--compression=dgc-wm0", f"--runs={runs}"]
    line = [*before, *script, *config, f"--config.train.steps={steps}", *changes]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([str(word) for word in line], env=os.environ | more, **pipes)


def local(steps, runs, *changes, **more):
    return [start([sys.executable], steps, runs, "--devices=3", *changes, **more)]


def mpirun(steps, runs, *changes, script=TRAIN):
    pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
    line = [shutil.which("mpirun", path=PATH), "-n", "2", sys.executable, "-m", "mpi4py"]
    more = AS_ROOT | {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return [start(line, steps, runs, *changes, script=script, **more)]


def distributed(steps, runs, *changes, each=((), ()), script=TRAIN):
    """each: more changes for each process."""
    world = dict(script=script, JAX_COORDINATOR_ADDRESS=f"localhost:{free_port()}", JAX_NUM_PROCESSES="2")
    start_one = lambda i: start([sys.executable], steps, runs, *changes, *each[i], **world, JAX_PROCESS_ID=str(i))
    return [start_one(i) for i in range(2)]


def end(processes, status=0):
    for process in processes:
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == status, errors


def losses(runs):
    lines = map(json.loads, next(runs.glob("*/metrics.jsonl")).read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_mpirun_distributed_and_local(train, tmp_path):
    end(mpirun(20, tmp_path))
    end(distributed(40, tmp_path))
    end(local(60, tmp_path))
    log = (tmp_path / "digits-mlp-dgc-wm0/log.txt").read_text()
    assert "2 ranks, 20 steps" in log and "2 ranks, goes on from step 20 of 40" in log
    assert "3 ranks, goes on from step 40 of 60" in log
    found = list(losses(tmp_path).values())
    assert len(found) == 3 and found[-1] < found[0]


def test_the_line_for_several_hosts(train, tmp_path):
    """Every option of the page's line is one of this mpirun, with slots of this host and a smaller network."""
    pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
    page = (RECIPES.parent / "docs/from-dgc.md").read_text()
    (line,) = re.findall(r"^mpirun -np 32 .*?(?=\n```)", page, re.DOTALL | re.MULTILINE)
    here = re.sub(r"-np 32 -H \S+", "-np 4 -H localhost:4", line.replace("\\\n", " "))
    here = here.replace("imagenet/resnet50", "cifar/resnet20")
    changes = "data=synthetic", "model.depth=8", "train.batch_size=2", "train.steps=2", "train.test_examples=2"
    words = [*shlex.split(here), *(f"--config.{change}" for change in changes), f"--runs={tmp_path}"]
    env = AS_ROOT | dict(PATH=PATH, LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
    run(*words, env=env, cwd=RECIPES.parent)
    assert "4 ranks, 2 steps" in next(tmp_path.glob("cifar-resnet20-wm0/log.txt")).read_text()


def test_the_loss_of_ranks_that_train_on_their_own(train, tmp_path):
    """With DiLoCo, it is the mean over the ranks of all processes."""
    changes = "--compression=diloco", "--config.compression.every=10", "--config.train.log_every=10"
    end(distributed(20, tmp_path / "two", *changes))
    end([start([sys.executable], 20, tmp_path / "one", "--devices=2", *changes)])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_an_error_of_one_process_ends_all(train, tmp_path):
    """No process waits minutes for the one that has failed, which says why in one line."""
    lines = lambda process: process.communicate(timeout=LIMIT)[1].splitlines()
    config = f"--config={RECIPES}/configs/text/gpt.py"
    for process in distributed(20, tmp_path, config, each=[(), (f"--config.data.files={tmp_path}/none",)]):
        assert lines(process)[-1].startswith("train.py: config.data.files: ") and process.returncode == 1
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text of which one process has more. " * 1000)
    files = [[f"--config.data.files={tmp_path}/{name}.txt"] for name in ("[ab]", "a")]
    for process in distributed(20, tmp_path, config, each=files):
        assert lines(process)[-1].startswith("train.py: config.data: process 0 has other data than process 1: ")
        assert process.returncode == 1
    folder = tmp_path / "digits-mlp-dgc-wm0"
    folder.mkdir()
    (folder / "log.txt").symlink_to("/dev/full")  # the disk of the process that writes is full
    first, second = distributed(20, tmp_path)
    full = f"train.py: [Errno 28] No space left on device: '{folder}/log.txt'"
    assert lines(first)[-1] == full and first.returncode == 1
    assert lines(second) and second.returncode


@pytest.mark.parametrize("begin", [local, mpirun, distributed])
def test_bad_checkpoints(train, tmp_path, begin):
    """A full disk ends all processes with one line. Of checkpoints, the last that can be read counts."""
    folder = tmp_path / "digits-mlp-dgc-wm0/checkpoints"
    saved = lambda: sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    often = "--config.train.save_every=10"
    end(begin(20, tmp_path, often))
    for place, more in ("Checkpoints", r" \(it has up to [\d,]+ bytes\)"), ("PyTreeCheckpointHandler", ""):
        why = f"can't save the checkpoint of step 25: File too large{more}; the last good one is that of step 20"
        for process in begin(25, tmp_path, often, script=(PROBE, place)):
            said = process.communicate(timeout=LIMIT)[1].rstrip("\0")  # mpirun ends its output with \0
            said = re.sub(r"^-{9,}\n.*?^-{9,}\n", "", said, flags=re.DOTALL | re.MULTILINE)  # and has a notice
            # Each process says it. mpirun ends the others when one ends, maybe before they say it.
            assert re.fullmatch(rf"(train\.py: {folder}: {why}\n){{1,2}}", said) and process.returncode == 1
        assert saved() == [10, 20]
    for part in (folder / "20").iterdir():
        if part.is_dir():  # those of the arrays
            shutil.rmtree(part)
    end(begin(25, tmp_path, often))
    log = (folder.parent / "log.txt").read_text()
    assert re.search(r"the checkpoint of step 20 can't be read \(.+\): trying the one before\n", log)
    assert "goes on from step 10 of 25" in log and saved() == [20, 25]


@pytest.mark.parametrize(
    "begin, number",
    [(local, signal.SIGINT), (mpirun, signal.SIGUSR1), (distributed, signal.SIGINT), (distributed, signal.SIGTERM)],
)
def test_a_signal_ends_all_processes_after_the_same_step(train, tmp_path, begin, number):
    """The run that goes on has the losses, to the bit, of one that was not interrupted."""
    changes = "--config.train.log_every=1", "--config.train.num_epochs=600"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    processes = begin(12_000, parts, *changes)
    until = time.monotonic() + LIMIT
    while not (list(parts.glob("*/metrics.jsonl")) and losses(parts)):
        assert time.monotonic() < until and processes[-1].poll() is None
        time.sleep(0.1)
    processes[-1].send_signal(number)  # in a world of jax.distributed only one of two
    end(processes, status=1)
    last = next(parts.glob("*/log.txt")).read_text().splitlines()[-1]
    step = int(re.search(r"interrupted: step (\d+) of 12000 is saved", last)[1])
    saved = [step]
    if number == signal.SIGTERM:  # also if it comes before the first step of a run that continues
        processes, log = begin(12_000, parts, *changes), next(parts.glob("*/log.txt"))
        while f"goes on from step {step} of" not in log.read_text():
            assert time.monotonic() < until and processes[-1].poll() is None
            time.sleep(0.02)
        processes[-1].send_signal(number)
        end(processes, status=1)
        step = int(re.findall(r"interrupted: step (\d+) of 12000 is saved", log.read_text())[-1])
        assert step > saved[0]
        saved.append(step)
    assert list(losses(parts)) == [*range(1, step + 1)]
    assert sorted(int(path.name) for path in parts.glob("*/checkpoints/*")) == saved
    end(begin(step + 5, parts, *changes))
    end(begin(step + 5, whole, *changes))
    assert f"goes on from step {step} of {step + 5}" in next(parts.glob("*/log.txt")).read_text()
    assert losses(parts) == losses(whole)

"""Tests runs in several processes that continue with another number of processes and another launcher.

`make test-recipes` runs these tests.
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"
LIMIT = 300  # seconds


def start(before, steps, runs, **more):
    config = [f"--config={RECIPES}/configs/digits/mlp.py", "--compression=dgc-wm0", f"--runs={runs}", "--devices=3"]
    line = [*before, RECIPES / "train.py", *config, f"--config.train.steps={steps}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([str(word) for word in line], env=os.environ | more, **pipes)


def end(*processes):
    for process in processes:
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, errors


def test_mpirun_distributed_and_local(train, tmp_path):
    pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    mpirun = [shutil.which("mpirun", path=path), "-n", "2", sys.executable, "-m", "mpi4py"]
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    end(start(mpirun, 20, tmp_path, **root))
    with socket.socket() as port:
        port.bind(("localhost", 0))
        address = f"localhost:{port.getsockname()[1]}"
    world = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2")
    end(*(start([sys.executable], 40, tmp_path, **world, JAX_PROCESS_ID=str(i)) for i in range(2)))
    end(start([sys.executable], 60, tmp_path))
    log = (tmp_path / "digits-mlp-dgc-wm0/log.txt").read_text()
    assert "2 ranks, 20 steps" in log and "2 ranks, goes on from step 20 of 40" in log
    assert "3 ranks, goes on from step 40 of 60" in log
    lines = map(json.loads, (tmp_path / "digits-mlp-dgc-wm0/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]

"""Tests recipes/launching: `make test-clusters`.

- slurm.sh runs on a cluster of one node, which the test makes. That needs root, and Debian's packages slurm-wlm and
  munge. Four tasks train. One of them is killed, which ends the job, and the requeued job goes on from its last
  checkpoint.
- The job of jobset.yaml is as Kubernetes' schema wants it, and the command of its container runs in two processes.
"""

import contextlib
import importlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from helpers import run
from started import free_port

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue"
LIMIT = 300  # seconds

MISSING = [name for name in PROGRAMS if not shutil.which(name)]

# The script asks for four GPUs and 32 processors. The node says that it has them.
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=20
NodeName=localhost CPUs=32 Gres=gpu:4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Starts a cluster. Returns a function that runs one of its commands."""
    for name in ("munge", "state", "spool"):
        (tmp_path / name).mkdir(mode=0o755)
    key = tmp_path / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (tmp_path / "slurm.conf").write_text(CONFIG.format(controller=free_port(), daemon=free_port(), folder=tmp_path))
    for number in range(4):
        (tmp_path / f"gpu{number}").touch()
    (tmp_path / "gres.conf").write_text(f"NodeName=localhost Name=gpu File={tmp_path}/gpu[0-3]\n")
    (tmp_path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    files = {name: tmp_path / f"munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", *(f"--{k}={v}" for k, v in files.items())]
    with contextlib.ExitStack() as stack:
        for words in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            log = stack.enter_context((tmp_path / f"{words[0]}.log").open("wb"))
            daemon = subprocess.Popen(words, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            time.sleep(1)
        yield lambda *words: run(*words, timeout=60).stdout.strip()


def wait(condition, path):
    end = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < end, path.read_text() if path.exists() else "the job has not begun"
        time.sleep(0.5)
    return found


def tasks(job):
    """Returns {number of a task: process id} of the tasks of a job."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pairs = (each.partition("=") for each in (folder / "environ").read_text(errors="replace").split("\0"))
            variables = {name: value for name, _, value in pairs}
            if variables.get("SLURM_JOB_ID") == job and "recipes/train.py" in (folder / "cmdline").read_text():
                found[variables.get("SLURM_PROCID")] = int(folder.name)
    return found


@pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason="needs root, and apt-get install slurm-wlm munge")
def test_a_killed_task_and_a_requeue(slurm, tmp_path, monkeypatch):
    for name, value in dict(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false").items():
        monkeypatch.setenv(name, value)
    changes = "train.steps=400", "train.save_every=10", "train.log_every=10", "data.synthetic=True"
    train = ["--config=recipes/configs/digits/mlp.py", "--compression=dgc-wm0", f"--runs={tmp_path}/runs"]
    train += [f"--config.{change}" for change in changes]
    log = tmp_path / "job.log"
    script = f"--chdir={ROOT}", "--nodes=1", f"--output={log}", "--parsable", "recipes/launching/slurm.sh"
    job = slurm("sbatch", *script, *train)
    state = lambda: dict(word.partition("=")[::2] for word in slurm("scontrol", "show", "job", job).split())["JobState"]
    folder = tmp_path / "runs/digits-mlp-dgc-wm0"
    saved = lambda: any(each.name.isdigit() and int(each.name) >= 20 for each in (folder / "checkpoints").glob("*"))
    wait(saved, log)
    running = tasks(job)
    assert {*"0123"} <= running.keys()
    os.kill(running["2"], signal.SIGKILL)
    wait(lambda: state() == "FAILED", log)
    assert not tasks(job).keys() & {*"0123"}  # --kill-on-bad-exit has ended the others
    slurm("scontrol", "requeue", job)
    wait(lambda: state() == "COMPLETED", log)
    text = log.read_text()
    assert "4 ranks, goes on from step" in text and text.rstrip().splitlines()[-1].startswith("next: "), text
    assert max(json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()) == 400


def test_the_pods_of_kubernetes(tmp_path):
    (ranks,) = yaml.safe_load((ROOT / "recipes/launching/jobset.yaml").read_text())["spec"]["replicatedJobs"]
    versions = dict(apiVersion="batch/v1", kind="Job", metadata={"name": "jaxcgx-ranks-0"})
    validate = importlib.import_module("kubernetes_validate").validate
    validate(versions | {"spec": ranks["template"]["spec"]}, "1.30", strict=True)
    (container,) = ranks["template"]["spec"]["template"]["spec"]["containers"]
    python, *words = [word.replace("/shared", str(tmp_path)) for word in container["command"]]
    assert python == "python"
    small = "data=synthetic", "model.depth=8", "train.batch_size=8", "train.steps=4", "train.test_examples=8"
    words += [f"--config.{change}" for change in small]
    values = {each["name"]: each.get("value") for each in container["env"]}
    address = f"localhost:{free_port()}"  # in place of the first pod's name
    values |= dict(JAX_COORDINATOR_ADDRESS=address, JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
    each = [os.environ | values | {"JAX_PROCESS_ID": str(i)} for i in range(int(values["JAX_NUM_PROCESSES"]))]
    pods = [subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env) for env in each]
    assert [pod.wait(LIMIT) for pod in pods] == [0, 0]
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 4

"""Tests the command itself, in a separate process."""

import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import tomllib
import types

import pytest
from helpers import AS_ROOT, load_script, run

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CONFIG = f"--config={RECIPES}/configs/digits/mlp.py"


def test_a_first_run(train, tmp_path):
    """The run ends with accuracy, bytes, a plot and the next command."""
    arguments = CONFIG, "--compression=dgc-wm0", "--config.train.steps=20", f"--runs={tmp_path}"
    done = run(sys.executable, RECIPES / "train.py", *arguments)
    first, few, accuracy, sent, files, following = done.stdout.splitlines()
    assert first == "digits-mlp-dgc-wm0: digits, 33,738 parameters, 4 ranks, 20 steps"
    assert few.startswith("20 steps are few for a ratio of 0.001 without a warm-up: --compression=dgc")
    assert float(accuracy.split()[5].rstrip("%,")) > 60
    numbers = [int(word.replace(",", "")) for word in sent.split() if word[0].isdigit()]
    assert numbers[1] > 50 * numbers[0]
    plot = tmp_path / "digits-mlp-dgc-wm0/plot.png"
    assert plot.read_bytes().startswith(b"\x89PNG") and str(plot) in files
    left = f"{CONFIG} --config.train.steps=20 --runs={tmp_path}"
    prompt, python, script, *words = shlex.split(following)
    assert prompt == "next:" and following.endswith(f"train.py {left} --compression=none")
    assert shutil.which(python) and (RECIPES / "train.py").samefile(script)
    assert train.config.parse(words).config.train.steps == 20


def test_benchmark(train, monkeypatch):
    options = "--ways", "none", "cgx4", "--turns=2", "--steps=1", "--devices=2"
    done = run(sys.executable, RECIPES / "benchmark.py", CONFIG, *options)
    head, none, cgx4, last = (line.split() for line in done.stdout.splitlines())
    assert head[:4] == ["way", "ms", "a", "step"] and none[0] == "none" and cgx4[0] == "cgx4"
    assert float(none[-1]) > 4 * float(cgx4[-1]) > 0
    assert last[:2] == ["2", "ranks;"] and float(last[-2].replace(",", "")) > 0
    with pytest.raises(SystemExit) as ended:
        load_script(RECIPES / "benchmark.py", monkeypatch).main(["--config=none.py", "--turns=0"])
    assert ended.value.code.startswith("benchmark.py: --turns, --steps: expected a turns of at least 1, got 0")


def test_errors_are_one_line(train, tmp_path, monkeypatch):
    def refuses(starts, *arguments):
        with pytest.raises(SystemExit) as ended:
            train.main([CONFIG, *arguments])
        said = ended.value.code
        assert said.startswith(f"train.py: {starts}") and "\n" not in said, said

    monkeypatch.setattr(train.launch.cgx, "keep_pages", lambda: None)
    refuses("--launch=distributed: jax.distributed.initialize() must", "--launch=distributed")
    with monkeypatch.context() as patch:
        patch.setenv("JAX_NUM_PROCESSES", "x")
        refuses("--launch=distributed: invalid literal", "--launch=distributed")
    monkeypatch.setattr(train.launch, "start", lambda *args: train.launch.World(1, 0, 1, None, None))
    refuses("config.train.stepz: there is no such key", "--config.train.stepz=1")
    refuses("--suffix: it is given twice", "--suffix=a", "--suffix=b")
    refuses("--configs.train.steps: it is given", "--config.train.steps=1", "--configs.train.steps=2")
    refuses("--suffix: expected the end of a folder's name, got '../x'", "--suffix=../x")


def test_devices_of_several_processes(train, refuses):
    """Their number of ranks is the number of processes or of devices."""
    for how in ("mpi", "distributed"):
        refuses(f"--devices: expected --launch=local, got {how}", train.launch.start, how, 2)


def test_files_for_clusters(train):
    """train.py and the shell accept their commands, and their extras exist."""
    import yaml

    jobset = yaml.safe_load((RECIPES / "launching/jobset.yaml").read_text())
    pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    python, script, *arguments = container["command"]
    assert (python, (ROOT / script).is_file()) == ("python", True)
    found = train.config.parse([each.replace("=recipes", f"={RECIPES}") for each in arguments])
    assert (found.launch, found.name) == ("distributed", "cifar-resnet20-dgc")
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["JAX_NUM_PROCESSES"] == str(pods["parallelism"]) == str(pods["completions"])
    name, job = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-{job}-0-0.{name}:")
    run("bash", "-n", RECIPES / "launching/slurm.sh")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"\.whl\)\[(.*?)\]", (ROOT / "Dockerfile").read_text()):
        assert set(names.split(",")) <= extras.keys()
    json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())


def test_hosts(tmp_path):
    """mpirun takes the example of a hostfile, here of one host, and starts as many processes as it has slots."""
    pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
    first = [line for line in (RECIPES / "launching/hosts").read_text().splitlines() if "node2" not in line]
    (tmp_path / "hosts").write_text("\n".join(first).replace("node1", "localhost"))
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    line = [shutil.which("mpirun", path=path), "--hostfile", tmp_path / "hosts", "--bind-to", "none", "-n"]
    start = lambda ranks: run(*line, ranks, "sh", "-c", "echo $OMPI_COMM_WORLD_RANK", env=AS_ROOT, status=None)
    assert sorted(start(4).stdout.split()) == list("0123")
    assert "not enough slots" in start(5).stderr


def with_ray(monkeypatch, **functions):
    """Returns ray_train.py with a stand-in for Ray."""
    errors = {name: type(name, (Exception,), {}) for name in ("RayActorError", "RayError", "RayTaskError")}
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(**functions))
    monkeypatch.setitem(sys.modules, "ray.exceptions", types.SimpleNamespace(**errors))
    return load_script(RECIPES / "ray_train.py", monkeypatch)


def test_where_ray_starts(train, monkeypatch):
    """Only RAY_ADDRESS names a cluster that already runs. Here a stand-in for Ray notes what it is told."""
    told = []

    def init(**options):
        told.append(options)
        raise KeyboardInterrupt

    script = with_ray(monkeypatch, init=init)
    for address in "", "host:6379":
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(KeyboardInterrupt):
            script.main(["--workers=3", CONFIG])
    for wrong, says in (("--workers=0", "--workers: expected a positive"), ("--launch=mpi", "--launch: expected none")):
        with pytest.raises(script.Wrong, match=says):
            script.main(["--workers=3", wrong, CONFIG])
    here, there = told
    assert (here["address"], here["num_cpus"]) == ("local", 3)
    assert not {"address", "num_cpus"} & there.keys()  # Ray reads the variable, and a cluster has its own CPUs


def test_ray_without_room_for_all_workers(train, monkeypatch, capsys):
    """As many train as Ray has room for. Here a stand-in for Ray starts two."""
    kept = []

    def remote(**options):
        make = lambda: types.SimpleNamespace(find=types.SimpleNamespace(remote=lambda: ("host:1", 7)), train=train_one)
        train_one = types.SimpleNamespace(remote=lambda arguments, folder, world: kept.append(world))
        return lambda worker: types.SimpleNamespace(remote=make)

    fake = dict(init=lambda **options: None, remote=remote, get=lambda calls: calls, kill=lambda worker: None)
    fake |= dict(wait=lambda calls, num_returns, timeout: (calls[:2], calls[2:]))
    fake |= dict(cluster_resources=lambda: {"CPU": 2}, available_resources=dict)
    with_ray(monkeypatch, **fake).main(["--workers=3", CONFIG])
    assert "Ray has room for only 2 of 3 workers\n2 workers: processes 7 7\n" in capsys.readouterr().out
    assert [world["JAX_NUM_PROCESSES"] for world in kept] == ["2", "2"]

"""The commands of the pages, as printed, on a copy of the repository: `make test-commands`.

They get the environment of a new account and an environment of Python that has nothing but what the commands install.
Those that install something come first, in the order of the pages, then all others. What `NOT_RUN` names is left out.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import commands
import numpy as np
import pytest
from commands import ROOT

LIMIT = 1800  # seconds
ROOTS = {  # as docs/mpi.md says
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def runnable():
    """{text: param} of every script, without the lines that aren't run."""
    found = {}
    for script in commands.scripts():
        kept = [line for line in script.lines if not commands.why_not_run(commands.command_of(line))]
        if any(map(commands.command_of, kept)):
            found.setdefault("\n".join(kept), pytest.param("\n".join(kept), id=str(script)))
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("pip")))


def others():
    """{text: param} of every command that isn't run. The report says why."""
    shown = {" ".join(words): commands.why_not_run(words) for each in commands.scripts() for words in each.commands}
    return {text: pytest.param(text, marks=pytest.mark.skip(reason=why)) for text, why in shown.items() if why}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The folder of a copy of the repository, and the environment."""
    home = tmp_path_factory.mktemp("home")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folder = home / "jaxcgx"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)  # `make check` asks git which files there are
    write_readers_files(folder)
    python = pathlib.Path(sys.base_prefix) / "bin/python3"
    subprocess.run([python, "-m", "venv", home / "venv"], check=True)
    path = f"{home}/venv/bin:{python.parent}:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    cache = {"PIP_CACHE_DIR": str(pathlib.Path("~/.cache/pip").expanduser())}  # downloads are no part of the test
    pips = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return folder, cache | pips | ROOTS | {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"}


def write_readers_files(folder):
    """The files that commands take from the reader: train.py is docs/mpi.md's program."""
    program = re.search(r"`train\.py`:\n\n```python\n(.*?)```", (ROOT / "docs/mpi.md").read_text(), re.DOTALL)
    (folder / "train.py").write_text(program[1])
    (folder / "shapes.json").write_text(json.dumps({"block/0/kernel": [768, 3072]}))
    np.savez(folder / "grads.npz", **{"block/0/kernel": np.random.default_rng(0).normal(size=(64, 128))})


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("text", [*runnable().values(), *others().values()])
def test_it_works_as_printed(text, copy):
    folder, env = copy
    line = ["bash", "-e", "-c", text]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"

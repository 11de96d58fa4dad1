"""Runs the commands of the pages, as printed, on a copy of the repository: `make test-commands`.

The commands get the environment of a new account, and a Python environment that has only what they install themselves.
Commands that install something come first, in the order of the pages, then all others. Commands in `NOT_RUN` are left
out.
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
import pages
import pytest
from commands import ROOT

LIMIT = 1800  # seconds
ROOTS = {  # from docs/mpi.md
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
READERS_FILES = "train.py", "centers.py", "shapes.json", "grads.npz"


def runnable():
    """Returns {text: param} of every script, without the lines that aren't run."""
    found = {}
    for script in commands.scripts():
        kept = [line for line in script.lines if not any(map(commands.why_not_run, commands.commands_of(line)))]
        if any(map(commands.commands_of, kept)):
            found.setdefault("\n".join(kept), pytest.param("\n".join(kept), id=str(script)))
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("pip")))


def others():
    """Returns {text: param} of every command that isn't run. The report shows the reason."""
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
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)  # `make check` gets the list of files from git
    python = pathlib.Path(sys.base_prefix) / "bin/python3"
    subprocess.run([python, "-m", "venv", home / "venv"], check=True)
    path = (
        # Without nvcc, because compiling the CUDA half takes minutes.
        f"{home}/venv/bin:{python.parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    cache = {"PIP_CACHE_DIR": str(pathlib.Path("~/.cache/pip").expanduser())}  # downloads are not tested
    pips = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return folder, cache | pips | ROOTS | {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"}


def write_readers_files(folder):
    """Writes the files that the reader of the pages has: train.py is the program in docs/mpi.md.

    centers.py is that in docs/two-centers.md.
    """
    (folder / "train.py").write_text(pages.programs("docs/mpi")[0])
    (folder / "centers.py").write_text(pages.programs("docs/two-centers")[-1])
    (folder / "shapes.json").write_text(json.dumps({"block/0/kernel": [768, 3072]}))
    np.savez(folder / "grads.npz", **{"block/0/kernel": np.ones((64, 128), np.float32)})


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("text", [*runnable().values(), *others().values()])
def test_it_works_as_printed(text, copy):
    folder, env = copy
    if not text.startswith("make"):  # a check of the checkout would find fault with them
        write_readers_files(folder)
    # The shell's `wait` forgets how processes in the background end.
    each = "& pids+=($!); done; for pid in ${pids[@]}; do wait $pid; done"
    line = ["bash", "-e", "-c", re.sub(r"&\s*done; wait", lambda _: each, text)]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT)
    for name in READERS_FILES:
        (folder / name).unlink(missing_ok=True)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"

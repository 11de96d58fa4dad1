"""Runs the commands of the pages, as printed, on a copy of the repository: `make test-commands`.

The commands get the environment of a new account, and a Python environment with what README's first installation and
those of their own page install, for a program what its docstring says. Pages that install the same share one. Commands
in `NOT_RUN` are left out. benchmarks/results/commands.md lists those that worked when they last ran.
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import commands
import numpy as np
import pages
import pytest
from commands import ROOT
from helpers import AS_ROOT, run

from jaxcgx.report import results

LIMIT = 1800  # seconds
ROOTS = AS_ROOT | {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}  # from docs/mpi.md
READERS_FILES = "train.py", "centers.py", "shapes.json", "grads.npz"
RESULTS = ROOT / "benchmarks/results/commands.json"


def kept(script):
    """Returns the lines of a script that are run, as one text; "" if none is a command."""
    lines = [line for line in script.lines if not any(map(commands.why_not_run, commands.commands_of(line)))]
    return "\n".join(lines) if any(map(commands.commands_of, lines)) else ""


def installations(page):
    """Returns the commands that make the Python environment of a page, in their order."""
    first = next(script for script in commands.of_page(ROOT / "README.md") if script.text.startswith("pip install"))
    scripts = [first] * (page in commands.PAGES) + commands.of_page(page)
    lines = [line for script in scripts for line in kept(script).splitlines() if line.startswith("pip ")]
    return tuple(dict.fromkeys(lines))


def runnable():
    """Returns a param (installations, text) for every script, without the lines that aren't run."""
    found = {}
    for script in commands.scripts():
        if text := kept(script):
            # make has an environment of its own.
            made_by = () if text.startswith("make") else installations(script.page)
            found.setdefault((made_by, text), pytest.param(made_by, text, id=str(script)))
    return list(found.values())


def others():
    """Returns a param for every command that isn't run. The report shows the reason."""
    shown = {" ".join(words): commands.why_not_run(words) for each in commands.scripts() for words in each.commands}
    return [pytest.param((), text, id=text, marks=pytest.mark.skip(reason=why)) for text, why in shown.items() if why]


class Copy:
    """A copy of the repository in the home of a new account, with the environments that its commands made."""

    def __init__(self, home):
        self.home, self.folder = home, home / "jaxcgx"
        self.environments = {}  # {installations: folder}
        self.worked = {}  # {(installations, text): whether it did}
        listed = run("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        run("git", "init", "-q", cwd=self.folder)
        # `make check` gets the list of files from git.
        run("git", "add", "-A", cwd=self.folder)

    def run(self, text, environment):
        """Runs a script, with the Python of an environment if it isn't None."""
        python = pathlib.Path(sys.base_prefix) / "bin"
        # Without nvcc, because compiling the CUDA half takes minutes.
        path = [*([] if environment is None else [environment / "bin"]), python, "/usr/sbin:/usr/bin:/sbin:/bin"]
        # Downloads are not tested, so pip and npm keep the settings with which they work here.
        cache = {"PIP_CACHE_DIR": str(pathlib.Path("~/.cache/pip").expanduser())}
        settings = ("PIP_", "NODE_EXTRA_CA_CERTS")
        downloads = {name: value for name, value in os.environ.items() if name.startswith(settings)}
        env = cache | downloads | ROOTS | {"HOME": str(self.home), "PATH": ":".join(map(str, path)), "LANG": "C.UTF-8"}
        # The shell's `wait` forgets how processes in the background end.
        each = "& pids+=($!); done; for pid in ${pids[@]}; do wait $pid; done"
        line = ["bash", "-e", "-c", re.sub(r"&\s*done; wait", lambda _: each, text)]
        with tempfile.TemporaryFile("w+") as log:
            bash = subprocess.Popen(line, cwd=self.folder, env=env, stdout=log, stderr=log, process_group=0)
            try:
                code = bash.wait(LIMIT)
            finally:
                with contextlib.suppress(ProcessLookupError):  # ends what the script has left in the background
                    os.killpg(bash.pid, signal.SIGKILL)
            log.seek(0)
            assert code == 0, f"{text}\n{log.read()[-6000:]}"

    def environment(self, made_by):
        """Returns the folder of the environment that some commands make; None without commands."""
        if made_by and made_by not in self.environments:
            folder = self.home / f"venv{len(self.environments)}"
            run(pathlib.Path(sys.base_prefix) / "bin/python3", "-m", "venv", folder)
            self.run("\n".join(made_by), folder)
            self.environments[made_by] = folder
        return self.environments.get(made_by)


def write_report(worked):
    """Writes which commands worked, and how many others there are for each reason.

    `worked` is {(installations, text): whether it did} of this run. Of others, it keeps what the last run wrote.
    """
    before = results.read(RESULTS)["rows"] if RESULTS.exists() else []
    known = {(row["environment"], row["command"]): True for row in before}
    known |= {("; ".join(made_by), text): found for (made_by, text), found in worked.items()}
    found = [("; ".join(param.values[0]), param.values[1], str(param.id).partition(":")[0]) for param in runnable()]
    rows = [dict(zip(("environment", "command", "page"), each)) for each in found if known.get(each[:2])]
    reasons = collections.Counter(param.marks[0].kwargs["reason"] for param in others())
    not_run = [{"commands": count, "reason": reason} for reason, count in reasons.most_common()]
    data = results.origin("make test-commands") | {"rows": rows, "not_run": not_run}
    results.write(RESULTS, data)
    lines = [f"Made by `make test-commands` on {data['date']}: {data['cpu']}, {data['threads']} threads.", ""]
    lines += [f"{len(rows)} of {len(runnable())} commands and blocks of commands work as printed.", ""]
    for environment in dict.fromkeys(row["environment"] for row in rows):
        lines += [f"In an environment with `{environment}`:" if environment else "In make's environment:", ""]
        lines += ["| command | first on |", "| --- | --- |"]
        for row in rows:
            if row["environment"] == environment:
                command = "; ".join(row["command"].splitlines()).replace("|", r"\|")
                lines.append(f"| `{command}` | {row['page']} |")
        lines.append("")
    lines += ["Commands that are not run, because each", "", "| reason | commands |", "| --- | ---: |"]
    lines += [f"| {row['reason']} | {row['commands']} |" for row in not_run]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    made = Copy(tmp_path_factory.mktemp("home"))
    yield made
    write_report(made.worked)


def write_readers_files(folder, text):
    """Writes the files that the reader of the pages has, for a script.

    train.py is the program in docs/mpi.md for mpirun, else those of docs/first-step.md. centers.py is that in
    docs/two-centers.md.
    """
    programs = pages.programs("docs/mpi")[:1] if "mpirun" in text else pages.programs("docs/first-step")
    (folder / "train.py").write_text("\n".join(programs))
    (folder / "centers.py").write_text(pages.programs("docs/two-centers")[-1])
    (folder / "shapes.json").write_text(json.dumps({"block/0/kernel": [768, 3072]}))
    np.savez(folder / "grads.npz", **{"block/0/kernel": np.ones((64, 128), np.float32)})


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("made_by, text", [*runnable(), *others()])
def test_it_works_as_printed(made_by, text, copy):
    copy.worked[made_by, text] = False
    environment = copy.environment(made_by)
    if rest := "\n".join(line for line in text.splitlines() if line not in made_by):
        if not rest.startswith("make"):  # a check of the checkout would find fault with them
            write_readers_files(copy.folder, rest)
        copy.run(rest, environment)
        for name in READERS_FILES:
            (copy.folder / name).unlink(missing_ok=True)
    copy.worked[made_by, text] = True

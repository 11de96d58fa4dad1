"""Lets ranks of an older commit exchange with today's, over Tcp, over MPI and through shared memory: `make test-old`.

If both have the same version of a protocol, every rank must get the numbers that it gets among today's ranks alone.
Otherwise every rank must get an error. Writes benchmarks/results/old.json and a table next to it.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import matrix

import cuda

sys.path.append(str(matrix.ROOT / "tests"))
from started import free_port

COMMIT = "cd960b3a"  # the last one before training was rebuilt
RANKS, LIMIT = 3, 600  # seconds
RANK = pathlib.Path(__file__).with_name("old_rank.py")
PROTOCOLS = {  # where each one has its version
    "Tcp": [("jaxcgx/native/meeting.py", "MAGIC = (.*)"), ("xla_ffi/tcp/net.cc", "kMessage = (.*)")],
    "MPI": [("xla_ffi/shm/segment.cc", "kMagic = (.*)")],
}


def install(folder, commit):
    """Builds a commit, unless it is built. Returns the Python of an environment that has it."""
    source = folder / "source"
    if not (folder / "env").exists():
        print(f"== {commit}: building", flush=True)
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        matrix.run(f"git archive {commit} | tar -x -C '{source}'", shell=True, cwd=matrix.ROOT, check=True)
        without = "--config-settings=cmake.define.JAXCGX_CUDA=OFF"
        matrix.pip(sys.executable, "wheel", source, "--no-deps", "--wheel-dir", folder, without)
        cuda.environment(folder, next(folder.glob("*.whl")))
    return folder / "env/bin/python"


def versions(over, folder):
    return [re.search(pattern, (folder / file).read_text())[1] for file, pattern in PROTOCOLS[over]]


def exchange(over, pythons):
    """Returns {call: digest or error} of each rank, and the packages that the ranks have imported."""
    with tempfile.TemporaryDirectory() as folder:
        if over == "Tcp":
            job = ["Tcp", f"127.0.0.1:{free_port()}"]
            commands = [[p, "-P", RANK, folder, *job, rank, len(pythons)] for rank, p in enumerate(pythons)]
        else:
            each = [word for python in pythons for word in (":", "-n", 1, python, "-P", RANK, folder, "MPI")]
            commands = [[matrix.ROOT / ".venv/bin/mpirun", *each[1:]]]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        running = [subprocess.Popen(list(map(str, words)), env=environment) for words in commands]
        try:
            for process in running:
                process.wait(LIMIT)
        finally:
            for process in running:
                process.kill()
        said = [json.loads(pathlib.Path(folder, f"{rank}.json").read_text()) for rank in range(len(pythons))]
    return [each["found"] for each in said], [each["path"] for each in said]


def compare(found, expected, same):
    """Returns a row of the table: the calls of a job, next to those of today's ranks alone.

    The ranks of MPI also compare the names of functions and their arguments, which may change within a version.
    """
    differ = {
        name: [ranks[name] for ranks in found]
        for name in expected[0]
        if any(ranks[name] != wanted[name] or "Error: " in wanted[name] for ranks, wanted in zip(found, expected))
    }
    refused = {
        name: said[0].strip().splitlines()[-1]
        for name, said in differ.items()
        if all("Error: " in each for each in said) and (name == "compared mean" or not same)
    }
    return dict(
        calls=len(expected[0]),
        equal=len(expected[0]) - len(differ),
        refused=[f"{list(refused.values()).count(why)} calls: {why}" for why in dict.fromkeys(refused.values())],
        wrong=[f"{name}: {said}" for name, said in differ.items() if name not in refused],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=COMMIT)
    commit = parser.parse_args().commit
    if not matrix.output("git", "-C", matrix.ROOT, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        print(f"old: SKIPPED: this clone has no commit {commit}; `git fetch --unshallow` fetches it")
        return
    folder = matrix.WORK / f"old-{commit}"
    old, rows = install(folder, commit), []
    for over in PROTOCOLS:
        same = versions(over, folder / "source") == versions(over, matrix.ROOT)
        expected, _ = exchange(over, [sys.executable] * RANKS)
        for place in 0, RANKS - 1:
            found, paths = exchange(over, [old if rank == place else sys.executable for rank in range(RANKS)])
            assert [str(folder) in path for path in paths] == [rank == place for rank in range(RANKS)], paths
            rows.append(dict(over=over, old_rank=place, same_version=same) | compare(found, expected, same))
            print(json.dumps(rows[-1], indent=1), flush=True)
    from jaxcgx.report import results

    command = "make test-old" + (f" COMMIT={commit}" if commit != COMMIT else "")
    data, path = results.origin(command) | dict(commit=commit, rows=rows), matrix.ROOT / "benchmarks/results/old.json"
    results.write(path, data)
    cells = [[key.replace("_", " ") for key in rows[0]], ["---"] * len(rows[0])]
    cells += [[", ".join(x) if isinstance(x, list) else str(x) for x in row.values()] for row in rows]
    table = "".join(f"| {' | '.join(each)} |\n" for each in cells)
    said = f"{RANKS} ranks, one of which has the jaxcgx of commit {commit}"
    path.with_suffix(".md").write_text(f"Made by `{command}` on {data['date']}: {said}.\n\n{table}")
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()

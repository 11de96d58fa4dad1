"""Runs the examples and writes their output to examples/output (`make gallery`).

`.venv/bin/python scripts/gallery.py fsdp nnx_train` runs only these two examples.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
HELPERS = {"common"}  # modules that examples import


def command(path):
    """Returns (the command that starts an example, its environment variables)."""
    python = ["python", str(path.relative_to(ROOT))]
    if path.stem == "mpi_train":
        return ["mpirun", "-n", "2", "python", "-m", "mpi4py", *python[1:]], {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}
    return python + ["--local"] * ("demonstrate(" in path.read_text()), {}


def main(names):
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    for path in sorted(EXAMPLES.rglob("*.py")):
        if path.stem in HELPERS or (names and path.stem not in names):
            continue
        words, variables = command(path)
        shown = " ".join([*(f"{name}={value}" for name, value in variables.items()), *words])
        print(shown, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "examples").symlink_to(EXAMPLES)
            done = subprocess.run(words, cwd=folder, env=environment | variables, stdout=subprocess.PIPE, text=True)
            done.check_returncode()
            printed = done.stdout.replace(f"{pathlib.Path(folder).resolve()}/", "").strip()
        (EXAMPLES / "output").mkdir(exist_ok=True)
        (EXAMPLES / "output" / f"{path.stem}.txt").write_text(f"$ {shown}\n{printed}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

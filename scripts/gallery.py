"""Runs the examples and writes their output to examples/output (`make gallery`).

`.venv/bin/python scripts/gallery.py fsdp nnx_train` runs only these two examples.

The wide-area demonstrations run between hosts, as root, or with `--local` if this machine can't make hosts. The first
line of a file has a digest of the code that printed it.
"""

import ast
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from jaxcgx.lab import why_not

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
HELPERS = {"common"}  # modules that examples import
MODULES = {"tunix_weights"}  # modules for programs of others
ON_RANKS = {"mpi_train": [], "cifar_train": ["--width=8", "--steps=20"]}  # examples for mpirun, and their options


def command(path):
    """Returns (the command that starts an example, its environment variables)."""
    python = ["python", str(path.relative_to(ROOT))]
    if path.stem in ON_RANKS:
        words = ["mpirun", "-n", "2", "python", "-m", "mpi4py", *python[1:], *ON_RANKS[path.stem]]
        return words, {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}
    return python + ["--local"] * (between_hosts(path) and bool(why_not())), {}


def between_hosts(path):
    return "demonstrate(" in path.read_text()


def digest(path):
    """Returns a digest of the code of an example, and of the helpers in its folder, without their docstrings."""
    found = hashlib.sha256()
    for name in (path.name, *(f"{helper}.py" for helper in sorted(HELPERS))):
        text = path.with_name(name).read_text() if path.with_name(name).is_file() else '""'
        lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
        found.update("\n".join(lines).encode())
    return found.hexdigest()[:16]


def main(names):
    environment = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    for path in sorted(EXAMPLES.rglob("*.py")):
        if path.stem in HELPERS | MODULES or (names and path.stem not in names):
            continue
        words, variables = command(path)
        root = ["sudo", "env", 'PATH="$PATH"'] * (between_hosts(path) and "--local" not in words)
        shown = " ".join([*root, *(f"{name}={value}" for name, value in variables.items()), *words])
        print(shown, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "examples").symlink_to(EXAMPLES)
            done = subprocess.run(words, cwd=folder, env=environment | variables, stdout=subprocess.PIPE, text=True)
            done.check_returncode()
            # Gloo prints how many "peer ranks" it connects.
            left_out = r"^(The curves are in |.* peer ranks).*\n"
            printed = re.sub(left_out, "", done.stdout, flags=re.MULTILINE).strip()
        (EXAMPLES / "output").mkdir(exist_ok=True)
        (EXAMPLES / "output" / f"{path.stem}.txt").write_text(f"code {digest(path)}\n$ {shown}\n{printed}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

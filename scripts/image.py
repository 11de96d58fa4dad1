"""Runs the steps of the Dockerfile's image `cpu` without a container engine (`make test-image`, as root).

The root filesystem is Debian's, made by mmdebstrap, with Debian's Python in place of that of Docker's image. RUN and
ENTRYPOINT are run in it as the Dockerfile has them, one stage after another.
"""

import json
import os
import pathlib
import re
import shutil
import sys

import matrix

ROOT = matrix.ROOT / "build/image"
STAGES = "cpu-wheel", "recipes", "cpu"  # in their order
MOUNTED = 'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" sh -ec "$1"'
# How this machine reaches package servers.
OF_HOST = "etc/pip.conf", "etc/resolv.conf", "etc/ssl", "usr/share/ca-certificates", "usr/local/share/ca-certificates"
ARGUMENTS = "--config=recipes/configs/digits/mlp.py --compression=dgc --config.train.steps=20 --devices=2"


def instructions():
    """Yields (stage, instruction, its words)."""
    text = re.sub(r"\\\n\s*", " ", (matrix.ROOT / "Dockerfile").read_text())
    stage = None
    for line in text.splitlines():
        name, _, words = line.partition(" ")
        if name == "FROM":
            stage = words.split()[-1]
        elif name and name != "#":
            yield stage, name, words


def run(command):
    """Runs a command of a shell in the root filesystem, in its folder /jaxcgx if that is there."""
    words = f"PATH=/python/bin:$PATH; export HOME=/root; cd /jaxcgx 2>/dev/null || cd /; {command}"
    print(f"== {command}", flush=True)
    matrix.run("unshare", "--mount", "sh", "-ec", MOUNTED, ROOT, words, check=True)


def copy(source, to):
    """Copies what git would of a file or folder of the repository."""
    listed = matrix.output("git", "-C", matrix.ROOT, "ls-files", "-co", "--exclude-standard", source).splitlines()
    for name in listed:
        target = ROOT / "jaxcgx" / to / pathlib.Path(name).relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(matrix.ROOT / name, target)


def main():
    if os.geteuid():
        sys.exit("image: run this as root, which can make a root filesystem")
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    matrix.run("mmdebstrap", "--include=python3-venv,python3-dev", "bookworm", ROOT, check=True)
    for path in OF_HOST:
        if pathlib.Path("/", path).is_dir():
            shutil.rmtree(ROOT / path, ignore_errors=True)
            shutil.copytree(pathlib.Path("/", path), ROOT / path, symlinks=True)
        elif pathlib.Path("/", path).exists():
            shutil.copy(pathlib.Path("/", path), ROOT / path)
    run("python3 -m venv /python && pip install --quiet --upgrade pip")
    for stage in STAGES:
        if stage == "recipes":  # begins with an image of its own
            shutil.rmtree(ROOT / "jaxcgx")
        for of, name, words in instructions():
            if of != stage:
                continue
            if name == "RUN":
                run(re.sub(r"--mount=\S+ ", "", words))
            elif name == "COPY":
                copy(words.split()[0], "" if words.split()[0] == "." else words.split()[1])
            elif name == "ENTRYPOINT":
                command = f"{' '.join(json.loads(words))} {ARGUMENTS}"
    run(command)


if __name__ == "__main__":
    main()

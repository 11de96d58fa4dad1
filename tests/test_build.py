"""Tests CMake's JAXCGX_CUDA without a CUDA compiler, and the files of a release that has an address."""

import os
import re
import shutil
import tomllib

import pytest
from commands import ROOT
from helpers import load_script, run

PATH = f"{ROOT / '.venv/build/bin'}:{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=PATH)

NONE = "no CUDA compiler was found that works: put nvcc on the PATH"
OLD = "12.1 or later is needed"


@pytest.mark.skipif(not CMAKE, reason="there is no cmake on the PATH or in .venv/build")
@pytest.mark.parametrize(
    ("value", "nvcc", "status", "words"),
    [
        ("MAYBE", None, 1, "JAXCGX_CUDA: expected AUTO, ON, ALL or OFF, got 'MAYBE'"),
        ("ON", None, 1, f"JAXCGX_CUDA=ON, but {NONE}"),
        ("AUTO", None, 0, "CUDA half: none"),
        ("ON", "11.8", 1, f"is nvcc 11.8: {OLD}; name another one in the environment variable CUDACXX"),
        ("AUTO", "11.8", 0, f"CUDA half: none (nvcc 11.8; {OLD})"),
        ("OFF", "11.8", 0, "CUDA half: none"),
    ],
)
def test_without_a_cuda_compiler_that_is_new_enough(tmp_path, value, nvcc, status, words):
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {nvcc}, V{nvcc}.89\n")
    compiler.chmod(0o755)
    found = [f"-DCMAKE_CUDA_COMPILER={compiler}"] if nvcc else []
    options = "-S", ROOT, "-B", tmp_path / "build", "-DJAXCGX_MODULE=OFF", f"-DJAXCGX_CUDA={value}", *found
    env = dict(PATH=PATH) if nvcc else dict(PATH=PATH, CUDACXX="/bin/false")
    done = run(CMAKE, *options, status=status, env=env)
    assert words in " ".join((done.stdout + done.stderr).split())


def test_a_release_has_the_address_of_the_repository(tmp_path, monkeypatch):
    for name in "README.md", "pyproject.toml":
        shutil.copy(ROOT / name, tmp_path)
    load_script(ROOT / "scripts/wheels.py", monkeypatch).publish(tmp_path, "https://example.org/of/jaxcgx")
    text = (tmp_path / "README.md").read_text()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)", text)
    before = re.findall(r"!?\[[^\]]*\]\(([^)#]+)", (ROOT / "README.md").read_text())
    for (picture, link), path in zip(links, before, strict=True):
        kind = "raw" if picture else "blob"
        assert (ROOT / path).exists() and link == f"https://example.org/of/jaxcgx/{kind}/HEAD/{path}"
    assert text.index('pip install "jaxcgx[optax]"') < text.index('pip install ".[optax]"')
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == "https://example.org/of/jaxcgx"
    assert project["scripts"] == {"jaxcgx": "jaxcgx.__main__:main"} and project["optional-dependencies"]

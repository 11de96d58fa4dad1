"""Tests that the diffs of CONTRIBUTING.md apply, and that its codec and its transport work."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jaxcgx.native import registration

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CODEC, KERNELS, TRANSPORT = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

# An editable install would find the package of the checkout first.
USE_THE_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
sys.path[:0] = [".", "tests"]
"""

# Runs after the codec's tests, whose conftest.py makes the devices.
RUN = """
import jax, numpy as np, pathlib
import jaxcgx as cgx
assert pathlib.Path(cgx.__file__).is_relative_to(pathlib.Path.cwd()), cgx.__file__
from jax.sharding import PartitionSpec as P
x, codec = np.random.RandomState(0).standard_normal((2, 5000)).astype(np.float32), cgx.Log2()
payload = cgx.encode(x, codec)
assert payload.shape == (codec.wire_bytes(x.shape, x.dtype),)
y = cgx.decode(payload, codec, x.shape, x.dtype)
assert (np.abs(y - x) <= np.abs(x) / 3 + 0.1).all()
for schedule in ("two_shot", "ring"):
    f = lambda x: cgx.compressed_psum(x, "data", codec, schedule=schedule)
    body = lambda x: jax.lax.pcast(f(x), "data", to="varying")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = np.asarray(jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(x))
    assert (total == total[:1]).all() and np.corrcoef(total[0], x.sum(0))[0, 1] > 0.95
"""

TESTS_OF_THE_CODEC = """
import pytest
tests = ["tests/codecs/test_log2.py", "tests/codecs/test_base.py"]
assert pytest.main([*tests, "-q", "-k", "log2 or Log2", "-p", "no:cacheprovider"]) == 0
"""

TESTS_OF_THE_TRANSPORT = """
import pytest
sys.exit(pytest.main(["tests/transports/test_gathered.py", "-q", "-p", "no:cacheprovider"]))
"""


def apply(diff, where, *options):
    return subprocess.run(["git", "apply", *options, "-"], cwd=where, input=diff, text=True, capture_output=True)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package and its tests, with the native module, the codec and the transport."""
    where = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns("__pycache__", "cpp", "results", ".hypothesis")
    for name in ("jaxcgx", "tests", "xla_ffi"):
        shutil.copytree(ROOT / name, where / name, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", where)
    if registration.MODULE and not list((where / "jaxcgx" / "native").glob("_native*")):
        shutil.copy(registration.MODULE.__file__, where / "jaxcgx" / "native")
    for diff in (CODEC, TRANSPORT):
        done = apply(diff, where)
        assert done.returncode == 0, done.stderr
    return where


def run(code, where):
    command = [sys.executable, "-P", "-c", USE_THE_COPY + code]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_codec_works(copy):
    run(TESTS_OF_THE_CODEC + RUN, copy)


def test_the_transport_works(copy):
    run(TESTS_OF_THE_TRANSPORT, copy)


def test_its_kernels_compile(copy):
    """Compiles the kernels. Running them would need a build of the native module."""
    done = apply(KERNELS, copy)
    assert done.returncode == 0, done.stderr
    assert "native_codec(Kind.LOG2" in (copy / "jaxcgx" / "codecs" / "log2.py").read_text()
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip("there is no C++ compiler")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-I", "xla_ffi", "xla_ffi/cpu/kernels_portable.cc"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

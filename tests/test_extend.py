"""Tests that the diffs of the pages docs/extend-*.md apply, and that their codec and their transport work."""

import os
import re
import shutil
import sys

import pytest
from commands import FENCE, ROOT
from helpers import run

from jaxcgx.native import registration

PAGES = {"docs/extend-codec.md": ("Add a codec", "Add its kernels"), "docs/extend-transport.md": ("Add a transport",)}
DIFFS = {}
for page, sections in PAGES.items():
    found = [match[3] for match in FENCE.finditer((ROOT / page).read_text()) if match[2] == "diff"]
    DIFFS |= dict(zip(sections, found, strict=True))

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
    f = lambda x: cgx.compressed_psum(x, "data", cgx.Plan.every(codec, schedule=schedule))
    body = lambda x: jax.lax.pcast(f(x), "data", to="varying")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = np.asarray(jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(x))
    assert (total == total[:1]).all() and np.corrcoef(total[0], x.sum(0))[0, 1] > 0.95
"""

TESTS = """
import pytest
tests = ["tests/codecs/test_log2.py", "tests/codecs/test_base.py", "tests/transports/test_gathered.py"]
assert pytest.main([*tests, "-q", "-k", "log2 or Log2 or gathered", "-p", "no:cacheprovider"]) == 0
"""


def apply(section, where):
    """Applies the diff of a section."""
    done = run("git", "apply", "-", cwd=where, input=DIFFS[section], status=None)
    files = dict.fromkeys(re.findall(r"^error: (?:patch failed: )?([^ :]+):", done.stderr, re.MULTILINE))
    page = next(page for page, sections in PAGES.items() if section in sections)
    fits = f'the diff in {page}, "{section}", no longer fits {", ".join(files) or "its own line counts"}'
    assert done.returncode == 0, f"{fits}: update its lines\n{done.stderr}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package and its tests, with the native module, the codec and the transport."""
    where = tmp_path_factory.mktemp("copy")
    leave = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
    for name in ("jaxcgx", "tests", "xla_ffi", "cuda"):
        shutil.copytree(ROOT / name, where / name, ignore=leave)
    (where / "docs/api").mkdir(parents=True)
    for name in ("pyproject.toml", "docs/api/codecs.md"):
        shutil.copy(ROOT / name, where / name)
    if registration.MODULE and not list((where / "jaxcgx" / "native").glob("_native*")):
        shutil.copy(registration.MODULE.__file__, where / "jaxcgx" / "native")
    for section in ("Add a codec", "Add a transport"):
        apply(section, where)
    return where


def test_what_is_added_works(copy):
    run(sys.executable, "-P", "-c", USE_THE_COPY + TESTS + RUN, cwd=copy, timeout=600)


def test_its_kernels_compile(copy):
    """Compiles the kernels. Running them would need a build of the native module."""
    apply("Add its kernels", copy)
    assert "kind = Kind.LOG2" in (copy / "jaxcgx" / "codecs" / "log2.py").read_text()
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip("there is no C++ compiler")
    emulated = ["-x", "c++", "-I", ".", "-I", "tests/cpp/cuda_emulator", "-Wno-unknown-pragmas"]
    files = {"xla_ffi/cpu/kernels_portable.cc": ["-Werror=switch"]}
    files |= {f"cuda/{name}.cu": emulated for name in ("any_bucket", "encode", "decode")}
    for file, options in files.items():
        run(compiler, "-std=c++17", "-fsyntax-only", "-I", "xla_ffi", *options, file, cwd=copy, timeout=600)

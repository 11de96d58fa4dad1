"""Tests the package without its native module, with one of another version, and with JAXCGX_REFERENCE=1."""

import pathlib
import shutil

from helpers import python

import jaxcgx as cgx
from jaxcgx.native import registration

KERNELS, REFERENCE = ({"JAXCGX_REFERENCE": flag} for flag in "01")

BYTES = """
import hashlib, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, jaxcgx as cgx
x = jnp.asarray(np.random.RandomState(0).standard_normal(500).astype(np.float32))
f = jax.jit(lambda x: cgx.encode(x, cgx.MaxMin(4, 64, "stochastic"), jax.random.key(0)))
print("jaxcgx_encode" in f.lower(x).compile().as_text(), hashlib.sha256(np.asarray(f(x)).tobytes()).hexdigest())
"""

TRANSFORMATIONS = """
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

codec = cgx.Cast()  # whose jnp code compiles soon
f = lambda x: cgx.roundtrip(x, codec)
x = jax.random.normal(jax.random.key(1), (4, 1100))
rows = np.stack([f(r) for r in x])
np.testing.assert_array_equal(jax.vmap(f)(x), rows)
np.testing.assert_array_equal(lax.scan(lambda c, r: (c, f(r)), 0, x)[1], rows)
np.testing.assert_array_equal(jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x[0]), np.ones(1100))
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
g = jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
np.testing.assert_array_equal(jax.jit(g)(x), rows)
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    np.testing.assert_array_equal(jax.jit(f)(jax.device_put(x, NamedSharding(mesh, P("d")))), f(x))
layout = Layout(codec, ((1100,),), (jnp.float32,), chunks=3)
step = jax.jit(lambda x, r: ops.encode_fed(layout, [x], [r]), donate_argnums=1)
residual = jnp.zeros(1100)
payload, (new,) = step(x[0], residual)
assert residual.is_deleted()
np.testing.assert_allclose(ops.decode(layout, payload)[0] + new, x[0], atol=1e-6)
"""


def test_reference_mode_gives_the_same_bytes_without_a_kernel():
    not_even_loaded = 'import sys; sys.modules["jaxcgx.native._native"] = None'
    no_kernel, got = python(not_even_loaded + BYTES + TRANSFORMATIONS, env=REFERENCE).stdout.split()
    kernel, wanted = python(BYTES, env=KERNELS).stdout.split()
    assert kernel == "True" and no_kernel == "False" and got == wanted


def test_a_missing_module_is_one_error_with_the_remedy():
    code = "import sys; sys.modules['jaxcgx.native._native'] = None; import jaxcgx"
    last = python(code, status=1, env=KERNELS).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: jaxcgx: its native module can't be loaded")
    assert "pip install" in last and "JAXCGX_REFERENCE=1" in last


def test_a_checkout_takes_the_installed_module(tmp_path):
    """Where Python starts in its root, a checkout hides the installed package."""
    package = pathlib.Path(cgx.__file__).parent
    shutil.copytree(package, tmp_path / "jaxcgx", ignore=shutil.ignore_patterns("__pycache__", "_native*"))
    installed = tmp_path / "installed" / "jaxcgx" / "native"
    installed.mkdir(parents=True)
    shutil.copy(registration.find().__file__, installed)
    # An editable install finds the package of the checkout first.
    code = f"""
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
sys.path[:0] = [{str(tmp_path)!r}, {str(tmp_path / "installed")!r}]
import jaxcgx
print(jaxcgx.__file__, jaxcgx.native.registration.MODULE.__file__, sep="\\n")
"""
    ours, native = python(code, env=KERNELS).stdout.splitlines()
    assert pathlib.Path(ours).is_relative_to(tmp_path / "jaxcgx") and pathlib.Path(native).is_relative_to(installed)
    broken = tmp_path / "jaxcgx" / "native" / "_native.so"  # its own comes first
    broken.touch()
    last = python(code, status=1, env=KERNELS).stderr.strip().splitlines()[-1]
    assert "native module can't be loaded" in last and "pip install" in last


def test_a_module_of_another_version_is_refused():
    code = "import importlib.metadata as m; m.version = lambda name: '9.9'; import jaxcgx"
    last = python(code, status=1, env=KERNELS).stderr.strip().splitlines()[-1]
    assert "of version" in last and "the package of version 9.9" in last and "pip install" in last

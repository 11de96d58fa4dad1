"""Helpers of several test files."""

import dataclasses
import functools
import importlib.machinery
import importlib.util
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

import jaxcgx as cgx
from jaxcgx.native import ops, reference
from jaxcgx.native.reference import Decode, Encode

FULL = os.environ.get("HYPOTHESIS_PROFILE", "default") != "default"  # `make test-full`, in which tests have more cases

KEY = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)

# Every codec, every width once, both roundings, and short and odd buckets.
CODECS = [
    *(cgx.MaxMin(bits, size) for bits, size in zip(range(1, 9), (512, 64, 33, 128, 1, 7, 1000, 256))),
    cgx.MaxMin(4, 512, "stochastic"),
    cgx.MaxMin(8, 33, "stochastic"),
    cgx.MaxMin(1, 128, "stochastic"),
    cgx.MaxMin(4, 64, skip_incomplete=True),
    cgx.MaxMin(3, 100, "stochastic", skip_incomplete=True),
    cgx.ByteGrad(),
    cgx.ByteGrad(compatible=True),
    *(cgx.AbsMax(bits, size) for bits, size in zip(range(2, 9), (256, 33, 128, 7, 512, 100, 256))),
    cgx.Float8(),
    cgx.Float8("e5m2", 33),
    cgx.Cast("bfloat16"),
    cgx.Cast("float16"),
    cgx.Cast("bfloat16", "stochastic"),
    cgx.Cast("float16", "stochastic"),
    cgx.Sign(),
    cgx.Sign(33),
    cgx.Raw(),
    *map(cgx.Micro, ("nvfp4", "mxfp4", "mxfp8")),
    cgx.Eden(4),
    cgx.Eden(1, 128),
    cgx.MaxMin(4, 256, rotate=True),
    cgx.MaxMin(3, 128, "stochastic", rotate=True),
    cgx.AbsMax(8, 512, rotate=True),
    cgx.Lossless(),
    cgx.Micro("nvfp4", "stochastic"),
    cgx.Micro("mxfp8", "stochastic"),
    cgx.Micro("nvfp4", "eden"),
]
GRIDS = [c for c in CODECS if c.meta]  # codecs with buckets
SPARSE = [
    cgx.TopK(0.01),
    cgx.TopK(0.1, cgx.MaxMin(3, 20, "stochastic", skip_incomplete=True), "sampled"),
    cgx.TopK(0.05, cgx.Cast("float16"), "fitted", pull="top"),
]


@dataclasses.dataclass(frozen=True)
class Halves(cgx.Codec):
    """A codec of sixteen levels, with a byte per level, stochastic rounding, and one scale per bucket."""

    bucket_size: int = 10
    meta = 1
    stochastic = True

    def code_bytes(self, n, dtype):
        return n

    def encode_buckets(self, x, noise):
        scale = jnp.abs(x).max(-1, keepdims=True) / 7
        level = jnp.floor(x / jnp.where(scale == 0, 1, scale) + 8 + noise / 65536)
        return scale, level.astype(jnp.uint8)

    def decode_buckets(self, meta, codes, n):
        return meta * (codes.astype(jnp.float32) - 8)


@dataclasses.dataclass(frozen=True)
class Truncate(cgx.Codec):
    """A codec that sends the upper half of each float32, without buckets or metadata."""

    def code_bytes(self, n, dtype):
        return 2 * n

    def encode_buckets(self, x, noise):
        halves = lax.bitcast_convert_type(x, jnp.uint16)[..., 1]
        return jnp.zeros((len(x), 0), jnp.float32), lax.bitcast_convert_type(halves, jnp.uint8).reshape(len(x), -1)

    def decode_buckets(self, meta, codes, n):
        halves = lax.bitcast_convert_type(codes.reshape(-1, n, 2), jnp.uint16)
        return lax.bitcast_convert_type(halves.astype(jnp.uint32) << 16, jnp.float32)


def each_codec(codecs=CODECS):
    return dict(argvalues=codecs, ids=repr)


def planned(plan, **fields):
    """Returns a plan with other fields. A codec, or a dict of codecs, becomes a plan without guards."""
    return dataclasses.replace(plan, **fields) if isinstance(plan, cgx.Plan) else cgx.Plan.every(plan, **fields)


def as_bits(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_bytes(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_array_equal(as_bits(a), as_bits(b))


def assert_trees(check, *trees):
    """Calls check(leaf, ...) for the leaves of trees of one structure.

    Trees without leaves fail, as nothing is compared.
    """
    assert jax.tree.leaves(trees[0]), "no leaves to compare"
    jax.tree.map(check, *trees)


def assert_same_trees(got, expected):
    assert_trees(lambda a, b: assert_same_bytes(np.asarray(a), np.asarray(b)), got, expected)


def assert_close(got, expected, rtol=1e-4, atol=1e-5):
    assert_trees(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, expected)


def assert_same_values(a, b):
    """Checks that the bits are the same, except in the payload of NaNs, which depends on the processor."""
    assert a.shape == b.shape and a.dtype == b.dtype
    nan = np.isnan(np.asarray(a, np.float32))
    np.testing.assert_array_equal(nan, np.isnan(np.asarray(b, np.float32)))
    np.testing.assert_array_equal(as_bits(a)[~nan], as_bits(b)[~nan])


def one_nan(layout, payload, chunk=None):
    """Returns a payload, or one of its chunks, with every NaN among its raw float32 numbers replaced by the same NaN.

    The payload of a NaN in a sum depends on the processor. A payload of Lossless is unpacked for the replacement.
    """
    payload = np.array(payload)
    if layout.codec.carrier is not None:
        some = slice(None) if chunk is None else chunk
        whole = np.zeros((layout.chunks, layout.chunk_bytes), np.uint8)
        whole[some] = payload
        payload = np.array(ops.encode(layout.carried, ops.decode(layout, whole)))[some]
        layout = layout.carried
    for row, pieces in zip(
        np.atleast_2d(payload), layout.pieces if chunk is None else [layout.pieces[chunk]], strict=True
    ):
        for p in pieces:
            if layout.dtypes[p.leaf] == np.float32:
                for at, count in [(p.tail, p.raw)] + [(p.codes, p.coded)] * layout.codec.raw:
                    x = row[at : at + 4 * count].view(np.float32)
                    x[np.isnan(x)] = np.nan
    return payload


# The reference compiles slowly, so the program of each layout is kept.
@functools.cache
def reference_encode(layout, feedback=False):
    if feedback:
        return jax.jit(lambda leaves, residuals, key: reference.encode(layout, Encode(leaves, residuals, key)))
    return jax.jit(lambda leaves, key: reference.encode(layout, Encode(leaves, key=key))[0])


@functools.cache
def reference_decode(layout):
    return jax.jit(lambda payload: reference.decode(layout, Decode(payload)))


@functools.cache
def reference_reduce(layout, divisor, encoded):
    """Returns the reference's reduce, which takes the operands as a `Reduce`."""
    return jax.jit(lambda operands: reference.reduce(layout, operands, divisor, encoded))


RANDOM_KEY = jax.random.key(7)


def roundtrip(x, codec):
    return np.asarray(cgx.roundtrip(jnp.asarray(x, jnp.float32), codec, RANDOM_KEY if codec.stochastic else None))


def vnmse(x, y):
    """Returns the error |y - x|^2 / |x|^2."""
    x, y = np.float64(x), np.float64(y)
    return np.square(y - x).sum() / np.square(x).sum()


def bias(codec, x, draws=256):
    """Returns the error of the mean over `draws` keys, times `draws`, over the error of one key.

    Without a bias it is about 1.
    """
    keys = jax.random.split(jax.random.key(1), draws)
    y = jax.jit(jax.vmap(lambda key: cgx.roundtrip(x, codec, key)))(keys)
    return draws * vnmse(x, y.mean(0)) / vnmse(jnp.broadcast_to(x, y.shape), y)


def native_key(codec):
    return jnp.append(KEY, jnp.uint32(0xCAFE)) if codec.stochastic else None


def custom_calls(fn, *args):
    """Returns {kernel of jaxcgx: number of its calls in the compiled program}."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    return {name: text.count(f'custom_call_target="jaxcgx_{name}"') for name in ("encode", "decode", "reduce")}


@functools.lru_cache
def mesh_with(kind=AxisType.Auto, **sizes):
    """Returns a mesh of these axes, such as mesh_with(data=2, model=2)."""
    shape = tuple(sizes.values())
    return jax.make_mesh(
        shape, tuple(sizes), axis_types=(kind,) * len(sizes), devices=jax.devices()[: math.prod(shape)]
    )


def normal(shape, seed=0, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(
        np.random.RandomState(seed).standard_normal(shape).astype(np.float32) * np.float32(scale)
    ).astype(dtype)


def sent(program):
    """Returns the {(operation, dtype)} that a compiled program exchanges."""
    return {
        (operation, dtype)
        for dtype, operation in re.findall(
            r"= \(?(\w+)\[.*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
            program,
        )
    }


def bare(compiled):
    """Returns the text of a compiled program without names and source positions."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    text = text.replace("psum_invariant", "psum")  # JAX keeps the name under which a process first lowered a sum
    return re.sub(r"(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text).strip()


def all_captured(thunks):
    """Returns whether all custom calls in XLA's list of thunks are nested. Only a command buffer nests them."""
    calls = re.findall(r"^( *)\d+: kCustomCall", thunks, re.MULTILINE)
    return "kCommandBuffer" in thunks and bool(calls) and all(calls)


# mpirun also starts as root with these variables.
AS_ROOT = dict(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def run(*command, status=0, timeout=300, env=None, **options):
    """Runs a command, which must end with a status, and returns what it printed as .stdout and .stderr."""
    options |= dict(capture_output=True, text=True, timeout=timeout, env=os.environ | (env or {}))
    done = subprocess.run([str(word) for word in command], **options)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def python(code, **options):
    """Runs a program of Python, like `run`."""
    return run(sys.executable, "-P", "-c", code, **options)


def load_script(path, monkeypatch):
    """Imports a script as a module. It can import the scripts next to it."""
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.stem, loader))
    loader.exec_module(module)
    return module

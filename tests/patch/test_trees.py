"""Tests patches of trees and of words: every dtype, arrays of JAX and NumPy, golden vectors, and altered bytes.

The kernels and jnp make the same bytes, refuse the same ones, and make the same words of the others.
"""

import base64
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from golden import patches
from jax._src import xla_bridge
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import make_mesh

import jaxcgx as cgx
from jaxcgx.native import registration
from jaxcgx.patch import Patch, apply, checksum, encode, trees, words
from jaxcgx.patch.words import BLOCK

DTYPES = ["bool", "int8", "uint16", "int32", "float8_e4m3fn", "bfloat16", "float16", "float32", "complex64"]


def make(seed):
    """Returns a tree of random bits, so with NaNs, of all dtypes, in JAX's and NumPy's arrays."""
    rng, tree = np.random.default_rng(seed), {}
    for dtype in DTYPES:
        size = np.dtype(jnp.dtype(dtype)).itemsize
        bits = rng.integers(0, 2 if dtype == "bool" else 256, (6, 50 * size), np.uint8)
        tree[dtype] = bits.view(jnp.dtype(dtype))
    jaxs = jax.tree.map(jnp.asarray, tree)
    wide = {"float64": rng.normal(size=(3, 4)), "complex128": rng.normal(size=5) * 1j, "int64": np.int64(seed)}
    return {"numpy": tree | wide, "jax": (jaxs, [jnp.float32(seed), jnp.zeros((0, 3)), None])}


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert isinstance(x, jax.Array) == isinstance(y, jax.Array)
        assert x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_all_bits_of_all_dtypes():
    old, new = make(1), make(2)
    patch = Patch.frombytes(encode(old, new).tobytes())
    assert_same_bits(apply(old, patch), new)
    assert (patch.old, patch.new) == (checksum(old), checksum(new))
    size = sum(x.nbytes for x in jax.tree.leaves(new))
    assert patch.nbytes == len(patch.tobytes()) <= size + 22 * len(jax.tree.leaves(new)) + 56
    same = encode(new, new)
    assert same.old == same.new and same.nbytes <= 22 * len(jax.tree.leaves(new)) + 56
    assert_same_bits(apply(new, same), new)
    assert apply({}, encode({}, {})) == {}


def test_arrays_on_a_device(monkeypatch):
    mesh = NamedSharding(make_mesh(), P("data"))

    def tree(seed):
        leaves = {dtype: make(seed)["jax"][0][dtype] for dtype in ("bool", "complex64", "bfloat16")}
        return [np.arange(5) + seed, leaves, jax.device_put(jnp.arange(8.0) * seed, mesh)]

    old, new = tree(1), tree(2)
    patch = encode(old, new)
    monkeypatch.setattr("jaxcgx.patch.words.HOST", "none")  # now the CPU counts as a device
    assert encode(old, new) == patch and checksum(old) == patch.old
    got = apply(old, patch, donate=True)
    assert_same_bits(got, new)
    assert old[1]["bfloat16"].is_deleted() and old[2].is_deleted() and got[2].sharding == mesh
    assert not got[1]["bool"].committed


def test_nan_payloads_and_zeros_are_bits():
    old = np.array([0x7FC00001, 0x80000000, 0, 0xFFC00000], np.uint32).view(np.float32)
    new = np.array([0x7FC00002, 0, 0x80000000, 0x7FC00000], np.uint32).view(np.float32)
    assert_same_bits(apply(old, encode(old, new)), new)
    assert checksum(np.float32(0.0)) != checksum(np.float32(-0.0))


def test_donated_arrays_are_overwritten():
    old, new = {"a": np.arange(300.0), "b": jnp.zeros(5)}, {"a": np.arange(300.0) ** 2, "b": jnp.ones(5)}
    memory, patch, place = old["a"], encode(old, new), old["b"].unsafe_buffer_pointer()
    with pytest.raises(ValueError, match="'old': expected a tree with the checksum"):
        apply({"a": memory, "b": jnp.ones(5)}, patch, donate=True)
    np.testing.assert_array_equal(memory, np.arange(300.0))
    got = apply(old, patch, donate=True)
    assert np.shares_memory(got["a"], memory) and got["b"].unsafe_buffer_pointer() == place and old["b"].is_deleted()
    assert_same_bits(got, new)
    apply(new, encode(new, new))
    assert not new["b"].is_deleted()


def test_donated_arrays_of_jax_that_are_in_use():
    """JAX gives no memory away that NumPy still sees, that two leaves share, or that is on several devices."""
    seen, tied = jnp.arange(8.0), jnp.arange(9.0)
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(make_mesh(), P("data")))
    old, view = {"seen": seen, "tied": [tied, tied], "sharded": sharded}, np.asarray(seen)
    new = jax.tree.map(lambda x: x + 1, old) | {"tied": [tied + 2, tied * 3]}
    got = apply(old, encode(old, new), donate=True)
    assert_same_bits(got, new)
    np.testing.assert_array_equal(view, np.arange(8.0))
    assert all(x.is_deleted() for x in jax.tree.leaves(old)) and got["sharded"].sharding == new["sharded"].sharding


def test_donated_arrays_that_are_tied_or_unaligned():
    tied, data = np.arange(300.0), np.frombuffer(bytearray(81), np.float64, 10, 1)
    old = {"a": tied, "b": tied, "c": data, "d": data[5:].view("V8")}
    new = {"a": tied + 1, "b": tied + 2, "c": data + 3, "d": np.ones(5).view("V8")}
    assert checksum(data) == checksum(data.copy())
    got = apply(old, encode(old, new), donate=True)
    assert_same_bits(got, new)
    assert got["c"].flags.aligned and not np.shares_memory(got["d"], data)


def test_shardings_stay_and_do_not_count():
    whole = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)
    old = jax.device_put(whole, NamedSharding(make_mesh(), P("data")))
    patch = encode(old, whole * 1.01)
    assert (patch.old, patch.new) == (checksum(whole), checksum(np.asarray(whole * 1.01)))
    got = apply(old, patch)
    assert got.sharding == old.sharding and not apply(whole, patch).committed
    assert_same_bits(apply(np.asarray(whole), patch), np.asarray(got))


def test_checksums_tell_dtypes_and_shapes_apart():
    x = np.arange(12, dtype=np.int32)
    trees = [x, x.view(np.uint32), x.reshape(3, 4), [x[:6], x[6:]], [x, x[:0]], [x[:0], x], {}]
    assert len({checksum(tree) for tree in trees}) == len(trees)
    assert checksum({"a": x}) == checksum([jnp.asarray(x)]) == checksum(x)


OLD, NEW = {"w": np.zeros((2, 3), np.float32)}, {"w": np.ones((2, 3), np.float32)}
PATCH, KEY = encode(OLD, NEW), jax.random.key(0)
NO_ARRAYS = [3.0], ["a"], np.array(["a"]), np.array([None]), np.zeros(2, ">f4"), np.zeros(2, "f4,f4"), np.longdouble(1)
apply_to = lambda old, patch=PATCH: lambda: apply(old, patch)
ERRORS = {
    "patch.apply": [
        (apply_to(NEW), ValueError, "old", "a tree with the checksum", "apply all patches in the order"),
        (apply_to({"w": OLD["w"].reshape(3, 2)}), ValueError, "old", "a tree with the checksum"),
        (apply_to([OLD, OLD]), ValueError, "old", "the 1 leaves 2"),
        (apply_to({"w": np.zeros(2, np.float32)}), ValueError, "old ['w']", "6 words of 4 bytes float32[2]"),
        (apply_to(OLD, PATCH.tobytes()), TypeError, "patch", "jaxcgx.patch.Patch.frombytes returns b'"),
    ],
    "patch.encode": [
        (lambda: encode(OLD, {"v": NEW["w"]}), ValueError, "new", "the structure of 'old'"),
        (lambda: encode(OLD, {"w": NEW["w"].reshape(6)}), ValueError, "new ['w']", "float32[2, 3] float32[6]"),
        (lambda: jax.jit(lambda x: encode(x, x))(jnp.ones(3)), TypeError, "old", "", "outside of jax.jit"),
        (lambda: encode({"key": KEY}, {"key": KEY}), TypeError, "old ['key']", "", "pass jax.random.key_data"),
    ],
    "patch.checksum": [(lambda tree=tree: checksum(tree), TypeError, "tree") for tree in NO_ARRAYS],
}
test_errors = table(ERRORS)


def test_altered_bytes_are_refused():
    data = encode(np.zeros(50, np.float16), np.ones(50, np.float16)).tobytes()
    assert repr(Patch.frombytes(memoryview(data))).endswith(f"{len(data)} bytes)")
    for cut in (data[:10], data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="argument 'data': expected .* bytes"):
            Patch.frombytes(cut)
    with pytest.raises(ValueError, match="expected a patch of format 1, got one of format 2; install"):
        Patch.frombytes(data[:16] + b"\2" + data[17:])
    with pytest.raises(ValueError, match="expected the bytes of a patch, got bytes that begin with b'xgxpatch'"):
        Patch.frombytes(b"x" + data[1:])
    for at in range(8, len(data)):
        with pytest.raises(ValueError, match="argument 'data'"):
            Patch.frombytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])


def test_numpy_needs_no_devices(monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends", None)  # a call is an error
    old, new = {"w": np.zeros(5)}, {"w": np.ones(5)}
    assert_same_bits(apply(old, encode(old, new)), new)


GOLDEN = json.loads(patches.FILE.read_text())
KERNELS = ["portable", "avx2", "avx512"] if registration.MODULE else []
LONG = 2 * BLOCK + 13


@pytest.fixture(params=["jnp", *KERNELS])
def engine(request, monkeypatch):
    native = registration.MODULE
    if request.param == "jnp":
        monkeypatch.setattr(trees, "engine", words)
        yield words
        return
    best = native.build_info()["kernels"]
    try:
        native.select_kernels(request.param)
    except ValueError:
        pytest.skip(f"this processor does not run {request.param} kernels")
    yield native.patch
    native.select_kernels(best)


@pytest.mark.parametrize("name", ["there", "back"])
def test_golden_patches(engine, name):
    before, after = patches.trees() if name == "there" else patches.trees()[::-1]
    data = base64.b64decode(GOLDEN[name])
    patch = cgx.patch.Patch.frombytes(data)
    assert cgx.patch.encode(before, after).tobytes() == data
    assert patches.decode(data, before) == [x.tobytes() for x in after] and patch.new == patches.checksum(after)
    for got, expected in zip(cgx.patch.apply(before, patch), after, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["ones", "small", "any", "mixed"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_any_words(engine, width, kind):
    rng = np.random.default_rng(width)
    for share in (0, 0.0003, 0.01, 0.2, 0.45, 0.9, 1):
        # jnp compiles a program for each length, and takes long for long ones.
        in_jnp = (0, 300, LONG) if kind == "mixed" and share in (0.01, 0.9) else (0, 300)
        lengths = in_jnp if engine is words else (0, 1, 2, 7, 300, BLOCK, LONG)
        olds = [rng.integers(0, 256, n * width, np.uint8).view(f"u{width}") for n in lengths]
        news = [patches.change(rng, old, share, kind) for old in olds]
        parts = [words.Part(*part) for part in engine.encode(olds, news)]
        compared = [i for i, n in enumerate(lengths) if n in in_jnp and engine is not words]
        assert [parts[i] for i in compared] == words.encode([olds[i] for i in compared], [news[i] for i in compared])
        digests = [words.digest_of(x) for x in olds], [words.digest_of(x) for x in news]
        assert digests == ([part.old for part in parts], [part.new for part in parts])
        for part, new in zip(parts, news):
            assert len(part.blocks) <= new.nbytes and len(part.heads) == 6 * -(-new.size // BLOCK)
            heads = np.frombuffer(part.heads, words.HEAD)
            assert words.block_sizes(heads, new.size, width).sum() == len(part.blocks)
        made = [x.copy() for x in olds]
        heads, blocks = [part.heads for part in parts], [part.blocks for part in parts]
        assert engine.apply(heads, blocks, made, made) == ([0] * len(olds), digests[1])  # in place
        for got, expected in zip(made, news):
            np.testing.assert_array_equal(got, expected)


def applied(engine, parts, olds):
    """Returns the new words, or None if the bytes are refused."""
    news = [np.empty_like(x) for x in olds]
    try:
        engine.apply(parts[::2], parts[1::2], olds, news)
    except ValueError as error:
        assert "blocks as jaxcgx.patch.encode writes them" in str(error)
        return None
    return [x.tobytes() for x in news]


def test_bytes_that_no_encoder_wrote(engine):
    """They are refused, or give some words: nothing else happens."""
    rng, refused = np.random.default_rng(0), 0
    olds = [rng.integers(0, 256, n * w, np.uint8).view(f"u{w}") for n, w in [(300, 2), (9, 1), (70, 4), (40, 8)]]
    whole = [words.Part(*x) for x in engine.encode(olds, [patches.change(rng, x, 0.2, "mixed") for x in olds])]
    for number in range(400):
        parts = [bytearray(x) for part in whole for x in (part.heads, part.blocks)]
        if number % 2:
            parts[1::2] = [bytearray(rng.bytes(len(x))) for x in parts[1::2]]
        else:
            data = parts[rng.integers(len(parts))]
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        made = applied(engine, parts, olds)
        refused += made is None
        if engine is not words and number < 100:
            assert made == applied(words, parts, olds)
    assert refused > 200

"""Tests patches of trees: every dtype, arrays of JAX and NumPy, shardings, checksums, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from jax._src import xla_bridge
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import make_mesh

from jaxcgx.patch import Patch, apply, checksum, encode

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
    seen, tied, sharded = (
        jnp.arange(8.0),
        jnp.arange(9.0),
        jax.device_put(jnp.arange(8.0), NamedSharding(make_mesh(), P("data"))),
    )
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
    mesh = make_mesh()
    whole = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)
    old = jax.device_put(whole, NamedSharding(mesh, P("data")))
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
NO_ARRAYS = [3.0], ["a"], np.array(["a"]), np.array([None]), np.zeros(2, ">f4"), np.zeros(2, "f4,f4")
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

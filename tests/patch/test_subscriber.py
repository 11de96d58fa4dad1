"""Tests Publisher and Subscriber over a directory: random chains with faults, shardings, and bad input.

What `latest` returns has the bits of the published version. Otherwise it is an error.
"""

import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, refused, rows, says
from helpers import FULL
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from started import Processes, free_port

import jaxcgx as cgx
from jaxcgx.patch import publisher as published
from jaxcgx.patch import subscriber as subscribed
from jaxcgx.patch.carriers import Directory
from jaxcgx.patch.versions import CHECK, HEAD, File, Index

RANK = pathlib.Path(__file__).with_name("subscriber_rank.py")
TREE = {"w": np.zeros((4, 8), jnp.bfloat16), "step": np.zeros((), np.int32)}
EVENTS = {"publish": 8, "latest": 8, "restart": 1, "join": 2, "leave": 1, "hurt": 3, "fail": 1}  # and how often
KINDS = ("numpy", "rows", "columns", "one", "default")  # where subscribers want their arrays
file_of = lambda publisher, path, version: path / str(File(version, publisher._run, anchor=False))


def changed(tree, rng):
    """Returns a tree with other bits in a few elements, NaNs among them."""

    def change(x):
        words = x.copy().reshape(-1).view(f"u{x.itemsize}")
        at = rng.random(words.size) < rng.choice([0, 0.1, 1], p=[0.2, 0.7, 0.1])
        words[at] = rng.integers(0, np.iinfo(words.dtype).max, at.sum(), words.dtype, endpoint=True)
        return words.view(x.dtype).reshape(x.shape)

    return jax.tree.map(change, tree)


def like(kind):
    if kind == "numpy":
        return TREE
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = {"rows": P("a"), "columns": P(None, ("b",)), "one": P(), "default": None}
    sharding = lambda x: None if kind == "default" else NamedSharding(mesh, specs[kind] if x.ndim > 1 else P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), TREE)


def check(subscriber, history):
    """Checks that the newest version that can be made has the publisher's bits, or that an error says which comes."""
    try:
        found = subscriber.latest()
    except TimeoutError as error:
        assert not subscriber.version and ("the next anchor" in str(error) or "no version" in str(error))
        return
    wanted = history[subscriber._run, subscriber.version]
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(found)] == [x.tobytes() for x in jax.tree.leaves(wanted)]
    for x, kind in zip(jax.tree.leaves(found), jax.tree.leaves(subscriber._like)):
        assert kind.sharding is None or x.sharding == kind.sharding


class Full(Directory):
    """A disk that becomes full in the middle of a version."""

    def write(self, name, parts):
        if "anchor" in name:
            raise OSError("full")
        super().write(name, parts)


class Chain:
    """A publisher in a directory, some subscribers, and all versions that any of them may have seen."""

    def __init__(self, path, seed):
        self.path, self.rng = path, np.random.default_rng(seed)
        self.tree, self.history, self.subscribers = TREE, {}, []
        self.restart()
        self.join()

    def restart(self):
        self.publisher = cgx.patch.Publisher(self.path, anchor_every=3, keep=4)

    def publish(self):
        self.tree = changed(self.tree, self.rng)
        key = self.publisher._run, self.publisher.version + 1
        self.history[key] = self.tree
        assert self.publisher.publish(self.tree) == key[1]

    def fail(self):
        self.publisher._store.__class__ = Full
        if self.publisher.version % 3 == 2 or not self.publisher._old:
            with pytest.raises(OSError, match="full"):
                self.publish()
        self.publisher._store.__class__ = Directory

    def join(self):
        kind = self.rng.choice(KINDS, p=[0.6, 0.1, 0.1, 0.1, 0.1])
        self.subscribers.append(cgx.patch.Subscriber(self.path, like(kind), every=None, timeout=0, connections=2))

    def leave(self):
        if self.subscribers:
            self.subscribers.pop(self.rng.integers(len(self.subscribers))).close()

    def latest(self):
        if self.subscribers:
            check(self.rng.choice(self.subscribers), self.history)

    def hurt(self):
        """Flips a bit of a file, cuts it off, or removes it."""
        if files := [file for file in sorted(self.path.glob("*")) if file.stat().st_size]:
            file, how = self.rng.choice(files), self.rng.integers(3)
            data = file.read_bytes()
            at = self.rng.integers(len(data))
            flipped = bytes([data[at] ^ 1 << self.rng.integers(8)]) + data[at + 1 :]
            file.write_bytes(data[:at] + (flipped if how else b""))
            if how == 2:
                file.unlink()


@pytest.mark.filterwarnings("ignore:Subscriber.latest. this is version")
@pytest.mark.parametrize("hundred", range(10 if FULL else 2))
def test_random_chains(hundred, tmp_path, monkeypatch):
    """After the next anchor, all subscribers have the newest version."""
    monkeypatch.setattr(published, "PIECE", 16)
    for seed in range(100 * hundred, 100 * hundred + 100):
        chain = Chain(tmp_path / str(seed), seed)
        for event in chain.rng.choice(list(EVENTS), 10, p=np.array([*EVENTS.values()]) / sum(EVENTS.values())):
            getattr(chain, event)()
        chain.publish()
        while chain.publisher.version % 3:
            chain.publish()
        chain.join()
        for each in chain.subscribers:
            check(each, chain.history)
            assert each.version == chain.publisher.version
            each.close()


def made(path, count, subscriber=True, **options):
    """Returns (a publisher of `count` versions, a subscriber that has the first)."""
    publisher = cgx.patch.Publisher(path, **options)
    follower = None
    for value in range(1, count + 1):
        publisher.publish({"w": np.full(40, value, np.float32)})
        if value == 1 and subscriber:
            follower = cgx.patch.Subscriber(path, {"w": np.zeros(40, np.float32)}, every=None, timeout=0)
            assert follower.latest()["w"][0] == 1
    return publisher, follower


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, "a patch on the way is missing"),
        (lambda data, _: data[:-1], "the patch of version 4: a piece is corrupted"),
        (lambda _, before: before, "the patch of version 4: it is that of another version"),
        (lambda *_: Index("", [], 0, 7, []).pack(), "the patch of version 4: its index is malformed"),
        (lambda *_: Index("", [], 8, 7, [9, -9]).pack(), "the patch of version 4: its index is malformed"),
    ],
)
def test_a_chain_with_a_hole(tmp_path, change, why):
    """The versions before it are made. The warning and the error name the next anchor, which ends it."""
    publisher, subscriber = made(tmp_path, 5, anchor_every=7)
    before, file = (file_of(publisher, tmp_path, number) for number in (3, 4))
    file.write_bytes(change(file.read_bytes(), before.read_bytes())) if change else file.unlink()
    with pytest.warns(UserWarning, match=f"version 3: version 5 can't be made: {why}; ask for version 7, the next"):
        assert subscriber.latest()["w"][0] == 3
    assert subscriber.latest() is subscriber.latest()  # it has warned
    with raises(TimeoutError, says("Subscriber.latest", expected="version 7 within 0 s", got="3: version 5 can't be")):
        subscriber.latest(7)
    for value in 6, 7:
        publisher.publish({"w": np.full(40, value, np.float32)})
    assert subscriber.latest(7)["w"][0] == 7 and subscriber._why == "a patch on the way is missing"
    subscriber.close(), publisher.close()


def absent(*_):
    raise FileNotFoundError("absent")


def test_an_anchor_that_comes_late(tmp_path, monkeypatch):
    """A mount may list a file before it has it."""
    words = says("Subscriber.latest", got="none: version 1", remedy="wait for the next anchor")
    made(tmp_path, 1, subscriber=False)
    subscriber = cgx.patch.Subscriber(tmp_path, {"w": np.zeros(40, np.float32)}, every=None, timeout=0)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "read", absent)
        for _ in range(3):
            with raises(TimeoutError, words):
                subscriber.latest()
    assert subscriber.latest()["w"][0] == 1


def test_a_publisher_that_is_faster(tmp_path, monkeypatch):
    """`latest` returns, and an end doesn't wait for all pieces."""
    publisher, subscriber = made(tmp_path, 2)
    take = subscriber._take
    subscriber._take = lambda *args: (take(*args), publisher.publish({"w": np.full(40, 9, np.float32)}))
    assert subscriber.latest()["w"][0] == 2 and publisher.version == 3
    read = Directory.read
    monkeypatch.setattr(published, "PIECE", 1)
    monkeypatch.setattr(subscribed, "SPAN", 1)
    monkeypatch.setattr(subscribed, "FIRST", 1)
    reads = []

    def closing(*args):
        reads.append(args)
        if len(reads) == 4:  # the first piece, after three reads of the index
            other._closed.set()
        return read(*args)

    cgx.patch.Publisher(tmp_path / "other").publish({"w": np.ones(40, np.float32)})
    monkeypatch.setattr(Directory, "read", closing)
    other = cgx.patch.Subscriber(tmp_path / "other", {"w": np.zeros(40, np.float32)}, every=None, timeout=0)
    with raises(TimeoutError, says("Subscriber.latest", got="none: the publisher", remedy="closed")):
        other.latest()
    assert len(reads) <= 3 + 4


def test_old_versions_go(tmp_path, monkeypatch):
    """A subscriber that is `keep` versions late has its patches, a later one an anchor. A failure delays it."""
    publisher, first = made(tmp_path, 3, anchor_every=3, keep=4)
    (tmp_path / f"{File(3, 'a' * 16, False)}.unfinished").touch()
    second = cgx.patch.Subscriber(tmp_path, TREE | {"w": np.zeros(40, np.float32)}, every=None)
    assert first.latest()["w"][0] == 3
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "remove", absent)
        for value in range(4, 11):
            publisher.publish({"w": np.full(40, value, np.float32)})
    publisher.publish({"w": np.full(40, 11, np.float32)})
    assert not list(tmp_path.glob("*.unfinished"))
    kept = sorted((file.version, file.anchor) for file in File.of(Directory(tmp_path).names()))
    assert kept == [(6, False), (6, True), (7, False), (8, False), (9, False), (9, True), (10, False), (11, False)]
    assert first.latest()["w"][0] == 11
    for each in first, second:
        each.close()


def test_only_the_pieces_of_its_devices(tmp_path, monkeypatch):
    """The bytes that are read are about the part that a process has."""
    monkeypatch.setattr(published, "PIECE", 1000)
    publisher = cgx.patch.Publisher(tmp_path)
    x = np.random.default_rng(0).normal(size=(64, 1000)).astype(np.float32)
    publisher.publish(x)
    subscriber = cgx.patch.Subscriber(tmp_path, x, every=None)
    whole, read = subscriber.latest(), []
    monkeypatch.setattr("jaxcgx.patch.subscriber.needed", lambda shape, *_: np.arange(64) // 8 == 5)
    monkeypatch.setattr(subscribed, "FIRST", 4000)
    reads = Directory.read
    monkeypatch.setattr(Directory, "read", lambda *args: read.append(reads(*args)) or read[-1])
    part = cgx.patch.Subscriber(tmp_path, x, every=None)
    np.testing.assert_array_equal(part.latest()[40:48], whole[40:48])
    assert 32_000 <= sum(map(len, read)) < 40_000 and len(read) == 2
    for each in subscriber, part:
        each.close()


def test_leaves_that_one_device_has(tmp_path, monkeypatch):
    """They are kept, encoded and applied there, in memory of their own. The files are those of NumPy arrays."""
    monkeypatch.setattr(published, "PIECE", 16)
    monkeypatch.setattr("jaxcgx.patch.words.HOST", "none")  # now the CPU counts as a device
    device, rng, tree = jax.devices()[1], np.random.default_rng(0), TREE | {"rows": TREE["w"]}
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    at = dict.fromkeys(["fours", *tree], SingleDeviceSharding(device)) | {"rows": NamedSharding(mesh, P("a"))}
    fours = lambda version: {"fours": np.full(3, version, jnp.int4)}
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at[name]) for name, x in (tree | fours(0)).items()}
    publishers = [cgx.patch.Publisher(tmp_path / name, anchor_every=3) for name in ("device", "host")]
    publishers[0]._run = publishers[1]._run
    subscriber = cgx.patch.Subscriber(tmp_path / "device", like, every=None, timeout=0)
    for version in range(1, 5):
        tree = changed({name: tree[name] for name in ("w", "step", "rows")}, rng) | fours(version)
        arrays = {name: jax.device_put(x, at[name]) for name, x in tree.items()}
        for publisher, each in zip(publishers, (arrays, tree)):
            publisher.publish(each)
        found = subscriber.latest(version)
        for name, x in found.items():
            assert np.asarray(x).tobytes() == tree[name].tobytes() and x.sharding == at[name], name
        jax.tree.map(lambda x: x.delete(), (arrays, found))  # as steps that donate them
    for pieces in publishers[0]._old, [piece.elements for piece in subscriber._state.pieces]:
        assert [getattr(x, "device", None) == device for x in pieces] == [False] * 3 + [True] * 3  # fours, rows
    device_files, host_files = ({f.name: f.read_bytes() for f in p._store._path.glob("*")} for p in publishers)
    assert device_files == host_files and len(host_files) == 5


def test_processes_get_the_same_version(tmp_path):
    """Two processes share a mesh. One has no version for a while."""
    port = free_port()
    with Processes(*([RANK, port, rank, tmp_path] for rank in range(2))) as ranks:
        assert [rank.wait() for rank in ranks.running] == [0, 0]


@pytest.mark.parametrize("number", [0, 2])
def test_subscribers_see_another_format(tmp_path, number):
    publisher, subscriber = made(tmp_path, 2)
    file = file_of(publisher, tmp_path, 2)
    magic, _, size = HEAD.unpack_from(data := file.read_bytes(), CHECK.size)
    index = HEAD.pack(magic, number, size) + data[CHECK.size + HEAD.size :][:size]
    file.write_bytes(CHECK.pack(zlib.crc32(index)) + index)
    words = says("Subscriber.latest", expected="version 2 in format 1", got=f"format {number}", remedy="install")
    for _ in range(2):
        with raises(ValueError, words):
            subscriber.latest()
    subscriber.close()


def test_two_publishers_in_a_directory(tmp_path):
    first, second = (cgx.patch.Publisher(tmp_path) for _ in range(2))
    first.publish(TREE)
    words = says("Publisher.publish", expected="one publisher in this directory", got="version 1 of another one")
    with raises(RuntimeError, words):
        second.publish(TREE)
    assert first.publish(TREE) == 2


def other_model(path, **like):
    made(path, 1, subscriber=False)
    return cgx.patch.Subscriber(path, like, every=None)


WIDE = {"w": jax.ShapeDtypeStruct((2,), np.float64)}
BAD_INPUT = {
    "Publisher": [
        (lambda path: cgx.patch.Publisher("s3://bucket/w"), ValueError, "where", "'s3://bucket/w'", "mount"),
        (lambda path: cgx.patch.Publisher("tcp://host:75"), ValueError, "where", "'tcp://host:75'", "pass 'host:port'"),
        (lambda path: cgx.patch.Publisher("localhost"), ValueError, "where", "'localhost'", "pass 'localhost:port'"),
        (lambda path: cgx.patch.Publisher("host:99999"), ValueError, "where", "'host:99999'"),
        (lambda path: cgx.patch.Publisher(3), TypeError, "where", "3"),
        (lambda path: cgx.patch.Publisher(path, secret="a"), ValueError, "secret", "one"),
        (lambda path: cgx.patch.Publisher(path, pace=1e6), ValueError, "pace", "one"),
        (lambda path: cgx.patch.Publisher("127.0.0.1:9000", pace="fast"), ValueError, "pace"),
        (lambda path: cgx.patch.Publisher(path, anchor_every=0), ValueError, "anchor_every", "0"),
        (lambda path: cgx.patch.Publisher(path, keep=1.5), TypeError, "keep", "1.5"),
    ],
    "Publisher.publish": [
        (lambda path: cgx.patch.Publisher(path).publish({"w": "no"}), TypeError, "tree ['w']", "'no'"),
        (lambda path: cgx.patch.Publisher(path).publish({"w": np.ones(2, ">f4")}), TypeError, "tree ['w']", ">f4[2]"),
        (lambda path: made(path, 1)[0].publish({"w": np.zeros(9)}), ValueError, "tree", "['w'] float64[9]"),
    ],
    "Subscriber": [
        (lambda path: cgx.patch.Subscriber(path, {"w": 3}), TypeError, "like ['w']", "3"),
        (lambda path: cgx.patch.Subscriber(path, WIDE), ValueError, "like ['w']", "float64[2]", "jax_enable_x64"),
        (lambda path: cgx.patch.Subscriber(path, TREE, connections=0), ValueError, "connections", "0"),
        (lambda path: cgx.patch.Subscriber(path, TREE, every=0), ValueError, "every", "0"),
        (lambda path: cgx.patch.Subscriber(path, TREE, timeout=-1), ValueError, "timeout", "-1"),
    ],
    "Subscriber.latest": [
        (lambda path: other_model(path, w=np.zeros(4, np.float32)).latest(), ValueError, "like ['w']", "float32[4]"),
        (lambda path: other_model(path, v=np.zeros(40, np.float32)).latest(), ValueError, "like ['v']", "float32[40]"),
        (lambda path: made(path, 1)[1].latest(0), ValueError, "version", "0"),
    ],
}


@pytest.mark.parametrize("row", rows(BAD_INPUT))
def test_bad_input(row, tmp_path):
    refused(*row, run=lambda call: call(tmp_path))

"""Tests the files of versions, the shortest way to the newest one, and which pieces a sharding needs."""

import base64
import json
import types

import jax
import numpy as np
import pytest
from golden import patches
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.patch.versions import File, needed, shortest

RUN = "0123456789abcdef"


def files(text):
    """Returns {file: bytes} of words such as "a3:100", an anchor of version 3 with 100 bytes, and "p4:1", a patch."""
    words = [word.partition(":") for word in text.split()]
    return {File(int(name[1:]), RUN, name[0] == "a"): int(size) for name, _, size in words}


@pytest.mark.parametrize(
    ("listed", "at", "way"),
    [
        ("a1:100 p2:1 p3:1", 0, "a1 p2 p3"),
        ("a1:100 p2:1 p3:1", 2, "p3"),
        ("a1:100 p2:1 p3:1", 3, ""),
        ("a1:100 p2:1 p4:1", 1, "p2"),  # a hole: version 2 is the newest that can be made
        ("a1:100 p3:1 a3:100 p4:1", 1, "a3 p4"),
        ("a1:100 p2:60 p3:60 a3:100", 1, "a3"),
        ("a1:100 p2:40 p3:40 a3:100", 1, "p2 p3"),
        ("p2:1 p3:1", 0, ""),
        ("", 0, ""),
    ],
)
def test_the_shortest_way(listed, at, way):
    found = shortest(files(listed), RUN, at)
    assert " ".join(f"{'a' if file.anchor else 'p'}{file.version}" for file in found) == way
    assert not shortest(files(listed), "f" * 16, at)  # another run


def test_names():
    file = File(12, RUN, True)
    assert str(file) == f"000000000012-{RUN}.anchor"
    assert File.of({str(file): 7, "unfinished": 8, f"12-{RUN}.anchor": 9}) == {file: 7}


def test_golden_files(tmp_path):
    trees = [[leaves[i] for i in patches.SOME] for leaves in patches.trees()]
    files = patches.files(*patches.trees(), tmp_path)
    golden = json.loads(patches.FILE.read_text())["versions"]
    assert files == {name: base64.b64decode(data) for name, data in golden.items()}
    old = [np.zeros_like(x) for x in trees[0]]
    for name, tree in zip(sorted(files), trees, strict=True):
        expected = [x.tobytes() for x in tree]
        assert patches.decode_version(name, files[name], old) == expected
        old = tree
    with cgx.patch.Subscriber(tmp_path, old, every=None) as subscriber:
        assert [x.tobytes() for x in subscriber.latest(2)] == expected


@pytest.mark.parametrize("elements", [1, 3, 16, 1000])
@pytest.mark.parametrize("shape", [(16,), (8, 6), (4, 8, 3), (2, 1, 8), (0, 8), ()])
def test_needed_pieces(shape, elements):
    """Of single devices and of pairs, those with one of their elements."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    size = int(np.prod(shape))
    for spec in (P(), P("x"), P("y"), P(None, "x"), P(None, "y"), P("x", "y"), P(None, ("x", "y"))):
        if len(spec) > len(shape) or any(n and shape[i] % {"x": 2, "y": 4}.get(n, 8) for i, n in enumerate(spec)):
            continue
        every = NamedSharding(mesh, spec).addressable_devices_indices_map(shape)
        for some in [{d: every[d]} for d in every] + [dict(list(every.items())[i : i + 2]) for i in (0, 3, 6)]:
            marked = np.zeros(shape, bool)
            for at in some.values():
                marked[at] = True
            process = types.SimpleNamespace(addressable_devices_indices_map=lambda shape, some=some: some)
            expected = [marked.reshape(-1)[start : start + elements].any() for start in range(0, size, elements)]
            np.testing.assert_array_equal(needed(shape, process, elements), expected)

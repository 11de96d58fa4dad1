"""A process that test_subscriber.py starts: python subscriber_rank.py PORT RANK DIRECTORY."""

import contextlib
import ctypes
import importlib.util
import signal
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.patch import publisher as published

PUBLISHED, AWAY = 8, range(3, 6)  # the versions, and those at which one process reads nothing


def away(*_):
    raise OSError("away")


def main():
    port, rank, path = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end together with the parent
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    published.PIECE = 8
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tree = {"w": np.zeros((8, 4), np.float32), "b": np.zeros(4, np.float32)}
    shard = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    like = {"w": shard(tree["w"], P("data")), "b": shard(tree["b"], P())}
    if rank == "0":
        part = jax.ShapeDtypeStruct((2,), np.float32, sharding=SingleDeviceSharding(jax.devices()[1]))
        with pytest.raises(ValueError, match="over all processes"):
            cgx.patch.Subscriber(path, part, every=None)
    publisher = cgx.patch.Publisher(path, anchor_every=3) if rank == "0" else None
    subscriber, seen = cgx.patch.Subscriber(path, like, every=None, timeout=60), []
    read = subscriber._source.read
    for number in range(1, PUBLISHED + 1):
        if publisher:
            publisher.publish(jax.tree.map(lambda x: x + np.float32(number), tree))
        multihost_utils.sync_global_devices(str(number))
        subscriber._source.read = away if rank == "1" and number in AWAY else read
        found = subscriber.latest(number if number in (1, PUBLISHED) else 1)
        for x in jax.tree.leaves(found):
            assert all((shard.data == subscriber.version).all() for shard in x.addressable_shards)
        seen.append(subscriber.version)
    assert (multihost_utils.process_allgather(np.array(seen)) == seen).all(), seen
    assert seen[0] == 1 and seen[-1] == PUBLISHED and seen == sorted(seen) and seen[AWAY[0]] == seen[AWAY[-1] - 1], seen
    assert len(subscriber._state.pieces) == 3  # two of the four of w, and b
    for where in path, f"{path}/none":
        late = cgx.patch.Subscriber(where, like, every=None, timeout=0)
        with contextlib.nullcontext() if where == path else pytest.raises(TimeoutError, match="there is no version"):
            late.latest(PUBLISHED)
    if publisher:  # each process has this array whole
        assert cgx.patch.Publisher(f"{path}/b").publish(found["b"]) == 1
        with cgx.patch.Subscriber(f"{path}/b", tree["b"], every=None) as other:
            assert (other.latest() == PUBLISHED).all()
        assert cgx.patch.checksum(found["b"]) == cgx.patch.checksum(tree["b"] + PUBLISHED)
    if importlib.util.find_spec("orbax"):
        from jaxcgx.patch import checkpoints

        with pytest.raises(TypeError, match="checkpoints.Save: argument 'item', leaf .*whole"):
            checkpoints.handler(f"{path}/patches").save(path, checkpoints.Save(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

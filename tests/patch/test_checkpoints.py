"""Tests checkpoints of Orbax that are patches: the bits of every step, the space that they take, and other folders."""

import errno
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_trees
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import make_mesh

ocp = pytest.importorskip("orbax.checkpoint", reason="needs the extra `test`")
from jaxcgx.patch import checkpoints  # noqa: E402

STEPS, SIZE = 12, 2**16


def trained():
    """Yields a bfloat16 tree after each step, of which a step changes one weight in a hundred."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**15, (8, SIZE // 8), np.uint16)
    for _ in range(STEPS):
        words = words + (rng.random(words.shape) < 0.01).astype(np.uint16)
        yield {"w": jnp.asarray(words.view(jnp.bfloat16)), "step": np.int32(rng.integers(100))}


def test_a_manager_with_anchors(tmp_path):
    """Old steps go, and with the last step that needs them an anchor and its patches."""
    options = ocp.CheckpointManagerOptions(max_to_keep=5)
    handler = checkpoints.handler(tmp_path / "patches", anchor_every=4)
    trees = list(trained())
    with ocp.CheckpointManager(tmp_path / "steps", options=options, item_handlers=handler) as manager:
        for step, tree in enumerate(trees):
            assert manager.save(step, args=checkpoints.Save(tree))
        manager.wait_until_finished()
        assert manager.all_steps() == [7, 8, 9, 10, 11]
        for step in manager.all_steps():
            assert_same_trees(manager.restore(step, args=checkpoints.Restore(trees[step])), trees[step])
        rows = NamedSharding(make_mesh(), P("data"))
        like = {"w": jax.ShapeDtypeStruct((8, SIZE // 8), jnp.bfloat16, sharding=rows), "step": trees[0]["step"]}
        found = manager.restore(11, args=checkpoints.Restore(like))
        assert found["w"].sharding == rows
        assert_same_trees(found, trees[11])
    files = {path.stat().st_ino: path for path in tmp_path.rglob("*.*") if path.suffix in (".anchor", ".patch")}
    assert {int(path.name[:12]) for path in files.values()} == {8, 9, 10, 11, 12}
    assert sum(path.suffix == ".anchor" for path in files.values()) == 2
    assert sum(path.stat().st_size for path in files.values()) < 2.2 * 2 * SIZE


def test_another_run_begins_with_an_anchor(tmp_path):
    trees = list(trained())
    for step, tree in enumerate(trees[:2]):
        with ocp.Checkpointer(checkpoints.handler(tmp_path / "patches")) as checkpointer:
            checkpointer.save(tmp_path / str(step), args=checkpoints.Save(tree))
            for each in range(step + 1):
                got = checkpointer.restore(tmp_path / str(each), args=checkpoints.Restore(tree))
                assert_same_trees(got, trees[each])
    assert len(list((tmp_path / "1").glob("*.patch"))) == 0


def test_what_is_no_whole_checkpoint(tmp_path):
    handler, tree = checkpoints.handler(tmp_path / "patches"), next(trained())
    (tmp_path / "1").mkdir()
    handler.save(tmp_path / "1", checkpoints.Save(tree))
    (file,) = (tmp_path / "1").glob("*.anchor")
    file.write_bytes(file.read_bytes()[:-1])
    for folder, why in (tmp_path / "1", "is corrupted"), (tmp_path, "No such file.*version"):
        with pytest.raises(ValueError, match=f"checkpoints.Restore: expected the whole weights in {folder}, .*{why}"):
            handler.restore(folder, checkpoints.Restore(tree))


@pytest.mark.parametrize("removed", ["folder", "patch"])
def test_files_that_another_program_has_removed(removed, tmp_path):
    """Each step has its own weights, or none."""
    folder = tmp_path / "patches"
    trees, handler = list(trained())[:5], checkpoints.handler(folder)
    for step, tree in enumerate(trees):
        if step == 3:
            shutil.rmtree(folder) if removed == "folder" else next(folder.glob("*2-*.patch")).unlink()
        (tmp_path / str(step)).mkdir()
        handler.save(tmp_path / str(step), checkpoints.Save(tree))
        assert_same_trees(handler.restore(tmp_path / str(step), checkpoints.Restore(tree)), tree)
    next((tmp_path / "4").glob("*6-*.patch")).unlink()
    with pytest.raises(ValueError, match="expected version 6 .* got 5"):
        handler.restore(tmp_path / "4", checkpoints.Restore(tree))


def test_what_is_not_saved(tmp_path, monkeypatch):
    tree, fail = {"w": np.zeros(4)}, lambda code: lambda *_: (_ for _ in ()).throw(OSError(code, ""))
    handler = checkpoints.handler(tmp_path / "patches")
    for rank in 0, 1:  # in all processes, so that none waits for another one
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        with pytest.raises(TypeError, match=r"checkpoints.Save: argument 'item', leaf \['s'\]: expected an array"):
            handler.save(tmp_path, checkpoints.Save({"s": 2}))
    with pytest.raises(ValueError, match="checkpoints.handler: argument 'folder': expected a path, got 'gs://b/p'"):
        checkpoints.handler("gs://b/p")
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    for code, error, match in (errno.EXDEV, OSError, "'folder': .* hard links"), (errno.ENOENT, RuntimeError, "a part"):
        monkeypatch.setattr(checkpoints.os, "link", fail(code))
        with pytest.raises(error, match=match):
            handler.save(tmp_path, checkpoints.Save(tree))

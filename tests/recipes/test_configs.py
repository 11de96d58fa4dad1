"""Tests that every config trains for 20 steps on synthetic data, and that an unused setting is an error."""

import collections
import importlib
import itertools
import pathlib
import re
import struct
import types

import jax
import numpy as np
import pytest
from helpers import FULL

import jaxcgx as cgx

CONFIGS = pathlib.Path(__file__).parents[2] / "recipes/configs"
# heavy_configs.py has the whole depth of these networks, and ImageNet's, which take half a minute each.
SHALLOW, NARROW = {"model.depth": 8}, {"data.tokens": 256, "model.width": 16, "model.heads": 2}
TINY = dict.fromkeys(["cifar/resnet56", "digits/resnet20", "fashion_mnist/resnet20"], SHALLOW)
TINY |= {
    "cifar/resnet20": SHALLOW | {"compression": "cgx4"},
    "digits/mlp": {},
    "fashion_mnist/mlp": {},
    "qa/bert": NARROW | {"data.length": 24, "model.layers": 1},
    "text/transformer_xl": NARROW | {"data.context": 16, "model.layers": 2, "model.inner": 16, "model.segment": 8},
}
HEAVY = {"imagenet/resnet50", "imagenet/vgg16"}
RESUMED = {"text/gpt"}  # these are in test_resume.py
WORDS = sorted(path.stem for path in (CONFIGS / "compression").glob("*.py"))


def test_all_configs_are_here():
    found = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/[!_]*.py")}
    assert {name for name in found if not name.startswith("compression/")} == TINY.keys() | HEAVY | RESUMED


def events(path):
    """TensorBoard's events in a file: each has its size, a checksum, its bytes and another checksum."""
    event = importlib.import_module("tensorboardX.proto.event_pb2").Event
    content = path.read_bytes()
    while content:
        (size,) = struct.unpack_from("<Q", content)
        yield event.FromString(content[12 : 12 + size])
        content = content[16 + size :]


@pytest.mark.parametrize("name", TINY if FULL else ["cifar/resnet20", "digits/mlp", "qa/bert", "text/transformer_xl"])
def test_configs(name, run, tmp_path):
    results = run(name, TINY[name])
    assert results["step"] == 20 and results["test_loss"] > 0
    log, title = (next(tmp_path.glob(f"*/{file}")).read_text() for file in ("log.txt", "plot.txt"))
    assert re.search(r": synthetic \w+, [\d,]+ parameters", log) and re.search(r"synthetic \w+, step 20: ", log)
    assert title.startswith("synthetic ")
    (path,) = tmp_path.glob("*/events.out.tfevents.*")
    shown = {(event.step, each.tag): each.simple_value for event in events(path) for each in event.summary.value}
    assert {(0, "bytes"), (20, "loss")} <= shown.keys()
    assert shown[20, "test_loss"] == pytest.approx(results["test_loss"])


@pytest.fixture
def steps(train, monkeypatch):
    """The programs of steps that are lowered. "sent" comes before the first step."""
    found, named = [], {"jit(step)", "jit(train)", "jit(act)"}

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration" and about["fun_name"] in named:
            found.append(about["fun_name"])

    sent = train.Job.sent
    monkeypatch.setattr(train.Job, "sent", lambda *args: (sent(*args), found.append("sent"))[0])
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


# By default one of each kind. test_a_key_that_nothing_reads has all files.
@pytest.mark.parametrize("word", WORDS if FULL else ["cgx4", "dgc", "diloco", "none"])
def test_compressions(word, run, steps, tmp_path):
    results = run("digits/mlp", {"compression": word} | ({"compression.every": 10} if word == "diloco" else {}))
    log = next(tmp_path.glob("*/log.txt")).read_text()
    warms = word in ("dgc", "dgc-fp16")
    assert ("bytes a step after the warm-up" in log) == warms
    assert ("all 20 steps belong to the warm-up, in which a rank sends more" in log) == warms
    # All is compiled before the first step. With DiLoCo, no step has exchanges in conditionals.
    own = ["jit(train)", "jit(act)"] if word == "diloco" else ["jit(step)"] * (1 + warms)
    assert steps == [*own, "sent"]
    if word in ("cgx", "none"):  # CGX's variables are unset
        assert results["bytes"] == results["raw_bytes"]
    else:
        assert results["bytes"] < 0.6 * results["raw_bytes"]


def test_dgc_after_its_warm_up(run, train, monkeypatch):
    """Steps then change few parameters: 0.1 % of each of two ranks."""
    saved = []
    save = lambda self, step, tree: saved.append(jax.tree.map(np.asarray, tree.params))
    monkeypatch.setattr(train.Checkpoints, "save", save)
    changes = {"compression": "dgc", "compression.warmup_epochs": 1, "train.save_every": 1, "train.steps": 7}
    run("digits/mlp", changes | {"train.batch_size": 256, "optimizer.weight_decay": 0.0})  # 5 steps an epoch
    weights = [np.concatenate([x.ravel() for x in jax.tree.leaves(tree) if x.ndim > 1]) for tree in saved]
    changed = [np.mean(new != old) for old, new in itertools.pairwise(weights)]
    assert len(changed) == 6 and max(changed[-2:]) < 0.003 and min(changed[:3]) > 0.03


def test_ranks_of_a_process_are_consecutive(train, monkeypatch):
    """Also if JAX lists the devices in another order."""
    Device = collections.namedtuple("Device", "process_index id")
    monkeypatch.setattr(train.launch, "Mesh", lambda devices, *args, **options: [tuple(each) for each in devices])
    monkeypatch.setattr(np, "array", list)
    world = train.launch.over_devices([Device(1, 3), Device(0, 0), Device(1, 1), Device(0, 2)])
    assert world.mesh == [(0, 0), (0, 2), (1, 1), (1, 3)] and (world.first, world.here) == (0, 2)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"modell.x": 1}, r"config\.modell\.x: there is no such key; config has compression, data"),
        ({"train.stepz": 1}, r"config\.train\.stepz: there is no such key; config\.train has .*steps"),
        ({"train": 1}, r"config\.train: expected a key of this section, as --config\.train\.batch_size="),
        ({"train.steps": "many"}, r"config\.train\.steps: expected a value like 0, got 'many'"),
        ({"train.batch_size": 1}, r"config\.train\.batch_size: expected at least one example for each of 2 ranks"),
        ({"train.batch_size": 5000}, r"config\.train\.batch_size: expected at most 1347 examples of synthetic digits"),
        ({"compression": "dgcc"}, r"config\.compression: there is no file .*dgcc\.py; its folder has bsc, .*none"),
        ({"data.name": "text", "data.synthetic": False}, r"\.data: .*missing.* 'files', 'context',? and 'tokens'"),
        ({"model.name": "resnet"}, r"config\.model\.hidden: nothing reads it; config\.model has depth"),
        ({"optimizer.name": "adamw"}, r"config\.optimizer\.decay_1d: nothing reads it; .* has b1, b2, weight_decay"),
        ({"schedule.name": "step"}, r"config\.schedule\.name: expected one of cosine, scaled, steps, got 'step'"),
        ({"train.num_epochs": "1e400"}, r"config\.train: expected a positive num_epochs, got inf"),
        ({"train.seed": 2**32}, r"config\.train: expected a seed below 2\^32, got 4294967296"),
        ({"compression": "diloco"}, r"config\.train\.steps: expected at least 50, .*every 50 steps, got 20"),
        ({"compression": "../digits/mlp"}, r"config\.compression: expected a word, the name of a file"),
        ({"optimizer.clip": -1.0}, r"config\.optimizer: expected a clip of at least 0, got -1\.0"),
        ({"optimizer.momentum": 1.0}, r"config\.optimizer: expected a momentum from 0 to below 1, got 1\.0"),
        ({"model.hidden": (0,)}, r"config\.model: expected a size of at least 1, got 0"),
        ({"compression": "dgc", "compression.ratio": 2.0}, r"\.compression, dgc: DGC: argument 'ratio': expected"),
        ({"compression": "dgc", "compression.ratio": 1.0}, r"\.ratio: expected .* got 1; --compression=none sends"),
        (
            {"compression": "dgc-wm0", "compression.warmup_coeff": 0.1},
            r"config\.compression\.warmup_coeff: nothing reads it, because warmup_epochs is 0",
        ),
        ({"compression": "cgx4", "compression.codec.name": "Max"}, r"a codec's name: expected one of .*, got 'Max'"),
        ({"compression": "cgx4", "compression.codec.bits": 9}, r"config\.compression.*MaxMin: argument 'bits'"),
    ],
)
def test_wrong_configs(changes, says, run, train, tmp_path):
    with pytest.raises(train.Wrong) as error:
        run("digits/mlp", changes)
    assert re.search(says, str(error.value)), error.value
    assert "\n" not in str(error.value) and not list(tmp_path.glob("*/checkpoints"))


@pytest.mark.parametrize(
    "section, word",
    [(section, "none") for section in ("data", "model", "optimizer", "schedule", "train")]
    + [("compression", word) for word in WORDS],
)
def test_a_key_that_nothing_reads(section, word, train):
    """It is an error before the training, also if a file has it."""
    config = train.config.make_config(str(CONFIGS / "digits/mlp.py"), {"data": "synthetic", "compression": word})
    with config[section].unlocked():
        config[section].extra = 1
    with pytest.raises(train.Wrong, match=rf"config\.{section}\b.*\bextra\b"):
        job = train.prepare(config, train.launch.over_devices(jax.devices()[:2]))
        train.call(job.make_step, "config.compression", job.exchange.made)


def test_wrong_files(train, tmp_path, refuses):
    """The cases are a section that doesn't exist, and a file without a config."""
    config = "import configs\n\ndef get_config():\n    config = configs.get_config()\n    {}\n    return config\n"
    path = tmp_path / "extra.py"
    path.write_text(config.format("config.extra = 1"))
    refuses(r"expected the sections compression, .*, got .*extra", train.config.parse, [f"--config={path}"])
    path.write_text("")
    refuses(r"extra\.py has no get_config\(\)", train.config.parse, [f"--config={path}"])
    words = r"--config: there is no file .*none\.py; its folder has extra"
    refuses(words, train.config.parse, [f"--config={tmp_path}/none.py"])
    (tmp_path / "half.py").write_text("def get_config(:")
    refuses(r"--config: .*half\.py, line 1: invalid syntax", train.config.parse, [f"--config={tmp_path}/half.py"])
    (tmp_path / "wrong.py").write_text(config.format("config.trian.steps = 3"))
    with pytest.raises(train.Wrong, match=r"--config: .*wrong\.py, line 5: .*trian") as error:
        train.config.parse([f"--config={tmp_path}/wrong.py"])
    assert "\n" not in str(error.value)


def test_no_process_waits_for_one_that_refuses_a_folder(train, run, tmp_path):
    run("digits/mlp", {})
    folder = next(tmp_path.iterdir())
    settings = train.config.parse([f"--config={CONFIGS}/digits/mlp.py", "--config.data=synthetic"]).config
    sent = []
    for rank in (0, 1):  # the first one writes and refuses, and the other one hears why
        comm = types.SimpleNamespace(allgather=lambda mine: sent.append(mine) or sent)
        with pytest.raises(train.Wrong, match=r"config\.train\.batch_size: the run in .* has 8"):
            train.RunFolder(folder, settings, {}, train.launch.World(2, rank, 1, None, comm))
    assert any(sent[0]) and not any(sent[1])


def test_a_folder_that_is_not_the_repository(train, tmp_path, monkeypatch):
    """A path in the current folder comes first."""
    monkeypatch.chdir(tmp_path)
    given = "recipes/configs/cifar/resnet20.py"
    for changes in ["--config.compression=dgc"], ["--config.compression", "dgc"], ["--compression=dgc"]:
        command = train.config.parse([f"--config={given}", *changes, "--config.train.num_epochs=500", "--suffix=x"])
        assert command.name == "cifar-resnet20-dgc-x" and command.config.train.num_epochs == 500
    path = tmp_path / given
    path.parent.mkdir(parents=True)
    path.write_text("from configs.cifar.resnet56 import get_config\n")
    assert train.config.parse([f"--config={given}"]).config.model.depth == 56


DGC = "configs/cifar/resnet20.py configs/dgc/wm5.py configs/dgc/fp16.py configs/dgc/int32.py"


def test_the_command_of_dgc(train, tmp_path, monkeypatch):
    """Its files are found from any folder. The rate is multiplied by the ranks, and so is the batch."""
    monkeypatch.chdir(tmp_path)
    line = f"--configs {DGC} --configs.train.num_epochs 500 --suffix .e500 --evaluate".split()
    command = train.config.parse(line)
    assert (command.name, command.evaluate) == ("cifar-resnet20-wm5-fp16-int32.e500", True)
    command = train.config.parse([*line[:-1], "--config.data=synthetic", "--configs.compression.clip_value", "0.5"])
    job = train.prepare(command.config, train.launch.over_devices(jax.devices()[:2]))
    made, rates = job.exchange.made, [float(job.schedule(step)) for step in (0, 5 * job.steps_per_epoch, job.stop)]
    options = dict(values=cgx.Cast("float16"), select="sampled", clip_value=0.5, weight_decay=1e-4)
    assert made == cgx.DGC(**options, warm_up=cgx.WarmUp(5, job.steps_per_epoch))
    np.testing.assert_allclose(rates, (0.1, 0.2, 0.0), atol=1e-6)
    assert (job.settings.batch_size, job.stop) == (256, 500 * job.steps_per_epoch)


@pytest.mark.parametrize("path", sorted(CONFIGS.parent.glob("dgc/configs/[!d]*/*.py")), ids=lambda path: path.stem)
def test_the_networks_of_dgc(path, train):
    found = train.config.parse(["--configs", str(path), "configs/dgc/wm5o.py", "configs/dgc/nm.py"]).config
    assert found.train.per_rank and found.schedule.name == "scaled"
    assert found.compression.warmup_coeff == (1.0,) * 5 and not found.compression.masking


def test_evaluate(run, tmp_path, refuses):
    refuses("there is no checkpoint", run, "digits/mlp", {}, more=["--evaluate"])
    results = run("digits/mlp", {}, runs=tmp_path / "b")
    assert run("digits/mlp", {}, runs=tmp_path / "b", more=["--evaluate"])["test_loss"] == results["test_loss"]


@pytest.mark.parametrize("word", ["bytegrad", "dgc-wm0", "diloco"])
def test_nodes(word, train, run, refuses):
    """Between nodes, every word compresses. Inside of a node, gradients travel raw."""
    world = train.launch.over_devices(jax.devices()[:4], locals=2)
    assert dict(world.mesh.shape) == {"node": 2, "local": 2}
    changes = {"compression": word} | ({"compression.every": 10} if word == "diloco" else {})
    results = run("digits/mlp", changes, world=world)
    assert 4 * 33_738 < results["bytes"] < 0.9 * results["raw_bytes"]  # the parameters, over the ranks of a node
    words = "--nodes, --locals: expected two numbers whose product is 4"
    for sizes in (3, None), (2, 3), (0, None):
        refuses(words, train.launch.over_devices, jax.devices()[:4], *sizes)


def test_the_page_for_users_of_dgc(train):
    """Its command and the options in its table are those of the recipes, and reach `jaxcgx.DGC`."""
    page = (CONFIGS.parents[1] / "docs/from-dgc.md").read_text()
    (line,) = re.findall(r"python recipes/train.py (--devices 8 --configs .*?)\n```", page, re.DOTALL)
    command = train.config.parse(line.replace("\\\n", " ").split())
    assert (command.name, command.devices) == ("cifar-resnet20-wm5-fp16-int32.e500", 8)
    options = re.findall(r"`(--configs\.[a-z0-9_.]+ [^`]*)`", page)
    given = [word for option in options for word in option.split()]
    assert len(options) == 6
    config = train.config.parse(["--configs", *DGC.split(), *given]).config
    applied = importlib.import_module("optimizers").Moved(nesterov=config.optimizer.nesterov)
    around = importlib.import_module("exchanges").Around(applied, 10)
    made = importlib.import_module("exchanges").make(around, **config.compression.to_dict()).made
    assert (made.ratio, made.select, made.clip_value, made.nesterov) == (0.01, "exact", 1.0, True)
    assert made.warm_up == cgx.WarmUp(5, 10, 0.25)
    assert not config.optimizer.decay_1d


@pytest.mark.parametrize("drops, got", [((82, 123), r"\(82, 123\)"), ((0.5, 0.5), r"\(0\.5, 0\.5\)")])
def test_drops_are_fractions(drops, got, run, refuses):
    words = rf"config\.schedule: expected different numbers between 0 and 1 as drops, got {got}"
    refuses(words, run, "cifar/resnet20", SHALLOW | {"schedule.drops": drops})


def test_diloco_ends_with_an_exchange(run):
    """A test after further steps would see none of them."""
    assert run("digits/mlp", {"compression": "diloco", "compression.every": 8})["step"] == 16

"""Tests the large models, unchanged except for the size of the images: `make test-recipes`."""

import jax
import pytest

LARGE = {f"{name}/resnet20": {} for name in ("cifar", "digits", "fashion_mnist")} | {
    "cifar/resnet56": {},
    "imagenet/resnet50": {"data.size": 32, "compression": "cgx4"},
    "text/gpt": {},
    "imagenet/vgg16": {"data.size": 32, "model.hidden": 64, "compression": "dgc"},
}


@pytest.mark.parametrize("name", LARGE)
def test_configs(name, run):
    assert run(name, LARGE[name])["step"] == 20


def test_gpt_as_written(run, tmp_path):
    """The transformer of the config trains on text, which comes with Python."""
    results = run("text/gpt", {"data": "text", "train.steps": 2, "train.test_examples": 8}, small={})
    assert results["step"] == 2 and results["test_loss"] < 5.6 and results["raw_bytes"] > 12e6
    assert next(tmp_path.glob("*/plot.txt")).read_text().startswith("text, gpt, none, 2 ranks")


CASES = [("cifar/resnet20 dgc/wm5 dgc/fp16 dgc/int32", 8, 2), ("imagenet/resnet50 dgc/wm0", 2, 20)]


@pytest.mark.parametrize("files, devices, steps", CASES)
def test_the_files_of_dgc(files, devices, steps, train, tmp_path):
    """They train, on as many ranks and on images of the same size as there, with few images for each rank."""
    paths = (f"configs/{name}.py" for name in files.split())
    changes = "data=synthetic", "train.batch_size=2", f"train.steps={steps}", "train.test_examples=2"
    words = ["--configs", *paths, *(f"--config.{change}" for change in changes), f"--runs={tmp_path}"]
    results = train.train(train.config.parse(words), train.launch.over_devices(jax.devices()[:devices]))
    assert results["step"] == steps and results["test_loss"] > 0

"""Tests the large models, unchanged except for the size of the images: `make test-recipes`."""

import pytest

LARGE = {
    "cifar/resnet20": {},
    "cifar/resnet56": {},
    "digits/resnet20": {},
    "fashion_mnist/resnet20": {},
    "imagenet/resnet50": {"data.size": 32, "compression": "cgx4"},
    "imagenet/vgg16": {"data.size": 32, "model.hidden": 64, "compression": "dgc"},
}


@pytest.mark.parametrize("name", LARGE)
def test_configs(name, run):
    assert run(name, LARGE[name])["step"] == 20

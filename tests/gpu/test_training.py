"""Tests whole training steps on GPUs. The full tests also run the same code on the CPU."""

import pathlib

import jax
import pytest
from helpers import FULL, load_script

in_full = pytest.mark.skipif(not FULL, reason="runs in the full tests")
on_each_platform = pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=in_full), pytest.param("gpu", marks=pytest.mark.gpu)]
)


@pytest.fixture
def training(monkeypatch):
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason=f"needs {package}")
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        yield load_script(pathlib.Path(__file__).parent / "training.py", monkeypatch)


@on_each_platform
def test_train_step_and_fsdp(training, platform):
    devices = jax.devices(platform)[:4]
    if len(devices) == 1:
        pytest.skip(f"needs two devices, got one ({platform}), which exchanges nothing")
    training.check_train_step(devices)


@on_each_platform
def test_ranks_of_one_device(training, platform):
    training.check_ranks_of_one_device(jax.devices(platform)[0])

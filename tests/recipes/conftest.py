"""Fixtures that run recipes/train.py in this process."""

import importlib
import pathlib

import jax
import pytest
from helpers import load_script

RECIPES = pathlib.Path(__file__).parents[2] / "recipes"
SMALL = {"train.batch_size": 8, "train.steps": 20, "train.test_examples": 8}


@pytest.fixture
def train(monkeypatch):
    """The module train.py. It imports the other modules of its folder."""
    for library in ("flax", "matplotlib", "ml_collections", "orbax", "tensorboardX", "tqdm"):
        pytest.importorskip(library, reason="needs the extra `recipes`")
    with jax.numpy_dtype_promotion("standard"):
        yield load_script(RECIPES / "train.py", monkeypatch)


@pytest.fixture
def refuses(train):
    """A function that checks why a call ends: refuses(pattern, function, *arguments)."""

    def check(pattern, function, *args, **options):
        with pytest.raises(train.Wrong, match=pattern):
            function(*args, **options)

    return check


@pytest.fixture
def data(train):
    """The package recipes/data."""
    return importlib.import_module("data")


@pytest.fixture
def run(train, tmp_path, monkeypatch):
    """A function that trains. run("digits/mlp", {"compression": "dgc"}, devices=2) returns the results.

    Drawing a plot takes a second, so plot.txt has its title instead.
    """
    write = lambda figure, path, **options: path.with_suffix(".txt").write_text(figure.get_suptitle())
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", write)

    def of(name, changes, *, devices=2, small=SMALL, runs=tmp_path, more=(), world=None):
        changes = {"data": "synthetic"} | small | changes
        changes = [f"--config.{key}={value}" for key, value in changes.items()]
        command = train.config.parse([f"--config={RECIPES}/configs/{name}.py", f"--runs={runs}", *changes, *more])
        return train.train(command, world or train.launch.over_devices(jax.devices()[:devices]))

    return of

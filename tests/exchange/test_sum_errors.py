"""Tests that the errors of sums are those that errors.py predicts."""

import jax
import numpy as np
import pytest
from helpers import planned
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange.errors import Losses, drawn
from jaxcgx.plan.overlay import Overlay

SIZE, RANKS = 2**16, 4
STOCHASTIC, CORRELATED = (cgx.MaxMin(4, rounding=rounding) for rounding in ("stochastic", "correlated"))


def measured(codec, x, schedule, axes="a", sizes=(RANKS,)):
    key = jax.random.key(3) if getattr(codec, "stochastic", False) else None
    f = lambda x: cgx.compressed_pmean(x, axes, planned(codec, schedule=schedule), key=key)
    result = np.asarray(on_ranks(f, mesh(*sizes))(x.reshape(*sizes, -1)), np.float64).reshape(-1, SIZE)[0]
    exact = x.mean(0, dtype=np.float64)
    return np.square(result - exact).sum() / np.square(exact).sum()


@pytest.mark.parametrize(
    ("codec", "distribution", "schedule"),
    [
        (cgx.MaxMin(4), "normal", "two_shot"),
        (cgx.MaxMin(2), "normal", "two_shot"),
        (cgx.MaxMin(3), "laplace", "ring"),
        (cgx.MaxMin(3), "normal", "tree"),
        (STOCHASTIC, "normal", "one_shot"),
        (STOCHASTIC, "laplace", "two_shot"),
        (CORRELATED, "normal", "one_shot"),
        (CORRELATED, "normal", "tree"),
        (cgx.Float8(), "student", "ring"),
        (cgx.Float8(), "student", "gather"),
        (cgx.Sign(), "normal", "two_shot"),
        (cgx.Micro(), "student", "two_shot"),
        (cgx.Eden(2), "student", "two_shot"),
        (cgx.Eden(4), "laplace", "ring"),
        (cgx.MaxMin(4, 256, rotate=True), "student", "tree"),
        (cgx.TopK(0.05), "laplace", "one_shot"),
        (cgx.TopK(0.05), "laplace", Overlay.owners(RANKS)),
    ],
    ids=str,
)
def test_within_a_tenth(codec, distribution, schedule):
    predicted = Losses(drawn(distribution, RANKS, SIZE, seed=1), codec, cut=RANKS).error(schedule, RANKS)
    assert predicted == pytest.approx(measured(codec, drawn(distribution, RANKS, SIZE, seed=2), schedule), rel=0.1)


def test_ranks_that_are_alike_make_the_same_errors():
    """With nearest rounding errors don't average out. With stochastic rounding they do, with correlated they cancel."""
    same = np.tile(drawn("normal", 1, SIZE), (8, 1))
    nearest, stochastic, correlated = (Losses(same, codec) for codec in (cgx.MaxMin(4), STOCHASTIC, CORRELATED))
    assert nearest.error("one_shot", 8) == pytest.approx(nearest.error("one_shot", 2), rel=0.01)
    assert stochastic.error("one_shot", 8) == pytest.approx(stochastic.error("one_shot", 2) / 4, rel=0.05)
    assert correlated.error("one_shot", 8) == pytest.approx(stochastic.error("one_shot", 8) / 8, rel=0.05)


def test_nodes():
    codec = {"a": cgx.MaxMin(4), "b": cgx.Raw()}
    x = drawn("laplace", RANKS, SIZE, seed=2)
    losses = Losses(drawn("laplace", RANKS, SIZE, seed=1), codec["a"])
    for schedule in ("one_shot", "two_shot"):
        exact = measured(codec, x, {"a": schedule, "b": "two_shot"}, axes=("a", "b"), sizes=(2, 2))
        assert losses.error(schedule, 2, each=2) == pytest.approx(exact, rel=0.1)


def test_more_ranks_than_the_sample_has():
    codec = cgx.MaxMin(4)
    few, many = (Losses(drawn("normal", ranks, SIZE), codec) for ranks in (2, 16))
    for schedule in ("one_shot", "two_shot", "ring"):
        assert few.error(schedule, 16) == pytest.approx(many.error(schedule, 16), rel=0.05)

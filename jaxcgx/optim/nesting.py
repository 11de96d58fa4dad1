"""Checks the place of compress_gradients in an optimizer. Before it, gradients differ from rank to rank."""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import callers_level, wrong
from jaxcgx.optim.require import import_optax
from jaxcgx.optim.state import CompressState


def has_rows(node: Any) -> bool:
    """Returns whether a node of an optimizer's state has fields with a row per rank."""
    return hasattr(type(node), "per_rank")


def check_opt_state(opt_state: Any) -> None:
    """Refuses what is no optimizer's state of a `TrainStep`: a tuple whose first entry is that of the exchange."""
    given = opt_state[:1] if type(opt_state) is tuple else ()
    # With overlap="priority", the first entry is None while gradients travel.
    if given == (None,) or any(map(has_rows, jax.tree_util.tree_leaves(given, is_leaf=has_rows))):
        return
    expected = "the optimizer's state that train.init or the step before returned"
    remedy = "write train.step(params, opt_state, batch), or train.step(params, model_state, opt_state, batch)"
    raise wrong("train.step", "opt_state", expected, f"a {type(opt_state).__name__}", remedy, kind=TypeError)


def check_nesting(function: str, opt_state: Any) -> None:
    """Refuses transformations whose state depends on one rank's gradients but has no axis of ranks.

    Such transformations are wrappers around compress_gradients, or come before it in a chain.
    """
    optax = import_optax(function)
    _check_around(function, opt_state, optax.MultiStepsState, name="MultiSteps")
    _check_around(function, opt_state, optax.ApplyIfFiniteState, name="apply_if_finite")
    for chain in jax.tree_util.tree_leaves(opt_state, is_leaf=_is_chain):
        if _is_chain(chain):
            _check_before(function, chain)


def warn_of_momentum(function: str, argument: str, opt_state: Any) -> None:
    """Warns about a state in which an optimizer has momentum, and so do the gradients that it gets."""
    trace = import_optax(function).TraceState
    nodes = jax.tree_util.tree_leaves(opt_state, is_leaf=lambda node: isinstance(node, (CompressState, trace)))
    moved = any(isinstance(node, CompressState) and node.momentum is not None for node in nodes)
    if moved and any(isinstance(node, trace) for node in nodes):
        expected = "none with momentum of its own, because gradients already have momentum (momentum=, dgc, bsc)"
        error = wrong(function, argument, expected, "optax.trace", "write optax.sgd(rate)")
        warnings.warn(str(error), stacklevel=callers_level())


def _check_around(function: str, opt_state: Any, wrapper: type[Any], name: str) -> None:
    def wraps(node: Any) -> bool:
        return isinstance(node, wrapper) and any(map(has_rows, jax.tree_util.tree_leaves(node, is_leaf=has_rows)))

    if any(map(wraps, jax.tree_util.tree_leaves(opt_state, is_leaf=wraps))):
        raise wrong(
            function,
            "opt_state",
            f"optax.{name} behind compress_gradients, where gradients are the same on every rank",
            "it around",
            f"write optax.chain(jaxcgx.compress_gradients(...), optax.{name}(optimizer, ...))",
        )


def _check_before(function: str, chain: tuple[Any, ...]) -> None:
    for node in itertools.takewhile(lambda node: not has_rows(node), chain):
        leaves = jax.tree_util.tree_leaves(node, is_leaf=has_rows) if isinstance(node, tuple) else ()
        if any(map(_like_gradients, leaves)):
            raise wrong(
                function,
                "opt_state",
                "transformations with a state like the gradients behind compress_gradients, where gradients are the "
                "same on every rank",
                f"{type(node).__name__} before it",
                "put it behind (in place of optax.trace before it, give compress_gradients momentum=)",
            )


def _is_chain(node: Any) -> bool:
    """Returns whether a node is optax.chain's tuple of states, and one of the states has fields with a row per rank."""
    return type(node) is tuple and any(map(has_rows, node))


def _like_gradients(leaf: Any) -> bool:
    return not has_rows(leaf) and len(leaf.shape) > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)

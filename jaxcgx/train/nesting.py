"""Checks the place of compress_gradients in an optimizer. Before it, gradients differ from rank to rank."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import warn, wrong
from jaxcgx.exchange.message import Carry
from jaxcgx.train.require import import_optax
from jaxcgx.train.state import ExchangeState
from jaxcgx.typing import PyTree

SAME = "behind compress_gradients, where gradients are the same on every rank"


def nodes(tree: PyTree, *kinds: type[Any]) -> list[Any]:
    """Returns the nodes of these classes in a tree."""
    is_node = lambda x: isinstance(x, kinds)
    return [x for x in jax.tree_util.tree_leaves(tree, is_leaf=is_node) if is_node(x)]


def check_nesting(function: str, opt_state: PyTree) -> None:
    """Refuses transformations whose state depends on one rank's gradients but has no axis of ranks.

    Such transformations are wrappers around compress_gradients, or come before it in a chain.
    """
    optax = import_optax(function)
    for wrapper, name in (optax.MultiStepsState, "MultiSteps"), (optax.ApplyIfFiniteState, "apply_if_finite"):
        if any(nodes(node, ExchangeState) for node in nodes(opt_state, wrapper)):
            remedy = f"write optax.chain(jaxcgx.compress_gradients(...), optax.{name}(optimizer, ...))"
            raise wrong(function, "opt_state", f"optax.{name} {SAME}", "it around", remedy)
    # A chain's state is a tuple, in which compress_gradients has one of the entries.
    is_state = lambda x: isinstance(x, ExchangeState)
    is_chain = lambda x: type(x) is tuple and any(map(is_state, x))
    for chain in filter(is_chain, jax.tree_util.tree_leaves(opt_state, is_leaf=lambda x: is_chain(x) or is_state(x))):
        for node in itertools.takewhile(lambda x: not is_state(x), chain):
            if isinstance(node, tuple) and any(map(_like_gradients, jax.tree_util.tree_leaves(node))):
                expected, got = (
                    f"transformations with a state like the gradients {SAME}",
                    f"{type(node).__name__} before it",
                )
                remedy = "put it behind (in place of optax.trace before it, pass jaxcgx.Momentum to compress_gradients)"
                raise wrong(function, "opt_state", expected, got, remedy)


def warn_of_momentum(function: str, argument: str, opt_state: PyTree, exchange: ExchangeState | None = None) -> None:
    """Warns about a state in which an optimizer has momentum, and so do the gradients that it gets.

    Their exchange has the state `exchange`, or one inside of `opt_state`.
    """
    moved = any(carry.momentum is not None for carry in nodes((opt_state, exchange), Carry))
    if moved and nodes(opt_state, import_optax(function).TraceState):
        expected = "none with momentum of its own, because gradients already have momentum (jaxcgx.Momentum, DGC, BSC)"
        warn(str(wrong(function, argument, expected, "optax.trace", "write optax.sgd(rate)")))


def _like_gradients(leaf: Any) -> bool:
    return len(leaf.shape) > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)

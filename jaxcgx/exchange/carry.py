"""What a sum keeps from call to call."""

import dataclasses

import jax

from jaxcgx.typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What a sum keeps from call to call: trees like the summed one, with None for leaves that keep nothing.

    None in place of a tree: no leaf keeps anything of its kind.

    Attributes:
      residuals: float32, this rank's own compression errors, which the next sum adds to its input.
      momentum: this rank's own momentum, like the leaves.
      factors: the factors of low-rank codecs, the same on every rank.
    """

    residuals: PyTree = None
    momentum: PyTree = None
    factors: PyTree = None

"""Encodes the outer gradients of decoupled centers as bytes, and averages those of several centers."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.checks import check_encodes
from jaxcgx.codecs.coding import decode, encode
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange.message import fold
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import skips, spell_path, why_raw
from jaxcgx.train.telemetry import TINY
from jaxcgx.wan.fragments import Fragment, cut

# The weight of a center, from its tokens and steps since it last took part.
WEIGHTS: dict[str | None, Callable[[float, float], float]] = {
    "tokens": lambda tokens, steps: tokens**2 / steps,
    "steps": lambda tokens, steps: steps,
    None: lambda tokens, steps: 1.0,
}


class Leaf(NamedTuple):
    """The encoding of a parameter's outer gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the parameter; its outer gradient is float32
    codec: Codec
    radial: bool  # True: averaged as "radial", False: as "mean"

    @property
    def bytes(self) -> int:
        return self.codec.wire_bytes(self.shape, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Packing:
    """The encoding of outer gradients as bytes, and its inverse. Frozen parameters are not sent."""

    leaves: tuple[Leaf, ...]
    trained: Fragment = dataclasses.field(compare=False)  # all parameters that aren't frozen

    @classmethod
    def of(cls, op: str, plan: Plan, params: Any, average: Any) -> Self:
        """Returns the packing for these parameters. `Decoupled` explains the arguments. Errors name `op`."""
        each, tree = jax.tree_util.tree_flatten_with_path(params)
        paths, values = zip(*each)
        assigned, found = plan.assign(op, "plan", paths=paths, leaves=values), list[Leaf]()
        trained = cut(op, params, tree.unflatten([skips(codec) for codec, _ in assigned]), 1)[0]
        for path, x, at, (codec, guarded) in zip(paths, values, trained.rows, assigned):
            if at is None:
                continue
            if not isinstance(codec, Codec):
                raise wrong(
                    op, "plan", "one codec for a parameter", "one for each axis", "leave out the axes", path=path
                )
            check_encodes(op, codec, "plan")
            wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
            codec = Raw() if guarded or why_raw(wide, [codec]) else codec
            radial = _how(op, average, path, x) == "radial"
            found.append(Leaf(spell_path(path), x.shape, str(x.dtype), codec=codec, radial=radial))
        return cls(tuple(found), trained)

    @property
    def bytes(self) -> int:
        """The number of bytes of a center's outer gradients."""
        return sum(leaf.bytes for leaf in self.leaves)

    def pack(self, moved: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
        """Returns (uint8[bytes], the tree that other centers decode from it) for the outer gradients `moved`."""
        values, tree = jax.tree_util.tree_flatten(moved)
        keys = [fold(key, i) if leaf.codec.stochastic else None for i, leaf in enumerate(self.leaves)]
        rows = [encode(x, leaf.codec, k) for x, leaf, k in zip(values, self.leaves, keys)]
        row = jnp.concatenate([jnp.zeros(0, jnp.uint8), *rows])
        return row, tree.unflatten(self._unpack(row))

    def average(self, rows: jax.Array, weights: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """Returns (the average of each leaf, whether any center counts).

        Every center adds in the same order, so that all centers get the same bits.

        Args:
          rows: uint8[centers, bytes].
          weights: float32[centers]; 0 for a center that doesn't take part. A center whose outer gradients aren't finite
            counts as one with weight 0.
        """

        def add(total: Any, given: Any) -> tuple[Any, None]:
            row, weight = given
            parts = self._unpack(row)
            finite = jnp.stack([jnp.isfinite(x).all() for x in parts]).all()
            return jax.tree_util.tree_map(
                lambda x, y: jnp.where(finite, x + y, x), total, self._terms(parts, weight)
            ), None

        def step(total: Any, given: Any) -> tuple[Any, None]:
            return lax.cond(given[1] > 0, add, lambda total, _: (total, None), total, given)

        zeros = [jnp.zeros(leaf.shape, jnp.float32) for leaf in self.leaves]
        start = jax.tree_util.tree_map(jnp.zeros_like, self._terms(zeros, jnp.float32(0)))
        (weight, norms, sums), _ = lax.scan(step, start, (rows, weights))
        least = jnp.maximum(weight, TINY)
        means = [
            _unit(x) * (norm / least) if leaf.radial else x / least for leaf, norm, x in zip(self.leaves, norms, sums)
        ]
        return means, weight > 0

    def _terms(self, parts: list[jax.Array], weight: jax.Array) -> tuple[Any, list[Any], list[Any]]:
        """Returns (weight, norms, leaves), which a center adds to the sums. Norms and leaves are times the weight.

        Leaves with the radial average are unit vectors. The norms of the other leaves are 0.
        """
        norms = [weight * _norm(x) if leaf.radial else jnp.float32(0) for leaf, x in zip(self.leaves, parts)]
        return weight, norms, [weight * (_unit(x) if leaf.radial else x) for leaf, x in zip(self.leaves, parts)]

    def _unpack(self, row: jax.Array) -> list[jax.Array]:
        found, at = list[jax.Array](), 0
        for leaf in self.leaves:
            found.append(decode(row[at : at + leaf.bytes], leaf.codec, leaf.shape, jnp.float32))
            at += leaf.bytes
        return found


def _how(op: str, average: Any, path: Any, x: Any) -> str:
    """Returns the kind of a parameter's average: "mean" or "radial"."""
    name = spell_path(path)
    if average == "radial":
        return "mean" if "embed" in name.lower() else "radial"
    found = average(name, x) if callable(average) else average
    if found not in ("mean", "radial"):
        place = f"the function's answer {found!r}" if callable(average) else repr(average)
        raise wrong(op, "average", "'mean', 'radial' or a function that returns one of them", place)
    return found


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt((x * x).sum())


def _unit(x: jax.Array) -> jax.Array:
    """Returns the vector of length 1 in the same direction. The unit vector of 0 is 0."""
    norm = _norm(x)
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1), 0)

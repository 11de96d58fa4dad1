"""The compiled programs of a decoupled center: they encode its outer gradient, and move its parameters."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from jaxcgx.collectives.replicas import checksum
from jaxcgx.exchange.message import fold
from jaxcgx.train.update import import_optax
from jaxcgx.wan.contributions import Packing
from jaxcgx.wan.diloco.outer import digest_of
from jaxcgx.wan.diloco.turn import choose, finite, wide

_program = functools.partial(jax.jit, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Moves:
    """The programs for some parameters.

    Args:
      packing: the encoding of outer gradients.
      optimizer: the outer optimizer.
      seed: the seed of the noise of codecs that round stochastically.
    """

    packing: Packing
    optimizer: Any
    seed: int

    def rule(self, outer: Any, state: Any) -> str:
        """Returns a digest of the outer optimizer's update for such parameters and state, with its constants.

        Centers compare it to check that they have the same outer optimizer.
        """
        shapes = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (outer, state))
        before = self.packing.trained.take(shapes[0])
        return digest_of(self.optimizer.update, before, shapes[1], before)

    @_program
    def copy(self, tree: Any) -> Any:
        """Returns a copy of a tree in new memory, because a step may donate its arguments."""
        return jax.tree_util.tree_map(jnp.copy, tree)

    @_program
    def zeros(self, tree: Any) -> Any:
        """Returns the residuals before the first round: zeros, in float32."""
        return jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)

    @_program
    def encode(self, outer: Any, own: Any, residuals: Any, numbers: Any) -> tuple[jax.Array, Any, Any]:
        """Returns (bytes of the outer gradient, a copy of the own parameters, residuals).

        The residuals are valid if the outer gradient counts in the round.

        Args:
          outer: the outer parameters.
          own: the center's own parameters.
          residuals: the residuals before; None without feedback.
          numbers: the center's place and the round, which the noise depends on.
        """
        take = self.packing.trained.take
        moved = jax.tree_util.tree_map(lambda x, y: wide(x) - wide(y), take(outer), take(own))
        if residuals is not None:
            moved = jax.tree_util.tree_map(jnp.add, moved, residuals)
        row, arrives = self.packing.pack(moved, fold(jnp.array([0, self.seed], jnp.uint32), *numbers))
        if residuals is not None:
            lost = jax.tree_util.tree_map(jnp.subtract, moved, arrives)
            residuals = choose(finite(lost), lost, residuals)
        return row, jax.tree_util.tree_map(jnp.copy, own), residuals

    def move(self, outer: Any, state: Any, rows: Any, weights: Any) -> tuple[Any, Any, jax.Array]:
        """Returns (the outer parameters after a round, the outer optimizer's state, checksums of both).

        The sums are computed on one device, because their order, and so their rounding, depends on shardings. The
        results have the shardings of the arguments.
        """
        before = self.packing.trained.take(outer), state
        whole = jax.tree_util.tree_map(np.asarray, before)
        *found, checksums = jax.tree_util.tree_map(np.asarray, self._move(*whole, rows, weights))
        trained, state = put_like(before, tuple(found))
        return self.packing.trained.put(outer, trained), state, checksums

    @_program
    def _move(self, before: Any, state: Any, rows: jax.Array, weights: jax.Array) -> tuple[Any, Any, jax.Array]:
        """Returns (the trained outer parameters, the state, checksums)."""
        means, some = self.packing.average(rows, weights)
        leaves, structure = jax.tree_util.tree_flatten(before)
        mean = structure.unflatten([d.astype(x.dtype) for d, x in zip(means, leaves)])
        step, after = self.optimizer.update(mean, state, before)
        trained, state = choose(some, (import_optax("Decoupled").apply_updates(before, step), after), (before, state))
        return trained, state, self.checksums(trained, state)

    @_program
    def checksums(self, trained: Any, state: Any) -> jax.Array:
        """Returns checksums of the outer parameters and of the outer optimizer's state."""
        return jnp.stack([jnp.zeros(2, jnp.uint32), *map(checksum, jax.tree_util.tree_leaves((trained, state)))])

    @_program
    def follow(self, own: Any, outer: Any, base: Any) -> Any:
        """Returns the own parameters + (the outer parameters - the base).

        If the result isn't finite, it returns the outer parameters.
        """
        take = self.packing.trained.take
        moved = jax.tree_util.tree_map(
            lambda x, new, old: (wide(x) + (wide(new) - wide(old))).astype(x.dtype), take(own), take(outer), take(base)
        )
        return self.packing.trained.put(own, choose(finite(moved), moved, take(outer)))


def put_like(like: Any, tree: Any) -> Any:
    """Returns a tree of NumPy arrays as JAX arrays with the shardings of those in the tree `like`."""

    def placed(x: jax.Array, value: np.ndarray) -> jax.Array:
        if not x.committed:
            return jnp.asarray(value)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda at: value[at])

    return jax.tree_util.tree_map(placed, like, tree)


def shardings_of(tree: Any) -> Any:
    """Returns the shardings of a tree's arrays."""
    return jax.tree_util.tree_map(lambda x: x.sharding, tree)


def on_auto_axes(tree: Any) -> Any:
    """Returns the arrays of a tree, on meshes whose axes aren't Explicit: programs then need no shardings in types."""
    return jax.tree_util.tree_map(lambda x: jax.device_put(x, _auto(x.sharding)) if _explicit(x.sharding) else x, tree)


def on_axes_of(shardings: Any, tree: Any) -> Any:
    """Returns the arrays of a tree, with the shardings of the tree `shardings` where these have Explicit axes."""
    return jax.tree_util.tree_map(lambda s, x: jax.device_put(x, s) if _explicit(s) else x, shardings, tree)


def _explicit(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _auto(sharding: NamedSharding) -> NamedSharding:
    mesh = sharding.mesh.update(axis_types=(AxisType.Auto,) * len(sharding.mesh.axis_names))
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def number_of(checksums: Any) -> int:
    """Returns a 64-bit digest of checksums."""
    return int.from_bytes(hashlib.blake2b(np.asarray(checksums).tobytes(), digest_size=8).digest(), "big")

"""The operands of the native operations by name, in the order in which the handlers in xla_ffi/handlers expect them.

Each class is a pytree: JAX sees its leaves, and a rule gets the names back from its structure. An operand that is None
is left out.
"""

from typing import Any, NamedTuple

import jax

Arrays = list[Any]  # a list of jax.Array, tracers or abstract values


def places(tree: Any) -> Any:
    """Returns the pytree of a structure, whose leaves are the places of the arrays among the operands."""
    return tree.unflatten(range(tree.num_leaves))


class Encode(NamedTuple):
    leaves: Arrays
    residuals: Arrays | None = None  # float32, added to the leaves
    key: jax.Array | None = None  # uint32[3], for stochastic codecs: rng.kernel_key

    @property
    def in_place(self) -> Arrays:
        """The operands that are overwritten if they are donated. They become the last results."""
        return self.residuals or []


class Decode(NamedTuple):
    payload: jax.Array  # uint8[chunks, chunk_bytes]

    @property
    def in_place(self) -> Arrays:
        return []


class Reduce(NamedTuple):
    payloads: jax.Array  # uint8[ranks, chunk_bytes]
    where: jax.Array  # int32[2]: the number of the chunk, and the rank whose payload `own` replaces
    own: Arrays | None = None  # leaves
    residuals: Arrays | None = None  # float32, in the shapes of the whole leaves; never together with `own`
    key: jax.Array | None = None  # uint32[3], if the sum is encoded again by a stochastic codec

    @property
    def in_place(self) -> Arrays:
        return self.residuals or []


class Clear(NamedTuple):
    payload: jax.Array  # uint8[chunks, chunk_bytes]
    arrays: Arrays

    @property
    def in_place(self) -> Arrays:
        return self.arrays


class Roundtrip(NamedTuple):
    x: jax.Array
    key: jax.Array | None = None  # uint32[3], for stochastic codecs: rng.kernel_key

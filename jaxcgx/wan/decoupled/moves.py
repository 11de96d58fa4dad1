"""The computations of a decoupled center: it encodes its outer gradient, and averages those of several centers."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, Sharding

from jaxcgx import _programs
from jaxcgx.checks import wrong
from jaxcgx.codecs import Codec, Raw, decode, encode
from jaxcgx.codecs.checks import check_encodes
from jaxcgx.collectives.replicas import checksum
from jaxcgx.exchange.message import fold
from jaxcgx.exchange.routes import Routes
from jaxcgx.patch.trees import place, sharding_of
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import spell_path
from jaxcgx.train.division import choose
from jaxcgx.train.feedback import TINY
from jaxcgx.typing import PyTree
from jaxcgx.wan.diloco.fragments import Fragment, cut, finite, wide
from jaxcgx.wan.diloco.outer import outer_step

if TYPE_CHECKING:
    import optax

Array = np.ndarray[Any, Any]

# The weight of a center, from its tokens and steps since it last took part.
WEIGHTS: dict[str | None, Callable[[float, float], float]] = {
    "tokens": lambda tokens, steps: tokens**2 / steps,
    "steps": lambda tokens, steps: steps,
    None: lambda tokens, steps: 1.0,
}


class Packed(NamedTuple):
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

    leaves: tuple[Packed, ...]
    trained: Fragment = dataclasses.field(compare=False)  # all parameters that aren't frozen

    @classmethod
    def of(cls, op: str, plan: Plan, params: PyTree, average: Any) -> Self:
        routes, found = Routes.of(op, plan, params), list[Packed]()
        for x, route in zip(jax.tree.leaves(params), routes.leaves):
            if route.skipped:
                continue
            if not isinstance(route.codec, Codec):
                expected, remedy = "one codec for a parameter", "leave out the axes"
                raise wrong(op, "plan", expected, "one for each axis", remedy, path=route.path)
            check_encodes(op, route.codec, "plan")
            codec = route.codec if route.encoded else Raw()
            radial = _how(op, average, route.path, x) == "radial"
            found.append(Packed(spell_path(route.path), route.shape, str(route.dtype), codec=codec, radial=radial))
        return cls(tuple(found), cut(op, params, routes.skipped, 1)[0])

    @property
    def sparse(self) -> bool:
        """Whether a round may change few elements."""
        return any(leaf.codec.sparse for leaf in self.leaves)

    @property
    def bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves)

    def pack(self, moved: PyTree, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        """Returns (uint8[bytes], the tree that other centers decode from it) for the outer gradients `moved`."""
        values, tree = jax.tree.flatten(moved)
        keys = [fold(key, i) if leaf.codec.stochastic else None for i, leaf in enumerate(self.leaves)]
        rows = [encode(x, leaf.codec, k) for x, leaf, k in zip(values, self.leaves, keys)]
        row = jnp.concatenate([jnp.zeros(0, jnp.uint8), *rows])
        return row, tree.unflatten(self._unpack(row))

    def average(self, rows: jax.Array, weights: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """Returns (the average of each leaf, whether any center counts), from uint8[centers, bytes] and the weights."""
        # Every center adds in the same order, so that all centers get the same bits. A center whose outer gradients
        # aren't finite counts as one with weight 0.

        def add(total: PyTree, given: PyTree) -> tuple[PyTree, None]:
            row, weight = given
            parts = self._unpack(row)
            added = jax.tree.map(jnp.add, total, self._terms(parts, weight))
            return choose(finite(parts), added, total), None

        def step(total: PyTree, given: PyTree) -> tuple[PyTree, None]:
            return jax.lax.cond(given[1] > 0, add, lambda total, _: (total, None), total, given)

        zeros = [jnp.zeros(leaf.shape, jnp.float32) for leaf in self.leaves]
        start = jax.tree.map(jnp.zeros_like, self._terms(zeros, jnp.float32(0)))
        (weight, norms, sums), _ = jax.lax.scan(step, start, (rows, weights))
        least = jnp.maximum(weight, TINY)
        each = zip(self.leaves, norms, sums)
        means = [_unit(x) * (norm / least) if leaf.radial else x / least for leaf, norm, x in each]
        return means, weight > 0

    def _terms(self, parts: list[jax.Array], weight: jax.Array) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        """Returns (weight, norms, leaves), which a center adds to the sums. Norms and leaves are times the weight."""
        # Leaves with the radial average are unit vectors. The norms of the other leaves are 0.
        norms = [weight * _norm(x) if leaf.radial else jnp.float32(0) for leaf, x in zip(self.leaves, parts)]
        return weight, norms, [weight * (_unit(x) if leaf.radial else x) for leaf, x in zip(self.leaves, parts)]

    def _unpack(self, row: jax.Array) -> list[jax.Array]:
        parts = jnp.split(row, np.cumsum([leaf.bytes for leaf in self.leaves])[:-1])
        return [decode(part, leaf.codec, leaf.shape, jnp.float32) for leaf, part in zip(self.leaves, parts)]


def _how(op: str, average: Any, path: PyTree, x: jax.Array) -> str:
    name = spell_path(path)
    if average == "radial":
        return "mean" if "embed" in name.lower() else "radial"
    found = average(name, x) if callable(average) else average
    if found not in ("mean", "radial"):
        expected = "'mean', 'radial' or a function that returns one of them"
        raise wrong(op, "average", expected, f"the function's answer {found!r}")
    return found


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt((x * x).sum())


def _unit(x: jax.Array) -> jax.Array:
    """Returns the vector of length 1 in the same direction. The unit vector of 0 is 0."""
    norm = _norm(x)
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1), 0)


_program = functools.partial(jax.jit, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Moves:
    packing: Packing
    optimizer: "optax.GradientTransformation"  # the outer one
    seed: int  # of the noise of codecs that round stochastically

    def rule(self, outer: PyTree, state: PyTree) -> str:
        """Returns a digest of the outer optimizer's update for such parameters and state."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (outer, state))
        before = self.packing.trained.take(shapes[0])
        return _programs.digest_of(self.optimizer.update, before, shapes[1], before)

    @_program
    def copy(self, tree: PyTree) -> PyTree:
        """Returns a copy of a tree in new memory, because a step may donate its arguments."""
        return jax.tree.map(jnp.copy, tree)

    @_program
    def encode(
        self, outer: PyTree, own: PyTree, residuals: PyTree, numbers: jax.Array
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Returns (bytes of the outer gradient, a copy of the own parameters, residuals if it counts in the round)."""
        # The noise depends on `numbers`, the center's place and the round.
        take = self.packing.trained.take
        moved = jax.tree.map(lambda x, y: wide(x) - wide(y), take(outer), take(own))
        if residuals is not None:
            moved = jax.tree.map(jnp.add, moved, residuals)
        row, arrives = self.packing.pack(moved, fold(jnp.array([0, self.seed], jnp.uint32), *numbers))
        if residuals is not None:
            lost = jax.tree.map(jnp.subtract, moved, arrives)
            residuals = choose(finite(lost), lost, residuals)
        return row, jax.tree.map(jnp.copy, own), residuals

    def move(self, outer: PyTree, state: PyTree, rows: Array, weights: Array) -> tuple[PyTree, PyTree, Array]:
        """Returns (the outer parameters after a round, the outer optimizer's state, checksums of both)."""
        # The sums are computed on one device, because their order, and so their rounding, depends on shardings. The
        # results have the shardings of the arguments.
        before = self.packing.trained.take(outer), state
        whole = jax.tree.map(np.asarray, before)
        *found, checksums = jax.tree.map(np.asarray, self._move(*whole, rows, weights))
        trained, state = put_like(before, tuple(found))
        return self.packing.trained.put(outer, trained), state, checksums

    @_program
    def _move(
        self, before: PyTree, state: PyTree, rows: jax.Array, weights: jax.Array
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Returns (the trained outer parameters, the state, checksums)."""
        means, some = self.packing.average(rows, weights)
        mean = jax.tree.structure(before).unflatten(means)
        trained, after, _ = outer_step(self.optimizer, before, state, mean)
        trained, state = choose(some, (trained, after), (before, state))
        return trained, state, self.checksums(trained, state)

    @_program
    def checksums(self, trained: PyTree, state: PyTree) -> jax.Array:
        return jnp.stack([jnp.zeros(2, jnp.uint32), *map(checksum, jax.tree.leaves((trained, state)))])

    @_program
    def follow(self, own: PyTree, outer: PyTree, base: PyTree) -> PyTree:
        """Returns own + (outer - base), or the outer parameters if that isn't finite."""
        take = self.packing.trained.take
        add = lambda x, new, old: (wide(x) + (wide(new) - wide(old))).astype(x.dtype)
        moved = jax.tree.map(add, take(own), take(outer), take(base))
        return self.packing.trained.put(own, choose(finite(moved), moved, take(outer)))


def put_like(like: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree of NumPy arrays as JAX arrays with the shardings of those in the tree `like`."""
    return jax.tree.map(lambda x, value: place(value, sharding_of(x)), like, tree)


def on_auto_axes(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns (a tree on meshes without Explicit axes, whose types have no shardings; a function that puts it back)."""

    def on_auto(x: jax.Array) -> jax.Array:
        if not _explicit(at := x.sharding):
            return x
        mesh = at.mesh.update(axis_types=(AxisType.Auto,) * len(at.mesh.axis_names))
        return jax.device_put(x, NamedSharding(mesh, at.spec, memory_kind=at.memory_kind))

    shardings = jax.tree.map(lambda x: x.sharding, tree)
    put = lambda at, x: jax.device_put(x, at) if _explicit(at) else x
    return jax.tree.map(on_auto, tree), functools.partial(jax.tree.map, put, shardings)


def _explicit(sharding: Sharding) -> TypeGuard[NamedSharding]:
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def number_of(checksums: Array | jax.Array) -> int:
    return int.from_bytes(hashlib.blake2b(np.asarray(checksums).tobytes(), digest_size=8).digest(), "big")

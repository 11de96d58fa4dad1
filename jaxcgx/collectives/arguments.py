"""Checks of the arguments that the collectives share, and what they make of them."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import as_array, as_whole, check_integer, spell_array, warn, wrong
from jaxcgx.codecs.base import spell
from jaxcgx.codecs.checks import as_key, check_encodes
from jaxcgx.codecs.quantized import check_parts
from jaxcgx.exchange.message import Carry
from jaxcgx.exchange.reduce import travel_with
from jaxcgx.exchange.resolve import transport_over
from jaxcgx.exchange.routes import Routes, Travel, Way
from jaxcgx.plan import Plan
from jaxcgx.plan.leaves import Codecs
from jaxcgx.plan.plan import as_plan
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName, Key, PyTree


class Call(NamedTuple):
    x: PyTree  # the tree, of JAX arrays
    net: Transport
    routes: Routes
    backward: Routes  # those of the transpose
    key: Key | None  # the two words of the key, or None if no codec draws noise

    @classmethod
    def of(
        cls,
        op: str,
        x: PyTree,
        axis_name: AxisName,
        plan: Codecs | Plan,
        key: Key | None,
        backward_plan: Codecs | Plan | None = None,
        **settings: object,
    ) -> "Call":
        """Checks the arguments of a collective. `settings` are others that all processes of mpirun must share."""
        there = as_plan(op, plan)
        back = there if backward_plan is None else as_plan(op, backward_plan, "backward_plan")
        arrays = dict(x=x, key=key)
        net = transport_over(op, axis_name, arrays, dict(plan=there, backward_plan=backward_plan and back, **settings))
        x = jax.tree.map_with_path(lambda path, leaf: as_whole(op, "x", path, leaf), x)
        routes, backward = Routes.of(op, there, x), Routes.of(op, back, x)
        return cls(x, net, routes, backward, shared_key(routes, backward, key, net))

    def as_slices(self, argument: str, numbers: jax.Array) -> jax.Array:
        """Returns integers, some for each rank, as [ranks, ...]."""
        x, ranks = as_array(self.routes.op, argument, numbers), self.net.size
        if x.ndim != 1 or not x.size or x.size % ranks or not jnp.issubdtype(x.dtype, jnp.integer):
            raise wrong(self.routes.op, argument, f"integers, as many for each of {ranks} ranks", spell_array(x))
        return x.reshape(ranks, -1)

    def travel(self, way: Way, carry: Carry | None = None, argument: str = "x") -> Travel:
        """Returns how the tree travels, after a check that it and the carry may travel so."""
        carry = carry or Carry()
        return travel_with(carry, self.routes, self.net, way, x=self.x, argument=argument, backward=self.backward)

    def check_rows(self, by_axis: bool = True) -> None:
        """Checks that every codec makes bytes of rows, that no leaf is skipped, and whether it has a codec by axis."""
        for routes, argument in (self.routes, "plan"), (self.backward, "backward_plan"):
            for route in routes.leaves:
                if route.skipped:
                    expected, remedy = "a plan that skips no leaf", "Skip() is for sums and means; leave it out of x"
                    raise wrong(routes.op, argument, expected, "one with Skip() for it", remedy, path=route.path)
                if isinstance(route.codec, dict) and not by_axis:
                    expected = "one codec over all axes together"
                    raise wrong(routes.op, argument, expected, spell(route.codec), path=route.path)
                for codec in route.codecs:
                    check_encodes(routes.op, codec, argument)

    def per_leaf(self, argument: str, dimension: PyTree, extra: int = 0) -> tuple[int, ...]:
        """Returns a dimension of each leaf with `extra` more dimensions, counted from the front."""
        op, leaves, found = self.routes.op, self.routes.leaves, list[int]()
        if hasattr(dimension, "__index__"):
            given = [dimension] * len(leaves)
        else:
            try:
                given = self.routes.each(dimension)
            except (TypeError, ValueError):
                expected = f"an integer, or a tree of them like x, {self.routes.tree}"
                raise wrong(op, argument, expected, repr(dimension)) from None
        for route, each in zip(leaves, given):
            ndim, d = len(route.shape) + extra, check_integer(op, argument, each)
            if not -ndim <= d < ndim:
                expected = f"a dimension of {spell_array(route)}{' with one more' if extra else ''}"
                raise wrong(op, argument, expected, each, path=route.path)
            found.append(d % ndim)
        return tuple(found)

    def check_divisible(self, argument: str, dimensions: tuple[int, ...], tiled: bool) -> None:
        size = self.net.size
        for route, d in zip(self.routes.leaves, dimensions):
            if route.shape[d] % size if tiled else route.shape[d] != size:
                share = f"a multiple of {size} elements, one share" if tiled else f"{size} elements, one"
                remedy = "" if tiled else "pass tiled=True to split a longer one"
                expected = f"dimension {d} to have {share} for each rank"
                raise wrong(self.routes.op, argument, expected, spell_array(route), remedy, path=route.path)

    def check_parts(self, argument: str, dims: tuple[int, ...], tiled: bool, split: tuple[int, ...] = ()) -> None:
        """Checks that the rows of compressed leaves have whole blocks, whose elements joining keeps together.

        Rows are leaves or, with `split`, slices along these dimensions. They are joined along the dimensions `dims`.
        """
        self.check_rows(by_axis=False)
        for i, route in enumerate(self.routes.leaves):
            if not route.encoded:
                continue
            shape = list(route.shape)
            if split:
                shape[split[i] : split[i] + 1] = [shape[split[i]] // self.net.size] * tiled
            check_parts(self.routes.op, "plan", route.codecs[0], shape, leaf=route, path=route.path)
            if not tiled and dims[i] == len(shape):
                expected = "a dimension before the last one, along which scales are shared, with as_parts"
                raise wrong(self.routes.op, argument, expected, dims[i], path=route.path)


def shared_key(routes: Routes, backward: Routes, key: Key | None, net: Transport, argument: str = "key") -> Key | None:
    """Returns the words of a key that is the same on every rank, or None if no codec of a leaf draws noise.

    If no codec that the plans may give any leaf draws noise either, a key causes a warning.
    """
    op, both = routes.op, (routes, backward)
    drawing = [codec for each in both for route in each.leaves for codec in route.codecs if codec.stochastic]
    if not drawing:
        if key is not None and not any(each.plan.stochastic for each in both):
            codecs = ", ".join(map(spell, dict.fromkeys(codec for each in both for codec in each.plan.codecs)))
            warn(f"{op}: argument '{argument}' is not used: {codecs} draws no random numbers")
        return None
    which = "the same on every rank and another one every step"
    words = as_key(op, drawing[0], key, which=which, argument=argument)
    if axes := [name for name in net.names if name in _compat.varying_axes(words)]:
        got = f"one that varies over {', '.join(map(repr, axes))}"
        raise wrong(op, argument, "the same key on every rank", got, "every rank draws its own noise from the same key")
    return words


def as_pairs(op: str, perm: Sequence[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    expected = f"pairs (sender, receiver) of two of the {size} ranks, as in [(0, 1), (1, 0)]"
    try:
        pairs = tuple((operator.index(sender), operator.index(receiver)) for sender, receiver in perm)
    except (TypeError, ValueError):
        raise wrong(op, "perm", expected, repr(perm), kind=TypeError) from None
    if not all(0 <= rank < size for pair in pairs for rank in pair):
        raise wrong(op, "perm", expected, repr(perm))
    for which, ranks in zip(("sender", "receiver"), zip(*pairs)):
        if len(set(ranks)) < len(ranks):
            raise wrong(op, "perm", f"no rank to be the {which} of two pairs", repr(perm))
    return pairs


def check_summable(op: str, x: PyTree) -> None:
    """Checks that no leaf is a random key, because keys can't be added."""
    for path, leaf in jax.tree.flatten_with_path(x)[0]:
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            remedy = "take it out of the tree, or pass jax.random.key_data(key) to add its words"
            got = f"{spell_array(leaf)}, a random key"
            raise wrong(op, "x", "arrays of numbers", got, remedy, path=path, kind=TypeError)

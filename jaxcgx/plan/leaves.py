"""Leaves and their codecs: paths, the reasons why leaves travel raw, shared messages, and values by axis.

A value by axis is one for all axes, or {axis name: value}, outermost first. Codecs and schedules have this form.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from jaxcgx.checks import spell_array, wrong
from jaxcgx.codecs import Codec, PowerSGD, Raw
from jaxcgx.codecs.checks import check_codec
from jaxcgx.native.layout import DTYPES
from jaxcgx.typing import DType, PyTree

# A leaf: a jax.Array (tracers count, too), np.ndarray or jax.ShapeDtypeStruct. JAX has no precise types for their
# shapes and dtypes.
Shaped: TypeAlias = Any


def spell_path(path: PyTree) -> str:
    """Returns a JAX path as a text such as "a/b/kernel", which rules match."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_floating(function: str, trained: PyTree) -> None:
    """Checks the parameters that aren't frozen."""
    for path, x in jax.tree.leaves_with_path(trained):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            remedy = f'freeze it: pass jaxcgx.Plan(codec, rules=[("{spell_path(path)}", jaxcgx.Skip())])'
            expected = "parameters of floating point where they are trained"
            raise wrong(function, "params", expected, spell_array(x), remedy, path=path)


def why_unfit(leaf: Shaped) -> str | None:
    """Returns the reason why no codec can take a leaf, or None if codecs can."""
    if leaf.dtype not in DTYPES:
        return f"{leaf.dtype} is not float32, bfloat16 or float16"
    return "it has no elements" if leaf.size == 0 else None


def why_raw(leaf: Shaped, codecs: Sequence[Codec]) -> str | None:
    """Returns the reason why a leaf travels raw, or None if one of its codecs compresses it and none refuses it."""
    if why := why_unfit(leaf) or ("its codec is Raw()" if all(codec.raw for codec in codecs) else None):
        return why
    return next((why for codec in codecs if (why := codec.why_raw(leaf.shape, jnp.dtype(leaf.dtype)))), None)


def messages(leaves: Sequence[Shaped], limit: float) -> list[list[int]]:
    """Returns the indices of the leaves of each message, of at most `limit` bytes. A larger leaf travels alone."""
    found: list[list[int]] = []
    room = -1.0
    for i, leaf in enumerate(leaves):
        size = leaf.size * jnp.dtype(leaf.dtype).itemsize
        if size > room:
            found.append([])
            room = limit
        found[-1].append(i)
        room -= size
    return found


Codecs = Codec | dict[Any, Any]  # {axis name: codec}


class ByAxis(dict[Any, Any]):
    """A dict {axis name: value} that is hashable, because jit requires it of static values. So it can't be changed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  (a dict has None there)
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:  # copy and pickle would fill a dict item by item
        return ByAxis, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"a plan's {dict(self)} can't be changed: make another plan, of dict(...) of it")


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(ByAxis, _name, ByAxis._refuse)  # pyright: ignore[reportPrivateUsage]


def by_axis(names: Sequence[Any], outer: Any, inner: Any) -> Any:
    """Returns a dict with `outer` for the first axis and `inner` for the others. For a single axis, returns `outer`."""
    return {name: outer if name == names[0] else inner for name in names} if len(names) > 1 else outer


def values(given: Any) -> list[Any]:
    return list(given.values()) if isinstance(given, dict) else [given]


def compressing(given: Codecs) -> list[Codec]:
    """Returns the codecs that compress, outermost first, without duplicates."""
    return list(dict.fromkeys(codec for codec in values(given) if not codec.raw))


def skips(given: Codecs) -> bool:
    return isinstance(given, Codec) and given.skips


def as_codecs(function: str, argument: str, given: Any, *, skip: bool = False) -> Codec | ByAxis:
    """Returns a checked codec, or a dict with a checked codec for each axis. With `skip`, Skip() is allowed too."""
    if skip and skips(given):
        return given
    if not isinstance(given, dict):
        return check_codec(function, given, argument)
    if not given:
        raise wrong(function, argument, "a codec for each axis", "{}")
    return ByAxis((axis, check_codec(function, codec, argument)) for axis, codec in given.items())


@dataclasses.dataclass(frozen=True)
class Route:
    path: PyTree  # the JAX path of the leaf
    shape: tuple[int, ...]
    dtype: DType
    codec: Codecs  # the codec over all axes together, or {axis: codec}. Raw() if the leaf is skipped
    why_raw: str | None  # the reason why the leaf travels raw; None: it is compressed
    skipped: bool  # whether the leaf is not sent at all
    factor: tuple[int, ...] | None  # the shape of its low-rank factor (PowerSGD), or None

    @classmethod
    def of(cls, path: PyTree, leaf: Shaped, codec: Codecs, guarded: str | None = None) -> "Route":
        """Returns the route of a leaf with this codec. `guarded`: the reason why the leaf stays raw whatever it is."""
        skipped = skips(codec)
        codec = Raw() if skipped else codec
        why = None if skipped else guarded or why_raw(leaf, values(codec))
        low_rank = None if why else next((each for each in values(codec) if isinstance(each, PowerSGD)), None)
        factor = low_rank and low_rank.factor_shape(leaf.shape)
        return cls(path, tuple(leaf.shape), leaf.dtype, codec, why_raw=why, skipped=skipped, factor=factor)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def codecs(self) -> list[Codec]:
        return values(self.codec)

    @property
    def encoded(self) -> bool:
        return self.why_raw is None and not self.skipped

"""The state of a sum between calls: residuals, momentum and low-rank factors, each a tree like `x`."""

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import callers_level, spell_array, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.checks import check_codec
from jaxcgx.codecs.spelling import spell
from jaxcgx.collectives.calls import Call
from jaxcgx.exchange.message import Message, carry
from jaxcgx.native.layout import DTYPES
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import Codecs
from jaxcgx.plan.leaves import factor_shape


class State(NamedTuple):
    """The trees of state that a caller passes to a sum, or None for each that the caller doesn't pass."""

    residuals: Any = None
    momentum: Any = None
    factors: Any = None


class Kept:
    """The checked state of a call. Each message of the call replaces the state of its leaves."""

    tree: Any
    arrays: dict[str, list[Any]]  # {kind of state: an array or None for each leaf}

    def __init__(self, call: Call, state: State) -> None:
        self.tree = call.tree
        self.arrays = {}
        if state.residuals is not None:
            shapes = [x.shape if x.dtype in DTYPES else None for x in call.leaves]
            self.arrays["residuals"] = _check(call, "residuals", state.residuals, shapes=shapes)
        if state.momentum is not None:
            if state.residuals is None:
                raise wrong(call.op, "residuals", "a tree like x with 'momentum'", None)
            self.arrays["momentum"] = _check_momentum(call, state.momentum)
        if state.factors is not None:
            self.arrays["factors"] = _check_factors(call, state.factors)

    def attach(self, message: Message, codec: Codec) -> Message:
        """Returns the message with its state. A leaf for which the caller gave None starts from zeros."""
        state: dict[str, Any] = {}
        for kind, arrays in self.arrays.items():
            if kind in codec.state:
                given = [arrays[i] for i in message.ids]
                state[kind] = [_fresh(kind, codec, x) if a is None else a for a, x in zip(given, message.leaves)]
        return message.replace(**state)

    def carried(self, leaf: jax.Array, i: int) -> jax.Array:
        """Returns leaf i, which travels raw, plus its residual. The new residual is the loss of rounding to its dtype.

        Without a residual, the leaf stays as it is.
        """
        residuals = self.arrays.get("residuals")
        if residuals is not None and residuals[i] is not None:
            (leaf,), (residuals[i],) = carry([leaf], [residuals[i]])
        return leaf

    def update(self, done: Message) -> None:
        """Stores the new state of a message's leaves. If the caller gave None for a leaf, it stays None."""
        for kind, arrays in self.arrays.items():
            for i, new in zip(done.ids, getattr(done, kind) or ()):
                if arrays[i] is not None:
                    arrays[i] = new

    def trees(self) -> list[Any]:
        """Returns the new trees, in the order of `State`."""
        return [self.tree.unflatten(arrays) for arrays in self.arrays.values()]


def warn_of_growth(op: str, codecs: Iterable[Codec]) -> None:
    """Warns about codecs whose residuals grow without bound."""
    for codec in codecs:
        if not codec.contracts:
            warnings.warn(
                f"{op}: argument 'residuals': residuals of {spell(codec)} grow without bound, because its error is "
                "larger than its input; take more bits, smaller buckets, rounding to nearest, or jaxcgx.Sign",
                stacklevel=callers_level(),
            )


def _fresh(kind: str, codec: Any, x: jax.Array) -> jax.Array:
    if kind == "momentum":
        return jnp.zeros_like(x)
    return jnp.zeros(codec.factor_shape(x.shape) if kind == "factors" else x.shape, jnp.float32)


def _check(call: Call, argument: str, given: Any, shapes: list[Any], dtypes: list[Any] | None = None) -> list[Any]:
    """Returns an array or None for each leaf, after a check of shapes and dtypes (float32 by default)."""
    try:
        found = call.tree.flatten_up_to(given)
    except (TypeError, ValueError):
        raise wrong(
            call.op, argument, f"a tree like {call.argument}, {call.tree}", jax.tree_util.tree_structure(given)
        ) from None
    for i, (array, shape) in enumerate(zip(found, shapes)):
        expected = "None" if shape is None else f"{dtypes[i] if dtypes else 'float32'}{list(shape)}"
        if array is not None and spell_array(array) != expected:
            leaf = spell_array(call.leaves[i])
            raise wrong(call.op, argument, f"{expected} for {leaf}", spell_array(array), path=call.paths[i])
    return found


def _check_momentum(call: Call, given: Any) -> list[Any]:
    found = _check(
        call, "momentum", given=given, shapes=[x.shape for x in call.leaves], dtypes=[x.dtype for x in call.leaves]
    )
    for i, array in enumerate(found):
        codec = call.codecs[i][0]
        if array is not None and i not in call.raw and "momentum" not in codec.state:
            raise wrong(
                call.op,
                "momentum",
                f"None for a leaf whose every element is sent, with {spell(codec)}",
                "an array",
                "take jaxcgx.TopK",
                path=call.paths[i],
            )
    return found


def _check_factors(call: Call, given: Any) -> list[Any]:
    found = _check(call, "factors", given, shapes=list(map(factor_shape, call.leaves, call.codecs)))
    for path, array in zip(call.paths, found):
        if array is not None and (axes := [n for n in call.net.names if n in _compat.varying_axes(array)]):
            raise wrong(
                call.op,
                "factors",
                "the same array on every rank",
                f"one that varies over {', '.join(map(repr, axes))}",
                "pass on what the call before returned, through P() in shard_map's specs",
                path=path,
            )
    return found


def init_factors(x: Any, codec: Codecs | Plan) -> Any:
    """Returns the `factors` for a first call: a tree like `x` of zeros, with None for leaves that have no factors.

    Args:
      x: a pytree of arrays or jax.ShapeDtypeStruct.
      codec: the codec, {axis name: codec} or Plan of the call.
    """
    op = "init_factors"
    found, tree = jax.tree_util.tree_flatten_with_path(x)
    paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
    if isinstance(codec, Plan):
        chosen = [given for given, _ in codec.assign(op, "codec", paths=paths, leaves=leaves)]
    else:
        chosen = [codec if isinstance(codec, dict) else check_codec(op, codec)] * len(leaves)
    codecs = [list(given.values()) if isinstance(given, dict) else [given] for given in chosen]
    shapes = map(factor_shape, leaves, codecs)
    return tree.unflatten([None if shape is None else jnp.zeros(shape, jnp.float32) for shape in shapes])

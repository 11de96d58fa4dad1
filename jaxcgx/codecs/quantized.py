"""Quantized: an array in the numbers and scales in which it was sent, for matrix multiplications that take these."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxcgx import _compat
from jaxcgx.checks import as_whole, spell_array, unexpected, wrong
from jaxcgx.codecs.base import Codec, spell
from jaxcgx.codecs.checks import as_key, as_leaf, check_encodes
from jaxcgx.native import ops, reference
from jaxcgx.native.layout import Layout
from jaxcgx.typing import STATIC, ArrayLike, DType, KeyPath

Operand = TypeVar("Operand")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as small numbers and the scales that these share: value * scale * factor is an element.

    `scales` and `factors` have the dimensions of `values`. Along a dimension in which they are shorter, each is for
    several values: for consecutive ones along the last dimension, and for those of one shard along another one. They
    have no derivative: where a loss that is differentiated reads them, it is an error. The leaves of `jax.tree.leaves`
    are the bits of these numbers, as unsigned integers, and the zeros of `straight`.

    Attributes:
      sent: the bits of the values, the scales and the factors.
      straight: zeros, through which `dequantize` has its derivative.
      kinds: the dtypes of the values, the scales and the factors.
      dtype: the dtype of the array.
    """

    sent: tuple[jax.Array, jax.Array, jax.Array | None]
    straight: jax.Array | None
    kinds: tuple[DType, DType, DType | None] = dataclasses.field(metadata=STATIC)
    dtype: DType = dataclasses.field(metadata=STATIC)

    @property
    def values(self) -> jax.Array:
        """float8_e4m3fn, float8_e5m2, float4_e2m1fn or int8, in the shape of the array."""
        return _constant(self._numbers()[0], self.straight)

    @property
    def scales(self) -> jax.Array:
        """float32, or float8_e8m0fnu (`Micro("mxfp8")`, `Micro("mxfp4")`), or float8_e4m3fn (`Micro("nvfp4")`)."""
        return _constant(self._numbers()[1], self.straight)

    @property
    def factors(self) -> jax.Array | None:
        """float32, of each shard (`Micro("nvfp4")`), or None."""
        factors = self._numbers()[2]
        return None if factors is None else _constant(factors, self.straight)

    @classmethod
    def of(cls, x: ArrayLike, codec: Codec, key: ArrayLike | None = None) -> "Quantized":
        """Returns an array as a codec would send it.

        Args:
          x: an array whose last dimension has whole blocks.
          codec: one that `as_parts=True` takes.
          key: a random key, for codecs that round stochastically.
        """
        x = as_whole("Quantized.of", "x", (), as_leaf("Quantized.of", x))
        check_parts("Quantized.of", "codec", check_encodes("Quantized.of", codec), x.shape, leaf=x)
        if not x.size:
            raise wrong("Quantized.of", "x", "an array with elements", spell_array(x))
        layout, words = Layout.of(codec, [x]), as_key("Quantized.of", codec, key)
        found = read(layout, ops.encode(layout, [jax.lax.stop_gradient(x)], words)[0])
        return straight_through(lambda x, tangent: [tangent], x, found)[0]

    def dequantize(self) -> jax.Array:
        """Returns the array: the numbers and the derivatives of the call without `as_parts`.

        A zero may have another sign, and numbers below the normal ones may differ.
        """
        x, *scales = (part.astype(jnp.float32) for part in jax.tree.leaves(self._numbers()))
        for each in scales:
            x = x * _spread(each, x.shape)
        x = reference.narrow(x, self.dtype)
        return x if self.straight is None else x + self.straight

    def _numbers(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        return jax.tree.map(jax.lax.bitcast_convert_type, self.sent, self.kinds)


@jax.custom_jvp
def _constant(x: jax.Array, straight: jax.Array | None) -> jax.Array:
    """Returns x, which has no derivative: it is an error if `straight` has one."""
    return x


def _constant_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    if any(type(t) is not SymbolicZero for t in jax.tree_util.tree_leaves(tangents[1])):
        expected = "an array that is not differentiated, because the numbers that were sent have no derivative"
        remedy = (
            "write dequantize() in place of values and scales, jax.custom_vjp around what multiplies them, and "
            "jax.lax.stop_gradient(x) where no gradient is wanted"
        )
        raise unexpected("Quantized", expected, "one that is", remedy, kind=TypeError)
    return primals[0], tangents[0]


_constant.defjvp(_constant_jvp, symbolic_zeros=True)


def _spread(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns x, each element repeated so that x gets this shape."""
    for d, (mine, whole) in enumerate(zip(x.shape, shape)):
        x = x if mine == whole else jnp.repeat(x, whole // mine, d)
    return x


def check_parts(
    function: str, argument: str, codec: Codec, shape: Sequence[int], leaf: Any, path: KeyPath = ()
) -> None:
    """Checks that the codec, from this argument, has parts, and that no block of a row of this shape is cut."""
    if codec.block is None:
        expected = 'a codec with parts: Float8, Micro without rounding="eden", or AbsMax without rotate'
        remedy = "leave out as_parts" if argument == "plan" else ""
        raise wrong(function, argument, expected, spell(codec), remedy, path=path)
    if not shape or shape[-1] % codec.block:
        expected = f"a last dimension in whole blocks of {codec.block}, which share a scale"
        remedy = "take a codec with a smaller block" + ", or a plan that leaves this leaf raw" * (argument == "plan")
        raise wrong(function, "x", expected, spell_array(leaf), remedy, path=path)


def read(layout: Layout, chunk: jax.Array) -> list[Quantized]:
    codec, found = layout.codec, list[Quantized]()
    size = lambda dtype: (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
    bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{size(x.dtype)}")
    for p in layout.pieces[0]:
        parts = [codec.parts(each.meta, each.codes, each.size) for each in reference.read(layout, chunk, p)]
        values, scales = (jnp.concatenate([part[k].reshape(-1) for part in parts]) for k in (0, 1))
        shape, factors = layout.shapes[p.leaf], parts[0][2]
        factors = None if factors is None else factors.reshape([1] * len(shape))
        numbers = values.reshape(shape), scales.reshape(*shape[:-1], -1), factors
        kinds = jax.tree.map(lambda x: x.dtype, numbers)
        found.append(Quantized(jax.tree.map(bits, numbers), None, kinds, dtype=layout.dtypes[p.leaf]))
    return found


def straight_through(
    linear: Callable[[Operand, Operand], list[jax.Array]], operand: Operand, found: list[Quantized]
) -> list[Quantized]:
    """Returns `found` with the derivatives of arrays that depend on an operand.

    linear(operand, tangent) returns the tangents of the arrays, from the tangent of the operand.
    """
    shapes = [(q.values.shape, q.dtype, _compat.varying_axes(q.values)) for q in found]

    @jax.custom_jvp
    def zeros(operand: Operand) -> list[jax.Array]:
        return [_compat.vary(jnp.zeros(shape, dtype), axes) for shape, dtype, axes in shapes]

    zeros.defjvp(lambda primals, tangents: (zeros(*primals), linear(*primals, *tangents)))
    return [dataclasses.replace(q, straight=x) for q, x in zip(found, zeros(operand))]

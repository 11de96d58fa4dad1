"""TopK: sends the elements with the largest magnitudes, and their indices."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import MOST, check_choice, check_integer, check_number, set_field, unexpected, wrong
from jaxcgx.codecs.attribute import DENSE, Kind
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.checks import check_encodes
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.sign import sum_of_magnitudes
from jaxcgx.native import ieee, reference
from jaxcgx.native.layout import Layout, align16
from jaxcgx.native.packing import from_list, index_bytes, to_list
from jaxcgx.typing import DType

_FINITE, _NAN = 0x7F7FFFFF, 0x7F800001  # the bits of the largest finite magnitude, and of every NaN
_ESTIMATES = ("quantile", "exponential")


def _check_share(function: str, argument: str, value: Any, low: float, high: float) -> float:
    return float(
        check_number(function, argument, value, lambda x: low <= x <= high, f"a number from {low:g} to {high:g}")
    )


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Selects elements by a threshold that is estimated from a sample (Deep Gradient Compression).

    If more elements than wanted reach it, the largest of them are taken. So there is no upper bound as in DGC.

    Args:
      share: the fraction of the elements in the sample. The sample has at least 2 / ratio elements, at equal distances
        from a random first element.
      estimate: "quantile" takes the magnitude that the wanted fraction of the sample reaches. "exponential" fits an
        exponential distribution to the sample, another one to its elements above a threshold, and so on (SIDCo).
      lower: while fewer elements than `lower` times the wanted number reach the threshold, the threshold is multiplied
        by `lower`.
      refinements: the largest number of such multiplications.
    """

    share: float = 0.01
    estimate: str = "quantile"
    lower: float = 0.8
    refinements: int = 10

    def __post_init__(self) -> None:
        set_field(self, "share", _check_share, 2.0**-15, 1)
        set_field(self, "estimate", check_choice, _ESTIMATES)
        set_field(self, "lower", _check_share, 2.0**-15, 1)
        set_field(self, "refinements", check_integer, 0, 100)

    def threshold(self, magnitudes: jax.Array, k: int, random: jax.Array) -> jax.Array:
        """Returns the bits of the smallest magnitude that is selected, if k elements are wanted.

        `magnitudes` are the bits of all magnitudes, and `random` is an integer of 16 random bits.
        """
        n = magnitudes.size
        count = min(n, max(math.ceil(self.share * n), -(-2 * n // k)))
        stride = n // count
        first = random * stride >> 16
        sample = jax.lax.dynamic_slice(magnitudes, (first,), ((count - 1) * stride + 1,))[::stride]
        if self.estimate == "quantile":
            bits = jnp.minimum(jax.lax.top_k(sample, -(-k * count // n))[0][-1], _FINITE)
        else:
            bits = ieee.bits(_exponential(jnp.minimum(sample, _FINITE), n, k))
        tried = [ieee.as_float(jnp.minimum(bits, _FINITE))]
        for _ in range(self.refinements):
            tried.append(ieee.multiply(tried[-1], jnp.float32(self.lower)))
        tried = ieee.bits(jnp.stack(tried))
        reached = jax.lax.map(lambda t: (magnitudes >= t).sum(dtype=jnp.int32), tried)
        enough = (reached >= math.ceil(self.lower * k)).at[-1].set(True)
        return tried[jnp.argmax(enough)]


_SELECTIONS = {"exact": None, "sampled": Sampled(), "fitted": Sampled(estimate="exponential")}


def as_select(function: str, argument: str, value: Any) -> str | Sampled:
    """Checks a selection, and returns "exact" or a `Sampled`. Selections other than "exact" have names, too."""
    if isinstance(value, Sampled):
        return value
    return _SELECTIONS[check_choice(function, argument, value, _SELECTIONS)] or "exact"


def check_pull(function: str, argument: str, value: Any) -> str:
    return check_choice(function, argument, value, ("all", "top"))


def check_values(function: str, argument: str, value: Any) -> Codec:
    if check_encodes(function, value, argument).sparse:
        raise wrong(function, argument, "a codec that keeps every element", value)
    if value.correlated:
        remedy = 'write rounding="stochastic": ranks send different elements'
        raise wrong(function, argument, "a codec whose ranks round independently", value, remedy)
    return value


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """Sends the elements of a leaf with the largest magnitudes, and their indices. All other elements become 0.

    If a message is cut into a chunk for each rank, the largest elements of each leaf in each chunk are sent. Among
    equal magnitudes, lower indices come first. NaN comes before infinity, and infinity before all numbers.

    Args:
      ratio: the fraction of the elements that is sent, 0 to 1. The number of elements is rounded up.
      values: the codec of the elements that are sent. Raw() sends float32.
      select: "exact", "sampled", "fitted", or a `Sampled`. "sampled" is Sampled(), and "fitted" is
        Sampled(estimate="exponential"). All except "exact" draw a random number, so they need a key. They usually send
        up to a fifth fewer elements. On CPUs, "exact" is the fastest.
      pull: the elements of a sum that ranks get. "all": every element that any rank sent. "top": only the largest
        elements of the sum, the same number as one rank sends.
      lists: the capacity, as a number of lists of one rank. The sum over N ranks needs N lists to lose nothing.
    """

    ratio: float = 0.01
    values: Codec = Raw()
    select: str | Sampled = "exact"
    pull: str = "all"
    lists: int = 1

    whole = True
    sparse = True
    kind = Kind.TOPK
    most = 2**31 - 1  # an index has 32 bits

    def __post_init__(self) -> None:
        set_field(self, "ratio", _check_share, 0, 1)
        set_field(self, "values", check_values)
        set_field(self, "select", as_select)
        set_field(self, "pull", check_pull)
        set_field(self, "lists", check_integer, 1, MOST)

    @property
    def stochastic(self) -> bool:
        """Whether encoding draws noise, for the values or for a sample."""
        return self.values.stochastic or self.select != "exact"

    @property
    def state(self) -> tuple[str, ...]:
        """The state of a sum. If every element is sent, momentum isn't masked."""
        return ("residuals", "momentum") if self.ratio < 1 else ("residuals",)

    @property
    def contracts(self) -> bool:
        """Whether the error of `values` is smaller than its input."""
        return self.values.contracts

    def _kernel_fields(self) -> dict[str, Any] | None:
        native = self.values.native
        if native is None or self.values.rotate or self.values.carrier is not None:
            return None
        fields: dict[str, Any] = dict(stochastic=self.stochastic, ratio=self.ratio, lists=self.lists)
        if isinstance(self.select, Sampled):
            fields |= dataclasses.asdict(self.select)
            fields["select"] = 1 + _ESTIMATES.index(fields.pop("estimate"))  # Select in xla_ffi/codec/base.h
        values = {f"values_{name}": native[name] for name in DENSE}
        return fields | values | dict(top=self.pull == "top")

    def capacity(self, n: int) -> int:
        """Returns the largest number of elements that are sent of n elements."""
        return min(n, self.lists * math.ceil(self.ratio * n))

    def of_sum(self, ranks: int) -> "TopK":
        if self.pull == "top":
            return self
        lists = min(self.lists * ranks, MOST)  # MOST lists have room for all elements of any leaf
        return dataclasses.replace(self, values=Raw(), select="exact", lists=lists)

    def weight(self, n: int, dtype: DType) -> int:
        return n  # independent of the other fields, so that sums are cut at the same elements as messages

    def code_bytes(self, n: int, dtype: DType) -> int:
        if n > self.most:
            raise unexpected("TopK", "at most 2^31 - 1 elements of a leaf in a chunk", n)
        return align16(index_bytes(n, self.capacity(n))) + self._values(n).chunk_bytes

    def _values(self, n: int) -> Layout:
        """Returns the layout of the elements that are sent, as a separate message."""
        return Layout(self.values, ((self.capacity(n),),), (jnp.float32,))

    def encode_buckets(self, x: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        x, drawn = x[0], None if noise is None else noise[0]
        n = x.size
        indices = self._select(x, self.capacity(n), drawn)
        kept = x.at[indices].get(mode="fill", fill_value=0)
        kept = ieee.as_float(jnp.where(ieee.magnitude_bits(kept) >= _NAN, 0x7FC00000, ieee.bits(kept)))
        listed = to_list(indices, n)
        parts = [listed, jnp.zeros(-listed.size % 16, jnp.uint8), reference.encode_drawn(self._values(n), kept, drawn)]
        return jnp.zeros((1, 0), jnp.float32), jnp.concatenate(parts)[None]

    def decode_buckets(self, meta: jax.Array, codes: jax.Array, n: int) -> jax.Array:
        payload = codes[:, align16(index_bytes(n, self.capacity(n))) :]
        (values,) = reference.decode(self._values(n), reference.Decode(payload))
        return jnp.zeros(n, jnp.float32).at[self.indices(codes[0], n)].set(values, mode="drop")[None]

    def indices(self, codes: jax.Array, n: int) -> jax.Array:
        k = self.capacity(n)
        return from_list(codes[: index_bytes(n, k)], n, k)

    def _select(self, x: jax.Array, k: int, drawn: jax.Array | None) -> jax.Array:
        """Returns the indices of at most k elements: int32[k], ascending. Entries equal to x.size mean no element."""
        n = x.size
        if k in (0, n):
            return jnp.arange(k, dtype=jnp.int32)
        magnitudes = jnp.minimum(ieee.magnitude_bits(x), _NAN)
        found, indices = jax.lax.top_k(magnitudes, k)
        if isinstance(self.select, Sampled) and drawn is not None:
            indices = jnp.where(found >= self.select.threshold(magnitudes, k, drawn[-1]), indices, n)
        return jnp.sort(indices)


def _exponential(sample: jax.Array, n: int, k: int) -> jax.Array:
    """Returns the magnitude that k of n elements reach if all elements are distributed like the sample."""
    # An exponential distribution is fitted to the sample, another one to its largest quarter, and so on.
    largest = ieee.as_float(sample.max())
    scale = ieee.scale_of(largest)
    x = ieee.scaled(ieee.as_float(sample), scale)
    x = jnp.where(ieee.bits(x) < 0x800000, 0, x)  # XLA flushes denormals only on CPUs
    t, quarters = jnp.zeros((), jnp.float32), 0
    while True:
        last = k * 4 ** (quarters + 1) >= n
        above = x > t if quarters else jnp.ones(x.shape, bool)
        number = jnp.maximum(above.sum(dtype=jnp.int32), 1).astype(jnp.float32)
        excess = sum_of_magnitudes(jnp.where(above, x - t, 0)[None])[0, 0]
        t = t + excess * jnp.float32(math.log(n / (k * 4**quarters) if last else 4)) / number
        if last:
            return ieee.unscaled(t, scale)
        quarters += 1

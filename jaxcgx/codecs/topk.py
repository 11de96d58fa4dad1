"""TopK: the elements of the largest magnitude, and where they stand."""

import dataclasses
import math
import numbers

import jax.numpy as jnp
from jax import lax

from jaxcgx.checks import check_choice, check_field, check_integer
from jaxcgx.codecs.base import Codec, Kind, check_codec, check_encodes, native_codec
from jaxcgx.codecs.grid import scale_of, scaled, unscaled
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.sign import sum_of_magnitudes
from jaxcgx.native import ieee, reference
from jaxcgx.native.indices import from_list, index_bytes, to_list
from jaxcgx.native.layout import Layout, align16
from jaxcgx.native.operands import Decode

_FINITE, _NAN = 0x7F7FFFFF, 0x7F800001  # bits of the largest finite magnitude; what every NaN counts as
_ESTIMATES = ("quantile", "exponential")


def _check_share(codec, field, low, high):
    value = getattr(codec, field)
    expected = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{type(codec).__name__}: argument '{field}': expected {expected}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{type(codec).__name__}: argument '{field}': expected {expected}, got {value!r}")
    object.__setattr__(codec, field, float(value))


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Selection by a threshold that a sample gives, Deep Gradient Compression's; what is above it is read once more.

    share: of the elements, how many the sample has (at least 2 / ratio of them), at equal distances from a random first
    one.
    estimate: "quantile" takes the magnitude that the wanted ratio of the sample reaches; "exponential" fits exponential
    distributions to the sample and to what of it lies above, again and again (SIDCo's).
    lower, refinements: as long as fewer than `lower` times the wanted number reach the threshold, it is multiplied by
    `lower`, at
    most so often. If more reach it than wanted, the largest of them are taken: DGC's upper bound has no counterpart.
    """

    share: float = 0.01
    estimate: str = "quantile"
    lower: float = 0.8
    refinements: int = 10

    def __post_init__(self):
        _check_share(self, "share", 2.0**-15, 1)
        check_field(self, "estimate", check_choice, _ESTIMATES)
        _check_share(self, "lower", 2.0**-15, 1)
        check_field(self, "refinements", check_integer, 0, 100)


_SELECTIONS = {"exact": None, "sampled": Sampled(), "fitted": Sampled(estimate="exponential")}


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """The `ratio` of a leaf's elements that have the largest magnitudes, with their indices; all others are 0.

    Of a message that is cut into a chunk for each rank it is the largest of each leaf in each chunk. Of equal
    magnitudes those with
    lower indices come first, and NaN before infinity before all numbers.

    ratio: 0 to 1, of the elements, rounded up. values: the codec of the elements that are sent; Raw() is float32.
    select: "exact"; or, most often with up to a fifth fewer elements, "sampled", a `Sampled` with other numbers, or
    "fitted", which is
    Sampled(estimate="exponential"); these draw a random number and need a key. (On CPUs exact selection is the
    fastest.)
    pull: what ranks get of a sum that goes over its owners ("two_shot"): "all" that any rank sent, or the "top" of the
    sum, as
    few elements again whatever the number of ranks.
    lists: as many lists of that length make one: a sum of so many ranks' loses nothing.
    """

    ratio: float = 0.01
    values: Codec = Raw()
    select: str | Sampled = "exact"
    pull: str = "all"
    lists: int = 1

    whole = True
    sparse = True
    state = ("residuals", "momentum")
    most = 2**31 - 1  # that an index of 32 bits tells apart

    def __post_init__(self):
        _check_share(self, "ratio", 0, 1)
        check_encodes("TopK", check_codec("TopK", self.values, "values"), "values")
        if self.values.sparse:
            raise ValueError(f"TopK: argument 'values': expected a codec that keeps every element, got {self.values}")
        if not isinstance(self.select, Sampled):
            check_field(self, "select", check_choice, _SELECTIONS)
            object.__setattr__(self, "select", _SELECTIONS[self.select] or "exact")
        check_field(self, "pull", check_choice, ("all", "top"))
        check_field(self, "lists", check_integer, 1, 2**20)

    @property
    def stochastic(self):
        return self.values.stochastic or self.select != "exact"

    @property
    def contracts(self):
        return self.values.contracts

    @property
    def native(self):
        if self.values.native is None:
            return None
        knobs = {}
        if self.select != "exact":
            knobs = dataclasses.asdict(self.select)
            knobs["select"] = 1 + _ESTIMATES.index(knobs.pop("estimate"))  # Select in xla_ffi/codec/base.h
        return native_codec(
            Kind.TOPK,
            stochastic=self.stochastic,
            values=self.values.native,
            ratio=self.ratio,
            lists=self.lists,
            top=self.pull == "top",
            **knobs,
        )

    def capacity(self, n: int) -> int:
        """How many of n elements are sent, at most."""
        return min(n, self.lists * math.ceil(self.ratio * n))

    def of_sum(self, ranks):
        """Of a sum of so many ranks' elements, which lie where theirs did."""
        return (
            dataclasses.replace(self, values=Raw(), select="exact", lists=self.lists * ranks)
            if self.pull == "all"
            else self
        )

    def weight(self, n, dtype):
        return n  # whatever else: what becomes of a message is cut as the message was

    def code_bytes(self, n, dtype):
        if n > self.most:
            raise ValueError(f"TopK: expected at most 2^31 - 1 elements of a leaf in a chunk, got {n}")
        return align16(index_bytes(n, self.capacity(n))) + self._values(n).chunk_bytes

    def _values(self, n):
        """The elements that are sent as a message of their own."""
        return Layout(self.values, ((self.capacity(n),),), (jnp.float32,))

    def encode_buckets(self, x, noise):
        x, drawn = x[0], None if noise is None else noise[0]
        n = x.size
        indices = self._select(x, self.capacity(n), drawn)
        kept = x.at[indices].get(mode="fill", fill_value=0)
        kept = ieee.as_float(jnp.where(ieee.magnitude_bits(kept) >= _NAN, 0x7FC00000, ieee.bits(kept)))
        listed = to_list(indices, n)
        parts = [listed, jnp.zeros(-listed.size % 16, jnp.uint8), reference.encode_drawn(self._values(n), kept, drawn)]
        return jnp.zeros((1, 0), jnp.float32), jnp.concatenate(parts)[None]

    def decode_buckets(self, meta, codes, n):
        payload = codes[:, align16(index_bytes(n, self.capacity(n))) :]
        (values,) = reference.decode(self._values(n), Decode(payload))
        return jnp.zeros(n, jnp.float32).at[self.indices(codes[0], n)].set(values, mode="drop")[None]

    def indices(self, codes, n):
        """Which of the n elements of a piece were sent: int32[capacity], ascending; n stands for none."""
        k = self.capacity(n)
        return from_list(codes[: index_bytes(n, k)], n, k)

    def _select(self, x, k, drawn):
        n = x.size
        if k in (0, n):
            return jnp.arange(k, dtype=jnp.int32)
        magnitudes = jnp.minimum(ieee.magnitude_bits(x), _NAN)
        found, indices = lax.top_k(magnitudes, k)
        if self.select != "exact":
            indices = jnp.where(found >= self._threshold(magnitudes, k, drawn[-1]), indices, n)
        return jnp.sort(indices)

    def _threshold(self, magnitudes, k, random):
        """The bits of the magnitude that an element must have at least."""
        n, how = magnitudes.size, self.select
        count = min(n, max(math.ceil(how.share * n), -(-2 * n // k)))
        stride = n // count
        first = random * stride >> 16
        sample = lax.dynamic_slice(magnitudes, (first,), ((count - 1) * stride + 1,))[::stride]
        if how.estimate == "quantile":
            bits = jnp.minimum(lax.top_k(sample, -(-k * count // n))[0][-1], _FINITE)
        else:
            bits = ieee.bits(_exponential(jnp.minimum(sample, _FINITE), n, k))
        tried = [ieee.as_float(jnp.minimum(bits, _FINITE))]
        for _ in range(how.refinements):
            tried.append(ieee.multiply(tried[-1], jnp.float32(how.lower)))
        tried = ieee.bits(jnp.stack(tried))
        reached = lax.map(lambda t: (magnitudes >= t).sum(dtype=jnp.int32), tried)
        enough = (reached >= math.ceil(how.lower * k)).at[-1].set(True)
        return tried[jnp.argmax(enough)]


def _exponential(sample, n, k):
    """The magnitude that k of n elements reach, were all distributed as the sample: an exponential distribution is
    fitted to the
    sample, another one to what lies above a quarter of that, and so on."""
    largest = ieee.as_float(sample.max())
    scale = scale_of(largest)
    x = scaled(ieee.as_float(sample), scale)
    x = jnp.where(ieee.bits(x) < 0x800000, 0, x)  # everywhere, as XLA flushes denormals on CPUs only
    t, quarters = jnp.zeros((), jnp.float32), 0
    while True:
        last = k * 4 ** (quarters + 1) >= n
        above = x > t if quarters else jnp.ones(x.shape, bool)
        number = jnp.maximum(above.sum(dtype=jnp.int32), 1).astype(jnp.float32)
        excess = sum_of_magnitudes(jnp.where(above, x - t, 0)[None])[0, 0]
        t = t + excess * jnp.float32(math.log(n / (k * 4**quarters) if last else 4)) / number
        if last:
            return unscaled(t, scale)
        quarters += 1

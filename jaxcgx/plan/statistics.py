"""The errors of each codec on the gradients of each leaf. `Plan.adapt` chooses codecs by these errors."""

import dataclasses
import functools

import jax

from jaxcgx.checks import unexpected
from jaxcgx.codecs.base import Codec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["errors", "norms", "tops"],
    meta_fields=["paths", "shapes", "dtypes", "codecs"],
)
@dataclasses.dataclass(frozen=True)
class GradientStatistics:
    """Statistics of gradients: sums over ranks and, if statistics were added, over steps.

    They are a pytree, so a jitted step can return them.

    Attributes:
      errors: float32[leaves, codecs]: the squared error of one encoding.
      norms: float32[leaves]: the squared norm.
      tops: float32[leaves]: the squared norm of the 100 largest magnitudes.
      paths: the paths of the leaves that codecs can take, in the form that rules match.
      shapes: the shapes of these leaves.
      dtypes: the names of their dtypes.
      codecs: the codecs.
    """

    errors: jax.Array
    norms: jax.Array
    tops: jax.Array
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    codecs: tuple[Codec, ...]

    def __add__(self, other: "GradientStatistics") -> "GradientStatistics":
        # not every caller is typed
        if not isinstance(other, GradientStatistics):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        if jax.tree.structure(self) != jax.tree.structure(other):
            sizes = [f"those of {len(x.paths)} leaves and {len(x.codecs)} codecs" for x in (self, other)]
            raise unexpected(
                "GradientStatistics", "statistics of the same leaves and codecs to add", " and ".join(sizes)
            )
        return jax.tree.map(lambda a, b: a + b, self, other)

"""What is known of gradients when a plan chooses bits."""

import dataclasses
import functools

import jax

TOP = 100  # magnitudes that `tops` is of, CGX's number


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["errors", "norms", "tops"],
    meta_fields=["paths", "shapes", "dtypes", "codecs"],
)
@dataclasses.dataclass(frozen=True)
class GradientStatistics:
    """Sums over the ranks of an axis and, where statistics were added, over steps. A pytree: a jitted step can return
    it."""

    errors: jax.Array  # float32[leaves, codecs]: squared, of one encoding
    norms: jax.Array  # float32[leaves], squared
    tops: jax.Array  # float32[leaves]: the same of the 100 largest magnitudes
    paths: tuple  # of the leaves, as a plan's rules see them; without those that no codec can take
    shapes: tuple
    dtypes: tuple
    codecs: tuple

    def __add__(self, other):
        if not isinstance(other, GradientStatistics):
            return NotImplemented
        if jax.tree.structure(self) != jax.tree.structure(other):
            raise ValueError(
                "GradientStatistics: expected statistics of the same leaves and codecs to add, got those of "
                f"{len(self.paths)} leaves and {len(self.codecs)} codecs, and of {len(other.paths)} and "
                f"{len(other.codecs)}"
            )
        return jax.tree.map(lambda a, b: a + b, self, other)

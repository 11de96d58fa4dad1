"""Types of arguments. Those of jax.typing have no annotations, so type checkers don't use them outside of JAX."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

ArrayLike: TypeAlias = jax.Array | np.ndarray[Any, Any] | np.bool_ | np.number[Any] | bool | int | float
DTypeLike: TypeAlias = str | type[Any] | np.dtype[Any]
DType: TypeAlias = np.dtype[Any]
AxisName: TypeAlias = Hashable  # an axis of a mesh or of vmap; Tcp(name); or a tuple, outermost first
PyTree: TypeAlias = Any  # JAX has no type of trees
Params: TypeAlias = PyTree
Batch: TypeAlias = PyTree
Specs: TypeAlias = PyTree  # a tree of PartitionSpecs, or a prefix of one
Key: TypeAlias = jax.Array
KeyPath: TypeAlias = Sequence[Any]  # the place of a leaf in a tree
STATIC: dict[Any, bool] = dict(static=True)  # metadata of the fields of a dataclass that JAX takes for its structure

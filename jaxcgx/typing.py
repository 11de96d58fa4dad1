"""Types of arguments. Those of jax.typing are inferred ones, which type checkers don't take from other packages."""

from collections.abc import Hashable
from typing import Any, TypeAlias

import jax
import numpy as np

ArrayLike: TypeAlias = jax.Array | np.ndarray[Any, Any] | np.bool_ | np.number[Any] | bool | int | float
DTypeLike: TypeAlias = str | type[Any] | np.dtype[Any]
DType: TypeAlias = np.dtype[Any]
AxisName: TypeAlias = Hashable  # of a mesh or of vmap; Tcp of such a name; or a tuple of these, outermost first

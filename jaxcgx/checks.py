"""Checks of arguments. All errors have the same form.

Every error names the function that the user called, the argument, the expected value and the given value. If a remedy
is known, the error has it, too. A check returns the value as it is, or a number of NumPy as one of Python. What makes
something else of a value has a name that says what: `as_array`.
"""

import inspect
import numbers
import operator
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat
from jaxcgx.typing import ArrayLike, KeyPath, PyTree

BOOL = bool | np.bool_
MOST_SHOWN = 600  # the most characters of a wrong value in an error
REDUCED = (
    "if it is a gradient, JAX has reduced it already, uncompressed, because the parameters don't vary over that axis: "
    "take it with jaxcgx.value_and_grad(loss_fn, axis_name, None), or differentiate with respect to "
    "jax.lax.pcast(params, axis_name, to='varying')"
)
MOST = 2**40  # the most elements of a bucket, a leaf or a message; a limit that none reaches


def wrong(
    function: str,
    argument: str,
    expected: str,
    got: object,
    remedy: str = "",
    *,
    path: KeyPath = (),
    kind: type[Exception] = ValueError,
) -> Exception:
    """Returns the error for a wrong argument.

    Args:
      function: the function that the user called.
      argument: the name of the argument.
      expected: a description of right values.
      got: the given value. It is formatted by str, so pass repr(value) for a string.
      remedy: what to write instead, if it is known.
      path: the JAX path of the leaf, if the argument is a tree.
      kind: the class of the error.
    """
    text = str(got)
    if len(text) > MOST_SHOWN:  # of a tree of arrays
        text = f"{text[: MOST_SHOWN // 2]} ... {text[-MOST_SHOWN // 2 :]}"
    return unexpected(f"{function}: argument '{argument}'{at(path)}", expected, text, remedy, kind=kind)


def unexpected(
    place: str, expected: str, got: object, remedy: str = "", *, kind: type[Exception] = ValueError
) -> Exception:
    """Returns the error for a wrong value in a `place` that is no argument, such as a variable; else as `wrong`."""
    text = f"{place}: expected {expected}, got {got}"
    return kind(f"{text}; {remedy}" if remedy else text)


def at(path: KeyPath) -> str:
    """Returns the name of a leaf in errors, from its JAX path. For a tree that is a single leaf, it is ""."""
    name = jax.tree_util.keystr(tuple(path))
    return f", leaf {name}" if name else ""


def spell_array(x: Any) -> str:
    """Returns the dtype and shape of an array, or the repr of any other value."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer of Python or NumPy. A bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, BOOL)


def is_number(value: object) -> bool:
    """Returns whether a value is a real number of Python or NumPy. A bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, BOOL)


def check_choice(function: str, argument: str, value: Any, choices: Collection[Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise wrong(function, argument, f"one of {', '.join(map(repr, choices))}", repr(value))
    return value


def as_shape(function: str, argument: str, value: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in value)
    except TypeError:
        raise wrong(function, argument, "a tuple of integers", repr(value), kind=TypeError) from None
    if any(n < 0 for n in sizes):
        raise wrong(function, argument, "sizes of at least 0", sizes)
    return sizes


def check_type(function: str, argument: str, value: Any, kind: Any, expected: str) -> Any:
    """Checks that a value is an instance of `kind`, a class or a union of classes, which `expected` describes."""
    if not isinstance(value, kind):
        raise wrong(function, argument, expected, repr(value), kind=TypeError)
    return value


def check_flag(function: str, argument: str, value: object) -> bool:
    return bool(check_type(function, argument, value, BOOL, "True or False"))


def check_pattern(function: str, argument: str, value: str | None) -> None:
    if not isinstance(value, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong(function, argument, "a regular expression as a string", repr(value), kind=TypeError)
    try:
        re.compile(value or "")
    except re.error as error:
        raise wrong(function, argument, "a regular expression", f"{value!r}: {error}") from None


def check_integer(function: str, argument: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Returns the value as an int, and checks that it is from `low` to `high` if these are given."""
    if high is not None:
        expected = f"an integer from {low} to {'2^40' if high == MOST else high}"
    elif low is not None:
        expected = "a positive integer" if low == 1 else f"an integer of at least {low}"
    else:
        expected = "an integer"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, BOOL):
        raise wrong(function, argument, expected, repr(value), kind=TypeError)
    if (low is not None and number < low) or (high is not None and number > high):
        raise wrong(function, argument, expected, number)
    return number


def check_number(
    function: str, argument: str, value: Any, fits: Callable[[Any], bool], expected: str, remedy: str = ""
) -> Any:
    """Checks that a value is a real number for which `fits` is true. `expected` describes such numbers."""
    if not is_number(value):
        raise wrong(function, argument, expected, repr(value), remedy, kind=TypeError)
    if not fits(value):
        raise wrong(function, argument, expected, repr(value), remedy)
    return value


def check_positive(function: str, argument: str, value: Any) -> Any:
    return check_number(function, argument, value, lambda x: x > 0, "a positive number")


def check_hashable(function: str, argument: str, value: object, remedy: str) -> Any:
    """Checks that a value is hashable, because jit requires it of static values."""
    try:
        hash(value)
    except TypeError:
        raise wrong(function, argument, "something hashable", repr(value), remedy, kind=TypeError) from None
    return value


def set_field(instance: object, name: str, check: Callable[..., Any], *args: Any) -> None:
    """Sets a field of a frozen dataclass to what a check returns of it, such as a number of Python for one of NumPy."""
    object.__setattr__(instance, name, check(type(instance).__name__, name, getattr(instance, name), *args))


def as_array(function: str, argument: str, value: Any, path: KeyPath = (), *, remedy: str = "") -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise wrong(function, argument, "an array", repr(value), remedy, path=path, kind=TypeError) from None


def as_whole(op: str, argument: str, path: KeyPath, leaf: ArrayLike) -> jax.Array:
    """Returns the leaf as an array. Its type must not be sharded: every device has the whole array."""
    leaf = as_array(op, argument, leaf, path)
    if cut := [axis for axis in jax.typeof(leaf).sharding.spec if axis is not None]:
        got = f"{jax.typeof(leaf)}, sharded over {', '.join(map(repr, cut))}"
        remedy = "to compress the local shards, wrap the call in a jax.shard_map over these axes (docs/meshes.md)"
        raise wrong(op, argument, "an array that a device has whole", got, remedy, path=path)
    return leaf


def check_real(function: str, argument: str, tree: PyTree) -> None:
    """Checks that no leaf is complex, for functions that compute with their leaves in float32."""
    for path, x in jax.tree.flatten_with_path(tree)[0]:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            remedy = "keep the real and the imaginary part as two leaves"
            raise wrong(function, argument, "real numbers", x.dtype, remedy, path=path, kind=TypeError)


def check_varying(
    function: str,
    names: Sequence[Any],
    paths: Sequence[Any],
    leaves: Sequence[Any],
    argument: str = "x",
    remedy: str = REDUCED,
) -> None:
    """Checks that every leaf varies over the axes `names`, if JAX tracks this (shard_map's check_vma)."""
    tracked = _compat.tracked_axes(names)
    for path, leaf in zip(paths, leaves):
        same = [name for name in names if name in tracked and name not in _compat.varying_axes(leaf)]
        if same:
            expected = f"an array that varies over {', '.join(map(repr, names))}"
            got = f"one that is the same on every rank of {', '.join(map(repr, same))} ({jax.typeof(leaf)})"
            raise wrong(function, argument, expected, got, remedy, path=path)


def warn(text: str) -> None:
    """Warns, and points to the first line outside this package."""
    warnings.warn(text, stacklevel=callers_level())


def callers_level() -> int:
    """Returns the stacklevel that makes a warning point to the first line outside this package."""
    level, frame = 0, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").startswith("jaxcgx."):
        level, frame = level + 1, frame.f_back
    return level

"""What is wrong with an argument, in one wording.

Every error names the function that the user called, the argument, what was expected, what came, and what to write
instead where that is known. A check returns the value in the form that the rest of the package uses.
"""

import inspect
import numbers
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx import _compat

BOOL = bool | np.bool_
MOST = 2**40  # elements of a bucket, a leaf or a message: more than any has


def wrong(
    function: str,
    argument: str,
    expected: str,
    got: Any,
    remedy: str = "",
    *,
    path: Any = (),
    kind: type[Exception] = ValueError,
) -> Exception:
    """The error for an argument.

    `got` is text as it is. `path` is the JAX path of the leaf if the argument is a tree.
    """
    return unexpected(f"{function}: argument '{argument}'{at(path)}", expected, got, remedy, kind=kind)


def unexpected(
    place: str, expected: str, got: Any, remedy: str = "", *, kind: type[Exception] = ValueError
) -> Exception:
    """The error for whatever is not an argument: a variable, a key of a file, the answer of the caller's function."""
    text = f"{place}: expected {expected}, got {got}"
    return kind(f"{text}; {remedy}" if remedy else text)


def at(path: Any) -> str:
    """A leaf, by its JAX path, as errors name it; nothing for a tree that is a single leaf."""
    name = jax.tree_util.keystr(path)
    return f", leaf {name}" if name else ""


def spell_array(x: Any) -> str:
    """An array by its dtype and shape; anything else by its repr."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy. A bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, BOOL)


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or NumPy. A bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, BOOL)


def check_choice(function: str, argument: str, value: Any, choices: Collection[Any]) -> Any:
    """One of some strings."""
    if not isinstance(value, str) or value not in choices:
        raise wrong(function, argument, f"one of {', '.join(map(repr, choices))}", repr(value))
    return value


def check_shape(function: str, argument: str, value: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in value)
    except TypeError:
        raise wrong(function, argument, "a tuple of integers", repr(value), kind=TypeError) from None
    if any(n < 0 for n in sizes):
        raise wrong(function, argument, "sizes of at least 0", sizes)
    return sizes


def check_flag(function: str, argument: str, value: Any) -> bool:
    """The value as a bool."""
    if not isinstance(value, BOOL):
        raise wrong(function, argument, "True or False", repr(value), kind=TypeError)
    return bool(value)


def check_integer(function: str, argument: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """The value as an int, from `low` to `high` where these are given."""
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
    """A real number for which `fits` is true; `expected` says so in words."""
    if not is_number(value):
        raise wrong(function, argument, expected, repr(value), remedy, kind=TypeError)
    if not fits(value):
        raise wrong(function, argument, expected, repr(value), remedy)
    return value


def check_positive(function: str, argument: str, value: Any) -> Any:
    """A real number greater than 0."""
    return check_number(function, argument, value, lambda x: x > 0, "a positive number")


def check_hashable(function: str, argument: str, value: Any, remedy: str) -> Any:
    """Something hashable, as jit requires of everything static."""
    try:
        hash(value)
    except TypeError:
        raise wrong(function, argument, "something hashable", repr(value), remedy, kind=TypeError) from None
    return value


def check_field(instance: Any, name: str, check: Callable[..., Any], *args: Any) -> None:
    """Checks a field of a frozen dataclass, and stores the value that the check returns."""
    object.__setattr__(instance, name, check(type(instance).__name__, name, getattr(instance, name), *args))


def check_array(function: str, argument: str, value: Any, path: Any = ()) -> jax.Array:
    """The value as a JAX array."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise wrong(function, argument, "an array", repr(value), path=path, kind=TypeError) from None


def check_varying(
    function: str, names: Sequence[Any], paths: Sequence[Any], leaves: Sequence[Any], argument: str = "x"
) -> None:
    """Checks that every leaf varies over the axes `names`, where JAX tracks that (shard_map's check_vma)."""
    tracked = _compat.tracked_axes(names)
    for path, leaf in zip(paths, leaves):
        same = [name for name in names if name in tracked and name not in _compat.varying_axes(leaf)]
        if same:
            raise wrong(
                function,
                argument,
                f"an array that varies over {', '.join(map(repr, names))}",
                f"one that is the same on every rank of {', '.join(map(repr, same))} ({jax.typeof(leaf)})",
                "if it is a gradient, JAX has reduced it already, uncompressed, because the parameters don't vary over "
                "that axis. Take it with jaxcgx.local_value_and_grad, or differentiate with respect to "
                "jax.lax.pcast(params, axis_name, to='varying')",
                path=path,
            )


def callers_level() -> int:
    """The stacklevel of a warning that points to the first line outside this package."""
    level, frame = 0, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").startswith("jaxcgx."):
        level, frame = level + 1, frame.f_back
    return level

"""One-line errors for the person who started a run."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any


class Wrong(Exception):
    """An error that train.py shows as one line, without a traceback."""


class Interrupted(Exception):
    """A signal ended the training after a step, and that step has a checkpoint."""


def choose(choices: Mapping[str, Any], name: Any, place: str) -> Any:
    """Returns choices[name]. An unknown name is an error that names all choices."""
    if name not in choices:
        raise Wrong(f"{place}: expected one of {', '.join(choices)}, got {name!r}")
    return choices[name]


def call(function: Callable[..., Any], place: str, *args: Any, **section: Any) -> Any:
    """Returns function(*args, **section). `section` has the keys of a config at `place`.

    A key that is no parameter of the function is an error. Errors that wrong values cause become a `Wrong`.
    """
    signature = inspect.signature(function.__init__ if isinstance(function, type) else function)
    parameters = signature.parameters.values()
    reads = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) and (unread := sorted(set(section) - set(reads))):
        raise Wrong(f"{place}.{unread[0]}: nothing reads it; {place} has {', '.join(reads)}")
    try:
        return function(*args, **section)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise Wrong(f"{place}: {' '.join(str(error).split())}") from error


def check_least(least: float, **values: float) -> None:
    """Raises a ValueError if a value is smaller than `least`, or isn't finite."""
    for name, value in values.items():
        if not least <= value < math.inf:
            raise ValueError(f"expected a {name} of at least {least}, got {value}")


def check_shares(**values: float) -> None:
    """Raises a ValueError if a value isn't from 0 to below 1."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"expected a {name} from 0 to below 1, got {value}")

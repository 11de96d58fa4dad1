"""One-line errors for the person who started a run."""

import inspect
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

    A key that is no parameter of the function is an error. A TypeError or ValueError of the function becomes a `Wrong`.
    """
    signature = inspect.signature(function.__init__ if isinstance(function, type) else function)
    parameters = signature.parameters.values()
    reads = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) and (unread := sorted(set(section) - set(reads))):
        raise Wrong(f"{place}.{unread[0]}: nothing reads it; {place} has {', '.join(reads)}")
    try:
        return function(*args, **section)
    except (TypeError, ValueError) as error:
        raise Wrong(f"{place}: {error}") from error

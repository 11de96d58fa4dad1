"""What is wrong with a run, in one line for the person who started it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


class Wrong(Exception):
    """An error that train.py shows as one line, without a traceback."""


def choose(choices: Mapping[str, Any], name: Any, place: str) -> Any:
    """The choice of this name."""
    if name not in choices:
        raise Wrong(f"{place}: expected one of {', '.join(choices)}, got {name!r}")
    return choices[name]


def call(function: Callable[..., Any], place: str, *args: Any, **section: Any) -> Any:
    """function(*args, **section) of what a config says at `place`. What the function doesn't read is an error."""
    signature = inspect.signature(function.__init__ if isinstance(function, type) else function)
    parameters = signature.parameters.values()
    reads = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) and (unread := sorted(set(section) - set(reads))):
        raise Wrong(f"{place}.{unread[0]}: nothing reads it; {place} has {', '.join(reads)}")
    try:
        return function(*args, **section)
    except (TypeError, ValueError) as error:
        raise Wrong(f"{place}: {error}") from error

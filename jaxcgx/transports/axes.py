"""How a caller names ranks: the names of mesh axes, some of which may be marked with who moves their bytes."""

import dataclasses
from collections.abc import Hashable
from types import NoneType
from typing import Any

from jaxcgx.checks import check_field, check_number, wrong


@dataclasses.dataclass(frozen=True)
class Tcp:
    """An axis whose compressed bytes jaxcgx's own TCP connections move. It takes the place of the axis's name in
    `axis_name`, alone or in a tuple of axes; everything else knows the axis by its name.

    It is for CPUs, with one device in each process, after jax.distributed.initialize. The processes connect when the
    first program with such an exchange is lowered.

    Args:
      name: the name of the axis.
      timeout: how many seconds an exchange may take, including the wait for other processes, and how many seconds they
        wait for each other before the first one.
    """

    name: Hashable
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if isinstance(self.name, tuple | list | Tcp):
            raise wrong("Tcp", "name", "the name of one axis", repr(self.name), "a tuple of axes has a Tcp for each")
        check_field(self, "timeout", check_number, lambda x: 0.001 <= x < 1e9, "a positive number of seconds")


def _each(axis_name: Any) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def axis_names(axis_name: Any) -> tuple[Any, ...]:
    """The names of an axis or a tuple of axes, without the marks."""
    return tuple(axis.name if isinstance(axis, Tcp) else axis for axis in _each(axis_name))


def marked(axis_name: Any) -> tuple[Tcp, ...]:
    """The marks among an axis or a tuple of axes."""
    return tuple(axis for axis in _each(axis_name) if isinstance(axis, Tcp))


def check_axis_names(function: str, axis_name: Any) -> tuple[Any, ...]:
    """The names of an axis or a tuple of different axes. None alone passes, for a caller that has a default."""
    names = axis_names(axis_name)
    each = [isinstance(name, Hashable) and not isinstance(name, int | tuple | NoneType) for name in names]
    if not names or not (axis_name is None or all(each)) or len(set(names)) < len(names):
        raise wrong(function, "axis_name", "a name or a tuple of different names", repr(axis_name))
    return names

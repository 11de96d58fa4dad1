"""How a caller names ranks: by the names of mesh axes. A mark on a name says who moves the bytes."""

import dataclasses
from collections.abc import Hashable
from types import NoneType
from typing import Any, ClassVar

from jax.sharding import AbstractMesh, Mesh

from jaxcgx.checks import check_integer, check_number, set_field, wrong
from jaxcgx.native.meeting import Links
from jaxcgx.text import parse_rate
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName

MOST_CONNECTIONS = 64  # between two processes


@dataclasses.dataclass(frozen=True)
class Mark:
    """An axis with its own transport, passed in place of the axis's name. resolve.py has the transports (`MAKERS`).

    Attributes:
      name: the name of the axis.
      crosses: whether its transport has `begin_sum`, whose exchanges go on while later programs run.
    """

    name: Hashable
    crosses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.name, tuple | list | Mark):
            kind = type(self).__name__
            raise wrong(kind, "name", "the name of one axis", repr(self.name), f"a tuple of axes has a {kind} for each")


@dataclasses.dataclass(frozen=True)
class Tcp(Mark):
    """An axis whose compressed bytes travel over jaxcgx's own TCP connections.

    Pass it instead of the axis's name in `axis_name`, alone or in a tuple of axes. Everywhere else, use the name.

    It is for CPUs and NVIDIA's GPUs, after jax.distributed.initialize. On GPUs it has not run: it was tested under
    emulation. A process may have several devices. The processes connect when the first program with such an exchange is
    lowered.

    Args:
      name: the name of the axis.
      timeout: the seconds that an exchange may take, including the wait for other processes. It also limits the wait
        for all processes to connect.
      connections: the number of connections for data between a device and another process. Each passes at most one
        window per round trip, so links with long round trips may need several.
      pace: the limit for the bytes that this process sends to all other processes together, in bytes per second or as a
        rate such as "100mbit". None: no limit. The headers of TCP and of the layers below don't count.

    A process connects once, so every Tcp in all processes must have the same `connections` and `pace`.
    """

    crosses: ClassVar[bool] = True

    timeout: float = 1800.0
    connections: int = 1
    pace: float | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "timeout", check_number, lambda x: 0.001 <= x < 1e9, "a positive number of seconds")
        set_field(self, "connections", check_integer, 1, MOST_CONNECTIONS)
        set_field(self, "pace", as_pace)

    @property
    def links(self) -> Links:
        """`connections` and `pace`, which must be the same in all processes."""
        assert not isinstance(self.pace, str)  # __post_init__ has read it
        return Links(self.connections, self.pace)


def as_pace(function: str, argument: str, value: Any) -> float | None:
    """Returns the checked pace in bytes per second, or None."""
    if isinstance(value, str):
        return parse_rate(f"{function}: argument '{argument}'", value) / 8
    if value is None:
        return None
    expected = 'at least 1000 bytes a second, or a rate as in "100mbit"'
    return float(check_number(function, argument, value, lambda x: 1e3 <= x < 1e12, expected))


def each_axis(axis_name: AxisName) -> tuple[Any, ...]:
    """Returns each axis of a tuple or list of axes, or of one alone, with the marks."""
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def axis_names(axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the names of an axis or a tuple of axes, without the marks."""
    return tuple([axis.name if isinstance(axis, Mark) else axis for axis in each_axis(axis_name)])


def marked(axis_name: AxisName) -> list[Mark]:
    return [axis for axis in each_axis(axis_name) if isinstance(axis, Mark)]


def crosses(axis_name: AxisName) -> bool:
    """Returns whether an exchange over these axes may go on while later programs run."""
    return any(mark.crosses for mark in marked(axis_name))


def as_axis_names(
    function: str, axis_name: AxisName, argument: str = "axis_name", *, optional: bool = False
) -> tuple[Any, ...]:
    """Returns the checked names of an axis or a tuple of different axes. With `optional`, None is allowed."""
    names, expected = axis_names(axis_name), "a name or a tuple of different names"
    for name in names:  # communicators and meshes are hashable, so they could pass as names
        if isinstance(name, Transport) or is_communicator(name):
            remedy = (
                "axes are those of a mesh; for the processes of mpirun pass the communicator alone, as in "
                "jaxcgx.compressed_pmean(gradients, communicator, codec)"
            )
            raise wrong(function, argument, expected, f"a communicator, {name!r}", remedy, kind=TypeError)
        if isinstance(name, Mesh | AbstractMesh):
            remedy = f"pass the name of its axis, one of {', '.join(map(repr, name.shape))}"
            raise wrong(function, argument, expected, f"a mesh, {name!r}", remedy, kind=TypeError)
    if optional and axis_name is None:
        return names
    try:
        different = len(set(names)) == len(names)  # set raises a TypeError for arrays, which have no hash
    except TypeError:
        different = False
    if not names or not different or any(isinstance(name, int | tuple | NoneType) for name in names):
        raise wrong(function, argument, expected, repr(axis_name))
    return names


def check_for_mesh(function: str, argument: str, value: object, ranks: Any) -> None:
    """Refuses an argument that is for the ranks of a mesh, if `ranks` are processes of MPI."""
    if value is not None and is_communicator(ranks):
        remedy = "leave it out: a process has one device and its own row, and exchanges over MPI wait for one another"
        raise wrong(function, argument, "None between the processes of mpirun", repr(value), remedy)


def is_communicator(given: Any) -> bool:
    """Returns whether this is an mpi4py communicator or a transport over one."""
    for kind in type(given).__mro__:  # no isinstance: mpi4py may be missing
        if kind.__module__.partition(".")[0] == "mpi4py" or kind.__module__ == "jaxcgx.transports.mpi":
            return True
    return False

"""Values by axis: one for all axes, or {axis name: value}, outermost first. Codecs and schedules have this form."""

from collections.abc import Sequence
from typing import Any, NoReturn

from jaxcgx.checks import wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.checks import check_codec

Codecs = Codec | dict[Any, Any]  # {axis name: codec}


class ByAxis(dict[Any, Any]):
    """A dict {axis name: value} that is hashable, because jit requires it of static values. So it can't be changed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  (a dict has None there)
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:  # copy and pickle would fill a dict item by item
        return ByAxis, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"a plan's {dict(self)} can't be changed: make another plan, of dict(...) of it")

    __setitem__: Any = _refuse
    __delitem__: Any = _refuse
    __ior__: Any = _refuse
    clear: Any = _refuse
    pop: Any = _refuse
    popitem: Any = _refuse
    setdefault: Any = _refuse
    update: Any = _refuse


def by_axis(names: Sequence[Any], outer: Any, inner: Any) -> Any:
    """Returns a dict with `outer` for the first axis and `inner` for the others. For a single axis, returns `outer`."""
    return {name: outer if name == names[0] else inner for name in names} if len(names) > 1 else outer


def values(given: Any) -> list[Any]:
    """Returns the values as a list, outermost first."""
    return list(given.values()) if isinstance(given, dict) else [given]


def compressing(given: Codecs) -> list[Codec]:
    """Returns the codecs that compress, outermost first, without duplicates."""
    return list(dict.fromkeys(codec for codec in values(given) if not codec.raw))


def skips(given: Codecs) -> bool:
    """Returns whether leaves with this codec are not sent at all."""
    return isinstance(given, Codec) and given.skips


def check_codecs(function: str, argument: str, given: Any, *, skip: bool = False) -> Codec | ByAxis:
    """Returns a checked codec, or a dict with a checked codec for each axis. With `skip`, Skip() is allowed too."""
    if skip and skips(given):
        return given
    if not isinstance(given, dict):
        return check_codec(function, given, argument)
    if not given:
        raise wrong(function, argument, "a codec for each axis", "{}")
    return ByAxis((axis, check_codec(function, codec, argument)) for axis, codec in given.items())

"""Writes and reads plans as TOML."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Collection
from typing import Any

from jaxcgx import codecs
from jaxcgx.checks import unexpected
from jaxcgx.codecs.base import Codec
from jaxcgx.plan.assignment import Rule
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.network import Network

_EXPORTED: list[Any] = [found for found in vars(codecs).values() if isinstance(found, type) and found is not Codec]
CODECS: dict[str, type[Codec]] = {found.__name__: found for found in _EXPORTED if issubclass(found, Codec)}
# The types of values that are written as a table with a name: codecs, and other values in fields of codecs and plans.
PARTS: dict[str, type] = {**CODECS, "Sampled": codecs.Sampled, "Network": Network}


def write(fields: dict[str, Any]) -> str:
    """Returns the text of a plan with these fields. `read` is the inverse."""
    lines = ["# A plan of jaxcgx: jaxcgx.Plan.load reads it, docs/plans.md explains it."]
    said = {name: value for name, value in fields.items() if name != "rules" and value is not None}
    lines += [f"{name} = {_value(name, value)}" for name, value in said.items()]
    for i, rule in enumerate(fields["rules"]):
        where = f"rules[{i}]"
        if rule.where is not None:
            got = f"one by a predicate, which no file can hold: {rule}"
            raise unexpected(f"Plan.save: {where}", "a rule by path, size or dimensions", got)
        said = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
        lines += ["", "[[rules]]"]
        lines += [f"{name} = {_value(f'{where}.{name}', value)}" for name, value in said.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(where: str, value: Any) -> str:
    if isinstance(value, Codec | codecs.Sampled | Network):
        if PARTS.get(type(value).__name__) is not type(value):
            raise unexpected(f"Plan.save: {where}", "a codec of jaxcgx", f"{value!r}, which no file can hold")
        part: Any = value
        held = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        value = {"name": type(part).__name__} | {name: x for name, x in held.items() if x is not None}
    if isinstance(value, Overlay):
        raise unexpected(f"Plan.save: {where}", "the name of a schedule", "an Overlay, which no file can hold")
    if isinstance(value, dict):
        if other := [key for key in value if not isinstance(key, str)]:
            raise unexpected(f"Plan.save: {where}", "axis names that are strings", repr(other[0]))
        return "{ " + ", ".join(f"{_key(key)} = {_value(where, v)}" for key, v in value.items()) + " }"
    if isinstance(value, str):
        return _text(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _text(key)


def _text(text: str) -> str:
    """Returns a text as a TOML string. It is the JSON string, except that TOML must escape DEL, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read(text: str, fields: Collection[str]) -> dict[str, Any]:
    """Returns a plan's `fields` from its text. Errors about values begin with the key of the value."""
    found = tomllib.loads(text)
    _check_keys("", found, fields)
    rules = found.get("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise unexpected("key 'rules'", "tables [[rules]]", repr(rules))
    if "default" not in found:
        raise unexpected("key 'default'", "a codec", "none")
    if "network" in found:
        found["network"] = _codecs("network", found["network"])
    default = _codecs("default", found["default"])
    return found | dict(default=default, rules=[_rule(f"rules[{i}]", rule) for i, rule in enumerate(rules)])


def _check_keys(where: str, found: dict[str, Any], names: Collection[str]) -> None:
    for name in found:
        if name not in names:
            expected = f"one of {', '.join(names)}" if names else "none"
            raise unexpected(f"key '{where}{name}'", expected, repr(name))


def _rule(where: str, found: dict[str, Any]) -> Rule:
    _check_keys(f"{where}.", found, [field.name for field in dataclasses.fields(Rule) if field.name != "where"])
    if "codec" not in found:
        raise unexpected(f"key '{where}.codec'", "a codec", "none")
    return _made(where, Rule, found | dict(codec=_codecs(f"{where}.codec", found["codec"])))


def _codecs(where: str, found: Any) -> Any:
    """Returns the codec, the other value of `PARTS`, or the dict {axis: codec} that a TOML table describes."""
    if not isinstance(found, dict):
        expected = 'a codec such as { name = "MaxMin", bits = 4 }, or one for each axis'
        raise unexpected(f"key '{where}'", expected, repr(found))
    name, table = found.get("name"), {key: value for key, value in found.items() if key != "name"}
    if not isinstance(name, str):
        return {axis: _codecs(f"{where}.{axis}", codec) for axis, codec in found.items()}
    if name not in PARTS:
        raise unexpected(f"key '{where}.name'", f"one of {', '.join(PARTS)}", repr(name))
    _check_keys(f"{where}.", table, [field.name for field in dataclasses.fields(PARTS[name])])
    said = {key: _codecs(f"{where}.{key}", value) if isinstance(value, dict) else value for key, value in table.items()}
    return _made(where, PARTS[name], said)


def _made(where: str, make: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"key '{where}': {error}") from None

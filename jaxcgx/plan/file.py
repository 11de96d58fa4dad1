"""Plans as TOML."""

import dataclasses
import json
import re
import tomllib

from jaxcgx import codecs
from jaxcgx.codecs.base import Codec
from jaxcgx.plan.rules import Rule

CODECS = {
    name: found
    for name in codecs.__all__
    if isinstance(found := getattr(codecs, name), type) and issubclass(found, Codec)
}
del CODECS["Codec"]
PARTS = CODECS | {"Sampled": codecs.Sampled}  # and what a codec's field may be


def write(plan) -> str:
    """The text that `read` makes the same plan of."""
    lines = ["# A plan of jaxcgx: jaxcgx.Plan.load reads it, docs/plans.md explains it."]
    for field in dataclasses.fields(plan):
        if field.name != "rules":
            lines.append(f"{field.name} = {_value(field.name, getattr(plan, field.name))}")
    for i, rule in enumerate(plan.rules):
        where = f"rules[{i}]"
        if rule.where is not None:
            raise ValueError(
                f"Plan.save: {where}: expected a rule by path, size or dimensions, got one by a predicate, which no "
                "file can "
                f"hold: {rule}"
            )
        said = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
        lines += ["", "[[rules]]"]
        lines += [f"{name} = {_value(f'{where}.{name}', value)}" for name, value in said.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(where, value):
    if isinstance(value, (Codec, codecs.Sampled)):
        if PARTS.get(type(value).__name__) is not type(value):
            raise ValueError(f"Plan.save: {where}: expected a codec of jaxcgx, got {value!r}, which no file can hold")
        value = {"name": type(value).__name__} | {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        if other := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"Plan.save: {where}: expected axis names that are strings, got {other[0]!r}")
        return "{ " + ", ".join(f"{_key(key)} = {_value(where, v)}" for key, v in value.items()) + " }"
    return _text(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)


def _key(key):
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _text(key)


def _text(text):
    return json.dumps(text, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # all that JSON leaves as it is and TOML doesn't


def read(text, fields) -> dict:
    """The arguments of a plan, whose names are among `fields`. An error begins with the key that it is about."""
    found = tomllib.loads(text)
    _known("", found, fields)
    rules = found.get("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ValueError(f"key 'rules': expected tables [[rules]], got {rules!r}")
    if "default" not in found:
        raise ValueError("key 'default': expected a codec, got none")
    return found | dict(
        default=_codecs("default", found["default"]), rules=[_rule(f"rules[{i}]", rule) for i, rule in enumerate(rules)]
    )


def _known(where, found, names):
    for name in found:
        if name not in names:
            raise ValueError(
                f"key '{where}{name}': unknown, expected {'one of ' * bool(names)}{', '.join(names) or 'none'}"
            )


def _rule(where, found):
    _known(f"{where}.", found, [field.name for field in dataclasses.fields(Rule) if field.name != "where"])
    if "codec" not in found:
        raise ValueError(f"key '{where}.codec': expected a codec, got none")
    return _made(where, Rule, found | dict(codec=_codecs(f"{where}.codec", found["codec"])))


def _codecs(where, found):
    if not isinstance(found, dict):
        raise ValueError(
            f"key '{where}': expected a codec such as {{ name = \"MaxMin\", bits = 4 }}, or one for each axis, "
            f"got {found!r}"
        )
    if not isinstance(found.get("name"), str):
        return {axis: _codecs(f"{where}.{axis}", codec) for axis, codec in found.items()}
    if found["name"] not in PARTS:
        raise ValueError(f"key '{where}.name': expected one of {', '.join(PARTS)}, got {found['name']!r}")
    made, said = PARTS[found["name"]], {key: value for key, value in found.items() if key != "name"}
    _known(f"{where}.", said, [field.name for field in dataclasses.fields(made)])
    return _made(
        where,
        made,
        {key: _codecs(f"{where}.{key}", value) if isinstance(value, dict) else value for key, value in said.items()},
    )


def _made(where, make, arguments):
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"key '{where}': {error}") from None

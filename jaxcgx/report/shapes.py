"""Finds the shapes of a model's parameters, from a name, a number, or a file."""

import ast
import json
import pathlib
import re
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcgx.checks import unexpected, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.plan.file import CODECS

Shapes = dict[str, jax.ShapeDtypeStruct]

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_SIDE = 1024  # the rows, and the columns, of the matrices into which a number of parameters is divided


def _transformer(layers: int, matrices: dict[str, tuple[int, int]], vectors: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the layers' matrices, and of one leaf per layer for all its norms and biases."""
    return {
        f"layers/{i}/{name}": shape
        for i in range(layers)
        for name, shape in {**matrices, "norms and biases": (vectors,)}.items()
    }


def _gpt2() -> dict[str, tuple[int, ...]]:
    d = 768
    matrices = {"attention/qkv": (d, 3 * d), "attention/out": (d, d), "mlp/up": (d, 4 * d), "mlp/down": (4 * d, d)}
    return {"tokens": (50257, d), "positions": (1024, d)} | _transformer(12, matrices, 13 * d) | {"norm": (2 * d,)}


def _llama() -> dict[str, tuple[int, ...]]:
    d, kv, up = 2048, 512, 8192
    matrices = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, up), "up": (d, up), "down": (up, d)}
    return {"tokens": (128256, d)} | _transformer(16, matrices, 2 * d) | {"norm": (d,)}


def _resnet50() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"stem": (7, 7, 3, 64), "stem/norm": (128,)}
    given = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512))):
        for block in range(blocks):
            at, out = f"stage{stage}/block{block}", 4 * width
            found[f"{at}/reduce"], found[f"{at}/conv"] = (1, 1, given, width), (3, 3, width, width)
            found[f"{at}/expand"], found[f"{at}/norms"] = (1, 1, width, out), (2 * (2 * width + out),)
            if block == 0:
                found[f"{at}/shortcut"], found[f"{at}/shortcut/norm"] = (1, 1, given, out), (2 * out,)
            given = out
    return found | {"head": (2048, 1000), "head/bias": (1000,)}


MODELS = {"resnet50": _resnet50, "gpt2": _gpt2, "llama-1b": _llama}


def read(words: str) -> Shapes:
    """Returns the leaves for a word of the command line: a model, a number of parameters, or a file."""
    if words in MODELS:
        return _float32(MODELS[words]())
    if number := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmb]?)", words, re.IGNORECASE):
        return _float32(_matrices(round(float(number[1]) * _SUFFIX[number[2].lower()])))
    path = pathlib.Path(words)
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: jax.ShapeDtypeStruct(file[name].shape, file[name].dtype) for name in file}
    if path.suffix not in (".json", ".toml"):
        expected = f"one of {', '.join(MODELS)}, a number such as 25M, or a file .npz, .json or .toml"
        raise wrong("plan", "model", expected, repr(words))
    read_text = json.loads if path.suffix == ".json" else tomllib.loads
    return _float32(_as_shapes(words, read_text(path.read_text(encoding="utf-8"))))


def _float32(shapes: dict[str, tuple[int, ...]]) -> Shapes:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _matrices(parameters: int) -> dict[str, tuple[int, ...]]:
    if not parameters:
        raise wrong("plan", "model", "at least one parameter", 0)
    whole, rest = divmod(parameters, _SIDE**2)
    found: dict[str, tuple[int, ...]] = {f"{i}": (_SIDE, _SIDE) for i in range(whole)}
    return found | ({"rest": (1, rest)} if rest else {})


def _as_shapes(path: str, found: Any) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} from a file such as {"block/0/kernel": [768, 3072]}."""
    if not isinstance(found, dict) or not found:
        raise unexpected(path, 'shapes by name, as in {"block/0/kernel": [768, 3072]}', repr(found))
    for name, shape in found.items():
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise unexpected(f"{path}, {name!r}", "a list of sizes", repr(shape))
    return {name: tuple(shape) for name, shape in found.items()}


def read_codec(words: str) -> Codec:
    """Returns the codec of a text such as "MaxMin(4)" or "MaxMin(bits=4)"."""
    try:
        call = ast.parse(words, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CODECS:
            named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
            return CODECS[call.func.id](*map(ast.literal_eval, call.args), **named)
    except (SyntaxError, TypeError, ValueError) as error:
        raise wrong("plan", "codecs", "a codec as in 'MaxMin(4)'", f"{words!r} ({error})") from None
    raise wrong("plan", "codecs", f"one of {', '.join(CODECS)}, as in 'MaxMin(4)'", repr(words))

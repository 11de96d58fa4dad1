"""Finds the shapes of a model's parameters, from a name, a number, or a file."""

import ast
import functools
import itertools
import json
import math
import pathlib
import re
import tomllib
from collections.abc import Callable
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


def _layers(d: int, layers: int) -> dict[str, tuple[int, ...]]:
    matrices = {"attention/qkv": (d, 3 * d), "attention/out": (d, d), "mlp/up": (d, 4 * d), "mlp/down": (4 * d, d)}
    return _transformer(layers, matrices, 13 * d)


def _gpt2(d: int, layers: int) -> dict[str, tuple[int, ...]]:
    return {"tokens": (50257, d), "positions": (1024, d)} | _layers(d, layers) | {"norm": (2 * d,)}


def _bert(d: int, layers: int) -> dict[str, tuple[int, ...]]:
    first = {"tokens": (30522, d), "positions": (512, d), "segments": (2, d), "norm": (2 * d,)}
    return first | _layers(d, layers) | {"pooler": (d, d), "pooler/bias": (d,)}


def _vit() -> dict[str, tuple[int, ...]]:
    d, patches = 768, (224 // 16) ** 2
    first = {"patches": (16, 16, 3, d), "patches/bias": (d,), "class": (d,), "positions": (patches + 1, d)}
    return first | _layers(d, 12) | {"norm": (2 * d,), "head": (d, 1000), "head/bias": (1000,)}


def _transformer_xl() -> dict[str, tuple[int, ...]]:
    """The standard one for WikiText-103, whose embedding is also the matrix of its adaptive softmax."""
    tokens, d, inner, clusters = 267735, 410, 2100, 3
    attention = {"attention/qkv": (d, 3 * d), "attention/positions": (d, d), "attention/out": (d, d)}
    layers = _transformer(16, attention | {"mlp/up": (d, inner), "mlp/down": (inner, d)}, inner + 5 * d)
    last = {"softmax/bias": (tokens,), "clusters": (clusters, d), "clusters/bias": (clusters,)}
    return {"tokens": (tokens, d), "attention/biases": (2 * d,)} | layers | last


def _llama() -> dict[str, tuple[int, ...]]:
    d, kv, up = 2048, 512, 8192
    matrices = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, up), "up": (d, up), "down": (up, d)}
    return {"tokens": (128256, d)} | _transformer(16, matrices, 2 * d) | {"norm": (d,)}


def _resnet(blocks: tuple[int, ...], bottleneck: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"stem": (7, 7, 3, 64), "stem/norm": (128,)}
    given = 64
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512))):
        for block in range(count):
            at, out = f"stage{stage}/block{block}", 4 * width if bottleneck else width
            if bottleneck:
                convs = {"reduce": (1, 1, given, width), "conv": (3, 3, width, width), "expand": (1, 1, width, out)}
            else:
                convs = {"conv0": (3, 3, given, width), "conv1": (3, 3, width, width)}
            found |= {f"{at}/{name}": shape for name, shape in convs.items()}
            found[f"{at}/norms"] = (2 * sum(shape[-1] for shape in convs.values()),)
            if given != out:
                found[f"{at}/shortcut"], found[f"{at}/shortcut/norm"] = (1, 1, given, out), (2 * out,)
            given = out
    return found | {"head": (given, 1000), "head/bias": (1000,)}


def _vgg16() -> dict[str, tuple[int, ...]]:
    widths = 3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6
    dense = 7 * 7 * 512, 4096, 4096, 1000
    convs = {f"conv{i}": (3, 3, *sizes) for i, sizes in enumerate(itertools.pairwise(widths))}
    kernels = convs | {f"dense{i}": sizes for i, sizes in enumerate(itertools.pairwise(dense))}
    return {
        name: shape for at, kernel in kernels.items() for name, shape in ((at, kernel), (f"{at}/bias", kernel[-1:]))
    }


MODELS: dict[str, Callable[[], dict[str, tuple[int, ...]]]] = {
    "bert-base": functools.partial(_bert, 768, 12),
    "bert-large": functools.partial(_bert, 1024, 24),
    "gpt2": functools.partial(_gpt2, 768, 12),
    "gpt2-medium": functools.partial(_gpt2, 1024, 24),
    "llama-1b": _llama,
    "resnet18": functools.partial(_resnet, (2, 2, 2, 2), bottleneck=False),
    "resnet50": functools.partial(_resnet, (3, 4, 6, 3), bottleneck=True),
    "transformer-xl": _transformer_xl,
    "vgg16": _vgg16,
    "vit-b16": _vit,
}


def read(words: str, layers: int | None = None) -> Shapes:
    """Returns the leaves for a word of the command line: a model, a number of parameters, or a file."""
    # With `layers`, a number of parameters is divided into as many layers of a transformer.
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmb]?)", words, re.IGNORECASE)
    if number:
        return _float32(_divide(round(float(number[1]) * _SUFFIX[number[2].lower()]), layers))
    if layers is not None:
        raise wrong("plan", "layers", "a number of parameters beside it, such as --params 340M", layers)
    if words in MODELS:
        return _float32(MODELS[words]())
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


def _divide(parameters: int, layers: int | None) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of square matrices with a number of parameters in all, or those of layers."""
    if not parameters:
        raise wrong("plan", "model", "at least one parameter", 0)
    if layers is None:
        whole, rest = divmod(parameters, _SIDE**2)
        found: dict[str, tuple[int, ...]] = {f"{i}": (_SIDE, _SIDE) for i in range(whole)}
    else:
        if not 1 <= layers <= parameters // 25:  # a layer of width 1 has 25 parameters
            raise wrong("plan", "layers", "from 1 to a 25th of the parameters", layers)
        width = (math.isqrt(169 + 48 * parameters // layers) - 13) // 24  # the largest d with 12 d^2 + 13 d of these
        found = _layers(width, layers)
        rest = parameters - sum(map(math.prod, found.values()))
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

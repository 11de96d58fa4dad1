"""The environment variables of CGX, as they are set for programs that run with CGX."""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from jaxcgx.checks import MOST, unexpected

FLAG = {"0": False, "1": True}
Texts = dict[str, Any] | int | float  # the texts that a variable may have, as in `parse`
_REDUCTIONS = {"SRA": "two_shot", "Ring": "ring"}


def _variable(name: str, default: Any, values: Texts, remedy: str = "") -> Any:
    """Returns a dataclass field for a variable. The other arguments are as in `parse`."""
    return dataclasses.field(default=default, metadata=dict(variable=name, values=values, remedy=remedy))


@dataclasses.dataclass(frozen=True)
class Environment:
    """The checked variables, in jaxcgx's words. docs/plans.md has a table of their effects on a plan."""

    bits: int = _variable("CGX_COMPRESSION_QUANTIZATION_BITS", 32, {str(n): n for n in (*range(1, 9), 32)})  # 32: off
    bucket_size: int = _variable("CGX_COMPRESSION_BUCKET_SIZE", 512, 1)
    skip_incomplete: bool = _variable("CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS", False, FLAG)
    minimal_size: int = _variable("CGX_COMPRESSION_MINIMAL_SIZE", 0, 0)
    fusion_mb: int | None = _variable("CGX_FUSION_BUFFER_SIZE_MB", None, 1)  # None: the plan's default, 64 as in CGX
    # None: SHM if the processes of a node can share memory, else MPI
    inner_communicator: str | None = _variable(
        "CGX_INNER_COMMUNICATOR_TYPE", None, {n: n for n in ("MPI", "SHM", "NCCL")}
    )
    cross_communicator: str = _variable("CGX_CROSS_COMMUNICATOR_TYPE", "MPI", {n: n for n in ("MPI", "NCCL")})
    inner_reduction: str = _variable("CGX_INNER_REDUCTION_TYPE", "two_shot", _REDUCTIONS)
    cross_reduction: str = _variable("CGX_CROSS_REDUCTION_TYPE", "ring", _REDUCTIONS)
    intra_broadcast: bool = _variable("CGX_INTRA_BROADCAST", True, FLAG)
    intra_compress: bool = _variable("CGX_INTRA_COMPRESS", True, FLAG)
    all_to_all: bool = _variable("CGX_DEBUG_ALL_TO_ALL_REDUCTION", False, FLAG)
    remote_buffers: bool = _variable("CGX_REMOTE_BUF_COMPRESSION", False, FLAG)
    fake_ratio: float = _variable(
        "CGX_COMPRESSION_FAKE_RATIO",
        1.0,
        {"1": 1.0, "1.0": 1.0},
        remedy="CGX exchanges only that share of a buffer, to measure other ratios with wrong sums; unset it",
    )
    dummy: bool = _variable("CGX_DEBUG_DUMMY_COMPRESSION", False, FLAG)


def read(environ: Mapping[str, str] | None = None, op: str = "Plan.from_env") -> Environment:
    # Values that CGX doesn't have, and unknown names that begin with CGX_, are errors. Errors name the function `op`.
    environ = os.environ if environ is None else environ
    fields = {field.metadata["variable"]: field for field in dataclasses.fields(Environment)}
    if unknown := [name for name in environ if name.startswith("CGX_") and name not in fields]:
        raise unexpected(f"{op}: variable {unknown[0]}", f"one of {', '.join(fields)}", repr(unknown[0]), "unset it")
    given = {field: name for name, field in fields.items() if name in environ}
    return Environment(**{field.name: parse(op, environ[name], **field.metadata) for field, name in given.items()})


def parse(op: str, text: str, variable: str, values: Texts, remedy: str) -> Any:
    """Returns the value of a variable from its text. Errors name the function `op`, and have the remedy."""
    # `values` is {text: value}, the smallest integer that is allowed, or the largest number, as a float.
    if isinstance(values, dict):
        if text in values:
            return values[text]
        expected = f"one of {', '.join(values)}"
    elif isinstance(values, float):
        if re.fullmatch(r"[0-9]*\.?[0-9]+", text) and 0 < float(text) <= values:
            return float(text)
        expected = f"a number above 0 and up to {values:g}"
    else:
        if re.fullmatch("[0-9]{1,13}", text) and values <= int(text) < MOST:
            return int(text)
        expected = f"an integer of at least {values} (and less than 2^40)"
    raise unexpected(f"{op}: variable {variable}", expected, repr(text), remedy)

"""The options of make_train_step for a config's section `compression`.

This module can't have the name `compression`, because Python 3.14 has a module of that name.
"""

import functools
from typing import Any, NamedTuple

from checks import Wrong, call, choose

import jaxcgx as cgx
from jaxcgx.codecs import Codec


class Around(NamedTuple):
    """The properties of the training that an exchange depends on."""

    optimizer: Any
    moved: dict[str, Any]  # options, such as momentum, that the exchange gets in place of the optimizer
    steps_per_epoch: int


class Exchange(NamedTuple):
    """The exchange of gradients, as options of make_train_step."""

    options: dict[str, Any]
    settled: dict[str, Any] | None  # the options after the warm-up; None: there is no warm-up
    every: int = 1  # steps between two exchanges


def make(around: Around, *, word: str, kind: str, **section: Any) -> Exchange:
    """Returns the exchange for a config's section `compression`, which --compression=WORD chose."""
    return call(choose(KINDS, kind, "config.compression.kind"), f"config.compression, {word}", around, **section)


def has_momentum(kind: str) -> bool:
    """Returns whether the exchange applies the momentum in place of the optimizer."""
    return kind in ("bsc", "dgc", "mpq")


def _plan(around: Around, *, codec: Any, feedback: bool, **guards: Any) -> Exchange:
    return Exchange(dict(plan=cgx.Plan(_codec(codec), **guards), feedback=feedback), None)


def _dgc(around: Around, *, values: Any, ratio: float, **options: Any) -> Exchange:
    if ratio == 1:
        raise Wrong("config.compression.ratio: expected a number below 1, got 1; --compression=none sends everything")
    return _sparse(cgx.dgc, around, values=_codec(values), ratio=ratio, **options)


def _diloco(around: Around, *, codec: Any, every: int, **options: Any) -> Exchange:
    form = cgx.wan.diloco(around.optimizer, every=every, axis_name="data", plan=_codec(codec), **options)
    return Exchange(dict(diloco=form), None, every)


def _sparse(compress: Any, around: Around, *, warmup_epochs: int, warmup_coeff: Any = None, **options: Any) -> Exchange:
    settled = dict(compress=compress, **options, **around.moved)
    if not warmup_epochs:
        if warmup_coeff is not None:
            raise Wrong("config.compression.warmup_coeff: nothing reads it, because warmup_epochs is 0")
        return Exchange(settled, None)
    warm = dict(warmup_epochs=warmup_epochs, warmup_coeff=warmup_coeff, steps_per_epoch=around.steps_per_epoch)
    return Exchange(settled | warm, settled)


def _codec(section: dict[str, Any]) -> Any:
    options = dict(section)
    return choose(CODECS, options.pop("name"), "config.compression, a codec's name")(**options)


CODECS = {name: x for name, x in vars(cgx).items() if isinstance(x, type) and issubclass(x, Codec) and x is not Codec}
KINDS = {
    "bsc": functools.partial(_sparse, cgx.bsc),
    "dgc": _dgc,
    "diloco": _diloco,
    "mpq": functools.partial(_sparse, cgx.mpq),
    "plan": _plan,
}

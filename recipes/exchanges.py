"""What a config's section `compression` is to make_train_step. (Python 3.14 has a module `compression`.)"""

from typing import Any, NamedTuple

from checks import call, choose

import jaxcgx as cgx
from jaxcgx.codecs import Codec


class Around(NamedTuple):
    """What an exchange needs to know of the training."""

    optimizer: Any
    moved: dict[str, Any]  # options that it gets in the optimizer's place
    steps_per_epoch: int


class Exchange(NamedTuple):
    """The exchange of gradients."""

    options: dict[str, Any]  # of make_train_step
    settled: dict[str, Any] | None  # the same after the warm-up, if there is one
    every: int = 1  # steps between two exchanges


def make(around: Around, *, word: str, kind: str, **section: Any) -> Exchange:
    """The exchange of a config's section `compression`, which --compression=WORD chose."""
    return call(choose(KINDS, kind, "config.compression.kind"), f"config.compression, {word}", around, **section)


def has_momentum(kind: str) -> bool:
    """Whether momentum belongs to the exchange, not to the optimizer."""
    return kind in ("bsc", "dgc", "mpq")


def _plan(around: Around, *, codec: Any, feedback: bool, **guards: Any) -> Exchange:
    return Exchange(dict(plan=cgx.Plan(_codec(codec), **guards), feedback=feedback), None)


def _dgc(around: Around, *, values: Any, **options: Any) -> Exchange:
    return _sparse(cgx.dgc, around, values=_codec(values), **options)


def _bsc(around: Around, **options: Any) -> Exchange:
    return _sparse(cgx.bsc, around, **options)


def _mpq(around: Around, **options: Any) -> Exchange:
    return _sparse(cgx.mpq, around, **options)


def _diloco(around: Around, *, codec: Any, every: int, **options: Any) -> Exchange:
    form = cgx.wan.diloco(around.optimizer, every=every, axis_name="data", plan=_codec(codec), **options)
    return Exchange(dict(diloco=form), None, every)


def _sparse(compress: Any, around: Around, *, warmup_epochs: int, **options: Any) -> Exchange:
    settled = dict(compress=compress, **options, **around.moved)
    if not warmup_epochs:
        return Exchange(settled, None)
    warm = dict(warmup_epochs=warmup_epochs, steps_per_epoch=around.steps_per_epoch)
    return Exchange(settled | warm, settled)


def _codec(section: dict[str, Any]) -> Any:
    options = dict(section)
    return choose(CODECS, options.pop("name"), "config.compression, a codec's name")(**options)


CODECS = {name: x for name, x in vars(cgx).items() if isinstance(x, type) and issubclass(x, Codec)}
KINDS = {"bsc": _bsc, "dgc": _dgc, "diloco": _diloco, "mpq": _mpq, "plan": _plan}

"""The exchange for a config's section `compression`."""

import functools
from typing import Any, NamedTuple

from checks import Wrong, call, choose

import jaxcgx as cgx
from jaxcgx.codecs import Codec


class Around(NamedTuple):
    """The properties of the training that an exchange depends on."""

    moved: dict[str, Any]  # options, such as momentum, that the exchange gets in place of the optimizer
    steps_per_epoch: int


class Exchange(NamedTuple):
    """How ranks exchange what they learn."""

    made: Any  # the argument `exchange` of make_train_step
    warmup_epochs: int = 0
    settled: Any = None  # the same after the warm-up; None: there is no warm-up
    every: int = 1  # steps between two exchanges


def make(around: Around, *, word: str, kind: str, **section: Any) -> Exchange:
    """Returns the exchange for a config's section `compression`, which --compression=WORD chose."""
    return call(choose(KINDS, kind, "config.compression.kind"), f"config.compression, {word}", around, **section)


def has_momentum(kind: str) -> bool:
    """Returns whether the exchange applies the momentum in place of the optimizer."""
    return kind in ("bsc", "dgc", "mpq")


def _plan(around: Around, *, codec: Any, feedback: bool, **guards: Any) -> Exchange:
    return Exchange(cgx.Feedback(cgx.Plan(_codec(codec), **guards), keep=feedback))


def _dgc(around: Around, *, values: Any, ratio: float, momentum_masking: bool, **options: Any) -> Exchange:
    if ratio == 1:
        raise Wrong("config.compression.ratio: expected a number below 1, got 1; --compression=none sends everything")
    return _sparse(cgx.DGC, around, values=_codec(values), ratio=ratio, masking=momentum_masking, **options)


def _diloco(around: Around, *, codec: Any, every: int, **options: Any) -> Exchange:
    return Exchange(cgx.wan.Diloco(_codec(codec), every, **options), every=every)


def _sparse(kind: Any, around: Around, *, warmup_epochs: int, warmup_coeff: Any = None, **options: Any) -> Exchange:
    made = functools.partial(kind, **options, **around.moved)
    if not warmup_epochs:
        if warmup_coeff is not None:
            raise Wrong("config.compression.warmup_coeff: nothing reads it, because warmup_epochs is 0")
        return Exchange(made())
    warm_up = cgx.WarmUp(warmup_epochs, around.steps_per_epoch, warmup_coeff)
    return Exchange(made(warm_up=warm_up), warmup_epochs, made())


def _codec(section: dict[str, Any]) -> Any:
    options = dict(section)
    return choose(CODECS, options.pop("name"), "config.compression, a codec's name")(**options)


CODECS = {name: x for name, x in vars(cgx).items() if isinstance(x, type) and issubclass(x, Codec) and x is not Codec}
KINDS = {
    "bsc": functools.partial(_sparse, cgx.BSC),
    "dgc": _dgc,
    "diloco": _diloco,
    "mpq": functools.partial(_sparse, cgx.MPQ),
    "plan": _plan,
}

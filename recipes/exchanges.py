"""The exchange for a config's section `compression`."""

import functools
from typing import Any, NamedTuple

from checks import Wrong, call, choose
from launch import cgx_variables
from optimizers import Moved

import jaxcgx as cgx
from jaxcgx.codecs import Codec


class Around(NamedTuple):
    """The properties of the training that an exchange depends on."""

    moved: Moved | None  # what the exchange applies in place of the optimizer
    steps_per_epoch: int
    axes: tuple[str, ...] = ()  # of the nodes and of the ranks of a node; (): all ranks are on one axis


class Exchange(NamedTuple):
    """How ranks exchange what they learn."""

    made: Any  # the argument `exchange` of make_train_step
    warmup_epochs: int = 0
    settled: Any = None  # the same after the warm-up; None: there is no warm-up
    every: int = 1  # steps between two exchanges
    said: str = ""  # a line for the log


def make(around: Around, *, word: str, kind: str, **section: Any) -> Exchange:
    """Returns the exchange for a config's section `compression`, which --compression=WORD chose."""
    return call(choose(KINDS, kind, "config.compression.kind"), f"config.compression, {word}", around, **section)


def has_momentum(kind: str) -> bool:
    """Returns whether the exchange applies the momentum in place of the optimizer."""
    return kind in ("bsc", "dgc", "mpq")


def _plan(
    around: Around, *, codec: Any, keep: bool, min_size: int = 1024, skip_1d: bool = True, prefer: str = "time"
) -> Exchange:
    found = _codec(codec)
    if around.axes:  # raw inside of nodes
        found = {axis: cgx.Raw() if i else found for i, axis in enumerate(around.axes)}
    plan = cgx.Plan(found, min_size=min_size, skip_1d=skip_1d, prefer=prefer)
    return Exchange(cgx.Feedback(plan, keep=keep))


def _cgx(around: Around) -> Exchange:
    variables = ", ".join(f"{name}={value}" for name, value in sorted(cgx_variables().items()))
    return Exchange(cgx.from_env(), said=f"CGX's variables: {variables or 'none, so nothing is compressed'}")


def _dgc(
    around: Around,
    *,
    values: Any,
    ratio: float,
    masking: bool,
    select: str,
    clip_value: float | None,
    warmup_epochs: int,
    warmup_coeff: Any = None,
) -> Exchange:
    if ratio == 1:
        raise Wrong("config.compression.ratio: expected a number below 1, got 1; --compression=none sends everything")
    moved = around.moved or Moved()
    dgc = functools.partial(
        cgx.DGC,
        ratio,
        values=_codec(values),
        masking=masking,
        select=select,
        clip_value=clip_value,
        clip_global_norm=moved.clip_global_norm,
    )
    return _with_warm_up(dgc, moved, _warm_up(around, warmup_epochs, warmup_coeff))


def _bsc(
    kind: Any, around: Around, *, threshold: float, size_bound: int, warmup_epochs: int, warmup_coeff: Any = None
) -> Exchange:
    sparse = functools.partial(kind, threshold, size_bound)
    return _with_warm_up(sparse, around.moved or Moved(), _warm_up(around, warmup_epochs, warmup_coeff))


def _diloco(around: Around, *, codec: Any, every: int, outer: str) -> Exchange:
    return Exchange(cgx.wan.Diloco(_codec(codec), every, outer=outer), every=every)


def _warm_up(around: Around, epochs: int, coeff: Any) -> cgx.WarmUp | None:
    if not epochs and coeff is not None:
        raise Wrong("config.compression.warmup_coeff: nothing reads it, because warmup_epochs is 0")
    return cgx.WarmUp(epochs, around.steps_per_epoch, coeff) if epochs else None


def _with_warm_up(kind: Any, moved: Moved, warm_up: cgx.WarmUp | None) -> Exchange:
    made = functools.partial(
        kind,
        momentum=moved.momentum,
        nesterov=moved.nesterov,
        weight_decay=moved.weight_decay,
        weight_decay_mask=moved.weight_decay_mask,
    )
    return Exchange(made(warm_up=warm_up), warm_up.epochs, made()) if warm_up else Exchange(made())


def _codec(section: dict[str, Any]) -> Any:
    options = dict(section)
    return choose(CODECS, options.pop("name"), "config.compression, a codec's name")(**options)


CODECS = {name: x for name, x in vars(cgx).items() if isinstance(x, type) and issubclass(x, Codec) and x is not Codec}
KINDS = {
    "bsc": functools.partial(_bsc, cgx.BSC),
    "cgx": _cgx,
    "dgc": _dgc,
    "diloco": _diloco,
    "mpq": functools.partial(_bsc, cgx.MPQ),
    "plan": _plan,
}

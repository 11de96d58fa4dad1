"""Published forms of `diloco`, by their names."""

from typing import TYPE_CHECKING, Any

from jaxcgx.checks import check_integer, check_number, wrong
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.topk import TopK
from jaxcgx.optim.require import import_optax
from jaxcgx.wan.diloco import Diloco, diloco_with

if TYPE_CHECKING:
    import optax


def sparseloco(
    inner: "optax.GradientTransformation",
    *,
    every: int = 30,
    ratio: float | None = None,
    bits: int | None = None,
    rate: float = 1.0,
    decay: float = 0.95,
    **options: Any,
) -> Diloco:
    """Makes the settings of SparseLoCo, a form of `diloco`.

    Centers send the largest elements of their outer gradients at few bits. Feedback takes the place of outer momentum.

    Args:
      inner: the optimizer of a center.
      every: the number of steps between two exchanges.
      ratio: the share of each parameter's elements that is sent. None: 0.01, or what `plan` says.
      bits: the bits of the value of an element that is sent. Its index takes further bits. None: 2, or what `plan`
        says.
      rate: the learning rate of the outer SGD.
      decay: the factor of residuals after each exchange.
      **options: other options of `diloco`.
    """
    op = "sparseloco"
    if ratio is not None:
        check_number(op, "ratio", ratio, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
    check_number(op, "rate", rate, lambda x: x > 0, "a number above 0")
    _check_beside_plan(op, options, ratio=ratio, bits=bits)
    codec = TopK(0.01 if ratio is None else ratio, values=MaxMin(2 if bits is None else bits))
    given = dict(outer=import_optax(op).sgd(rate), every=every, decay=decay)
    return diloco_with(op, inner, given, {"plan": codec} | options)


def muloco(
    inner: "optax.GradientTransformation", *, every: int = 30, bits: int | None = None, **options: Any
) -> Diloco:
    """Makes the settings of MuLoCo's exchange, a form of `diloco`.

    Centers send their outer gradients at 2 bits, with feedback. MuLoCo's inner optimizer is Muon (optax.contrib.muon).

    Args:
      inner: the optimizer of a center.
      every: the number of steps between two exchanges.
      bits: the bits of an element. None: 2, or what `plan` says.
      **options: other options of `diloco`.
    """
    op = "muloco"
    _check_beside_plan(op, options, bits=bits)
    return diloco_with(op, inner, dict(every=every), {"plan": MaxMin(2 if bits is None else bits)} | options)


def pier(
    inner: "optax.GradientTransformation",
    *,
    rounds: int,
    rate: float = 0.7,
    momentum: float = 0.9,
    warmup: float = 0.1,
    decay_from: float = 0.8,
    **options: Any,
) -> Diloco:
    """Makes the settings of Pier, a form of `diloco`.

    The outer optimizer has Nesterov's momentum. The momentum rises linearly from 0 at the beginning of the training,
    and falls linearly to 0 at the end.

    Args:
      inner: the optimizer of a center.
      rounds: the number of exchanges in the whole training, steps / `every`.
      rate: the learning rate of the outer SGD.
      momentum: the largest momentum, from 0 to below 1.
      warmup: the share of the rounds in which momentum rises, at the beginning.
      decay_from: the share of the rounds after which momentum falls.
      **options: other options of `diloco`.
    """
    op = "pier"
    check_integer(op, "rounds", rounds, 1)
    check_number(op, "rate", rate, lambda x: x > 0, "a number above 0")
    check_number(op, "momentum", momentum, lambda x: 0 <= x < 1, "a number from 0 to below 1")
    check_number(op, "warmup", warmup, lambda x: 0 <= x <= 1, "a number from 0 to 1")
    check_number(op, "decay_from", decay_from, lambda x: warmup <= x <= 1, "a number from warmup to 1")
    optax = import_optax(op)
    rises, falls = round(warmup * rounds), round(decay_from * rounds)
    momenta = optax.join_schedules(
        [
            optax.linear_schedule(0.0, momentum, rises),
            optax.constant_schedule(momentum),
            optax.linear_schedule(momentum, 0.0, rounds - falls),
        ],
        [rises, falls],
    )
    sgd = optax.inject_hyperparams(optax.sgd, static_args=("learning_rate", "nesterov"))
    return diloco_with(op, inner, dict(outer=sgd(rate, momentum=momenta, nesterov=True)), options)


def _check_beside_plan(op: str, options: dict[str, Any], **wanted: Any) -> None:
    """Checks that a caller who passes `plan` doesn't describe the codec, {argument: value or None}, too."""
    for name, value in wanted.items() if "plan" in options else ():
        if value is not None:
            raise wrong(op, name, "None with 'plan', which says what is sent", repr(value), f"leave out {name} or plan")

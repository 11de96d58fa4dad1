"""diloco: centers train independently, and exchange compressed outer gradients once in many steps."""

import dataclasses
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxcgx.checks import callers_level, check_flag, check_integer, check_number, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.spelling import spell
from jaxcgx.optim.compress import compress_with
from jaxcgx.optim.phases import check_phases
from jaxcgx.optim.placement import Placement
from jaxcgx.plan import Plan
from jaxcgx.transports.axes import axis_names, check_axis_names, crosses
from jaxcgx.typing import AxisName
from jaxcgx.wan.between import Between, by_leaf
from jaxcgx.wan.centers import Centers, check_several
from jaxcgx.wan.outer import check_outer, digest_of

if TYPE_CHECKING:
    import optax

OP = "diloco"
FEW_BITS = 3  # with fewer bits per element, training without feedback may fail, as in MuLoCo's paper


def diloco(
    inner: "optax.GradientTransformation",
    outer: Any = "nesterov",
    *,
    every: int = 500,
    axis_name: AxisName = "dc",
    plan: Codec | Plan | dict[Any, Any] = Raw(),
    fragments: int = 1,
    overlap: int = 0,
    alpha: float = 0.0,
    eager: bool = False,
    decay: float = 1.0,
    telemetry: bool = False,
    feedback: bool = True,
    seed: int = 0,
    schedule: str | dict[Any, str] = "auto",
    own: str = "raw",
    strict: bool = False,
    fusion_mb: float | None = None,
) -> "Diloco":
    """Makes the settings of low-communication training (DiLoCo), for `make_train_step(..., diloco=)`.

        inner = optax.adamw(1e-3)
        diloco = cgx.wan.diloco(inner, every=100, plan=cgx.MaxMin(4))
        train = cgx.make_train_step(loss_fn, inner, mesh, data_axis="dc", diloco=diloco)
        params, opt_state = train.init(params)
        for batch in batches:
            params, opt_state, metrics = train.step(params, opt_state, batch)

    Every center trains its own parameters with the inner optimizer. Every `every` steps the centers exchange their
    outer gradients, D = outer parameters - own parameters, and the outer optimizer moves the outer parameters by the
    mean of D. The centers go on from the new outer parameters. `params` are the outer parameters: evaluate, save and
    restore these. They change only in steps in which an exchange ends. In other steps, centers send nothing to each
    other.

    Args:
      inner: the optimizer of a center, the same object that make_train_step gets. Its state is never averaged.
      outer: an optax.GradientTransformation. "nesterov" is SGD of rate 0.7 with Nesterov's momentum 0.9, for `every` in
        the hundreds. "sgd" is SGD of rate 1: the outer parameters become the mean of the centers' parameters. Momentum
        of 0.9 hurts if `every` is small; see `telemetry`.
      every: the number of steps between two exchanges of a parameter, H.
      axis_name: the axis of the centers, the outermost axis of `data_axis`. It may be a `Tcp`.
      plan: a codec, {axis: codec} or a Plan, for outer gradients. A codec that isn't given by axis is used between
        centers. The ranks of a center share the work, and exchange uncompressed arrays.
      fragments: the number of fragments of the parameters, P. One fragment is exchanged every `every` / P steps. All
        fragments have about the same number of bytes. Large parameters are cut along their first dimension.
      overlap: the number of steps, less than `every` / P, after which the result of an exchange is applied. Over `Tcp`,
        the exchange goes on while these steps run.
      alpha: the weight of a center's own parameters when a result is applied, from 0 to below 1: own = alpha * own +
        (1 - alpha) * outer.
      eager: whether the result of an exchange is applied when the fragment's next exchange begins, `every` steps later.
        Until then, a center goes on from an outer step with its own part of the mean alone. `overlap` and `alpha` must
        be 0.
      decay: the factor of residuals after each exchange, above 0 and up to 1 (SparseLoCo's beta).
      telemetry: whether `metrics.outer` reports the outer steps. The state then also has the mean of the outer
        gradients of the last round.
      feedback: whether residuals, the compression errors of outer gradients, are kept and sent later.
      seed: the seed of the noise of codecs that round stochastically.
      schedule: the schedule of the exchange, as in `compressed_pmean`.
      own: how a center adds its own part, as in `compressed_pmean`.
      strict: whether a parameter that can't be compressed is an error.
      fusion_mb: the size of a message in MiB (64).
    """
    return Diloco(
        function=OP,
        inner=inner,
        outer=outer,
        every=every,
        axis_name=axis_name,
        plan=plan,
        fragments=fragments,
        overlap=overlap,
        alpha=alpha,
        eager=eager,
        decay=decay,
        telemetry=telemetry,
        feedback=feedback,
        seed=seed,
        options=dict(schedule=schedule, own=own, strict=strict, fusion_mb=fusion_mb),
    )


def diloco_with(function: str, inner: Any, given: dict[str, Any], options: dict[str, Any]) -> "Diloco":
    """Makes a `diloco` for the public function `function`, which its errors name.

    Args:
      function: the function.
      inner: the optimizer of a center.
      given: the options of `diloco` that the function sets.
      options: those that its caller has passed. All others have the defaults of `diloco`.
    """
    defaults = {name: each.default for name, each in inspect.signature(diloco).parameters.items() if name != "inner"}
    for name, value in options.items():
        if name in given or name not in defaults:
            others = ", ".join(each for each in defaults if each not in given)
            remedy = f"leave it out, or use jaxcgx.wan.diloco, as {function} sets it" if name in given else ""
            raise wrong(function, name, f"another option of diloco ({others})", repr(value), remedy, kind=TypeError)
    settings = defaults | given | options
    of_pmean = {name: settings.pop(name) for name in ("schedule", "own", "strict", "fusion_mb")}
    return Diloco(function=function, inner=inner, options=of_pmean, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Diloco:
    """The checked arguments of `diloco`, whose docstring explains them.

    Attributes:
      function: the public function that made these settings. Errors name it.
      inner: the optimizer of a center.
      outer: the outer optimizer, an optax.GradientTransformation.
      every: the number of steps between two exchanges of a parameter.
      axis_name: the axis of the centers.
      plan: the `Plan` of outer gradients.
      fragments: the number of fragments.
      overlap: the number of steps after which the result of an exchange is applied.
      alpha: the weight of a center's own parameters when a result is applied.
      eager: whether a center goes on with its own part until the result is applied.
      decay: the factor of residuals after each exchange.
      telemetry: whether outer steps are reported.
      feedback: whether residuals are kept.
      seed: the seed of the noise.
      options: further options of compressed_pmean: `schedule`, `own`, `strict` and `fusion_mb`.
    """

    function: str
    inner: Any
    outer: Any
    every: int
    axis_name: AxisName
    plan: Any
    fragments: int
    overlap: int
    alpha: float
    eager: bool
    decay: float
    telemetry: bool
    feedback: bool
    seed: int
    options: dict[str, Any]

    def __post_init__(self) -> None:
        op = self.function
        object.__setattr__(self, "outer", check_outer(op, self.outer))
        if len(check_axis_names(op, self.axis_name)) > 1:
            raise wrong(op, "axis_name", "the one axis of the centers", repr(self.axis_name))
        for name, low in (("every", 1), ("fragments", 1), ("overlap", 0)):
            check_integer(op, name, getattr(self, name), low)
        check_number(op, "alpha", self.alpha, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        check_number(op, "decay", self.decay, lambda x: 0 < x <= 1, "a number above 0 and up to 1")
        for name in ("eager", "telemetry"):
            check_flag(op, name, getattr(self, name))
        if self.decay != 1 and not self.feedback:
            raise wrong(op, "decay", "1 without feedback", self.decay, "leave out feedback=False, or pass decay=1.0")
        if self.eager and (self.overlap or self.alpha):
            name = "overlap" if self.overlap else "alpha"
            raise wrong(op, name, "0 with eager=True", getattr(self, name), f"leave out {name} or eager")
        self._check_rhythm()
        # This call only checks the arguments.
        given = dict(feedback=self.feedback, seed=self.seed, **self.options)
        compress_with(op, self.axis_name, self.plan, **given)
        phase, *others = check_phases(op, self.plan)
        if others:
            raise wrong(op, "plan", "one plan for the whole training", "a schedule of plans", "pass one of them")
        object.__setattr__(self, "plan", phase.plan)
        warn_of_few_bits(op, self.plan, self.feedback)

    @property
    def period(self) -> int:
        """The number of steps from the exchange of one fragment to the exchange of the next fragment."""
        return self.every // self.fragments

    def shared(self, fragments: Any) -> dict[str, str]:
        """Returns the settings that all processes must share, {argument: text}, except what messages already compare.

        `fragments` are the shapes of the parameters of all fragments.
        """
        names = "every", "fragments", "overlap", "alpha", "eager", "decay", "telemetry", "feedback", "seed"

        def moved(fragments: Any) -> Any:
            states = [self.outer.init(params) for params in fragments]
            return [self.outer.update(params, state, params) for params, state in zip(fragments, states)]

        outer = f"an optimizer with the digest {digest_of(moved, fragments)} for these parameters"
        return {name: str(getattr(self, name)) for name in names} | {"outer": outer}

    def _check_rhythm(self) -> None:
        if self.every % self.fragments:
            expected = f"a multiple of fragments={self.fragments}"
            remedy = f"pass every={max(self.period, 1) * self.fragments}"
            raise wrong(self.function, "every", expected, self.every, remedy)
        if self.overlap >= self.period:
            expected = f"less than every / fragments = {self.period} steps, as a fragment ends before the next begins"
            remedy = f"pass overlap={self.period - 1}, fewer fragments, or a larger every"
            raise wrong(self.function, "overlap", expected, self.overlap, remedy)

    def over(self, placement: Any, optimizer: Any, data_axis: Any) -> Any:
        """Returns the `Centers` of a mesh, for make_train_step.

        Args:
          placement: the placement of the step's batches and parameters.
          optimizer: the optimizer that make_train_step was given.
          data_axis: the axes that make_train_step was given. Some may be marked, as by `Tcp`.
        """
        op = self.function
        if optimizer is not self.inner:
            remedy = f"pass the same object to make_train_step and to {op}"
            raise wrong("make_train_step", "optimizer", f"the inner optimizer of {op}", "another one", remedy)
        name = axis_names(self.axis_name)[0]
        if not isinstance(placement, Placement):
            expected = "a mesh, and the axis of the centers in 'data_axis'"
            raise wrong("make_train_step", "diloco", expected, f"a communicator, {data_axis!r}")
        if placement.names[0] != name:
            expected = f"{name!r}, the axis of the centers, first"
            remedy = f"pass data_axis={name!r}, or ({name!r}, ...) with the axes of a center's ranks"
            raise wrong("make_train_step", "data_axis", expected, repr(data_axis), remedy)
        check_several(op, f"centers along {name!r}", placement.mesh.shape[name])
        if placement.state_specs is not None or placement.param_specs is not None:
            remedy = "leave out param_specs and optimizer_specs"
            raise wrong("make_train_step", "diloco", "parameters and state that every rank has whole", "shards", remedy)
        given = tuple(data_axis) if isinstance(data_axis, tuple | list) else (data_axis,)
        mark = given[0] if self.axis_name == name else self.axis_name
        axis = (mark, *given[1:]) if len(given) > 1 else mark
        self._warn_of_waits(axis)
        return Centers(diloco=self, placement=placement, axis=axis)

    def _warn_of_waits(self, axis: Any) -> None:
        """Warns if exchanges are to go on in later steps but can't. A single process only simulates centers."""
        name = next((name for name in ("overlap", "eager") if getattr(self, name)), None)
        whole = [codec for codec in self.plan.codecs if codec.sparse or codec.low_rank]
        if crosses(axis):
            why = f"a step waits for the whole exchange of {spell(whole[0])}; take another codec" if whole else ""
        else:
            over = axis_names(axis)[0]
            why = f"over {over!r} the step in which an exchange begins waits for it; pass jaxcgx.Tcp({over!r})"
            why = why if jax.process_count() > 1 and jax.default_backend() == "cpu" else ""
        if name and why:
            warnings.warn(f"{self.function}: argument '{name}': {why}", stacklevel=callers_level())

    def between(self, axis: Any, params: Any) -> Between:
        """Returns the exchange of parts of these params between the centers of a mesh, over these axes: `axis`."""
        plan = by_leaf(self.function, self.plan, params)
        return Between(axis, plan, feedback=self.feedback, seed=self.seed, options=self.options)


def warn_of_few_bits(op: str, plan: Plan, feedback: bool) -> None:
    """Warns if there is no feedback, and a codec of the plan may lose too much of outer gradients to train so."""
    few = [codec for codec in plan.codecs if codec.makes_codes and _bits(codec) < FEW_BITS]
    if few and not feedback:
        warnings.warn(
            f"{op}: argument 'feedback': {spell(few[0])} may lose too much of outer gradients to train without it; "
            "leave feedback=False out, or take 4 bits",
            stacklevel=callers_level(),
        )


def _bits(codec: Codec) -> float:
    """Returns the bits of the code of an element. Scales don't count: they don't make codes finer."""
    return codec.code_bytes(2**16, jnp.dtype(jnp.float32)) / 2**13

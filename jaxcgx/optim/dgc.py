"""Deep Gradient Compression: `compress_gradients` with DGC's plan, momentum, clipping and warm-up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxcgx.checks import check_flag, check_integer, check_number, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.codecs.topk import TopK, check_pull, check_select, check_values
from jaxcgx.optim.clipping import Clipping
from jaxcgx.optim.compress import compress_with
from jaxcgx.optim.settings import check_ranks
from jaxcgx.optim.warmup import warm_up
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import by_axis
from jaxcgx.typing import AxisName

if TYPE_CHECKING:
    import jax
    import optax

OP = "dgc"


def dgc(
    axis_name: AxisName,
    ratio: float = 0.001,
    *,
    momentum: "float | jax.Array" = 0.9,
    nesterov: bool = False,
    momentum_masking: bool = True,
    values: Codec = Raw(),
    select: Any = "sampled",
    pull: str = "all",
    min_size: int = 0,
    skip_1d: bool = True,
    clip_value: "float | jax.Array | None" = None,
    clip_norm: "float | jax.Array | None" = None,
    clip_global_norm: "float | jax.Array | None" = None,
    warmup_epochs: int = 0,
    warmup_coeff: float | Sequence[float] | None = None,
    steps_per_epoch: int | None = None,
    weight_decay: "float | jax.Array | None" = None,
    weight_decay_mask: Any = None,
    **options: Any,
) -> "optax.GradientTransformation":
    """Makes Deep Gradient Compression: every rank sends only its largest elements, the fraction `ratio` of each leaf.

    Elements are compared after momentum, and with the residuals of earlier steps added. The optimizer after this
    transformation should have no momentum of its own: optax.sgd(rate). Every rank clips its own gradients, before
    momentum.

    Args:
      axis_name: the axis of the ranks. In a tuple, all elements are summed over the inner axes, and the fraction
        `ratio` of the sums is exchanged over the outermost axis. Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`,
        where this fraction is exchanged between nodes.
      ratio: the fraction of a leaf's elements that is sent.
      momentum: the factor of momentum, as in `compress_gradients`.
      nesterov: whether to use Nesterov's momentum.
      momentum_masking: whether momentum becomes 0 where an element was sent.
      values: the codec of the elements that are sent, as in `TopK`.
      select: how the largest elements are found, as in `TopK`.
      pull: the elements of the sum that ranks get back, as in `TopK`: "all" elements that any rank sent, or only the
        "top" of the sum.
      min_size: smaller leaves travel raw, as in a `Plan`. Their momentum is applied after the reduction.
      skip_1d: whether leaves with at most one dimension travel raw, too.
      clip_value: the largest magnitude of an element.
      clip_norm: the largest norm of a leaf. Without check_vma, a norm covers only a device's own shards.
      clip_global_norm: the largest norm of the mean of all leaves together. A rank's share of the mean, its gradients
        divided by the number of ranks, is clipped to ranks**-0.5 times this limit.
      warmup_epochs: the number of epochs in which the fraction decreases to `ratio`.
      warmup_coeff: the fraction in each epoch of the warm-up. None: ratio**((epoch + 1) / (warmup_epochs + 1)). A
        number c: c**(epoch + 1), but at least `ratio`; the paper has c = 0.25. Or a list of the fractions, where 1
        sends everything.
      steps_per_epoch: the number of steps in an epoch of the warm-up.
      weight_decay: weight_decay * parameters is added to the mean, as in `compress_gradients`.
      weight_decay_mask: the parameters that have weight decay, as in `compress_gradients`.
      **options: all other options of `compress_gradients`.
    """
    refuse_plan(OP, options, "ratio, values, select, pull, min_size and skip_1d")
    remedy = "compress_gradients(axis_name, jaxcgx.Raw(), momentum=0.9) sends everything"
    check_number(OP, "ratio", ratio, lambda x: 0 < x < 1, "a number above 0 and below 1", remedy)
    values, select = check_values(OP, "values", values), check_select(OP, "select", select)
    check_pull(OP, "pull", pull)
    check_integer(OP, "min_size", min_size, 0)
    check_flag(OP, "skip_1d", skip_1d)
    ranks = check_ranks(OP, axis_name)
    clipping = Clipping(clip_value=clip_value, clip_norm=clip_norm, clip_global_norm=clip_global_norm)

    def plan(ratio: float) -> Plan:
        codec = values if ratio == 1 else TopK(ratio, values, select=select, pull=pull)
        return Plan(by_axis(ranks.levels, codec, Raw()), min_size=min_size, skip_1d=skip_1d)

    inner = compress_with(
        OP,
        axis_name,
        {
            start: plan(now)
            for start, now in warm_up(ratio, warmup_epochs, coeff=warmup_coeff, steps_per_epoch=steps_per_epoch).items()
        },
        momentum=momentum,
        nesterov=nesterov,
        momentum_masking=momentum_masking,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        maker=dgc,
        **options,
    )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        net = ranks.net()
        return inner.update(clipping.clip(updates, net.names, net.size), state, params, **extra)

    return inner._replace(update=update)


def refuse_plan(function: str, options: dict[str, Any], made_of: str) -> None:
    """Refuses the option `plan` for a function that makes the plan itself, from its arguments `made_of`."""
    if "plan" in options:
        raise wrong(
            function,
            "plan",
            f"none, as {made_of} make it",
            repr(options["plan"]),
            "another plan with momentum is for jaxcgx.compress_gradients",
            kind=TypeError,
        )

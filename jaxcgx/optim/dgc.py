"""Deep Gradient Compression: compress_gradients with its plan, momentum, clipping and warm-up."""

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
    """Deep Gradient Compression: every rank sends the `ratio` of its elements that are largest.

    The largest are those after momentum and with all that was not sent before. The optimizer after it has no momentum
    of its own: optax.sgd(rate). Every rank clips its own gradients, before momentum.

    Args:
      axis_name: the axis of the ranks. In a tuple, the inner axes sum everything, and the outermost one exchanges a
        `ratio` of the sums. Or an MPI communicator, or `jaxcgx.mpi.hierarchy()`, which exchanges it between nodes.
      ratio: the share of a leaf's elements that is sent.
      momentum: the factor of momentum, as in `compress_gradients`.
      nesterov: Nesterov's momentum.
      momentum_masking: momentum becomes 0 where an element was sent.
      values: the codec of the elements that are sent, as in `TopK`.
      select: how the largest elements are found, as in `TopK`.
      pull: "all" elements that any rank sent come back, or the "top" of the sum, as in `TopK`.
      min_size: smaller leaves travel raw, as in a `Plan`. Their momentum comes after the reduction.
      skip_1d: leaves of one dimension or none travel raw, too.
      clip_value: the largest magnitude of an element.
      clip_norm: the largest norm of a leaf. Without check_vma, norms are those of a device's own shards.
      clip_global_norm: the largest norm of the mean of all leaves together. A rank's share of the mean, its gradients
        divided by the number of ranks, is clipped to ranks**-0.5 times that.
      warmup_epochs: the number of epochs in which the share comes down to `ratio`.
      warmup_coeff: the share in each of these epochs. None: ratio**((epoch + 1) / (warmup_epochs + 1)). A number c:
        c**(epoch + 1); the paper's is 0.25. Or a list of the shares; 1 sends everything.
      steps_per_epoch: the number of steps in an epoch of the warm-up.
      weight_decay: weight_decay * parameters is added to the mean, as in `compress_gradients`.
      weight_decay_mask: which parameters have weight decay, as in `compress_gradients`.
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
        **options,
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        net = ranks.net()
        return inner.update(clipping.clip(updates, net.names, net.size), state, params)

    return inner._replace(update=update)


def refuse_plan(function: str, options: dict[str, Any], made_of: str) -> None:
    """Refuses a plan for a function that makes one itself, of the arguments `made_of`."""
    if "plan" in options:
        raise wrong(
            function,
            "plan",
            f"none, as {made_of} make it",
            repr(options["plan"]),
            "another plan with momentum is for jaxcgx.compress_gradients",
            kind=TypeError,
        )

"""mixed_sync: applies gradients some steps late, with DCASGD's compensation for the delay (GeoMX's mixed sync)."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import check_integer, check_number, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.optim.compress import check_settings, compress_with
from jaxcgx.optim.halves import Begun, Early, begin
from jaxcgx.optim.initial import init_state
from jaxcgx.optim.leaves import check_arrays
from jaxcgx.optim.require import import_optax
from jaxcgx.plan import Plan
from jaxcgx.typing import AxisName
from jaxcgx.wan.centers import check_centers

if TYPE_CHECKING:
    import optax

OP = "mixed_sync"


class Late(NamedTuple):
    """The gradients that are still to be exchanged. Both lists have an entry for each step of delay, oldest first.

    Attributes:
      gradients: the gradients of each rank, `[ranks, *shape]`.
      params: the parameters at which these gradients were computed, the same on every rank.
    """

    gradients: list[Any]
    params: list[Any]

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields with arrays per rank, and whether `reshard_state` keeps their sum or their mean over the ranks."""
        return {"gradients": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that have the structure of the parameters and are the same on every rank."""
        return ()


class MixedSyncState(NamedTuple):
    """The state of `mixed_sync`.

    Attributes:
      late: the gradients that are still to be exchanged.
      exchange: the state of compress_gradients.
      count: int32[]: the number of steps until now.
    """

    late: Late
    exchange: Any
    count: Any

    @property
    def telemetry(self) -> Any:
        """The Telemetry of the last exchange."""
        return self.exchange.telemetry


def mixed_sync(
    axis_name: AxisName,
    plan: Codec | Plan | dict[Any, Any] = Raw(),
    *,
    staleness: int = 1,
    compensation: float = 0.04,
    **options: Any,
) -> "optax.GradientTransformationExtraArgs":
    """Makes an optax.GradientTransformation whose means are `staleness` steps late and compensated for the delay.

        train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, compress=cgx.wan.mixed_sync, plan=cgx.MaxMin(4))

    A step exchanges the gradients of the step `staleness` steps before. The exchange doesn't depend on the step's own
    computation, so over `Tcp` both run at the same time. The result is mean + compensation * mean^2 * (params - the
    params at which these gradients were computed), as in DCASGD. All ranks have the same delay, so replicas stay equal.
    The first `staleness` steps change nothing. The gradients of the last `staleness` steps stay in the state.

    Args:
      axis_name: the axis of the ranks, or a tuple of axes, outermost first; or an MPI communicator, or
        `jaxcgx.mpi.hierarchy()`.
      plan: as in `compress_gradients`.
      staleness: the delay in steps, at least 1.
      compensation: DCASGD's lambda. 0: no compensation.
      **options: all other options of `compress_gradients`.
    """
    steps = check_integer(OP, "staleness", staleness, 1)
    check_number(OP, "compensation", compensation, lambda x: x >= 0, "a number of at least 0")
    settings = check_settings(OP, axis_name, plan, options, maker=mixed_sync)
    inner = compress_with(OP, axis_name, plan, **options)

    def describe(_: Any, params: Any, ranks: int) -> Late:
        array = lambda front, x: jax.ShapeDtypeStruct((*front, *x.shape), x.dtype)
        like = lambda *front: jax.tree_util.tree_map(functools.partial(array, front), params)
        return Late([like(ranks) for _ in range(steps)], [like() for _ in range(steps)])

    def init(params: Any) -> MixedSyncState:
        check_centers(OP, settings.ranks)
        return MixedSyncState(init_state(settings, params, describe), inner.init(params), jnp.zeros((), jnp.int32))

    def begin_due(state: MixedSyncState, params: Any, loss: Any = None) -> Begun:
        check_centers(OP, settings.ranks)
        due = jax.tree_util.tree_map(lambda x: x[0], state.late.gradients[0])
        send = lambda due, late, params: inner.update(due, late.exchange, params, value=loss)
        return begin(send, due, state, params)

    def update(
        updates: Any,
        state: MixedSyncState,
        params: Any = None,
        *,
        value: Any = None,
        begun: Begun | None = None,
        **_: Any,
    ) -> tuple[Any, MixedSyncState]:
        if params is None:
            raise wrong(OP, "params", "the parameters", None, "call update(gradients, state, params)", kind=TypeError)
        updates = check_arrays(OP, "updates", updates)
        late, _, count = state
        mean, exchange = (begun or begin_due(state, params, value)).end(updates)
        waited = count >= steps  # before that, updates are 0, even if momentum or weight decay are not

        def compensate(g: jax.Array, now: jax.Array, then: jax.Array) -> jax.Array:
            if not jnp.issubdtype(g.dtype, jnp.inexact):  # a frozen leaf
                return g
            moved = (now - then).astype(g.dtype)
            return jnp.where(waited, g + jnp.asarray(compensation, g.dtype) * g * g * moved, 0)

        rows = jax.tree_util.tree_map(lambda x: x[None], updates)
        late = Late([*late.gradients[1:], rows], [*late.params[1:], params])
        then = state.late.params[0]
        count = import_optax(OP).safe_increment(count)
        return jax.tree_util.tree_map(compensate, mean, params, then), MixedSyncState(late, exchange, count)

    return import_optax(OP).GradientTransformationExtraArgs(init, Early(begin_due, update))

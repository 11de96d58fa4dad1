"""CompressState: the state of compress_gradients, its shapes, and checks of it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx.checks import spell_array, wrong
from jaxcgx.optim.leaves import encoders, flatten
from jaxcgx.optim.settings import Settings
from jaxcgx.optim.telemetry import Telemetry
from jaxcgx.plan.leaves import factor_shape


class CompressState(NamedTuple):
    """The state of compress_gradients.

    A field is None if the arguments don't need it. count and key are None if nothing is compressed. Arrays per rank
    have a leading axis of the ranks, and are sharded over it (`state_specs`). Inside shard_map, and over MPI, the size
    of this axis is 1.

    Attributes:
      count: int32[]: the number of steps so far.
      key: uint32[2], the same on every rank and in every step.
      residuals: like the gradients, `float32[ranks, *shape]`; None for a leaf that always travels raw.
      momentum: like the gradients, `[ranks, *shape]`; None for a leaf that always travels raw.
      telemetry: the Telemetry of the last step.
      trace: like the gradients, the same on every rank: the momentum of the means of raw leaves, and of weight decay.
      factors: PowerSGD's factors, like the gradients, `float32[rank, n]`, the same on every rank.
    """

    count: Any
    key: Any
    residuals: Any
    momentum: Any
    telemetry: Any
    trace: Any = None
    factors: Any = None

    @property
    def per_rank(self) -> dict[str, str]:
        """The fields with arrays per rank, and whether `reshard_state` keeps their sum or their mean over the ranks."""
        return {"residuals": "sum", "momentum": "mean"}

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that are trees like the parameters, without a row per rank."""
        return ("trace",)


def describe_state(settings: Settings, tree: Any, ranks: int) -> CompressState:
    """Returns the state for gradients or parameters `tree`, with jax.ShapeDtypeStructs in place of arrays."""
    leaves = flatten(tree)
    # for each leaf, a tuple with its codecs under each plan
    codecs = list(zip(*(encoders(settings, plan, leaves) for plan in settings.plans)))
    skipped = [_skipped(settings, *found) for found in zip(leaves.paths, codecs)]
    encoded = [any(by_plan) for by_plan in codecs]
    moving = settings.momentum is not None
    traced = [
        moving and not skip and (settings.weight_decay is not None or not has) for has, skip in zip(encoded, skipped)
    ]
    # Plans whose PowerSGD has different ranks share the largest factor. Each plan uses its first rows.
    shapes = [[factor_shape(x, each or ()) for each in by_plan] for x, by_plan in zip(leaves.values, codecs)]
    factors = [max(filter(None, by_plan), default=None) for by_plan in shapes]
    # A state must fit all plans that compress the same leaves. So it has a key even if no codec draws noise, and a
    # count even if there is only one phase. optax may also pass a tree without leaves.
    compresses = settings.keyed or (any(encoded) if leaves.values else not all(plan.raw for plan in settings.plans))

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def for_leaves(describe: Callable[..., Any], wanted: list[Any]) -> Any:
        return leaves.tree([describe(x) if want else None for x, want in zip(leaves.values, wanted)])

    fed = [settings.feedback and has for has in encoded]
    scalars = leaves.tree([array(jnp.float32)] * len(leaves.values))
    factor_tree = leaves.tree([shape and array(jnp.float32, *shape) for shape in factors])
    return CompressState(
        count=array(jnp.int32) if compresses else None,
        key=array(jnp.uint32, 2) if compresses else None,
        residuals=for_leaves(lambda x: array(jnp.float32, ranks, *x.shape), fed),
        momentum=for_leaves(lambda x: array(x.dtype, ranks, *x.shape), encoded) if moving else None,
        telemetry=Telemetry(vnmse=scalars, saturation=scalars, bytes=scalars, uncompressed=scalars)
        if settings.telemetry
        else None,
        trace=for_leaves(lambda x: array(x.dtype, *x.shape), traced) if any(traced) else None,
        factors=factor_tree if any(factors) else None,
    )


def _skipped(settings: Settings, path: Any, by_plan: tuple[Any, ...]) -> bool:
    """Returns whether the plans skip a leaf. They must agree.

    If only some plans skipped it, its mean would be zero in some steps. In these steps, momentum and weight decay would
    still change it.
    """
    skips = {codecs is None for codecs in by_plan}
    if len(skips) > 1:
        expected, remedy = "plans that skip a leaf in every step or in none", "make a new transformation"
        raise wrong(settings.function, "plan", expected, "a schedule that changes it", remedy, path=path)
    return True in skips


def check_state(settings: Settings, state: Any, expected: Any) -> None:
    """Checks that a state fits the gradients and plans: its structure, shapes and dtypes."""
    if not isinstance(state, type(expected)):
        wanted, got = type(expected).__name__, type(state).__name__
        raise wrong(settings.function, "state", f"what its init returns, a {wanted}", got, kind=TypeError)
    flatten_all = functools.partial(jax.tree_util.tree_flatten_with_path, is_leaf=lambda x: x is None)
    (wanted, structure), (found, other) = flatten_all(expected), flatten_all(state)
    if structure != other:
        raise wrong(settings.function, "state", f"the structure {structure}", other, _OTHER)
    for (path, want), (_, got) in zip(wanted, found):
        if not _fits(path[0].name, want, got):
            remedy = _remedy(settings, want, got=got, rows=path[0].name in expected.per_rank)
            raise wrong(settings.function, "state", spell_array(want), spell_array(got), remedy, path=path)


_OTHER = "it was made with another plan or other options; go on with those, or take a new one from init"


def _fits(field: str, want: Any, got: Any) -> bool:
    same_shape = want is not None and got is not None and got.shape == want.shape
    # Momentum has the dtype of the parameters. Gradients may have another dtype.
    return spell_array(want) == spell_array(got) or (same_shape and field in ("momentum", "trace"))


def _remedy(settings: Settings, want: Any, got: Any, rows: bool) -> str:
    """Returns the remedy for a leaf of a state that doesn't fit. `rows` says whether it has a row per rank."""
    if want is None or got is None:
        return _OTHER
    if got.shape == want.shape:
        return "the state keeps the dtype that init gave it, whatever parameters are cast to; cast it back"
    if rows and got.shape[1:] == want.shape[1:]:
        return f"that is of several ranks; {settings.ranks.remedy}"
    return _OTHER

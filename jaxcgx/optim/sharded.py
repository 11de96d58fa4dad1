"""Training whose parameters, or whose optimizer state alone, are sharded over the ranks: ZeRO-3 (FSDP) and ZeRO-1.

The gradients of both go straight to the shards (exchange.py). A parameter that is sharded is gathered for the loss. One
whose optimizer state alone is sharded is whole on every rank, and its update is gathered.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_flag, check_integer, wrong
from jaxcgx.codecs.spelling import spell
from jaxcgx.collectives.all_gather import gather
from jaxcgx.collectives.arguments import Dimension, Options
from jaxcgx.exchange.keys import fold
from jaxcgx.exchange.message import carry
from jaxcgx.optim.accumulation import OP
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.compress import compress_gradients, scatter_with
from jaxcgx.optim.cut import Cut
from jaxcgx.optim.leaves import flatten, loose
from jaxcgx.optim.phases import check_plan
from jaxcgx.optim.placement import Placement
from jaxcgx.transports.axes import check_axis_names
from jaxcgx.transports.resolve import check_axes
from jaxcgx.typing import AxisName

GATHERED = 1  # the key of a step is folded with it for the noise of what is gathered


def shard_specs(params: Any, mesh: Any, axis_name: AxisName = "data", *, min_size: int = 1024) -> Any:
    """PartitionSpecs that shard parameters over an axis, for `param_specs` or `optimizer_specs` of make_train_step.

    The longest dimension that the ranks divide is sharded. Leaves without one, and leaves of fewer than `min_size`
    elements, stay whole.

    Args:
      params: a pytree of arrays or jax.ShapeDtypeStruct.
      mesh: a jax.sharding.Mesh.
      axis_name: an axis of the mesh, or a tuple of axes.
      min_size: the fewest elements of a leaf that is sharded.
    """
    op, names = "shard_specs", check_axis_names("shard_specs", axis_name)
    if missing := [name for name in names if name not in mesh.shape]:
        raise wrong(op, "axis_name", f"axes of the mesh, {', '.join(map(repr, mesh.shape))}", repr(missing[0]))
    check_integer(op, "min_size", min_size, 0)
    ranks = math.prod(mesh.shape[name] for name in names)

    def spec_of(x: Any) -> P:
        fit = [d for d, n in enumerate(x.shape) if n and n % ranks == 0]
        if not fit or x.size < min_size:
            return P()
        longest = max(fit, key=lambda d: x.shape[d])
        return P(*[None] * longest, names[0] if len(names) == 1 else names)

    return jax.tree_util.tree_map(spec_of, params)


def _join(some: Any, others: Any) -> Any:
    """A tree with its leaves from two trees, the first of which has None for what the second has."""
    return jax.tree_util.tree_map(lambda x, y: y if x is None else x, some, others, is_leaf=lambda x: x is None)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """What a training step gathers of what is sharded over its ranks. make_train_step explains `gather`, `regather`.

    `feedback`, an option of compress_gradients, says here whether what the gather of updates loses is sent later.
    """

    placement: Placement | Alone
    gather: Any
    regather: bool
    feedback: bool
    fusion_mb: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "gather", check_plan(OP, self.gather, "gather"))
        check_flag(OP, "regather", self.regather)
        for codec in self.gather.codecs:
            if codec.low_rank or codec.sparse or codec.skips:
                remedy = "take another one, such as jaxcgx.Cast() or jaxcgx.MaxMin(8)"
                raise wrong(OP, "gather", "codecs that send every element of a shard", spell(codec), remedy)
        if not self.placement.state and not self._exact:
            remedy = "pass param_specs=jaxcgx.shard_specs(params, mesh), or the same as optimizer_specs"
            raise wrong(OP, "gather", "parameters or an optimizer's state to gather", "none", remedy)

    @property
    def _exact(self) -> bool:
        return all(codec.raw for codec in self.gather.codecs)

    def transformation(
        self, compress: Callable[..., Any], options: dict[str, Any], order: tuple[int, ...] | None = None
    ) -> Any:
        """What exchanges gradients, in an order of the leaves: to shards where these are sharded."""
        axis, options = self.placement.data_axis, dict(options, axis_size=self.placement.ranks)
        if order is not None:
            options["order"] = order
        if not self.placement.state:
            return compress(axis, **options)
        if compress is not compress_gradients:
            expected = f"jaxcgx.compress_gradients, where gradients are sharded over {axis!r}"
            remedy = "pass a plan, such as plan=jaxcgx.TopK(0.01), or leave parameters and optimizer state whole"
            raise wrong(OP, "compress", expected, getattr(compress, "__name__", repr(compress)), remedy)
        plan = options.pop("plan")
        return scatter_with(
            axis, plan, options, dimensions=self.placement.state.dimensions, keyed=self.gather.stochastic
        )

    def freeze(self, skipped: Any) -> "Sharded":
        """The same, where some parameters get no updates. skipped: for each whether it is frozen."""
        return dataclasses.replace(self, placement=self.placement.freeze(skipped))

    @property
    def _updates(self) -> Cut:
        """The leaves whose updates are gathered."""
        return self.placement.state.without(self.placement.params)

    def check(self, params: Any) -> None:
        """Checks that the ranks divide the dimensions that are sharded, and that a leaf has each rule of `gather`."""
        found, ranks = flatten(params), self.placement.ranks
        self.placement.params.check("param_specs", params, ranks)
        self.placement.state.check("optimizer_specs", params, ranks)
        self.gather.assign(OP, "gather", paths=found.paths, leaves=found.values)

    def key(self, sent: Any) -> Any:
        """The key of a step's noise, from the state of compress_gradients before the step."""
        return fold(sent.key, sent.count, GATHERED) if self.gather.stochastic else None

    def open(self, params: Any, loss_fn: Callable[..., Any], key: Any) -> tuple[Any, Callable[..., Any]]:
        """Inside shard_map: (parameters, a loss function of them), whose gradients are those of whole parameters.

        With `regather`, the loss function gathers the shards itself, and again in the backward pass. Its parameters
        then have zeros in place of the shards, for their gradients only.
        """
        cut = self.placement.params
        if not cut:
            return params, loss_fn
        shards, gathered = cut.pick(params), lambda shards: self._gather(shards, cut, key)
        if self.placement.others:
            specs = cut.pick(self.placement.whole_specs)
            gathered = jax.shard_map(
                gathered, in_specs=(specs,), out_specs=specs, axis_names=self.placement.others, check_vma=False
            )
        if not self.regather:
            return _join(gathered(shards), params), loss_fn
        like = self.like_whole(params)

        fill = lambda shards, like: _join(gathered(shards), like)
        whole = jax.custom_vjp(fill)
        whole.defvjp(lambda *args: (fill(*args), None), lambda _, cts: (None, cts))
        policy = lambda op, *_, **__: str(op) != "all_gather"

        def loss(like: Any, *rest: Any) -> Any:
            given, of_rest = jax.tree_util.tree_flatten(rest)
            known: Any = None

            def run(like: Any, given: list[Any]) -> list[Any]:
                nonlocal known
                found, structure = jax.tree_util.tree_flatten(
                    loss_fn(whole(shards, like), *jax.tree_util.tree_unflatten(of_rest, given))
                )
                places = [next((i for i, y in enumerate(given) if y is x), None) for x in found]
                known = structure, places
                return [x for x, place in zip(found, places) if place is None]

            new = iter(jax.checkpoint(run, policy=policy)(like, given))
            structure, places = known
            # What the loss function returns as it got it is the same object here, too: a model state's parts.
            return structure.unflatten([next(new) if place is None else given[place] for place in places])

        return like, loss

    def like_whole(self, params: Any) -> Any:
        """Inside shard_map: arrays in the shapes of whole parameters, with zeros in place of those that are sharded."""
        cut = self.placement.params
        if not cut:
            return params
        zeros = lambda x, d: jnp.concatenate([jnp.zeros_like(x)] * self.placement.ranks, d)
        return _join(jax.tree_util.tree_map(zeros, cut.pick(params), cut.axis), params)

    def _gather(self, shards: Any, cut: Cut, key: Any, to: str = "varying") -> Any:
        """The whole arrays of the shards of a cut."""
        # That each rule holds for a leaf has been checked with all leaves.
        plan = loose(self.gather)
        options = Options(key=key, fusion_mb=self.fusion_mb, join_raw=True)
        op, net = "compressed_all_gather", check_axes(OP, self.placement.data_axis)
        dimension = Dimension(cut.axis, tiled=True)
        return gather(op, shards, net=net, codec=plan, options=options, dimension=dimension, to=to)

    def init_lost(self, params: Any) -> tuple[Any, ...]:
        """What the gather of updates has lost before the first step: a tree, or () where nothing is lost or kept."""
        zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
        return tuple(jax.tree_util.tree_map(zeros, self._updates.pick(params)) for _ in self.lost_specs)

    @property
    def lost_specs(self) -> tuple[Any, ...]:
        """The PartitionSpecs of `init_lost`."""
        kept = self.feedback and not self._exact and self._updates
        return (self._updates.pick(self.placement.state_specs),) if kept else ()

    def send_updates(self, updates: Any, lost: tuple[Any, ...], key: Any) -> tuple[Any, tuple[Any, ...]]:
        """The updates, each as whole as its parameter is, and what their gather has lost."""
        cut = self._updates
        if not cut:
            return updates, lost

        def send(shards: Any, lost: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
            if not lost:
                return self._gather(shards, cut, key, to="invarying"), ()
            leaves, tree = jax.tree_util.tree_flatten(shards)
            before = jax.tree_util.tree_leaves(lost)
            leaves, rest = carry(leaves, before)
            found = self._gather(tree.unflatten(leaves), cut, key, to="invarying")
            rank, after = check_axes(OP, self.placement.data_axis).rank, []
            for x, r, b, y, d in zip(
                leaves, rest, before, jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(cut.axis)
            ):
                arrived = lax.dynamic_slice_in_dim(y, rank * x.shape[d], x.shape[d], d)
                missing = r + (x.astype(jnp.float32) - arrived.astype(jnp.float32))
                after.append(jnp.where(jnp.isfinite(missing), missing, b))
            return found, (tree.unflatten(after),)

        shards, whole = cut.pick(self.placement.state_specs), cut.pick(self.placement.whole_specs)
        exchange = jax.shard_map(
            send, mesh=self.placement.mesh, in_specs=(shards, self.lost_specs), out_specs=(whole, self.lost_specs)
        )
        found, lost = exchange(cut.pick(updates), lost)
        return _join(found, updates), lost

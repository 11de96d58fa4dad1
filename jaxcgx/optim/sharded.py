"""Training with parameters (ZeRO-3, FSDP) or only the optimizer's state (ZeRO-1) sharded over the ranks.

In both cases, gradients go straight to the owners of the shards (exchange.py). Sharded parameters are gathered for the
loss. If only the optimizer's state is sharded, parameters are whole on every rank, and their updates are gathered.
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
from jaxcgx.collectives.old_all_gather import gather
from jaxcgx.collectives.old_arguments import Dimension, Options
from jaxcgx.exchange.keys import fold
from jaxcgx.exchange.message import carry
from jaxcgx.optim.accumulation import OP
from jaxcgx.optim.alone import Alone
from jaxcgx.optim.compress import compress_gradients, scatter_with
from jaxcgx.optim.cut import Cut
from jaxcgx.optim.leaves import check_real, flatten, loose
from jaxcgx.optim.phases import check_plan
from jaxcgx.optim.placement import Placement
from jaxcgx.transports.axes import check_axis_names
from jaxcgx.exchange.resolve import check_axes
from jaxcgx.typing import AxisName

GATHERED = 1  # the number that is folded into the key of a step, for the noise of gathers


def shard_specs(params: Any, mesh: Any, axis_name: AxisName = "data", *, min_size: int = 1024) -> Any:
    """Returns PartitionSpecs that shard parameters over an axis.

    They are for `param_specs` or `optimizer_specs` of make_train_step. For each leaf, they shard the longest dimension
    that the number of ranks divides. Leaves without such a dimension, and leaves with fewer than `min_size` elements,
    stay whole.

    Args:
      params: a pytree of arrays or jax.ShapeDtypeStruct.
      mesh: a jax.sharding.Mesh.
      axis_name: an axis of the mesh, or a tuple of axes.
      min_size: the smallest number of elements of a leaf that is sharded.
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
    """Returns the first tree, with leaves of the second tree in place of None."""
    return jax.tree_util.tree_map(lambda x, y: y if x is None else x, some, others, is_leaf=lambda x: x is None)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The gathers of a training step: of sharded parameters, or of the updates of whole parameters.

    make_train_step explains `gather` and `regather`. `feedback`, an option of compress_gradients, says here whether the
    errors of the gather of updates are kept and sent later.
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
        if not self.placement.state and not self.gather.raw:
            remedy = "pass param_specs=jaxcgx.shard_specs(params, mesh), or the same as optimizer_specs"
            raise wrong(OP, "gather", "parameters or an optimizer's state to gather", "none", remedy)

    def transformation(
        self, compress: Callable[..., Any], options: dict[str, Any], order: tuple[int, ...] | None = None
    ) -> Any:
        """Returns the transformation that exchanges gradients, in the given order of the leaves.

        For leaves that are sharded over the ranks, each rank gets only its slice of the mean.
        """
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
        """Returns the gathers with frozen parameters, which get no updates.

        `skipped` says for each parameter whether it is frozen.
        """
        return dataclasses.replace(self, placement=self.placement.freeze(skipped))

    @property
    def _updates(self) -> Cut:
        """The cut of the leaves whose updates are gathered."""
        return self.placement.state.without(self.placement.params)

    def check(self, params: Any) -> None:
        """Checks that the ranks divide the sharded dimensions, and that each rule of `gather` matches a leaf."""
        found, ranks = flatten(params), self.placement.ranks
        self.placement.params.check("param_specs", params, ranks)
        self.placement.state.check("optimizer_specs", params, ranks)
        self.gather.assign(OP, "gather", paths=found.paths, leaves=found.values)

    def key(self, sent: Any) -> Any:
        """Returns the key of the gathers of a step, from the state of compress_gradients before the step, or None."""
        return fold(sent.key, sent.count, GATHERED) if self.gather.stochastic else None

    def open(self, params: Any, loss_fn: Callable[..., Any], key: Any) -> tuple[Any, Callable[..., Any]]:
        """Returns (parameters, a loss function of these parameters). Call it inside shard_map.

        The parameters and the gradients have the shapes of whole parameters. With `regather`, the loss function gathers
        the shards itself, and again in the backward pass. The returned parameters then have zeros in place of sharded
        parameters, only so that these have gradients.
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
        # For the backward pass, everything is kept except the gathered parameters.
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
            # Arguments that the loss function returns unchanged must stay the same objects: leaves of a model state.
            return structure.unflatten([next(new) if place is None else given[place] for place in places])

        return like, loss

    def like_whole(self, params: Any) -> Any:
        """Returns parameters in their whole shapes, with zeros for sharded parameters. Call it inside shard_map."""
        cut = self.placement.params
        if not cut:
            return params
        zeros = lambda x, d: jnp.concatenate([jnp.zeros_like(x)] * self.placement.ranks, d)
        return _join(jax.tree_util.tree_map(zeros, cut.pick(params), cut.axis), params)

    def _gather(self, shards: Any, cut: Cut, key: Any, to: str = "varying") -> Any:
        """Returns the whole arrays, gathered from the shards of a cut."""
        # `check` has already checked with all leaves that each rule matches a leaf.
        plan = loose(self.gather)
        options = Options(key=key, fusion_mb=self.fusion_mb, join_raw=True)
        op, net = "compressed_all_gather", check_axes(OP, self.placement.data_axis)
        dimension = Dimension(cut.axis, tiled=True)
        return gather(op, shards, net=net, codec=plan, options=options, dimension=dimension, to=to)

    def init_lost(self, params: Any) -> tuple[Any, ...]:
        """Returns the errors of the gather of updates before the first step: (a tree of zeros,).

        Returns () if the gather loses nothing, or its errors are not kept.
        """
        zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
        if self.lost_specs:
            check_real(OP, "gather", self._updates.pick(params))
        return tuple(jax.tree_util.tree_map(zeros, self._updates.pick(params)) for _ in self.lost_specs)

    @property
    def lost_specs(self) -> tuple[Any, ...]:
        """The PartitionSpecs of the result of `init_lost`."""
        kept = self.feedback and not self.gather.raw and self._updates
        return (self._updates.pick(self.placement.state_specs),) if kept else ()

    def send_updates(self, updates: Any, lost: tuple[Any, ...], key: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns (the updates, whole where the parameters are whole; the new errors of their gather)."""
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

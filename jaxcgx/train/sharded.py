"""A mesh over which parameters (ZeRO-3, FSDP) or only the optimizer's state (ZeRO-1) are sharded, or other axes.

Gradients go straight to the owners of the shards. Sharded parameters are gathered for the loss, or else the updates of
whole ones. Over the other axes of the mesh, each shard is exchanged on its own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import check_flag, check_integer, check_real, spell_array, wrong
from jaxcgx.codecs.base import spell
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange import rows
from jaxcgx.exchange.message import carry_over
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import as_plan
from jaxcgx.train.batch import OP, Names, axes_of, check_axes, filled, mesh_of, shortest, specs_of_params, spell_axes
from jaxcgx.train.division import Function, OverMesh, like
from jaxcgx.train.state import ExchangeState, Sharding
from jaxcgx.train.update import part
from jaxcgx.transports.axes import as_axis_names, axis_names
from jaxcgx.typing import AxisName, Key, Params, PyTree, Specs


def shard_specs(params: Params, mesh: Mesh, axis_name: AxisName = "data", *, min_size: int = 1024) -> Specs:
    """Returns PartitionSpecs that shard parameters over an axis.

    They are for `Sharding(params=...)` or `Sharding(optimizer=...)` of make_train_step. For each leaf, they shard the
    longest dimension that the number of ranks divides. Leaves without such a dimension, and leaves with fewer than
    `min_size` elements, stay whole.

    Args:
      params: a pytree of arrays or jax.ShapeDtypeStruct.
      mesh: a jax.sharding.Mesh.
      axis_name: an axis of the mesh, or a tuple of axes.
      min_size: the smallest number of elements of a leaf that is sharded.
    """
    op, names = "shard_specs", as_axis_names("shard_specs", axis_name)
    check_axes(op, "axis_name", names, mesh)
    check_integer(op, "min_size", min_size, 0)
    ranks = math.prod(mesh.shape[name] for name in names)

    def spec_of(x: jax.Array) -> P:
        fit = [d for d, n in enumerate(x.shape) if n and n % ranks == 0]
        if not fit or x.size < min_size:
            return P()
        longest = max(fit, key=lambda d: x.shape[d])
        return P(*[None] * longest, names[0] if len(names) == 1 else names)

    return jax.tree.map(spec_of, params)


class Cut(NamedTuple):
    """For each leaf of the parameters, the dimension that is sharded over the ranks, or None."""

    structure: PyTree  # that of the parameters
    dimensions: tuple[int | None, ...]

    @classmethod
    def of(cls, specs: Specs, names: Names) -> "Cut":
        found, structure = jax.tree.flatten(specs)
        return cls(structure, tuple(_dimension(spec, names) for spec in found))

    def __bool__(self) -> bool:
        return any(d is not None for d in self.dimensions)

    def pick(self, tree: PyTree) -> PyTree:
        """Returns a tree like the parameters with None in place of whole leaves."""
        leaves = self.structure.flatten_up_to(tree)
        return self.structure.unflatten([None if d is None else x for d, x in zip(self.dimensions, leaves)])

    def specs(self, names: Names) -> Specs:
        """Returns the specs of a tree like the parameters, in a shard_map over the axes of the ranks."""
        spec = lambda d: P() if d is None else P(*[None] * d, names)
        return self.structure.unflatten(map(spec, self.dimensions)) if self else P()

    def check(self, argument: str, params: Params, ranks: int) -> None:
        if not self:
            return
        if jax.tree.structure(params) != self.structure:
            expected = f"a tree like the parameters, {jax.tree.structure(params)}"
            raise wrong(OP, argument, expected, self.structure)
        for (path, x), d in zip(jax.tree.leaves_with_path(params), self.dimensions):
            if d is not None and (d >= x.ndim or x.shape[d] % ranks):
                remedy = "PartitionSpec() leaves it whole, and jaxcgx.shard_specs finds dimensions"
                expected = f"a dimension that {ranks} ranks divide"
                raise wrong(OP, argument, expected, f"dimension {d} of {spell_array(x)}", remedy, path=path)


def named(spec: P) -> Names:
    return tuple(name for part in spec for name in axes_of(part))


def _dimension(spec: P, names: Names) -> int | None:
    """Returns the dimension that exactly these axes shard, or None."""
    return next((d for d, part in enumerate(spec) if axes_of(part) == names), None)


def beside(spec: P, names: Names) -> P:
    """Returns the spec without the axes of the ranks, `names`: the sharding over the other axes."""
    return shortest(P(*(None if axes_of(part) == names else part for part in spec)))


def check_specs(argument: str, specs: Specs, names: Names) -> None:
    """Checks that each spec has the axes of the ranks for at most one dimension, which no other axis shards."""
    for path, spec in jax.tree.leaves_with_path(specs):
        if not isinstance(spec, P):
            raise wrong(OP, argument, "a jax.sharding.PartitionSpec", repr(spec), path=path, kind=TypeError)
        having = [axes_of(part) for part in spec if set(axes_of(part)) & set(names)]
        if having not in ([], [names]):
            expected = f"{spell_axes(names)} for one dimension at most, and alone there"
            raise wrong(OP, argument, expected, spec, path=path)


class ShardedMesh(OverMesh):
    """The ranks of a mesh with sharded parameters or optimizer states. `Division` documents the members."""

    def __init__(self, mesh: Mesh, sharding: Sharding, gather: Plan, *, keep: bool = True, op: str = OP) -> None:
        super().__init__(mesh, sharding.axis, sharding.batch, op=op)
        self.spread: bool = True
        # The specs of the optimizer's state, a tree like the parameters; those of whole parameters are over other axes.
        self.state: Specs = sharding.params if sharding.optimizer is None else sharding.optimizer
        self._check_specs(sharding)
        self.whole: Specs = jax.tree.map(lambda spec: beside(spec, self.names), self.state)
        self.params: Specs = self.whole if sharding.params is None else sharding.params
        self.params_cut: Cut = Cut.of(self.params, self.names)
        self.state_cut: Cut = Cut.of(self.state, self.names)  # of gradients, updates and the optimizer's state
        self.dims: tuple[int | None, ...] = self.state_cut.dimensions if self.state_cut else ()
        self.params_specs: Specs = self.params_cut.specs(self.names)
        self.shard_axes: tuple[tuple[Any, ...], ...] = tuple(map(named, jax.tree.leaves(self.whole)))
        self.gather: Plan = gather  # of parameters or of updates
        self.regather: bool = sharding.regather
        self.keep: bool = keep  # whether the errors of gathered updates are kept
        self.noisy: bool = self.gather.stochastic

    def _check_specs(self, sharding: Sharding) -> None:
        if sharding.params is not None:
            check_specs("sharding.params", sharding.params, self.names)
        if sharding.optimizer is not None:
            check_specs("sharding.optimizer", sharding.optimizer, self.names)
            # States are sharded like parameters or, where these are whole, over the ranks, too.
            params = jax.tree.map(lambda _: P(), self.state) if sharding.params is None else sharding.params
            (found, tree), (each, other) = jax.tree.flatten_with_path(self.state), jax.tree.flatten(params)
            if other != tree:
                raise wrong(OP, "sharding.optimizer", f"a tree like sharding.params, {other}", tree)
            for (path, spec), param in zip(found, each):
                whole = _dimension(param, self.names) is None
                if (beside(spec, self.names) if whole else shortest(spec)) != shortest(param):
                    expected = f"the spec of the parameter, {param}, or where it is whole, with {self.names[0]!r}, too"
                    raise wrong(OP, "sharding.optimizer", expected, spec, path=path)
        for path, spec in jax.tree.leaves_with_path(self.state) if self.explicit else ():
            if auto := self.auto(spec):
                expected = "axes that are all Auto, or all Explicit, where parameters or state are sharded"
                remedy = f"make it with axis_types=(jax.sharding.AxisType.Explicit,) * {len(self.mesh.shape)}"
                got = f"one with {auto[0]!r} Auto and others Explicit"
                raise wrong(self.op, "mesh_or_comm" if self.op == OP else "mesh", expected, got, remedy, path=path)

    def check(self, params: Params) -> None:
        self.params_cut.check("sharding.params", params, self.size)
        self.state_cut.check("sharding.optimizer", params, self.size)
        self.gather.routes(OP, "sharding.gather", params)

    def shards(self, params: Params) -> Params:
        shard = lambda x, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        return jax.tree.map(shard, params, self.shardings(self.whole))

    def specs_of(self, params: Params) -> tuple[Specs, Specs]:
        return self.params, self.state

    def specs_of_means(self, skipped: PyTree) -> Specs:
        return part(self.state_cut.specs(self.names), skipped) if self.state_cut else P()

    def specs_of_exchange(self, fresh: Callable[[], ExchangeState], params: Params) -> Specs:
        if not self.others:
            return super().specs_of_exchange(fresh, params)
        return self._specs_of(jax.eval_shape(fresh), params, self.names)

    def _specs_of(self, sent: ExchangeState, params: Params, front: Any) -> Specs:
        """Returns the specs of the state of an exchange over this mesh or, if `front` is None, in its ranks.

        An array like a parameter, with the parameter's path at the end of its own, is sharded like it over the other
        axes. So is each row of such arrays. The factors of shards are side by side along their long dimension.
        """
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        known, any_shape = like(params, self.whole), dict(zip(paths, self.shard_axes))

        def spec_of(first: tuple[Any, ...], path: jax.tree_util.KeyPath[Any], x: jax.Array) -> P:
            spec = known(path, x.shape[len(first) :])
            if spec is not None:
                return P(*first, *spec)
            keys = [getattr(key, "name", None) for key in path]
            if "factors" in keys:
                return P(None, any_shape[path[keys.index("factors") + 1 :]])
            if first:
                expected = "an exchange whose state is like the parameters, where these are sharded over the mesh"
                remedy = "pass a plan, or leave parameters whole"
                raise wrong(self.op, "exchange", expected, f"one with {spell_array(x)}", remedy, path=path)
            return P()

        specs = lambda tree, *first: jax.tree.map_with_path(lambda *leaf: spec_of(first, *leaf), tree)
        return ExchangeState(specs(sent.own, front), specs(sent.shared))

    def on_shards(self, function: Function, sent: ExchangeState) -> Function:
        if not self.others:
            return function

        def run(grads: PyTree, sent: ExchangeState, params: Params, loss: jax.Array) -> Any:
            specs = self._specs_of(sent, grads, None)
            return jax.shard_map(
                function,
                in_specs=(self.whole, specs, P() if params is None else self.whole, P()),
                out_specs=(self.whole, specs),
                axis_names=self.others,
                check_vma=False,
            )(grads, sent, params, loss)

        return run

    def like_whole(self, params: Params) -> Params:
        cut = self.params_cut
        if not cut:
            return params
        zeros = lambda x, d: jnp.concatenate([jnp.zeros_like(x)] * self.size, d)
        values = jax.tree.leaves(params)
        return cut.structure.unflatten([x if d is None else zeros(x, d) for x, d in zip(values, cut.dimensions)])

    def open(self, params: Params, loss: Function, key: Key | None) -> tuple[Params, Function]:
        """The parameters and the gradients have the shapes of whole parameters.

        With `regather`, the loss function gathers the shards itself, and again in the backward pass. The returned
        parameters then have zeros in place of sharded parameters, only so that these have gradients.
        """
        cut = self.params_cut
        if not cut:
            return params, loss
        shards, gathered = cut.pick(params), lambda shards: self._gather(shards, cut, key)
        if self.others:
            specs = cut.pick(self.whole)
            gathered = jax.shard_map(
                gathered, in_specs=(specs,), out_specs=specs, axis_names=self.others, check_vma=False
            )
        if not self.regather:
            return filled(gathered(shards), params), loss
        fill = lambda shards, like: filled(gathered(shards), like)
        whole = jax.custom_vjp(fill)
        whole.defvjp(lambda *args: (fill(*args), None), lambda _, cts: (None, cts))
        return self.like_whole(params), _checkpointed(lambda like, *rest: loss(whole(shards, like), *rest))

    def _gather(self, shards: PyTree, cut: Cut, key: Key | None, to: str = "varying") -> PyTree:
        # `check` checks with all leaves that each rule matches a leaf. Gathers have only some of the leaves.
        routes = Routes.of("compressed_all_gather", self.gather.loose, shards)
        dims = tuple(d for d in cut.dimensions if d is not None)
        return rows.gather(shards, routes.over(self.net(), Way(rows=True, dims=dims, join=True)), key, to=to)

    def _updates_cut(self, skipped: PyTree) -> Cut:
        each = zip(self.state_cut.dimensions, self.params_cut.dimensions, jax.tree.leaves(skipped))
        dimensions = tuple(d if param is None and not skip else None for d, param, skip in each)
        return Cut(self.state_cut.structure, dimensions)

    def specs_of_lost(self, skipped: PyTree) -> Specs:
        cut = self._updates_cut(skipped)
        return cut.pick(self.state) if self.keep and cut and not self.gather.raw else None

    def init_lost(self, params: Params, skipped: PyTree) -> PyTree:
        if self.specs_of_lost(skipped) is None:
            return None
        updates = self._updates_cut(skipped).pick(params)
        check_real(OP, "sharding.gather", updates)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), updates)

    def send_updates(self, updates: PyTree, lost: PyTree, skipped: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        cut = self._updates_cut(skipped)
        if not cut:
            return updates, lost
        shards, whole = cut.pick(self.state), cut.pick(self.whole)
        kept = P() if lost is None else shards
        exchange = jax.shard_map(
            functools.partial(self._send, cut), mesh=self.mesh, in_specs=(shards, kept, P()), out_specs=(whole, kept)
        )
        found, lost = exchange(cut.pick(updates), lost, key)
        return filled(found, updates), lost

    def _send(self, cut: Cut, shards: PyTree, lost: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        """Gathers updates on one device. Returns (whole updates, new errors)."""
        if lost is None:
            return self._gather(shards, cut, key, to="invarying"), None
        leaves, tree = jax.tree.flatten(shards)
        before = jax.tree.leaves(lost)
        leaves, rest = carry_over(leaves, before)
        found = self._gather(tree.unflatten(leaves), cut, key, to="invarying")
        dims = [d for d in cut.dimensions if d is not None]
        rank, after = self.net().rank, list[jax.Array]()
        for x, r, b, y, d in zip(leaves, rest, before, jax.tree.leaves(found), dims):
            arrived = jax.lax.dynamic_slice_in_dim(y, rank * x.shape[d], x.shape[d], d)
            missing = r + (x.astype(jnp.float32) - arrived.astype(jnp.float32))
            after.append(jnp.where(jnp.isfinite(missing), missing, b))
        return found, tree.unflatten(after)


def over_axes(
    op: str, axis: AxisName, mesh: Any, params: list[Params], *, arrays: list[Any], given: Specs, joined: Any
) -> OverMesh:
    """Returns the ranks along axes of a mesh: the caller's, that in context, or that of arrays.

    `given` are the caller's param_specs, or None. `joined` makes of a list like `params` what the exchange gets.
    """
    names = axis_names(axis)
    mesh = mesh_of(op, mesh, names, arrays=arrays)
    specs = specs_of_params(op, mesh, names, params=params, given=given)
    if specs is None:
        return OverMesh(mesh, axis, op=op)
    return ShardedMesh(mesh, Sharding(axis, params=joined(specs)), Plan.every(Raw()), op=op)


def gather_plan(sharding: Sharding) -> Plan:
    plan = as_plan(OP, sharding.gather, "sharding.gather")
    check_flag(OP, "sharding.regather", sharding.regather)
    for codec in plan.codecs:
        if codec.low_rank or codec.sparse or codec.skips:
            remedy = "take another one, such as jaxcgx.Cast() or jaxcgx.MaxMin(8)"
            raise wrong(OP, "sharding.gather", "codecs that send every element of a shard", spell(codec), remedy)
    if sharding.params is sharding.optimizer is None and not plan.raw:
        remedy = "pass Sharding(params=jaxcgx.shard_specs(params, mesh)), or the same as optimizer="
        raise wrong(OP, "sharding.gather", "parameters or an optimizer's state to gather", "none", remedy)
    return plan


def _checkpointed(loss: Function) -> Function:
    """Returns a loss that keeps everything for the backward pass except gathered parameters."""
    policy = lambda op, *_, **__: str(op) != "all_gather"

    def run(params: Params, *rest: PyTree) -> PyTree:
        given, of_rest = jax.tree.flatten(rest)
        known: Any = None

        def renewed(params: Params, given: list[Any]) -> list[Any]:
            nonlocal known
            found, structure = jax.tree.flatten(loss(params, *of_rest.unflatten(given)))
            places = [next((i for i, y in enumerate(given) if y is x), None) for x in found]
            known = structure, places
            return [x for x, place in zip(found, places) if place is None]

        new = iter(jax.checkpoint(renewed, policy=policy)(params, given))
        structure, places = known
        # Arguments that the loss function returns unchanged must stay the same objects: leaves of a model state.
        return structure.unflatten([next(new) if place is None else given[place] for place in places])

    return run

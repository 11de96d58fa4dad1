"""Routes: which codec each leaf gets, why it travels raw, what state it keeps. Asked once, from a plan and a tree.

They need shapes and the names of the axes, no ranks. `Routes.over(net)` adds schedules and messages inside a trace.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.exchange import sums
from jaxcgx.exchange.message import Stage, Sum
from jaxcgx.plan import Plan, messages, why_raw
from jaxcgx.plan.by_axis import skips
from jaxcgx.plan.leaves import factor_shape
from jaxcgx.transports.base import Transport
from jaxcgx.exchange.carry import Carry
from jaxcgx.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Route:
    """The route of a leaf."""

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    codecs: tuple[Codec, ...]  # outermost first; one for all axes together
    why_raw: str | None  # None: it is compressed
    skipped: bool
    factor: tuple[int, ...] | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def encoded(self) -> bool:
        return self.why_raw is None and not self.skipped


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """The routes of a tree's leaves. Interned: the same plan and shapes give the same object, which jit hashes fast."""

    plan: Plan
    tree: jax.tree_util.PyTreeDef
    leaves: tuple[Route, ...]

    @staticmethod
    def of(op: str, plan: Plan, tree: PyTree) -> "Routes":
        leaves, structure = jax.tree_util.tree_flatten(tree)
        return _routes(op, plan, structure, tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves))

    @property
    def stochastic(self) -> bool:
        return any(c.stochastic for r in self.leaves for c in r.codecs)

    @property
    def skipped(self) -> PyTree:
        return self.tree.unflatten([r.skipped for r in self.leaves])

    def each(self, tree: PyTree) -> list[PyTree]:
        return [None] * len(self.leaves) if tree is None else self.tree.flatten_up_to(tree)

    def carry(self, *, feedback: bool, momentum: bool) -> Carry:
        """Returns the shapes of one rank's state."""
        fresh = lambda want, dtype: self.tree.unflatten(
            [jax.ShapeDtypeStruct(r.shape, dtype or r.dtype) if want and r.encoded else None for r in self.leaves]
        )
        factors = [r.factor and jax.ShapeDtypeStruct(r.factor, jnp.float32) for r in self.leaves]
        return Carry(
            residuals=fresh(True, jnp.float32) if feedback else None,
            momentum=fresh(True, None) if momentum else None,
            factors=self.tree.unflatten(factors) if any(factors) else None,
        )

    def over(self, net: Transport, dims: tuple[int | None, ...] = ()) -> "Travel":
        """Returns how the messages travel over these ranks. Of a leaf with a dimension, a rank gets only its slice."""
        mesh = jax.sharding.get_abstract_mesh()
        return _travel(self, net, net.size, dims, set(mesh.axis_names) == set(mesh.manual_axes))


@functools.lru_cache(maxsize=64)
def _routes(op: str, plan: Plan, tree: jax.tree_util.PyTreeDef, shapes: tuple) -> Routes:
    leaves = [jax.ShapeDtypeStruct(*each) for each in shapes]
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree.unflatten(leaves))[0]]
    assigned = plan.assign(op, "plan", paths=paths, leaves=leaves) if leaves else []
    return Routes(plan, tree, tuple(map(_route, paths, leaves, assigned)))


def _route(path: PyTree, x: PyTree, assigned: tuple[PyTree, str | None]) -> Route:
    codec, guarded = assigned
    skipped = skips(codec)
    codecs = (Raw(),) if skipped else tuple(codec.values()) if isinstance(codec, dict) else (codec,)
    why = guarded or why_raw(x, codecs)
    return Route(jax.tree_util.keystr(path), x.shape, jnp.dtype(x.dtype), codecs, why, skipped, factor_shape(x, codecs))


@dataclasses.dataclass(frozen=True, eq=False)
class Travel:
    """Messages and their stages, for the ranks of a transport. Static and interned, like `Routes`."""

    routes: Routes
    net: Transport
    messages: tuple[tuple[tuple[int, ...], tuple[Stage, ...]], ...]  # (numbers of the leaves, stages)
    raw: tuple[tuple[int, ...], ...]  # leaves that share a plain collective
    scattered: tuple[tuple[tuple[int, ...], Stage], ...]  # messages of which a rank gets its slices
    dims: tuple[int | None, ...]
    how: Sum

    @property
    def crosses(self) -> bool:
        return self.net.begin_sum is not None


SMALL = 2**16  # bytes of a raw leaf that shares a collective with others


@functools.lru_cache(maxsize=64)
def _travel(routes: Routes, net: Transport, size: int, dims: tuple[int | None, ...], whole: bool) -> Travel:
    plan, groups, raw = routes.plan, dict[tuple[Stage, ...], list[int]](), list[int]()
    slices = dict[Stage, list[int]]()
    hops = plan.schedule == "tree" or (net.begin_sum is not None and plan.schedule != "ring")
    for i, r in enumerate(routes.leaves):
        if dims and dims[i] is not None and not r.skipped:
            codec = Raw() if r.why_raw else r.codecs[0]
            slices.setdefault(Stage(net, codec, "ring" if plan.schedule == "ring" else "one_shot", codec), []).append(i)
            continue
        joins = hops and size > 1 and r.dtype in _FLOATS and r.size and all(c.raw for c in r.codecs)
        if r.skipped or not (joins or (r.encoded and size > 1)):
            raw.append(i)
            continue
        nets = tuple(net.parts.values()) if len(r.codecs) > 1 else (net,)
        stages = tuple(Stage(n, c, "auto", c) for n, c in zip(nets, r.codecs) if n.size > 1)
        groups.setdefault(stages or (Stage(net, r.codecs[0], "auto", r.codecs[0]),), []).append(i)
    found: list[tuple[tuple[int, ...], tuple[Stage, ...]]] = []
    for stages, ids in groups.items():
        leaves = [jax.ShapeDtypeStruct(routes.leaves[i].shape, routes.leaves[i].dtype) for i in ids]
        asked = (stages[0]._replace(schedule=plan.schedule), *stages[1:])
        chosen = sums.choose(asked, leaves, leader=plan.leader, prefer=plan.prefer, network=plan.network)
        found += [(tuple(ids[k] for k in part), chosen) for part in messages(leaves, plan.fusion_mb * 2**20)]
    cut = [(tuple(ids[k] for k in part), stage) for stage, ids in slices.items()
           for part in messages([jax.ShapeDtypeStruct(routes.leaves[i].shape, routes.leaves[i].dtype) for i in ids],
                                plan.fusion_mb * 2**20)]
    how = Sum(own="raw", divisor=float(size), leader=plan.leader)
    return Travel(routes, net, tuple(found), _share(routes, raw, join=bool(found) and whole), tuple(cut), dims, how)


_FLOATS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def _share(routes: Routes, raw: list[int], join: bool) -> tuple[tuple[int, ...], ...]:
    """Returns groups of raw leaves: small ones of a dtype share a collective, if anything is compressed."""
    found, alone = dict[jnp.dtype, list[int]](), list[tuple[int, ...]]()
    for i in raw:
        r = routes.leaves[i]
        small = 0 < r.size * r.dtype.itemsize <= SMALL and not r.skipped
        if join and small:
            found.setdefault(r.dtype, []).append(i)
        else:
            alone.append((i,))
    return (*alone, *map(tuple, found.values()))

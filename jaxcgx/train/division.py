"""Division: which part of a batch and of the parameters is a rank's. For ranks with whole arrays.

`Division` is for ranks on a device each, `OverMesh` for the devices along axes of a mesh, and `OverMapped` for the same
by vmap. A mesh with sharded parameters or states (sharded.py) overrides what is different there.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx import _programs
from jaxcgx.checks import wrong
from jaxcgx.exchange.resolve import transport_over_axes
from jaxcgx.train.batch import OP, TRAIN, axes_of, check_spans, shortest, spec_of_batch, split_batch
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.axes import axis_names, crosses
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName, Batch, DType, Key, Params, PyTree, Specs

Function = Callable[..., Any]


class Division:
    """The ranks of a step. Each has whole arrays on its own device, as a process of mpirun or a rank of a center.

    A function of one rank runs on all ranks by `over`. Specs are PartitionSpecs.
    """

    op: str = OP  # the public function that errors name
    rows: P = P()  # the spec of arrays with a row for each rank
    size: int = 1  # the number of rows that a program has of such arrays
    # For each parameter, the dimension along which a rank gets only its slice of the mean; () for whole means.
    dims: tuple[int | None, ...] = ()
    shard_axes: tuple[tuple[Any, ...], ...] = ()  # for each parameter, the other axes of the mesh that shard it
    params_specs: Specs = P()  # those of parameters in `over`
    mesh: Any = None
    noisy: bool = False  # whether gathers of parameters or updates draw noise
    spread: bool = False  # whether devices divide the work of the optimizer
    remedy: str = "a process has the row of its own rank alone: take it, or let jaxcgx.restore_state do so"

    def __init__(self, net: Callable[[], Transport], batch_specs: Specs = None, axis: AxisName = ()) -> None:
        self.net: Callable[[], Transport] = net  # returns the transport over the ranks, inside a step that is traced
        self.batch_specs: Specs = batch_specs  # the caller's, or None
        self.names: tuple[Any, ...] = axis_names(axis)  # outermost first; () if JAX doesn't know the ranks
        self.crosses: bool = bool(self.names) and crosses(axis)  # whether an exchange may go on in later programs

    def numbers(self) -> jax.Array:
        """Returns the numbers of the ranks whose rows a program has."""
        return jnp.array([self.net().rank])

    def first(self, tree: PyTree) -> PyTree:
        """Returns the first rank's tree, from which all ranks start."""
        return tree

    def check_batch(self, batch: Batch) -> None:
        """Refuses batches that jit would misread."""

    def place(self, batch: Batch, parts: int) -> tuple[Batch, Specs, bool]:
        """Returns (the batch, placed for ranks and `parts` micro-batches; its specs; whether these are a guess)."""
        # The batch belongs to this rank alone, and only micro-batches split it. Without them, leaves may have different
        # lengths: leaves as long as the first one are taken for examples.
        leaves, tree = jax.tree.flatten_with_path(batch)
        unknown = [None] * len(leaves)
        given = unknown if self.batch_specs is None else TRAIN.of_leaves(batch, self.batch_specs)
        if guessed := self.batch_specs is None and parts == 1:
            lengths = [np.shape(x)[0] for _, x in leaves if np.ndim(x)]
            given = [P("ranks") if np.shape(x)[:1] == (*lengths[:1],) else P() for _, x in leaves]
        return batch, tree.unflatten(split_batch(TRAIN, leaves, given, unknown, sizes={})), guessed

    def over(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        """Returns a function that runs a function of one rank on all ranks."""
        return function

    def shardings(self, specs: Specs) -> Any:
        """Returns the shardings for a tree of specs, or None for the default device."""
        return None

    def check(self, params: Params) -> None:
        """Checks that parameters can be divided."""

    def shards(self, params: Params) -> Params:
        """Returns the shapes of a device's shards of the gradients before the exchange."""
        return params

    def specs_of(self, params: Params) -> tuple[Specs, Specs]:
        """Returns the specs of the parameters, and of the updates that an optimizer makes from gradients."""
        specs = jax.tree.map(lambda _: P(), params)
        return specs, specs

    def specs_of_state(self, state: PyTree, params: Params, specs: Specs) -> Specs:
        """Returns the specs of an optimizer's state. `specs` are those of the updates of these parameters."""
        return P()

    def specs_of_means(self, skipped: PyTree) -> Specs:
        """Returns the specs of the means that ranks get, without the leaves that are skipped."""
        return P()

    def by_partitioner(self, function: Function, specs: Specs) -> Function:
        """Returns the function, but with results that are sharded by `specs`. It runs outside of `over`."""
        return function

    def init_exchange(self, init: Callable[[Params], ExchangeState], params: Params) -> ExchangeState:
        """Returns the state of an exchange, with rows. `init` must depend only on the shapes of parameters."""
        return with_row(init(params))

    def on_shards(self, function: Function, sent: ExchangeState) -> Function:
        """Returns a function (gradients, sent, parameters or None, loss) that runs on all shards, inside of `over`."""
        return function

    def open(self, params: Params, loss: Function, key: Key | None) -> tuple[Params, Function]:
        """Returns (whole parameters, a loss function of these), inside of `over`."""
        return params, loss

    def like_whole(self, params: Params) -> Params:
        """Returns parameters in their whole shapes, whatever their values, inside of `over`."""
        return params

    def init_lost(self, params: Params, skipped: PyTree) -> PyTree:
        """Returns the errors of the gather of updates before the first step. None: there are none."""
        return None

    def specs_of_lost(self, skipped: PyTree) -> Specs:
        return None

    def send_updates(self, updates: PyTree, lost: PyTree, skipped: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        """Returns (the updates, whole where the parameters are whole; the new errors of their gather)."""
        return updates, lost


def row(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), tree)


def without_row(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.squeeze(x, (0,)), tree)  # x[0] takes ten times as long to trace


def with_row(state: ExchangeState) -> ExchangeState:
    return ExchangeState(row(state.own), state.shared)


def shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), tree)


def zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def choose(condition: jax.Array | bool, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def first_of(x: jax.Array, net: Transport) -> jax.Array:
    if not addable(x):
        return jax.random.wrap_key_data(first_of(jax.random.key_data(x), net), impl=jax.random.key_impl(x))
    short = jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32  # XLA on CPUs can't add short numbers
    numbers = x.astype(short) if x.dtype.itemsize < 4 else x
    return net.plain_psum(jnp.where(net.rank == 0, numbers, jnp.zeros_like(numbers))).astype(x.dtype)


def addable(x: jax.Array) -> bool:
    """Returns whether an array holds numbers. Arrays of random keys don't."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def wide(dtype: DType) -> DType:
    """Returns the dtype in which numbers of a dtype are added: the same, or float32 for integers and short floats."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def after(tree: PyTree, x: jax.Array) -> jax.Array:
    """Returns x. XLA computes the arrays in the tree before it computes anything from the result."""
    # Nothing is above infinity, but XLA doesn't know this, so it computes each array first.
    numbers = lambda y: y if addable(y) else jax.random.key_data(y)
    first = lambda y: jnp.real(numbers(y).reshape(-1)[0]).astype(jnp.float32)
    above = [(first(y) > jnp.inf).astype(jnp.uint32) for y in jax.tree.leaves(tree) if y.size]
    return jnp.where(sum(above) > 0, jnp.zeros_like(x), x) if above else x


class OverMesh(Division):
    """The ranks along axes of a mesh. `Division` documents the members."""

    def __init__(self, mesh: Any, axis: AxisName, batch_specs: Specs = None, *, op: str = OP) -> None:
        super().__init__(lambda: transport_over_axes(op, axis), batch_specs, axis)
        self.op: str = op
        self.mesh: Any = mesh
        self.rows: P = P(self.names)
        self.sizes: dict[Any, int] = {name: mesh.shape[name] for name in self.names}
        self.size: int = math.prod(self.sizes.values())
        self.others: set[Any] = {name for name in mesh.shape if name not in self.names}  # XLA's partitioner has them
        self.explicit: bool = AxisType.Explicit in mesh.axis_types
        self.spread: bool = self.explicit
        self.remedy: str = f"shard it over {axis!r}; one of another number of ranks is for jaxcgx.reshard_state"

    def numbers(self) -> jax.Array:
        return jnp.arange(self.size)

    def check_batch(self, batch: Batch) -> None:
        """Refuses arrays of one process of several, too, which jit would take for the whole batch.

        On an Auto mesh, a traced step can't see shardings, so it would split every array along the first dimension.
        """
        leaves = jax.tree.leaves_with_path(batch)
        check_spans("train.step", self.mesh, self.names, leaves=leaves)
        if self.batch_specs is not None or self.explicit:
            return
        for (path, x), spec in zip(leaves, jax.tree.leaves(self._specs_of_batch(batch))):
            if np.ndim(x) and spec != self.rows:
                expected = "arrays that are split along their first dimension, where no specs say otherwise"
                raise wrong(*TRAIN.batch, expected, f"one sharded as {x.sharding.spec}", TRAIN.remedy(), path=path)

    def place(self, batch: Batch, parts: int) -> tuple[Batch, Specs, bool]:
        batch = jax.tree.map(jnp.asarray, batch)
        specs = self._specs_of_batch(batch)
        if self.explicit:  # over Explicit axes, shard_map doesn't move arrays
            placed = jax.tree.map(lambda spec: P() if self.auto(spec) else spec, specs)
            batch = jax.tree.map(jax.sharding.reshard, batch, self.shardings(placed))
        return batch, specs, False

    def _specs_of_batch(self, batch: Batch) -> Specs:
        leaves, tree = jax.tree.flatten_with_path(batch)
        unknown = [None] * len(leaves)
        if self.batch_specs is not None:
            given, known = TRAIN.of_leaves(batch, self.batch_specs), unknown
        else:
            given, known = unknown, [spec_of_batch(x, self.names) for _, x in leaves]
            # What is split along its first dimension alone is split over all ranks. So is everything if nothing is.
            known = [self.rows if spec and any(spec) and not any(spec[1:]) else spec for spec in known]
            known = known if any(map(any, filter(None, known))) else unknown
        return tree.unflatten(split_batch(TRAIN, leaves, given, known, sizes=self.sizes))

    def auto(self, spec: P) -> list[Any]:
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types))
        return [name for part in spec for name in axes_of(part) if types[name] == AxisType.Auto]

    def over(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        # Without check_vma, which refuses loops that start from zeros in a loss.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.names),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def shardings(self, specs: Specs) -> Any:
        # They are spelled like the shardings of jit's results. Otherwise the second step, which gets the results of the
        # first, would be compiled again.
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, shortest(spec)), specs)

    def by_partitioner(self, function: Function, specs: Specs) -> Function:
        shardings = self.shardings(specs)
        if self.explicit:
            return jax.sharding.auto_axes(function, out_sharding=shardings)
        return lambda *args: jax.lax.with_sharding_constraint(function(*args), shardings)

    def specs_of_state(self, state: PyTree, params: Params, specs: Specs) -> Specs:
        """An array gets the spec of a parameter that has its shape, and whose path is the end of the array's path.

        Other arrays are whole. The specs don't affect the results, because XLA's partitioner adds the collectives that
        an optimizer needs.
        """
        known = like(params, specs)
        return jax.tree.map_with_path(lambda path, x: known(path, x.shape) or P(), state)

    def init_exchange(self, init: Callable[[Params], ExchangeState], params: Params) -> ExchangeState:
        shards = self.shards(params)
        fresh = lambda: with_row(init(zeros(shards)))
        specs = self.specs_of_exchange(fresh, shards)
        return jax.shard_map(fresh, mesh=self.mesh, in_specs=(), out_specs=specs, check_vma=False)()

    def specs_of_exchange(self, fresh: Callable[[], ExchangeState], params: Params) -> Specs:
        return ExchangeState(self.rows, P())


class OverMapped(OverMesh):
    """The ranks of another division, but with `vmap` in place of `shard_map`.

    JAX knows no manual axes in it. The partitioner leaves each rank's part of the arrays on the rank's devices.
    """

    def __init__(self, division: OverMesh) -> None:
        super().__init__(division.mesh, division.names, op=division.op)

    def over(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        def run(*args: PyTree) -> PyTree:
            leaves, tree = jax.tree.flatten(args)
            specs = tree.flatten_up_to(jax.tree.broadcast(in_specs, args))
            each: Function = functools.partial(self._of_rank, lambda *leaves: function(*tree.unflatten(leaves)))
            out_axes = jax.tree.map(lambda spec: 0 if any(spec) else None, out_specs)
            for name in reversed(self.names):
                axes = [0 if any(name in axes_of(part) for part in spec) else None for spec in specs]
                each = jax.vmap(each, axes, out_axes, axis_name=name, axis_size=self.sizes[name], spmd_axis_name=name)
            found = each(*map(self._parts, leaves, specs))
            join = lambda x: self._placed(x.reshape(-1, *x.shape[len(self.names) + 1 :]), P(self.names))
            return jax.tree.map(lambda spec, part: jax.tree.map(join, part) if any(spec) else part, out_specs, found)

        if not self.explicit:
            return run
        return jax.sharding.auto_axes(run, out_sharding=self.shardings(out_specs))

    def _of_rank(self, function: Function, *leaves: jax.Array) -> PyTree:
        """Runs a function of one rank. In its sharding constraints, the ranks' axes mean the devices of the rank."""
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*leaves)
        return _programs.evaluate(_programs.constrained_without(self.names, program), shapes, leaves)

    def _parts(self, x: jax.Array, spec: P) -> jax.Array:
        """Returns an array with an axis for each axis of ranks that splits it, and then the dimensions of a part."""
        if not any(spec):
            return x
        shape, lead = list[int](), list[tuple[Any, int]]()
        for d, size in enumerate(x.shape):
            for name in axes_of(spec[d]) if d < len(spec) else ():
                lead.append((name, len(shape)))
                shape.append(self.sizes[name])
                size //= self.sizes[name]
            shape.append(size)
        lead.sort(key=lambda pair: self.names.index(pair[0]))
        rest = [d for d in range(len(shape)) if d not in dict(lead).values()]
        parts = x.reshape(shape).transpose(*(d for _, d in lead), *rest)
        return self._placed(parts, P(*(name for name, _ in lead)))

    def _placed(self, x: jax.Array, spec: P) -> jax.Array:
        """Returns x, whose first dimensions are sharded over the ranks. The partitioner chooses the others."""
        spec = P(*spec, *[P.UNCONSTRAINED] * (x.ndim - len(spec)))
        mesh = jax.sharding.get_abstract_mesh() if self.explicit else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def like(params: Params, specs: Specs) -> Any:
    """Returns a function (path, shape) -> the spec of the parameter with this shape whose path is the path's end."""
    pairs = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(specs))
    known = {(path, x.shape): spec for (path, x), spec in pairs}
    return lambda path, shape: next(
        (known[end] for end in ((path[i:], shape) for i in range(len(path) + 1)) if end in known), None
    )

"""value_and_grad: jax.value_and_grad with compressed gradients, for programs in which jit distributes the batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat, _programs
from jaxcgx.checks import check_choice, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.collectives.arguments import shared_key
from jaxcgx.exchange.message import Carry
from jaxcgx.exchange.reduce import plain_reduce, reduce, travel_with
from jaxcgx.exchange.resolve import is_bound, transport_over_axes, without_constraints
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import as_plan
from jaxcgx.train.arguments import OP, Others, Split, as_nnx, assign, changes, check_once, closing, joined, notes, part
from jaxcgx.train.batch import as_specs
from jaxcgx.train.division import OverMapped, OverMesh, row
from jaxcgx.train.exchange import At, send, send_rows
from jaxcgx.train.feedback import warn_of_loss
from jaxcgx.train.gradient import Forward, Given, Loss, forward
from jaxcgx.train.outputs import Outputs, beside_a_state
from jaxcgx.train.sharded import over_axes
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.axes import as_axis_names, axis_names
from jaxcgx.transports.base import Transport
from jaxcgx.typing import AxisName, Key, Params, PyTree, Specs

_CLOSED_OVER = "Closing over", "should match the aval mesh"  # in JAX's errors for closed-over arrays that are sharded
_STATEFUL = "Old and new values have different structures"  # in Equinox's, for its stateful layers
Arguments = ParamSpec("Arguments")


def value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: AxisName,
    plan: Codec | Plan | Mapping[AxisName, Codec] | None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    weighted: bool = False,
    aux_specs: Specs = None,
    batch_specs: Specs = None,
    param_specs: Specs = None,
    mesh: Any = None,
    ranks: str = "shard_map",
    closes_over: PyTree = (),
) -> "ValueAndGrad":
    """Makes a `jax.value_and_grad` for a batch that is sharded over an axis of a mesh, with compressed gradients.

        compressed = cgx.value_and_grad(loss_fn, "data", cgx.MaxMin(4))  # was jax.value_and_grad(loss_fn)
        loss, grads = compressed(params, batch)

    Use the result like the function that jax.value_and_grad returns. A call outside of jax.jit is compiled as well, but
    traced every time. Every rank of the axis computes the loss of its part of the batch. `loss_fn` must return a mean
    over the examples that it gets, because the value and the gradients are means over the ranks. XLA's partitioner
    handles the other axes of the mesh.

    Arguments that are not differentiated are split over the ranks according to their sharding. If their sharding isn't
    known, as for host arrays and under jit on Auto meshes, they are split along their first dimension. Scalars are the
    same on every rank. The rank is folded into random keys, so every rank draws its own noise.

    Inside of shard_map, pmap or vmap(axis_name=...), the arguments and aux are this rank's own. The value and the
    gradients are means over the ranks there, too. With plan=None the gradients are this rank's own: JAX doesn't sum
    them, as it would sum those of parameters that are the same on every rank. Take their mean with `compressed_pmean`
    or `compress_gradients`. `loss_fn` must return this rank's loss: under check_vma, a loss that is averaged over the
    ranks is an error. Without check_vma, that mean changes no gradient.

    Args:
      loss_fn: a function as for jax.value_and_grad. The differentiated arguments must be the same on every rank. Leaves
        that aren't floating point, such as functions, have the gradient None. So does a Python number that is an
        attribute of a module.
      axis_name: the axis of the mesh over which the batch is split, or a tuple of axes, outermost first.
      plan: a codec, {axis name: codec} or a `Plan`, which keeps nothing from call to call. If a codec rounds
        stochastically, pass a random key, `codec_key=`, in each call. Leaves that a plan skips (`Skip`) have gradients
        of zeros, as with jax.lax.stop_gradient. None exchanges no gradients: outside of shard_map they have a row for
        each rank, [ranks, ...], sharded over the axis. An optimizer that begins with `compress_gradients` takes such
        rows, or sums of them over micro-batches. It has error feedback and other exchanges.
      argnums: as in jax.value_and_grad.
      has_aux: whether `loss_fn` returns (loss, aux). Arrays of `aux` with the examples along their first dimension are
        those of the whole batch. Other floating-point values are averaged over the ranks, weighted if weighted=True.
        Typed random keys are those of plain JAX, as if their rank weren't folded into the keys that the loss gets.
        `aux_specs` says what all other values are. The same holds for variables that a module of Flax NNX changes in
        itself, but its integers and flags are those of the first rank.
      weighted: whether `loss_fn` returns (sum, weight) instead of a loss. The value is then the sum of all sums divided
        by the sum of all weights, for example a mean over all tokens that are not masked.
      aux_specs: what becomes of `aux`, a tree like it or a prefix of it: "mean", "sum", "first" (the first rank's),
        "key" (a raw random key, uint32[2]: that of plain JAX), or a PartitionSpec with the axis at the dimension of the
        examples. None: as `has_aux` says.
      batch_specs: how the arguments that are not differentiated are split over the axis. Either one PartitionSpec, or a
        tuple with a tree of PartitionSpecs (or a prefix of a tree) for each of these positional arguments. A dict
        {name: specs} at the end of the tuple is for keyword arguments.
      param_specs: how the differentiated arguments are sharded over the other axes of the mesh, if their types don't
        say it: a tree of PartitionSpecs, NamedShardings or tuples of axes, or a prefix of a tree (without tuples). For
        a module of Flax NNX, it may be an nnx.State, as from nnx.get_partition_spec. Gradients are compressed shard by
        shard.
      mesh: the mesh; by default the mesh in context (jax.set_mesh), or the mesh of the arguments.
      ranks: how the loss runs on the ranks. "shard_map": on each device, as a program of its own, which XLA's
        partitioner doesn't change along the axis. "vmap": as one program in which the ranks are a mapped axis, which
        the partitioner distributes. This works for losses that JAX refuses in shard_map, such as Diffrax's, and with
        sharding constraints over the axis. For convolutions, the partitioner gathers activations.
      closes_over: the arrays of the batch, or trees of them, that `loss_fn` closes over, as in closes_over=(x, y) for a
        `loss_fn(params)` that is defined inside of a step; or the names of its variables, as in ("x", "y"), where a
        library gets the loss. Each counts as one more positional argument: the loss gets a rank's part in its place.
    """
    function, closes_over = closing(loss_fn, closes_over if type(closes_over) is tuple else (closes_over,))
    loss = Loss(OP, function, has_aux=has_aux, weighted=weighted, aux_specs=aux_specs)
    as_axis_names(OP, axis_name)
    check_choice(OP, "ranks", ranks, ("shard_map", "vmap"))
    if not all(isinstance(i, int) for i in (argnums if isinstance(argnums, tuple | list) else [argnums])):
        remedy = (
            'for an nnx.DiffState, pass its position, and skip what is frozen: cgx.Plan(codec, rules=[("kernel", '
            "cgx.Skip())], min_size=0)"
        )
        raise wrong(OP, "argnums", "a position or a tuple of positions", repr(argnums), remedy, kind=TypeError)
    remedy = f"begin the optimizer with jaxcgx.compress_gradients({axis_name!r}, exchange), and pass None here"
    if not isinstance(plan, Codec | Plan | dict | None):
        expected, got = "a codec, {axis: codec}, a Plan or None", type(plan).__name__
        raise wrong(OP, "plan", expected, got, remedy, kind=TypeError)
    once = None if plan is None else Once(as_plan(OP, plan))
    if once is not None:
        warn_of_loss(OP, "plan", once.plan.codecs, remedy)
    return ValueAndGrad(
        loss=loss,
        axis_name=axis_name,
        once=once,
        argnums=argnums,
        batch_specs=as_specs(batch_specs),
        param_specs=param_specs,
        mesh=mesh,
        mapped=ranks == "vmap",
        closes_over=closes_over,
    )


Made = Callable[Arguments, "ValueAndGrad"]


def _with_arguments_of(make: Made[Arguments]) -> Callable[[Callable[..., "ValueAndGrad"]], Made[Arguments]]:
    return functools.wraps(make, assigned=())


@_with_arguments_of(value_and_grad)
def grad(*args: Any, **kwargs: Any) -> "ValueAndGrad":
    """Makes a `jax.grad` for a batch that is sharded over an axis of a mesh: `value_and_grad` without the value.

    The arguments are those of `value_and_grad`. With `has_aux`, the result is (gradients, aux).
    """
    return dataclasses.replace(value_and_grad(*args, **kwargs), valued=False)


@dataclasses.dataclass(frozen=True)
class Once:
    """The exchange of a plan that keeps nothing. Its state is the caller's `codec_key`."""

    plan: Plan
    early: ClassVar[bool] = False
    scatters: ClassVar[bool] = False

    def init(self, params: Params) -> ExchangeState:
        return ExchangeState(None, None)

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[PyTree, ExchangeState]:
        return grads, state

    def end(self, ticket: PyTree, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        routes = Routes.of(OP, self.plan, ticket, argument="plan")
        key = shared_key(routes, routes, state.shared, at.net, argument="codec_key")
        travel = travel_with(Carry(), routes, at.net, at.way, x=ticket, argument="params")
        return reduce(ticket, Carry(), travel, key)[0], state


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ValueAndGrad:
    """The result of `value_and_grad`: a function like the result of jax.value_and_grad.

    Attributes:
      loss: the loss function, with `has_aux`, `weighted` and `aux_specs`.
      mapped: whether the ranks are a mapped axis (ranks="vmap").
      valued: whether calls return the value, as those of `grad` don't.
      once: the exchange of the plan, or None.
      axis_name, argnums, batch_specs, param_specs, mesh, closes_over: as in `value_and_grad`.
    """

    loss: Loss
    axis_name: AxisName
    once: Once | None
    argnums: int | Sequence[int]
    batch_specs: Specs
    param_specs: Specs
    mesh: Any
    mapped: bool
    closes_over: tuple[Any, ...]
    valued: bool = True

    def __call__(self, *args: Any, codec_key: Key | None = None, **kwargs: Any) -> Any:
        if codec_key is not None and self.once is None:
            raise wrong(OP, "codec_key", "None without a plan", "one", "write seed= in the exchange")
        run = self._inside if is_bound(axis_names(self.axis_name)) else self._outside
        value, aux, grads = run(args, kwargs, ExchangeState(None, codec_key))
        grads = self._as_argument(list(map(as_nnx, self._as_list(grads))))
        with_aux = lambda first: (first, aux) if self.loss.has_aux else first
        return (with_aux(value), grads) if self.valued else with_aux(grads)

    def _inside(self, args: Sequence[Any], kwargs: dict[str, Any], sent: ExchangeState) -> tuple[Any, ...]:
        net, none = transport_over_axes(OP, self.axis_name), Given(None, None, None)
        self._check_inside()
        places, params, others = self._arguments(args, kwargs)
        objective = functools.partial(self._objective, lambda params, _: joined(others, places, params), net)
        with without_constraints(OP, net.names):
            found = forward(objective, _compat.vary_over(params, net.names), none, none, outputs=None, dims=())
        (aux, changed), (value, grads, _) = found.aux, _of_all(found, net, self.valued)
        if changed:
            expected, got = "a function that leaves modules as they are inside of shard_map", "one that changes them"
            raise wrong(OP, "loss_fn", expected, got, "call it outside, or return what is new with has_aux=True")
        grads = self._as_argument(grads)
        return value, aux, grads if self.once is None else send(self.once, grads, sent, At(net))[0]

    def _outside(self, args: Sequence[Any], kwargs: dict[str, Any], sent: ExchangeState) -> tuple[Any, ...]:
        """Runs the step on all ranks. Returns (value, aux, gradients)."""
        places, params, others = self._arguments(args, kwargs)
        arrays, given = jax.tree.leaves((params, others)), self._as_list(self.param_specs)
        division = over_axes(
            OP, self.axis_name, self.mesh, params, arrays=arrays, given=given, joined=self._as_argument
        )
        with notes(division, others), without_constraints(OP, division.names):
            split = Split.of(division, places, others=others, specs=self.batch_specs)
            arrays = split.arrays(others)
            step = functools.partial(self._run, division, split)
            value, (aux, changed), grads = _programs.jitted(step, params, arrays, sent, mesh=division.mesh)
        for i, new in changed.items():
            whole = [*args, *self.closes_over], kwargs
            assign(whole, jax.tree.leaves_with_path(whole)[i][0], new)
        return value, aux, grads

    def _run(self, division: OverMesh, split: Split, params: list[Any], arrays: list[Any], sent: ExchangeState) -> Any:
        """Returns (value, (aux, changes of the arguments), gradients), as `_outside`."""
        find = functools.partial(self._find, division, split)
        program, shapes = jax.make_jaxpr(find, return_shape=True)(params, arrays)
        split.check_closure(program, params, arrays, self.closes_over)
        value, extras, rows = _programs.evaluate(program, shapes, params, arrays)
        grads, given = self._as_argument(rows), self._as_argument(params)
        if self.once is not None:
            grads, _ = send_rows(division, self.once, grads, sent, params=given, loss=value, way=Way())
        return value, extras, grads

    def _find(self, division: OverMesh, split: Split, params: list[Any], arrays: list[Any]) -> Any:
        """Returns (value, (aux, changes of the arguments), gradients with a row for each rank)."""
        division = OverMapped(division) if self.mapped else division
        outputs = Outputs(OP, beside_a_state(self.loss.aux_specs), division.rows)

        def of_rank(params: list[Any], plain: list[Any]) -> tuple[Any, ...]:
            net = division.net()
            arrays = [jax.random.fold_in(x, net.rank) if key else x for x, key in zip(plain, split.keys)]
            objective = functools.partial(self._objective, split.arguments, net)
            given, of_plain = (Given(None, each, None) for each in (arrays, plain))
            found = forward(objective, params, given, of_plain, outputs=outputs, dims=split.dims)
            value, grads, weight = _of_all(found, net)
            return value, outputs.of_all(found.aux, weight, net), row(grads)

        if division.explicit:  # over Explicit axes, shard_map doesn't move arrays
            arrays = list(map(jax.sharding.reshard, arrays, division.shardings(split.specs)))
        step = division.over(of_rank, in_specs=(P(), split.specs), out_specs=(P(), outputs.out_specs, division.rows))
        try:
            value, aux, rows = step(params, arrays)
        except Exception as error:
            if any(words in str(error) for words in _CLOSED_OVER):
                expected, got = "a function that takes what is sharded as an argument", "one that closes over it"
                remedy = "pass it to the call, or if a library closes over it, take a mesh of Auto axes"
                raise wrong(OP, "loss_fn", expected, f"{got}: {error}", remedy) from error
            # Diffrax has an error without words, because it computes constants while JAX traces them.
            wordless = isinstance(error, AssertionError) and not str(error)
            if not self.mapped and (wordless or _STATEFUL in str(error)):
                remedy = 'if plain JAX takes this one, pass ranks="vmap"'
                error.add_note(f"{OP}: JAX refuses some losses inside of jax.shard_map; {remedy}.")
            raise
        return value, outputs.tree(aux), rows

    def _objective(self, arguments: Callable[..., Any], net: Transport, params: Params, given: Given) -> Any:
        """The loss as `forward` takes it, with (aux, the leaves of its arguments that it has changed) as outputs."""
        args, kwargs = arguments(params, given.batch)
        before = jax.tree.flatten_with_path((args, kwargs))
        (value, weight), (_, aux) = self.loss.parts(self.loss.function(*args, **kwargs))
        outputs = aux, changes(before, (args, kwargs))
        if weight is None:
            value = _own(net.names, value)
        return _compat.vary_over((value, weight), net.names), (None, outputs)

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], list[Any], Others]:
        places, args = self._places(len(args)), [*args, *self.closes_over]
        check_once((args, kwargs))
        params, fixed = part([args[i] for i in places])
        if not jax.tree.leaves(params):
            expected = "arguments that have arrays of floating point"
            got = ", ".join(repr(type(args[i]).__name__) for i in places)
            raise wrong(OP, "argnums", expected, f"{got} without any", "for a number, pass float(number)")
        for i, x in zip(places, fixed):
            args[i] = x
        return places, params, (args, kwargs)

    def _check_inside(self) -> None:
        specs = dict(batch_specs=self.batch_specs, param_specs=self.param_specs, aux_specs=self.loss.aux_specs)
        rest = dict(mesh=self.mesh, ranks="vmap" if self.mapped else None, closes_over=self.closes_over or None)
        for name, given in (specs | rest).items():
            if given is not None:
                expected = "none inside of shard_map and pmap, where every rank has its part already"
                raise wrong(OP, name, expected, repr(given), "leave it out")

    def _places(self, count: int) -> tuple[int, ...]:
        asked = self._as_list(self.argnums)
        if any(not -count <= i < count for i in asked):
            raise wrong(OP, "argnums", f"positions among {count} arguments", self.argnums)
        places = tuple(i % count for i in asked)
        if len({*places}) < len(places):
            raise wrong(OP, "argnums", "different positions", self.argnums)
        return places

    def _as_list(self, value: Any) -> Any:
        """Returns the caller's value for the differentiated arguments as a list, or None if it is None."""
        if value is None or isinstance(self.argnums, int):
            return value if value is None else [value]
        return [value] * len(self.argnums) if isinstance(value, P | jax.sharding.NamedSharding) else list(value)

    def _as_argument(self, values: Sequence[Any]) -> Any:
        """Returns values of the differentiated arguments as the caller would have them: one of them, or a tuple."""
        return values[0] if isinstance(self.argnums, int) else tuple(values)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _own(names: tuple[Any, ...], loss: jax.Array) -> jax.Array:
    """Returns the loss. If it is differentiated, its type must vary over the ranks. A constant isn't checked."""
    return loss


@_own.defjvp
def _own_jvp(names: tuple[Any, ...], primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    varying = _compat.varying_axes(primals[0])
    if same := [name for name in names if name in _compat.tracked_axes(names) - varying]:
        got = f"one that is the same on every rank of {', '.join(map(repr, same))}"
        raise wrong(OP, "loss_fn", "this rank's own loss", got, "take the pmean out of the loss")
    return primals[0], tangents[0]


def _of_all(found: Forward, net: Transport, valued: bool = True) -> tuple[jax.Array, list[Any], jax.Array | None]:
    """Returns (the value of all ranks, the rank's gradients, the mean of all weights or None).

    If nobody asks for the value, none is exchanged. Over Tcp, XLA wouldn't leave out an exchange without a use.
    """
    if found.weight is None:
        (grads,) = found.back(_compat.vary_over((jnp.ones_like(found.loss), None), net.names))
        return plain_reduce(OP, found.loss, net, mean=True) if valued else found.loss, grads, None
    # Rank r of n returns (s_r, w_r). The value is S / W, with the means S and W of all s_r and w_r. Its differential is
    # the mean over r of ds_r / W - S / W^2 dw_r, so a rank's gradients are its term.
    mean, weight = plain_reduce(OP, (found.loss, found.weight), net, mean=True)
    value = mean / weight
    (grads,) = found.back(_compat.vary_over((1 / weight, -value / weight), net.names))
    return value, grads, weight

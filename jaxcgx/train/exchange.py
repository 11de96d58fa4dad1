"""What an exchange is: init, begin, end. And what it may ask of the step in which it runs."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat
from jaxcgx.checks import spell_array, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.exchange.message import Carry, fold
from jaxcgx.exchange.reduce import plain_reduce
from jaxcgx.exchange.routes import Routes, Way
from jaxcgx.plan import Plan
from jaxcgx.plan.plan import Phase, as_phases
from jaxcgx.train.division import OverMesh, row, shapes, without_row
from jaxcgx.train.state import ExchangeState
from jaxcgx.transports.base import Transport
from jaxcgx.typing import Key, Params, PyTree

Number = float | jax.Array  # an array may be traced, as by optax.inject_hyperparams


@dataclasses.dataclass(frozen=True)
class At:
    """The place of a step in which an exchange runs."""

    net: Transport  # the transport over the ranks
    params: Params = None
    loss: jax.Array | None = None  # the mean loss, or None. Exchanges of a conditional wait for it
    way: Way = Way()  # what the step wants of the gradients
    # For each leaf, the other axes of the mesh over which it is sharded, besides those that its type has; () without.
    shards: tuple[tuple[Any, ...], ...] = ()
    center: tuple[jax.Array, ...] = ()  # the number of the center that the ranks are in, if it trains on its own

    def noise(self, shared: Any, *numbers: int) -> Key | None:
        """Returns the key of a step, folded with numbers. The centers of `Rounds` draw independent noise."""
        return fold(shared.key, *self.center, shared.count, *numbers)

    @property
    def centers(self) -> tuple[Any, int]:
        """(Name, size) of the outermost axis of the ranks. Processes without a hierarchy have the name ""."""
        name, outer = next(iter(self.net.parts.items()), ("", self.net))
        return name, outer.size

    def of_shards(self, numbers: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the sums of each leaf's numbers over the leaf's shards. All have the same shape and dtype."""
        groups, sums = dict[tuple[Any, ...], list[int]](), list(numbers)
        for i, x in enumerate(numbers):
            axes = (_compat.varying_axes(x) - set(self.net.names)) | set(self.shards[i] if self.shards else ())
            groups.setdefault(tuple(sorted(axes, key=str)), []).append(i)  # in the same order in every process
        for axes, ids in groups.items():
            if axes:
                total = jax.lax.psum(jnp.stack(_compat.match_varying(*(numbers[i] for i in ids))), axes)
                for i, x in zip(ids, total):
                    sums[i] = x
        return sums

    def nonfinite(self, op: str, mean: PyTree) -> jax.Array | int:
        """Returns the number of shards with an element that is not finite, the same on all ranks and shards."""
        each = [(~jnp.isfinite(x)).any().astype(jnp.int32) for x in jax.tree.leaves(mean)]
        bad = sum(self.of_shards(each))
        return plain_reduce(op, bad, self.net, mean=False) if self.way.dims else bad


class ForMesh(abc.ABC):
    """What becomes an exchange or rounds only for a mesh. It makes the functions of a training loop by itself."""

    @abc.abstractmethod
    def steps(self, mesh: Any, axis: Any, make: Callable[[Any], Any]) -> Any:
        """Returns the functions of a training loop. `make` makes those with an exchange or rounds."""


class Exchange(Protocol):
    """How every rank's gradients become their mean: a frozen dataclass. Its numbers may be traced, so it isn't hashed.

    Its functions are those of one rank, and know no rows. `ExchangeState.own` differs from rank to rank, and `keeps`
    says what becomes of it for another number of ranks. `ExchangeState.shared` is the same on every rank.

    Attributes:
      early: whether `begin` needs nothing of this step. A step then calls it before the loss, with None in place of the
        gradients, and `end` gets this step's gradients.
      scatters: whether `end` can return a rank's slices of means (`Way.dims`).
    """

    @property
    def plan(self) -> Plan | Mapping[int, Plan] | None:
        """The plan, or a dict from first steps to plans, which skip the same leaves; None if it sends no messages."""
        ...

    early: ClassVar[bool]
    scatters: ClassVar[bool]

    def init(self, params: Params) -> ExchangeState:
        """Returns the state before the first step. It depends on the shapes of `params` alone."""
        ...

    def begin(self, grads: PyTree, state: ExchangeState, at: At) -> tuple[Any, ExchangeState]:
        """Returns (a ticket for `end`, the state in between). `at` is the place in a step. `early`: `grads` is None."""
        ...

    def end(self, ticket: Any, state: ExchangeState, at: At, grads: PyTree = None) -> tuple[PyTree, ExchangeState]:
        """Returns (the mean, the state after the step). `ticket`, `state` and `at` are those of `begin`.

        `grads` are this step's gradients with `early`, and else None.
        """
        ...


# What users pass: a codec, {axis: codec}, a plan, a schedule of plans {first step: plan}, or an exchange.
AnyExchange: TypeAlias = Exchange | Codec | Plan | dict[Any, Any]
Outcome: TypeAlias = tuple[Any, ExchangeState]  # (a ticket or the mean, the state)


def is_rounds(given: object) -> bool:
    return callable(getattr(given, "act", None)) and not isinstance(given, type)


def send(exchange: Exchange, grads: PyTree, state: ExchangeState, at: At) -> Outcome:
    """Begins and ends an exchange on a rank, and returns (mean, new state). `state.own` has a row."""

    def both(own: PyTree, grads: PyTree) -> Outcome:
        given = ExchangeState(own, state.shared)
        ticket, given = exchange.begin(None if exchange.early else grads, given, at)
        return exchange.end(ticket, given, at, grads if exchange.early else None)

    if not jax.tree.leaves(state.own):
        return both(state.own, grads)
    # The function runs under vmap: reshaping a donated row to [...] makes XLA copy it.
    mean, new = jax.vmap(both)(state.own, row(grads))
    return without_row(mean), ExchangeState(new.own, without_row(new.shared))


def first_state(division: OverMesh, exchange: Exchange, params: Params) -> ExchangeState:
    """Returns the state of an exchange before the first step, sharded: no device ever holds the rows of all ranks."""
    return jax.jit(lambda: division.init_exchange(exchange.init, shapes(params)))()


def send_rows(
    division: OverMesh, exchange: Exchange, rows: PyTree, sent: ExchangeState, params: Params, loss: Any, *, way: Way
) -> Outcome:
    """Exchanges gradients that have a row for each rank, outside of shard_map. Returns (mean, new state)."""

    def of_rank(rows: PyTree, sent: ExchangeState, params: Params, loss: Any) -> Outcome:
        def of_shards(grads: PyTree, sent: ExchangeState, params: Params, loss: Any) -> Outcome:
            return send(exchange, grads, sent, At(division.net(), params, loss, way, shards=division.shard_axes))

        return division.on_shards(of_shards, sent)(without_row(rows), sent, params, loss)

    if division.explicit and not division.shard_axes:  # over Explicit axes, shard_map doesn't move arrays
        place = lambda x: jax.sharding.reshard(x, division.shardings(division.rows))
        rows, sent = jax.tree.map(place, rows), ExchangeState(jax.tree.map(place, sent.own), sent.shared)
    state = ExchangeState(division.rows, P())
    in_specs = division.rows, state, P(), P()
    return division.over(of_rank, in_specs=in_specs, out_specs=(P(), state))(rows, sent, params, loss)


def check_state(op: str, state: Any, expected: ExchangeState, remedy: str) -> None:
    """Checks that a state has the structure, shapes and dtypes of `expected`. `remedy`: for another number of ranks."""
    if not isinstance(state, ExchangeState):
        raise wrong(op, "state", "what its init returns, an ExchangeState", type(state).__name__, kind=TypeError)
    other = "it was made with another plan or other options; go on with those, or take a new one from init"
    flatten = functools.partial(jax.tree.flatten_with_path, is_leaf=lambda x: x is None)
    (wanted, structure), (found, got_structure) = flatten(expected), flatten(state)
    if structure != got_structure:
        paths = [{jax.tree_util.keystr(path) for path, _ in leaves} for leaves in (wanted, found)]
        changed = [f"one without {name}" for name in sorted(paths[0] - paths[1])]
        changed += [f"one with {name}" for name in sorted(paths[1] - paths[0])]
        raise wrong(op, "state", "a state like that of init", (changed or [got_structure])[0], other)
    for (path, want), (_, got) in zip(wanted, found):
        if want is None or got is None:
            fits, why = want is got, other
        elif path[0].name == "own" and got.shape[1:] == want.shape[1:] and got.shape != want.shape:
            fits, why = False, f"that is of another number of ranks; {remedy}"
        else:
            # Momentum has the dtype of the parameters. Gradients may have another dtype.
            moves = any(getattr(key, "name", None) in ("momentum", "trace") for key in path)
            fits = got.shape == want.shape and (got.dtype == want.dtype or moves)
            why = "the state keeps the dtype that init gave it, whatever parameters are cast to; cast it back"
            why = why if got.shape == want.shape else other
        if not fits:
            raise wrong(op, "state", spell_array(want), spell_array(got), why, path=path)


def keeps(own: PyTree) -> PyTree:
    """Returns what each array of `ExchangeState.own` keeps for another number of ranks, in a tree like it.

    It is the "sum" or the "mean" over the ranks, or "zeros": nothing. A class of nodes says this by its function
    `per_rank`, {field: what}. Fields without an entry are nodes that say it themselves.
    """
    says = lambda x: isinstance(x, Carry) or hasattr(type(x), "per_rank")

    def of_node(node: Any) -> PyTree:
        if not says(node):
            raise TypeError(f"jaxcgx: {type(node).__name__} in the state of an exchange has no `per_rank`")
        rows = {"residuals": "sum", "momentum": "mean"} if isinstance(node, Carry) else node.per_rank()
        names = getattr(node, "_fields", None) or [field.name for field in dataclasses.fields(node)]
        of_field = lambda name, x: jax.tree.map(lambda _: rows[name], x) if name in rows else keeps(x)
        return type(node)(**{name: of_field(name, getattr(node, name)) for name in names})

    return jax.tree.map(of_node, own, is_leaf=says)


def check_centers(op: str, name: Any, size: int) -> None:
    """Checks that the outermost axis of the ranks has several places, because `op` needs several centers."""
    if size == 1:
        what = f"centers along {name!r}" if name else "processes"
        raise wrong(op, "axis", f"several {what}", "one", f"leave {op} out, or make a mesh of several centers")


def set_phases(exchange: Any, op: str, argument: str = "plan") -> None:
    """Sets `phases` of an exchange, and `plan` as its protocol says, from the plan or schedule that it was given."""
    phases = as_phases(op, exchange.plan, argument)
    object.__setattr__(exchange, "phases", phases)
    object.__setattr__(exchange, "plan", phases[0].plan if len(phases) == 1 else dict(phases))


def routes_of(op: str, phases: Sequence[Phase], tree: PyTree, argument: str = "plan") -> list[Routes]:
    """Returns the routes of a tree for each phase. All phases must skip the same leaves.

    Otherwise the mean of a leaf would be zero in some steps, in which momentum and weight decay still change it.
    """
    found = [Routes.of(op, phase.plan, tree, argument=argument) for phase in phases]
    for routes in zip(*(each.leaves for each in found)):
        if len({route.skipped for route in routes}) > 1:
            expected, remedy = "plans that skip a leaf in every step or in none", "make a new exchange"
            raise found[0].wrong(expected, "a schedule that changes it", remedy, routes[0].path)
    return found


def check_hyperparameter(op: str, argument: str, value: Any, check: Callable[..., Any], *args: Any) -> None:
    """Checks a number or, except under jit, a scalar array as from optax.inject_hyperparams."""
    if isinstance(value, jax.Array) and not value.ndim:
        if isinstance(value, Tracer):
            return
        value = value.item()
        if isinstance(value, float) and value.is_integer():  # inject_hyperparams may have made it from an integer
            value = int(value)
    check(op, argument, value, *args)

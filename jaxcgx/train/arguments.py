"""Splits the arguments of a `value_and_grad` call: differentiated arguments, arrays for the ranks, and constants."""

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat, _programs
from jaxcgx.checks import spell_array, wrong
from jaxcgx.train.batch import Words, broadcast, check_spans, dimensions, filled, spec_of_batch, spell_axes, split_batch
from jaxcgx.train.division import OverMesh
from jaxcgx.typing import PyTree, Specs

OP = "value_and_grad"
# The positional and the keyword arguments of a call, with None in place of the leaves that have a gradient.
Others = tuple[list[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    division: OverMesh
    places: tuple[int, ...]  # the positions of the differentiated arguments
    tree: PyTree  # the structure of the other arguments
    static: list[Any]  # the leaves of the other arguments that are no arrays, with None in place of each array
    is_array: list[bool]  # for each leaf of the other arguments
    specs: list[P]  # for each array: how it is split over the ranks
    keys: list[bool]  # for each array: whether it is a single random key
    remedy: Callable[[], str]  # returns the remedy of errors: how to tell how the arguments are split

    @property
    def dims(self) -> list[int | None]:
        """For each array, the dimension of the examples, or None if every rank has the whole array."""
        return dimensions(self.specs)

    @classmethod
    def of(cls, division: OverMesh, places: tuple[int, ...], others: Others, specs: Specs) -> "Split":
        found, tree = jax.tree.flatten_with_path(others)
        is_array = [isinstance(x, jax.Array | np.ndarray) for _, x in found]
        rest = [x for i, x in enumerate(others[0]) if i not in places], others[1]
        remedy = functools.partial(_remedy, division, rest)
        # What has no gradient in a differentiated argument is whole on every rank.
        fixed = [getattr(path[1], "idx", None) in places for path, _ in found]
        each = iter(_given_specs(specs, rest, remedy))
        given = [P() if whole else next(each) for whole in fixed]
        arrays = [(path[1:], x) for (path, x), array in zip(found, is_array) if array]
        check_spans(OP, division.mesh, division.names, leaves=arrays)
        place = OP, "batch_specs"
        if specs is None and any(isinstance(x, _compat.BatchTracer) and x.ndim for _, x in arrays):
            got = "None for a batch without the dimension that jax.vmap maps, which may be that of the examples"
            raise wrong(*place, "a PartitionSpec for each argument", got, remedy())
        asked, known, keys = list[P | None](), [spec_of_batch(x, division.names) for _, x in arrays], list[bool]()
        of_arrays = [(spec, whole) for spec, whole, array in zip(given, fixed, is_array) if array]
        for (_, x), (spec, whole), said in zip(arrays, of_arrays, known):
            # What has no gradient in a differentiated argument may be any two words.
            raw = _is_raw_key(x) and not any((said if spec is None else spec) or ()) and not whole
            keys.append(raw or (jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not x.ndim))
            asked.append(P() if keys[-1] else spec)
        specs = split_batch(Words(place, place, remedy), arrays, asked, known, sizes=division.sizes)
        if division.size > 1 and not any(map(any, specs)):
            axes = spell_axes(division.names)
            shard = (
                "pass the batch as an argument, not by a closure, and shard it: "
                f"jax.device_put(batch, NamedSharding(mesh, P({axes}))), or pass batch_specs"
            )
            expected = f"an argument that is split over {axes}"
            raise wrong(*place, expected, "none: every rank would compute the same", shard)
        if any(spec and x.shape[0] == 2 for (_, x), spec in zip(arrays, specs)):
            for path, x in (leaf for leaf, key in zip(arrays, keys) if key and _is_raw_key(leaf[1])):
                expected, got = "a typed key, or batch_specs", f"{spell_array(x)}, a random key or a batch of 2"
                raise wrong(*place, expected, got, f"make keys with jax.random.key, or {remedy()}", path=path)
        return cls(
            division=division,
            places=places,
            tree=tree,
            static=[None if array else x for (_, x), array in zip(found, is_array)],
            is_array=is_array,
            specs=specs,
            keys=keys,
            remedy=remedy,
        )

    def arrays(self, others: PyTree) -> list[Any]:
        return [x for x, array in zip(jax.tree.leaves(others), self.is_array) if array]

    def arguments(self, params: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns (args, kwargs) for the loss function, from the differentiated leaves and the other arrays."""
        each = iter(arrays)
        leaves = [next(each) if array else x for x, array in zip(self.static, self.is_array)]
        return joined(jax.tree.unflatten(self.tree, leaves), self.places, params)

    def check_closure(self, program: Any, params: PyTree, arrays: list[jax.Array], given: PyTree) -> None:
        """Refuses a loss that closes over the examples of all ranks.

        That are arrays of `given`, the caller's closes_over, and arrays with as many rows as the batch if each rank has
        a single example. JAX would broadcast the single example against the rows of all ranks. If a rank has more
        examples, the shapes don't match, and JAX raises an error.

        `program` is a traced function of the parameters and the arrays.
        """
        size, elsewhere = self.division.size, jax.tree.leaves(given)
        single = size > 1 and any(d is not None and x.shape[d] == size for x, d in zip(arrays, self.dims))
        if not (single or elsewhere):
            return
        found = _programs.closed_over(program, len(jax.tree.leaves((params, arrays))))
        # JAX copies NumPy's arrays, so of these only the type is known.
        same = lambda x, y: x is y if isinstance(x, jax.Array) else spell_array(x) == spell_array(y)
        for x in elsewhere:
            if any(same(x, y) for y in found):
                expected = "arrays that only variables of loss_fn, and of functions that it calls, hold"
                remedy = "make them arguments: def loss_fn(params, x, y)"
                raise wrong(OP, "closes_over", expected, f"{spell_array(x)}, which something else holds", remedy)
        for x in found:
            if single and np.shape(x)[:1] == (size,):
                expected = "a function that takes the batch as arguments, of which a rank has a single example"
                got = f"one that closes over {spell_array(x)}, which looks like the examples of all ranks"
                remedy = f"pass it to the call; if it is no batch, {self.remedy()}"
                raise wrong(OP, "loss_fn", expected, got, remedy)


def _given_specs(specs: Specs, rest: Others, remedy: Callable[[], str]) -> list[P | None]:
    """Returns the spec of the caller's batch_specs, or None, for each leaf of the arguments without gradient."""
    positional, keywords = rest
    if specs is None or isinstance(specs, P):
        return [specs] * len(jax.tree.leaves(rest))
    given = [specs] if isinstance(specs, dict) else list(specs)
    named = given.pop() if len(given) > len(positional) and isinstance(given[-1], dict) else {}
    for name, value in keywords.items():
        if name not in named and any(map(np.ndim, jax.tree.leaves(value))):
            raise wrong(OP, "batch_specs", f"one for {name!r}, too", specs, remedy())
    named, arguments = {**dict.fromkeys(keywords, P()), **named}, [positional, keywords]
    expected = f"a PartitionSpec, or a tuple with a tree of them for each of {len(positional)} arguments"
    expected += " that are not differentiated"
    expected += f", and a dict of {', '.join(map(repr, keywords))}" if keywords else ""
    return broadcast(OP, "batch_specs", [given, named], arguments, expected=expected)


def _remedy(division: OverMesh, rest: Others) -> str:
    """Returns batch_specs that suit the arguments: examples are in arrays of the commonest length that ranks share."""
    positional, keywords = rest
    lengths = [np.shape(x)[0] for x in jax.tree.leaves(rest) if np.ndim(x)]
    count = max(lengths, key=lambda n: (n % division.size == 0, lengths.count(n), n), default=0)
    rows = P(division.names[0] if len(division.names) == 1 else division.names)

    def of_argument(argument: PyTree) -> Specs:
        spec = lambda x: rows if np.ndim(x) and np.shape(x)[0] == count else P()
        specs = jax.tree.map(spec, argument)
        each = set(jax.tree.leaves(specs)) or {P()}
        return specs if len(each) > 1 else each.pop()

    named = {name: of_argument(x) for name, x in keywords.items()}
    suggestion = *map(of_argument, positional), *[named] * bool(named)
    return (
        f"pass batch_specs={suggestion}, a PartitionSpec for each argument that is not differentiated, in their order, "
        "and behind them a dict for those by keyword; P() is for one that every rank has whole"
    )


def closing(function: Any, closes_over: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns (a function whose last arguments are what `function` closes over, the values of `closes_over`)."""
    if not (closes_over and callable(function)):
        return function, closes_over
    is_function = isinstance(function, types.FunctionType)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ())) if is_function else {}
    for name in closes_over:
        if isinstance(name, str) and name not in cells:
            expected = f"arrays, or names of variables that loss_fn closes over: {sorted(cells)}"
            remedy = "" if is_function else "pass a Python function, without jax.jit"
            raise wrong(OP, "closes_over", expected, repr(name), remedy)
    given = tuple(cells[x].cell_contents if isinstance(x, str) else x for x in closes_over)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        values = args[len(args) - len(given) :]
        pairs = [*zip(given, values), *zip(*map(jax.tree.leaves, (given, values)))]
        found = set[int]()
        closed = _closed(function, {id(old): new for old, new in pairs}, found, {})
        for i, x in enumerate(given):
            if id(x) not in found and not found.issuperset(map(id, jax.tree.leaves(x))):
                expected, got = "variables that loss_fn closes over, a Python function", f"something else as item {i}"
                remedy = "write closes_over=(batch,) for a tuple, or make it an argument: def loss_fn(params, x, y)"
                raise wrong(OP, "closes_over", expected, got, remedy)
        return closed(*args[: len(args) - len(given)], **kwargs)

    return called, given


def _closed(function: Any, values: dict[int, Any], found: set[int], known: dict[int, Any]) -> Any:
    """Returns a function, and the functions that it closes over, with other values in place of those with these ids.

    Adds the ids that it finds to `found`, and the functions by their ids to `known`: functions may call each other.
    """
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    if id(function) in known:
        return known[id(function)]

    def replaced(cell: types.CellType) -> bool:
        try:
            held = cell.cell_contents
        except ValueError:  # it has no value yet
            return False
        return id(held) in values or (isinstance(held, types.FunctionType) and bool(held.__closure__))

    cells = tuple(types.CellType() if replaced(cell) else cell for cell in function.__closure__)
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    known[id(function)] = new
    for cell, before in zip(cells, function.__closure__):
        if cell is not before:
            held = before.cell_contents
            found.update({id(held)} & values.keys())
            cell.cell_contents = values[id(held)] if id(held) in values else _closed(held, values, found, known)
    return new


@contextlib.contextmanager
def notes(division: OverMesh, others: Others) -> Generator[None]:
    """Adds to errors what a loss gets, where its shapes may not match or the batch is mapped by jax.vmap."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if any(isinstance(x, _compat.BatchTracer) for x in jax.tree.leaves(others)):
            error.add_note(
                f"{OP}: under jax.vmap, the batch lacks the dimension that vmap maps. For the gradients of single "
                "examples (DP-SGD), call jax.vmap(jax.grad(loss_fn), (None, 0)) inside jax.shard_map, where each rank "
                "has its examples, clip and average them, and call "
                f"compressed_pmean(mean, {spell_axes(division.names)}, plan)."
            )
        elif "shape" in str(error):  # of a part, and of an array that is closed over
            error.add_note(
                f"{OP}: 'loss_fn' gets a rank's part of the batch, one of {division.size}. What else has a row for "
                "each example must be an argument of the call, too, and not closed over, or be in closes_over=(x, y)."
            )
        raise


def joined(others: Others, places: Sequence[int], params: Sequence[Any]) -> Others:
    args, kwargs = list(others[0]), others[1]
    for i, x in zip(places, params):
        args[i] = filled(x, args[i])
    return args, kwargs


def changes(before: tuple[list[tuple[Any, Any]], Any], given: PyTree) -> dict[int, Any]:
    """Returns {number of the leaf: new value} for the leaves of its arguments that a loss has changed.

    Modules of Flax NNX change their variables. A loss gets copies of its arguments. So items that it replaces in a list
    or a dict, new variables of a module, and changed static attributes would be lost. These are errors.

    `before` has the leaves of the arguments with their paths, and the structure, from before the call.
    """
    (leaves, structure), (now, structure_now) = before, jax.tree.flatten_with_path(given)
    after = dict(now)
    found = {i: after[path] for i, (path, old) in enumerate(leaves) if path in after and after[path] is not old}
    for i in found:
        path, _ = leaves[i]
        if not isinstance(path[-1], jax.tree_util.GetAttrKey):
            expected, got = "a function that leaves its arguments as they are", "one that changes them"
            remedy = "return what is new beside the loss, with has_aux=True"
            raise wrong(OP, "loss_fn", expected, got, remedy, path=path)
    for old, new in zip(_modules(structure), _modules(structure_now)):
        if old != new:
            expected = "a function that changes only variables of a module, which it had before"
            remedy = (
                "make variables in __init__, also of what is counted (nnx.Variable), or return what is new beside the "
                "loss, with has_aux=True; change what is static before the call"
            )
            raise wrong(OP, "loss_fn", expected, f"one that changes attributes of {old[0].__name__}", remedy)
    return found


def _modules(structure: PyTree) -> list[tuple[type, Any]]:
    """Returns (type, static data) of every node that isn't a plain container: a loss may add to its copies of those."""
    data = structure.node_data()
    own = [] if data is None or data[0] in (dict, list, tuple) else [data]
    return own + [each for child in structure.children() for each in _modules(child)]


def check_once(arguments: PyTree) -> None:
    """Refuses a variable of NNX in two places, as a pytree has it twice, each with a part of the gradient."""
    seen: dict[int, Any] = {}
    for path, x in jax.tree.leaves_with_path(arguments, is_leaf=_is_variable):
        if _is_variable(x) and (first := seen.setdefault(id(x), path)) != path:
            expected = "modules of which every variable is in one place, as JAX's pytrees have it"
            got = f"one that is also {jax.tree_util.keystr(first)}"
            remedy = (
                "share the module by calling it twice, as emb.attend does, or differentiate a state: "
                "graph, params, rest = nnx.split(model, nnx.Param, ...), and nnx.merge(graph, params, rest) in the loss"
            )
            raise wrong(OP, "loss_fn", expected, got, remedy, path=path)


def assign(tree: PyTree, path: Sequence[Any], value: Any) -> None:
    *inner, last = path
    for key in inner:
        is_name = isinstance(key, jax.tree_util.GetAttrKey)
        tree = getattr(tree, key.name) if is_name else tree[key.key if hasattr(key, "key") else key.idx]
    if _is_variable(tree):  # assignment to its attribute is deprecated
        tree.set_value(value)
    else:
        setattr(tree, last.name, value)


def _is_variable(x: Any) -> bool:
    """Returns whether x is a variable of NNX, by its type: instances of nnx.Rngs have an attribute of any name."""
    return hasattr(type(x), "set_value")


def part(params: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns (differentiated leaves, leaves without gradient), each with None in place of the others."""

    def differentiated(path: jax.tree_util.KeyPath[Any], x: Any) -> bool:
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            return jnp.issubdtype(x.dtype, jnp.inexact)
        # A number in a module has no gradient in Equinox. A number in a dict has one in JAX.
        return isinstance(x, float) and not any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)

    take = lambda wanted: jax.tree.map_with_path(
        lambda path, x: x if differentiated(path, x) == wanted else None, params
    )
    return take(True), take(False)


def as_nnx(grads: PyTree) -> PyTree:
    """Returns gradients as nnx.value_and_grad does: those of a module of Flax NNX as an nnx.State of its nnx.Params."""
    nnx = sys.modules.get("flax.nnx")
    return nnx.state(grads, nnx.Param) if nnx and isinstance(grads, nnx.Module) else grads


def _is_raw_key(x: Any) -> bool:
    return x.dtype == np.uint32 and x.shape == (2,)

"""check_loss: compares a loss on a whole batch with the same loss on the ranks' parts, and names why they differ."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import spell_array, wrong
from jaxcgx.train.batch import Words, axes_over, dimensions, split_batch
from jaxcgx.train.division import addable
from jaxcgx.train.gradient import Given, Loss
from jaxcgx.train.outputs import Outputs, beside_a_state
from jaxcgx.transports.axes import axis_names, is_communicator
from jaxcgx.transports.base import split_rows
from jaxcgx.typing import AxisName, Batch, Key, Params, PyTree, Specs

OP = "check_loss"
LEAST, MOST = 2.0**-12, 0.25  # limits of the relative difference that counts as rounding
ORDERED = 2.0**-5  # the relative difference from which on the order of the examples matters
SHAPES = TypeError, ValueError, IndexError  # what a loss raises if the shapes of a part don't fit
CLOSURE = "pass all arrays with a row for each example in the batch, not by a closure"
WHOLE = "pass batch_specs, a tree like the batch, with P() for an array that is no array of examples"
WORDS = Words((OP, "batch"), (OP, "batch_specs"), lambda: WHOLE)


class Results(NamedTuple):
    """What a loss finds for the whole batch; or for all parts, with a leading axis of the parts."""

    loss: Any  # with `weighted`, the sum of the losses
    weight: Any
    gradients: PyTree  # of the loss
    outputs: PyTree  # (auxiliary outputs, new model state), without random keys


class WholeBatch(NamedTuple):
    """A whole batch, and how the ranks divide it."""

    paths: list[jax.tree_util.KeyPath[Any]]
    leaves: list[jax.Array]
    tree: PyTree
    dims: list[int | None]  # for each leaf, the dimension of the examples; None: it is whole
    sizes: dict[Any, int]  # {name: number of ranks} of the axes, outermost first; processes have the name None
    place: Callable[[Any], Any]  # puts an array with a leading axis of the parts on the ranks

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    def orders(self) -> list[Any]:
        """Returns orders of the examples: that of the batch, one that deals them out, and sorted by each array."""
        (examples,) = {x.shape[d] for x, d in zip(self.leaves, self.dims) if d is not None}
        places = np.arange(examples)
        orders = [places, places[::-1], np.argsort(places % self.ranks, kind="stable")]
        for x, d in zip(self.leaves, self.dims):
            if d is not None and addable(x):
                rows = np.moveaxis(np.asarray(jax.device_get(x)), d, 0).reshape(examples, -1).astype(np.float32)
                orders.append(np.lexsort((rows.sum(1), (rows != 0).sum(1))))
        return list({order.tobytes(): order for order in orders}.values())

    def program(self, one: Callable[..., Results], kept: int | None, whole: bool) -> Callable[..., Results]:
        """Returns the function (params, given, order) for the whole batch, or for all parts.

        Args:
          one: a function (params, given, arrays) of the examples in `arrays`.
          kept: the number of an array that is neither split nor put into the order, or None.
          whole: whether all examples are in one part.
        """
        dims = [None if i == kept else d for i, d in enumerate(self.dims)]
        sizes, each = [1 if whole else size for size in self.sizes.values()], one
        for name in reversed(self.sizes):  # a loss may use collectives over the axes
            each = jax.vmap(each, in_axes=(None, None, [None if d is None else 0 for d in dims]), axis_name=name)

        def cut(x: jax.Array, d: int) -> jax.Array:
            rows = split_rows(x, d, math.prod(sizes), tiled=True)
            return (rows if whole else self.place(rows)).reshape(*sizes, *rows.shape[1:])

        @jax.jit
        def run(params: Params, given: Given, order: Any) -> Results:
            arrays = [x if d is None else cut(jnp.take(x, order, d), d) for x, d in zip(self.leaves, dims)]
            lead = () if whole else (self.ranks,)
            return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[len(sizes) :]), each(params, given, arrays))

        return lambda *args: jax.device_get(run(*args))


def check_loss(
    loss_fn: Callable[..., Any],
    params: Params,
    batch: Batch,
    mesh_or_comm: Any,
    *,
    axis: AxisName = "data",
    weighted: bool = False,
    has_aux: bool = False,
    aux_specs: Specs = None,
    model_state: PyTree = None,
    key: Key | None = None,
    batch_specs: Specs = None,
) -> None:
    """Raises an error that names the cause if data-parallel training with this loss would differ from plain JAX.

        cgx.check_loss(loss_fn, params, batch, mesh)  # once, before training

    It computes the loss and its gradients for the whole batch as plain JAX does, and for the ranks' parts as
    `make_train_step` and `value_and_grad` do, without compression. It compares both, and auxiliary outputs and the new
    model state. It repeats this with the examples in other orders, such as sorted by the length of their masks, so that
    the parts are unlike. So take a batch of real data. The cost is that of a few training steps.

    The loss must not draw noise, as ranks draw other noise than plain JAX. Batch norm with the statistics of a rank's
    part is an error, too. Training with it works, but it isn't what plain JAX computes.

    Args:
      loss_fn: a function as for `make_train_step`: (params, batch), with a model state (params, model_state, batch).
        With a key, it takes the key as its last argument. It may use collectives over `axis`.
      params: the parameters.
      batch: the batch of all ranks. With a communicator, it is the process's own part, and the whole batch has the
        parts of all processes, in the order of the ranks. The other arguments are the same in all processes.
      mesh_or_comm: a mesh, or an MPI communicator or hierarchy.
      axis: the axis of the mesh over which the batch is split, or a tuple of axes.
      weighted: whether `loss_fn` returns (sum, weight) in place of a loss.
      has_aux, aux_specs: whether `loss_fn` returns auxiliary outputs, and what they are, as in `make_train_step`.
      model_state: the model's state, if `loss_fn` takes one. The new state is compared as with model_state="mean".
      key: a random key, if `loss_fn` takes one.
      batch_specs: a PartitionSpec, or a tree of them like the batch, as in `make_train_step`.
    """
    loss = Loss(OP, loss_fn, model_state is not None, has_aux=has_aux, weighted=weighted, aux_specs=aux_specs)
    split = _divide(batch, mesh_or_comm, axis, batch_specs)
    if split.ranks == 1 or all(d is None for d in split.dims):
        return
    program = functools.cache(functools.partial(split.program, functools.partial(_one, loss, split.tree)))
    given, orders = Given(model_state, None, key), split.orders()
    wholes = [program(None, True)(params, given, order) for order in orders]
    if not all(np.isfinite(_vector(each)).all() for each in wholes):
        got = f"a loss of {wholes[0].loss}, or such gradients"
        raise wrong(OP, "loss_fn", "a finite loss of the whole batch, with finite gradients", got)
    first, size = _vector(wholes[0]), _norms(_vector(wholes[0]))
    salted = given._replace(key=None if key is None else jax.random.fold_in(key, 1))
    if key is not None and _gap(first, _vector(program(None, True)(params, salted, orders[0])), size) > LEAST:
        remedy = "leave out dropout here, or draw noise from an array in the batch that has a key for each example"
        expected = "a loss without noise, as ranks draw other noise than plain JAX"
        raise wrong(OP, "loss_fn", expected, "one that depends on the random key", remedy)
    limit, parts, failure = _limit(params, wholes), None, None
    try:
        parts = [program(None, False)(params, given, order) for order in orders]
    except SHAPES as error:
        failure = error
    ordered = max(_gap(first, _vector(each), size) for each in wholes) > ORDERED
    if parts and _constant(parts):
        expected, got = "a loss of the examples that it gets", "one that is the same for other examples"
        raise wrong(OP, "loss_fn", expected, got, f"{CLOSURE}, and take real data, whose examples differ")
    if parts and not ordered and max(map(_apart, wholes, parts)) <= limit:
        rows = P() if is_communicator(mesh_or_comm) else P(axis_names(axis))
        for each, of_ranks in zip(wholes, parts):
            _check_outputs(Outputs(OP, beside_a_state(aux_specs), rows), each, of_ranks, limit)
        return
    for i in (i for i, d in enumerate(split.dims) if d is not None and len(split.dims) > 1):
        try:
            runs = [[program(i, whole)(params, given, order) for whole in (True, False)] for order in orders]
        except SHAPES:
            continue  # the loss needs a rank's part of this array
        if not _constant([of_ranks for _, of_ranks in runs]) and max(_apart(*each) for each in runs) <= limit:
            expected = "arrays with a row for each example"
            got = f"{spell_array(split.leaves[i])}, which is split, but which the loss needs whole"
            raise wrong(OP, "batch", expected, got, f"{WHOLE}; {CLOSURE}", path=split.paths[i])
    if ordered:
        expected = "a loss that doesn't depend on the order of the examples"
        raise wrong(OP, "loss_fn", expected, "one that does", f"{CLOSURE}; draw no noise; {WHOLE}")
    if parts is None:
        expected, got = "a function of any number of examples", f"one that fails for a rank's part: {failure}"
        remedy = f"{CLOSURE}; take sizes from the shapes of the batch; {WHOLE}"
        raise wrong(OP, "loss_fn", expected, got, remedy) from failure
    raise _cause(wholes, parts, weighted, limit)


def _divide(batch: Batch, mesh_or_comm: Any, axis: AxisName, batch_specs: Specs) -> WholeBatch:
    batch = jax.tree.map(jnp.asarray, batch)
    over_mpi = is_communicator(mesh_or_comm)
    names = () if over_mpi else axes_over(OP, mesh_or_comm, axis, "axis")
    sizes = {name: mesh_or_comm.shape[name] for name in names}
    found, tree = jax.tree.flatten_with_path(batch)
    specs = split_batch(WORDS, found, WORDS.of_leaves(batch, batch_specs), [None] * len(found), sizes=sizes)
    paths, leaves, dims = [path for path, _ in found], [x for _, x in found], dimensions(specs)
    if len(counts := {x.shape[d] for x, d in zip(leaves, dims) if d is not None}) > 1:
        expected = "arrays with the same number of examples, as check_loss changes their order"
        raise wrong(OP, "batch", expected, f"{', '.join(map(str, sorted(counts)))} examples", WHOLE)
    if over_mpi:
        comm = getattr(mesh_or_comm, "comm", mesh_or_comm)  # a hierarchy has a communicator
        every = comm.allgather([x.shape for x in leaves])
        if any(shapes != every[0] for shapes in every):
            raise wrong(OP, "batch", "parts of the same shapes in all processes", every)
        join = lambda x, d: x if d is None else jnp.concatenate(comm.allgather(jax.device_get(x)), d)
        leaves = list(map(join, leaves, dims))
        return WholeBatch(paths, leaves, tree, dims, sizes={None: comm.size}, place=lambda x: x)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(mesh_or_comm.devices, mesh_or_comm.axis_names), P(names))
    place = lambda x: jax.lax.with_sharding_constraint(x, sharding)
    return WholeBatch(paths, leaves, tree, dims, sizes=sizes, place=place)


def _one(loss: Loss, tree: PyTree, params: Params, given: Given, arrays: list[jax.Array]) -> Results:
    leaves, of_params = jax.tree.flatten(params)
    trained = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)}

    def objective(trained: dict[int, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
        params = of_params.unflatten([trained.get(i, x) for i, x in enumerate(leaves)])
        (value, weight), (new, aux) = loss.call(params, given._replace(batch=tree.unflatten(arrays)))
        return value.astype(jnp.float32), (jnp.float32(1 if weight is None else weight), (aux, new))

    (value, (weight, outputs)), gradients = jax.value_and_grad(objective, has_aux=True)(trained)
    keep = lambda x: jnp.asarray(x) if addable(jnp.asarray(x)) else None
    return Results(value, weight, list(gradients.values()), jax.tree.map(keep, outputs))


def _vector(found: Results) -> np.ndarray[Any, Any]:
    """Returns the loss and the gradients of the whole batch as one vector, or those of all parts as rows."""
    lead = np.shape(found.loss)
    rows = [np.asarray(x, np.float64).reshape(*lead, -1) for x in (found.loss, *found.gradients)]
    return np.concatenate(rows, -1) / (1 if lead else found.weight)


def _norms(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.stack([np.abs(vector[..., 0]), np.linalg.norm(vector[..., 1:], axis=-1)], -1)


def _gap(a: Any, b: Any, scale: Any) -> float:
    """Returns the difference of the losses or of the gradients in two vectors, the larger one, relative to `scale`."""
    found = _norms(a - b) / np.where(scale == 0, 1, scale)
    return float(np.nan_to_num(found, nan=np.inf).max())


def _scale(whole: Results, parts: Results) -> np.ndarray[Any, Any]:
    """Returns the sizes of loss and gradients that count: a mean may cancel what its parts have."""
    rows = np.nan_to_num(_norms(_vector(parts)), nan=0.0, posinf=0.0)
    return np.maximum(_norms(_vector(whole)), rows.sum(0) / max(np.sum(parts.weight), LEAST))


def _limit(params: Params, wholes: list[Results]) -> float:
    """Returns the relative difference that counts as rounding, from what the order of the examples changes."""
    losses = np.array([each.loss for each in wholes], np.float32)
    dtypes = [jnp.dtype(jnp.float32), *map(jnp.result_type, jax.tree.leaves(params))]
    dtypes += [jnp.dtype(jnp.bfloat16)] * bool((losses == losses.astype(jnp.bfloat16)).all())
    eps = max(float(jnp.finfo(x).eps) for x in dtypes if jnp.issubdtype(x, jnp.inexact))
    first = _vector(wholes[0])
    noise = max(_gap(first, _vector(each), _norms(first)) for each in wholes)
    return min(max(LEAST, 8 * noise, 8 * eps), MOST)


def _apart(whole: Results, parts: Results) -> float:
    """Returns how far the parts together, as training averages them, are from the whole batch."""
    mean = _vector(parts).sum(0) / np.sum(parts.weight, dtype=np.float64)
    return _gap(_vector(whole), mean, _scale(whole, parts))


def _constant(parts: list[Results]) -> bool:
    """Returns whether the parts' results have the same bits in all orders."""
    return len(parts) > 1 and all(np.array_equal(_vector(parts[0]), _vector(each)) for each in parts[1:])


def _cause(wholes: list[Results], parts: list[Results], weighted: bool, limit: float) -> Exception:
    """Returns the error for a loss whose parts don't agree with the whole batch. The lists are by order."""
    worst = int(np.argmax(list(map(_apart, wholes, parts))))
    whole, rows = _vector(wholes[worst]), _vector(parts[worst])
    scale, gap = _scale(wholes[worst], parts[worst]), _apart(wholes[worst], parts[worst])
    mean = rows[:, 0].sum() / parts[worst].weight.sum()
    both = f"{whole[0]:.6g} for the whole batch, and {mean:.6g} for {len(rows)} parts together"
    got = f"{both}, which differ by {gap:.2g} of the size of the loss or of its gradients"
    # The weights with which the parts add up to the whole batch. With few parameters, there always are some.
    finite, weights, fits = bool(np.isfinite(rows).all()), np.zeros(len(rows)), False
    if finite and np.any(rows, 0).sum() > len(rows):
        unit = np.concatenate([[scale[0]], np.full(rows.shape[1] - 1, scale[1])])
        unit = np.where(unit == 0, 1, unit)
        weights = np.linalg.lstsq((rows / unit) @ (rows / unit).T, (rows / unit) @ (whole / unit), rcond=limit**2)[0]
        fits = _gap(weights @ rows, whole, scale) <= limit
    sums = [_vector(each).sum(0) for each in parts]
    adds = len(sums) > 1 and max(_gap(x, sums[0], scale * len(rows)) for x in sums) <= limit
    if weighted:
        remedy = "return (losses.sum(), weights.sum()) of the examples that it gets, and no means"
        return wrong(OP, "loss_fn", "a sum and a weight that add up over the parts", got, remedy)
    if not finite or (fits and weights.min() > -0.1 and abs(weights.sum() - 1) < 0.1):
        remedy = "return (losses.sum(), weights.sum()), and pass weighted=True here and to the step"
        return wrong(OP, "loss_fn", "a mean in which all parts have the same weight", got, remedy)
    if adds or (fits and np.abs(weights - 1).max() < 0.1):
        remedy = "return the mean over the examples that it gets, as in losses.mean()"
        return wrong(OP, "loss_fn", "a mean over the examples", f"{got}, as sums over the examples do", remedy)
    remedy = (
        "average statistics over the ranks, or gather the examples (docs/convert.md); batch norm with the statistics "
        "of a rank's part is usual, so leave it as it is and check without it; for a mean with weights, return (sum, "
        "weight) and pass weighted=True"
    )
    expected = "a loss without statistics of the batch, in which no example depends on others"
    return wrong(OP, "loss_fn", expected, got, remedy)


def _check_outputs(outputs: Outputs, whole: Results, parts: Results, limit: float) -> None:
    """Compares auxiliary outputs and the new model state with those of the parts, put together as training does."""
    shares, found = parts.weight / parts.weight.sum(), jax.tree.leaves_with_path(whole.outputs)
    for ((field, *path), x), y, said in zip(found, jax.tree.leaves(parts.outputs), outputs.said(whole.outputs)):
        what = "a new model state" if field.idx else "auxiliary outputs"
        kind = outputs.kind(path, x, said) if said is not None or y.shape[1:] == x.shape else 0
        if kind == "key":
            continue
        of_all = _together(y, kind, shares)
        if of_all.shape != x.shape:
            expected = f"{what} with a row for each example along the first dimension, or without"
            raise wrong(OP, "loss_fn", expected, spell_array(x), "take it out", path=path)
        differs = _most(np.asarray(of_all, np.float64) - np.asarray(x, np.float64))
        if differs > limit * max(_most(x), _most(y)):
            expected = f"{what} of which the ranks' parts, put together, are those of the whole batch"
            remedy = 'return means or rows; for a count or a sum, jax.lax.psum over the axis, or "sum" in aux_specs'
            raise wrong(OP, "loss_fn", expected, f"{spell_array(x)}, which differs by {differs:.3g}", remedy, path=path)


def _together(y: Any, kind: str | int, shares: Any) -> Any:
    if kind == "mean":
        return np.tensordot(shares, np.asarray(y, np.float64), 1)
    if kind == "sum":
        return y.sum(0)
    return y[0] if kind == "first" else np.concatenate([*y], int(kind))


def _most(x: Any) -> float:
    return float(np.abs(np.asarray(x, np.float64)).max(initial=0))

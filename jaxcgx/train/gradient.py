"""The gradients of one rank: micro-batches, model state, keys, weights. And how its outputs become those of all ranks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import spell_array, wrong
from jaxcgx.transports.base import Transport
from jaxcgx.train.division import first_of, mean_of
from jaxcgx.typing import Batch, Key, Params, PyTree, Specs


class Found(NamedTuple):
    """What a rank finds. With weights, loss and gradients are sums, and averaged outputs are multiplied by the weight."""

    grads: PyTree
    loss: jax.Array
    weight: jax.Array | None
    model_state: PyTree
    aux: list[jax.Array]  # the leaves of the auxiliary outputs


@dataclasses.dataclass(frozen=True)
class Loss:
    """The caller's loss function, in the one form that a step differentiates."""

    function: Callable[..., PyTree]
    has_state: bool
    has_aux: bool
    weighted: bool

    def __call__(self, params: Params, model_state: PyTree, batch: Batch, key: Key | None) -> tuple[PyTree, PyTree]:
        """Returns (loss, (weight, model state, aux))."""
        states = (jax.tree_util.tree_map(lambda x: x, model_state),) if self.has_state else ()
        found = self.function(params, *states, batch, *(() if key is None else (key,)))
        loss, new, aux, weight = found, None, None, None
        if self.has_state and self.has_aux:
            loss, (new, aux) = found
        elif self.has_state:
            loss, new = found
        elif self.has_aux:
            loss, aux = found
        if self.weighted:
            loss, weight = (jnp.asarray(x, jnp.float32) for x in loss)
            weight = lax.stop_gradient(weight)
        return loss, (weight, new, aux)


class Outputs:
    """How the auxiliary outputs of a rank become those of all ranks, told from shapes, types and `aux_specs` alone.

    It learns the structure while the loss is traced, so the loss is traced once. Where an output's first dimension is
    as long as the rank's examples, the loss is traced a second time with twice as many, never executed.
    """

    def __init__(self, op: str, specs: Specs, rows: P) -> None:
        self.op, self.specs, self.rows = op, specs, rows
        self.tree: jax.tree_util.PyTreeDef | None = None
        self.kinds: list[str | int] = []  # "mean", "sum", "first", or the dimension along which parts are joined

    def learn(self, aux: PyTree, larger: Callable[[], PyTree], examples: int | None) -> list[jax.Array]:
        found, self.tree = jax.tree_util.tree_flatten_with_path(aux)
        leaves = [jnp.asarray(x) for _, x in found]
        said = [None] * len(found)
        if self.specs is not None:
            is_leaf = lambda s: isinstance(s, P | str)
            said = jax.tree_util.tree_leaves(jax.tree_util.tree_broadcast(self.specs, aux, is_leaf=is_leaf), is_leaf=is_leaf)
        unsure = [s is None and x.ndim > 0 and x.shape[0] == examples for s, x in zip(said, leaves)]
        twice = jax.tree_util.tree_leaves(larger()) if any(unsure) else leaves
        self.kinds = [self._kind(path, x, y, s) for (path, _), x, y, s in zip(found, leaves, twice, said)]
        return leaves

    def _kind(self, path: PyTree, x: jax.Array, larger: PyTree, said: PyTree) -> str | int:
        if isinstance(said, P):
            return next((d for d, name in enumerate(said) if name is not None), "first")
        if isinstance(said, str):
            return said
        if x.ndim and larger.shape[0] == 2 * x.shape[0]:
            return 0
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return "mean"
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return "first"
        expected = 'floats, or arrays with the examples along their first dimension, where "aux_specs" say nothing'
        raise wrong(self.op, "loss_fn", expected, spell_array(x), 'say "sum", "mean", "first" or a PartitionSpec', path=path)

    def of_all(self, leaves: list[jax.Array], weight: jax.Array | None, net: Transport) -> dict[str, list[jax.Array]]:
        """Returns the outputs in two lists, those with the rank's examples in front and those that are shared."""
        found: dict[str, list[jax.Array]] = {"joined": [], "shared": []}
        for x, kind in zip(leaves, self.kinds):
            if isinstance(kind, int):
                found["joined"].append(jnp.moveaxis(x, kind, 0))
            elif kind == "first":
                found["shared"].append(first_of(x, net))
            elif kind == "sum":
                found["shared"].append(net.plain_psum(x))
            else:
                mean = mean_of(x, net)
                found["shared"].append(mean if weight is None else (mean / weight).astype(x.dtype))
        return found

    @property
    def out_specs(self) -> dict[str, P]:
        return {"joined": self.rows, "shared": P()}

    def tree_of(self, found: dict[str, list[jax.Array]]) -> PyTree:
        joined, shared = iter(found["joined"]), iter(found["shared"])
        each = [jnp.moveaxis(next(joined), 0, k) if isinstance(k, int) else next(shared) for k in self.kinds]
        return self.tree.unflatten(each) if self.tree else None


def find(
    loss: Loss, params: Params, model_state: PyTree, batch: Batch, key: Key | None, dims: Sequence[int | None],
    parts: int, outputs: Outputs
) -> Found:
    """Returns a rank's gradients and outputs, averaged over micro-batches."""
    differentiate = jax.value_and_grad(loss, has_aux=True)
    leaves, tree = jax.tree_util.tree_flatten(batch)

    def of_part(state: PyTree, part: list[jax.Array], key: Key | None) -> Found:
        (value, (weight, new, aux)), grads = differentiate(params, state, tree.unflatten(part), key)
        double = [x if d is None else jnp.concatenate([x, x], d) for x, d in zip(part, dims)]
        larger = lambda: jax.eval_shape(lambda: loss(params, state, tree.unflatten(double), key)[1][2])
        examples = next((x.shape[d] for x, d in zip(part, dims) if d is not None), None)
        out = outputs.learn(aux, larger, examples) if loss.has_aux else []
        if weight is not None:
            averaged = lambda x: jnp.where(weight == 0, 0, x.astype(_wide(x.dtype)) * weight)
            out = [averaged(x) if k == "mean" else x for x, k in zip(out, outputs.kinds)]
        return Found(grads, jnp.asarray(value), weight, new, out)

    if parts == 1:
        return of_part(model_state, leaves, key)
    split = [x if d is None else _split(x, d, parts) for x, d in zip(leaves, dims)]

    def add(total: tuple, i: jax.Array) -> tuple[tuple, list]:
        sums, state = total
        part = [x if d is None else x[i] for x, d in zip(split, dims)]
        found = of_part(state, part, None if key is None else jax.random.fold_in(key, i))
        new = found.grads, found.loss, found.weight
        sums = jax.tree_util.tree_map(lambda t, x: t + x.astype(t.dtype), sums, new)
        return (sums, found.model_state), found.aux

    zero = lambda x: jnp.zeros(x.shape, _wide(x.dtype))
    scalar = jnp.zeros((), jnp.float32)
    start = jax.tree_util.tree_map(zero, params), scalar, scalar if loss.weighted else None
    (sums, state), each = lax.scan(add, (start, model_state), jnp.arange(parts))
    grads, value, weight = jax.tree_util.tree_map(lambda x: x / parts, sums)
    grads = jax.tree_util.tree_map(lambda x, p: x.astype(p.dtype), grads, params)
    aux = [_joined(x, kind, parts) for x, kind in zip(each, outputs.kinds)]
    return Found(grads, value, weight, state, aux)


def of_all(found: Found, given: PyTree, outputs: Outputs, net: Transport) -> tuple[PyTree, jax.Array, PyTree, dict]:
    """Returns (the rank's own gradients, and the loss, model state and outputs of all ranks)."""
    loss, weight = mean_of(found.loss, net), None
    grads = found.grads
    if found.weight is not None:
        weight = mean_of(found.weight, net)
        loss = loss / weight
        grads = jax.tree_util.tree_map(lambda g: (g.astype(_wide(g.dtype)) / weight).astype(g.dtype), grads)
    return grads, loss, _state_of_all(given, found.model_state, net), outputs.of_all(found.aux, weight, net)


def _state_of_all(given: PyTree, new: PyTree, net: Transport) -> PyTree:
    """Floats that the loss renewed are averaged; integers, flags and keys are the first rank's."""

    def of_all(was: jax.Array, now: jax.Array) -> jax.Array:
        if now is was:
            return was
        now = jnp.asarray(now)
        if jnp.issubdtype(now.dtype, jnp.inexact):
            return mean_of(now.astype(_wide(now.dtype)), net).astype(now.dtype)
        return first_of(now, net)

    return jax.tree_util.tree_map(of_all, given, new)


def _split(x: jax.Array, d: int, parts: int) -> jax.Array:
    return jnp.moveaxis(x.reshape(*x.shape[:d], parts, x.shape[d] // parts, *x.shape[d + 1 :]), d, 0)


def _joined(x: jax.Array, kind: str | int, parts: int) -> jax.Array:
    """Returns the outputs [parts, ...] of micro-batches as one output."""
    if isinstance(kind, int):
        x = jnp.moveaxis(x, 0, kind)
        return x.reshape(*x.shape[:kind], -1, *x.shape[kind + 2 :])
    if kind == "first":
        return x[-1]
    total = x[0].astype(_wide(x.dtype))
    for i in range(1, parts):
        total = total + x[i].astype(total.dtype)
    return (total / parts if kind == "mean" else total).astype(x.dtype)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4 else jnp.dtype(jnp.float32)

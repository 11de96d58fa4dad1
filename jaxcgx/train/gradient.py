"""The gradients of one rank's part of a batch: micro-batches, model state, random keys, weights."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxcgx import _programs
from jaxcgx.checks import check_flag, spell_array, wrong
from jaxcgx.exchange.reduce import plain_reduce
from jaxcgx.train.batch import OP, filled
from jaxcgx.train.division import Division, after, wide
from jaxcgx.train.outputs import ModelState, Outputs, added, as_model_state
from jaxcgx.train.update import part
from jaxcgx.transports.base import Transport
from jaxcgx.typing import Batch, Key, Params, PyTree, Specs

FLAGS = "has_aux=True is for (loss, aux), weighted=True for (sum, weight)"


class Given(NamedTuple):
    model_state: PyTree
    batch: Batch
    key: Key | None


# The loss function in the form that is differentiated: a function (params, given) that returns ((loss, weight), (model
# state, aux)).
Objective = Callable[..., tuple[tuple[jax.Array, Any], tuple[PyTree, PyTree]]]


class OfRank(NamedTuple):
    """What a rank finds. With weights, loss and gradients are sums, and averaged outputs are times the weight."""

    grads: PyTree
    loss: jax.Array
    weight: jax.Array | None
    model_state: PyTree
    keys: PyTree  # the random keys of the model state as plain JAX has them, which are the same on all ranks
    aux: list[jax.Array]  # the leaves of the auxiliary outputs


class Forward(NamedTuple):
    """What a loss returns for a part of a batch, and the way back to its gradients."""

    loss: jax.Array
    weight: jax.Array | None
    back: Callable[..., tuple[PyTree]]  # returns (gradients,) for the cotangents (that of the loss, of the weight)
    model_state: PyTree
    aux: Any  # the leaves of the auxiliary outputs, averaged ones times the weight; without `Outputs`, their tree
    plain: Callable[[], tuple[PyTree, PyTree]]  # returns (model state, aux) for the keys of plain JAX


@dataclasses.dataclass(frozen=True)
class Loss:
    """The caller's loss function, in the one form that is differentiated. `make_train_step` explains the fields."""

    op: str  # the public function that errors name
    function: Callable[..., Any]
    has_state: bool = False
    has_aux: bool = False
    weighted: bool = False
    aux_specs: Specs = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise wrong(self.op, "loss_fn", "a function", repr(self.function), kind=TypeError)
        for name in ("has_aux", "weighted"):
            check_flag(self.op, name, getattr(self, name))
        if self.aux_specs is not None and not self.has_aux:
            raise wrong(self.op, "aux_specs", "None without has_aux", repr(self.aux_specs), "pass has_aux=True")

    def __call__(self, params: Params, given: Given) -> tuple[tuple[jax.Array, Any], tuple[PyTree, PyTree]]:
        """Returns ((loss, weight), (model state, aux)), with None for those that the function doesn't return."""
        (loss, weight), rest = self.call(params, given)
        return (loss, weight if weight is None else _constant(weight)), rest

    def call(self, params: Params, given: Given) -> tuple[tuple[jax.Array, Any], tuple[PyTree, PyTree]]:
        """Returns the same, but the weight may depend on the parameters."""
        # The loss function gets a copy, because NNX variables can be changed only in the trace that made them.
        states = (jax.tree.map(lambda x: x, given.model_state),) if self.has_state else ()
        keys = () if given.key is None else (given.key,)
        return self.parts(self.function(params, *states, given.batch, *keys))

    def parts(self, found: Any) -> tuple[tuple[jax.Array, Any], tuple[PyTree, PyTree]]:
        rest: Any = None
        weight, model_state, aux = None, None, None
        try:
            loss, rest = found if self.has_state or self.has_aux else (found, rest)
            if self.has_state:
                model_state, aux = rest if self.has_aux else (rest, None)
            elif self.has_aux:
                aux = rest
            if self.weighted:
                loss, weight = loss
        except (TypeError, ValueError):
            names = ["model state"] * self.has_state + ["aux"] * self.has_aux
            second = f", ({', '.join(names)})" if len(names) == 2 else "".join(f", {each}" for each in names)
            expected = f"a function that returns ({'(sum, weight)' if self.weighted else 'loss'}{second})"
            raise wrong(self.op, "loss_fn", expected, f"one that returns {found}", FLAGS) from None
        loss = self._scalar(loss, "sum" if self.weighted else "loss")
        if self.weighted:
            loss = loss.astype(wide(loss.dtype))
            weight = self._scalar(weight, "weight").astype(loss.dtype)
        return (loss, weight), (model_state, aux)

    def _scalar(self, x: Any, what: str) -> jax.Array:
        """Returns a loss, a sum or a weight as an array, after a check that it is a scalar that JAX can use."""
        expected, got, remedy = f"a function whose {what} is a number", None, ""
        if not (hasattr(x, "shape") or isinstance(x, int | float)):
            got, remedy = f"a {type(x).__name__}", FLAGS
        elif jnp.shape(x):
            got, remedy = spell_array(x), "return a mean, as in losses.mean()"
        elif what != "weight" and not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            expected, got = f"a function whose {what} is of floating point", spell_array(x)
        if got is not None:
            raise wrong(self.op, "loss_fn", expected, got, remedy, kind=TypeError)
        return jnp.asarray(x)


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    """Returns the weight. Its derivative is an error: the sum of weights is known only after the last micro-batch."""
    return weight


def _constant_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        expected, got = "a weight that doesn't depend on the parameters", "one that does"
        raise wrong(OP, "loss_fn", expected, got, "return (sum, jax.lax.stop_gradient(weight))")
    return primals[0], tangents[0]


_constant.defjvp(_constant_jvp, symbolic_zeros=True)


def _split(x: jax.Array, d: int, parts: int) -> jax.Array:
    if x.shape[d] % parts:
        expected = f"batches that every rank can split into {parts}"
        raise wrong(OP, "accumulate", expected, f"{spell_array(x)} on a rank")
    return jnp.moveaxis(x.reshape(*x.shape[:d], parts, x.shape[d] // parts, *x.shape[d + 1 :]), d, 0)


def forward(
    loss: Objective, params: Params, given: Given, plain: Given, *, outputs: Outputs | None, dims: Sequence[int | None]
) -> Forward:
    """Runs a loss that is to be differentiated on a part of a rank's batch, which is split along these dimensions.

    In `plain`, random keys are as plain JAX has them: the rank isn't folded in. Outputs that are keys are those for it.
    """
    of_params = functools.partial(loss, given=given)
    (value, weight), back, (model_state, aux) = jax.vjp(of_params, params, has_aux=True)
    of_plain = functools.cache(lambda: loss(params, plain)[1])
    if outputs is not None and aux is not None:
        leaves, tree = jax.tree.flatten(given.batch)
        again = lambda leaves: loss(params, given._replace(batch=tree.unflatten(leaves)))[1][1]
        aux = outputs.learn(aux, again, list(zip(leaves, dims)), plain=lambda: of_plain()[1])
        aux = aux if weight is None else outputs.weighted(aux, weight)
    return Forward(value, weight, back, model_state, aux=aux, plain=of_plain)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Gradient:
    division: Division
    loss: Loss
    model_state: ModelState
    skipped: PyTree
    accumulate: int  # the number of micro-batches
    dims: Sequence[int | None]  # for each leaf of a batch, the dimension that is split; None: it is whole everywhere
    outputs: Outputs
    early: bool  # whether the exchange begins before, so that XLA may let the gradients wait for it

    def __call__(
        self, params: Params, model_state: PyTree, batch: Batch, keys: tuple[Key | None, Key | None]
    ) -> tuple[PyTree, jax.Array, PyTree, dict[str, list[jax.Array]]]:
        """Returns (gradients, and of all ranks: the mean loss, the model state, the outputs).

        `params` are the rank's parameters or shards of parameters. `keys` are that of the loss function, and that of
        the gather of parameters.
        """
        net, (key, noise) = self.division.net(), keys
        whole, loss = self.division.open(params, self.loss, noise)
        trained, frozen = part(whole, self.skipped), part(whole, self.skipped, frozen=True)
        of_trained = lambda trained, given: loss(filled(trained, frozen), given)
        of_rank = None if key is None else jax.random.fold_in(key, net.rank)
        given = Given(self.model_state.of_rank(model_state, net), batch, of_rank)
        plain = Given(None if model_state is None else self.model_state.keys(model_state), None, key)
        found, renewed = self._find(of_trained, trained, given, plain)
        if self.early:
            found = found._replace(loss=after(found.grads, found.loss))
        grads, value, aux = self._of_all(found, net)
        new = None if model_state is None else filled(found.keys, found.model_state)
        model_state = self.model_state.of_all(model_state, new, renewed, net)
        # An exchange that waits for the loss waits for the other means, too.
        return grads, after((aux["shared"], model_state), value), model_state, aux

    def _find(self, loss: Objective, params: Params, given: Given, plain: Given) -> tuple[OfRank, list[bool]]:
        """Returns (the rank's results, averaged over micro-batches; for each leaf of the model state if it is renewed).

        Each micro-batch gets another key, and the model state that the one before returned. Gradients are added up in
        at least float32. `plain` has the keys of plain JAX, in the model state with None in place of other leaves.
        """
        outputs, number = self.outputs, self.accumulate
        leaves, tree = jax.tree.flatten(given.batch)
        renewed: list[bool] = []
        has_keys = bool(jax.tree.leaves(plain.model_state))
        places = jax.tree.leaves(plain.model_state, is_leaf=lambda x: x is None) if has_keys else []

        def of_part(given: Given, keys: PyTree) -> OfRank:
            nonlocal renewed
            state = filled(keys, given.model_state) if has_keys else given.model_state
            unfolded = Given(state, given.batch, plain.key)
            found = forward(loss, params, given, unfolded, outputs=outputs, dims=self.dims)
            new, renewed = as_model_state(given.model_state, found.model_state)
            if has_keys and any(new for new, key in zip(renewed, places) if key is not None):
                keys = self.model_state.keys(as_model_state(state, found.plain()[0])[0])
            (grads,) = found.back(jax.tree.map(jnp.ones_like, (found.loss, found.weight)))
            return OfRank(grads, found.loss, found.weight, new, keys=keys, aux=found.aux or [])

        if number == 1:
            return of_part(given, plain.model_state), renewed
        split = [x if d is None else _split(x, d, number) for x, d in zip(leaves, self.dims)]

        def add(total: tuple[PyTree, ...], i: jax.Array) -> tuple[tuple[PyTree, ...], tuple[Any, ...]]:
            sums, state, keys = total
            batch = tree.unflatten(x if d is None else x[i] for x, d in zip(split, self.dims))
            key = None if given.key is None else jax.random.fold_in(given.key, i)
            found = of_part(Given(state, batch, key), keys)
            sums = jax.tree.map(lambda t, x: t + x.astype(t.dtype), sums, found.grads)
            return (sums, found.model_state, found.keys), (found.loss, found.weight, found.aux)

        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, wide(x.dtype)), params)
        first = zeros, given.model_state, plain.model_state
        (sums, state, keys), (*each, aux) = jax.lax.scan(add, first, jnp.arange(number))
        grads = jax.tree.map(lambda x, p: (x / number).astype(p.dtype), sums, params)
        value, weight = (None if x is None else added(x) / number for x in each)
        assert value is not None
        return OfRank(grads, value, weight, state, keys=keys, aux=outputs.joined(aux, number)), renewed

    def _of_all(self, found: OfRank, net: Transport) -> tuple[PyTree, jax.Array, dict[str, list[jax.Array]]]:
        """Returns (gradients, the mean loss of all ranks, their outputs), each divided by the mean of the weights."""
        loss, weight, grads = plain_reduce(OP, found.loss, net, mean=True), None, found.grads
        if found.weight is not None:
            weight = plain_reduce(OP, found.weight, net, mean=True)
            loss = loss / weight
            divide = lambda x: (x.astype(wide(x.dtype)) / weight.astype(wide(x.dtype))).astype(x.dtype)
            grads = jax.tree.map(divide, grads)
        return grads, loss, self.outputs.of_all(found.aux, weight, net)


def backward_order(loss_fn: Callable[..., Any], params: Params, *args: PyTree) -> tuple[int, ...]:
    """Returns the order in which the gradients of `params` are ready in the backward pass of `loss_fn`.

    The order is a tuple of the numbers of the leaves, for `compress_gradients(..., order=...)` and
    `sync_in_backward(..., order=...)`. Arrays may be jax.ShapeDtypeStructs, because nothing is computed.

    Args:
      loss_fn: a function `(params, *args)` that returns a loss, or (loss, auxiliary outputs).
      params: a pytree of parameters.
      *args: the other arguments of `loss_fn`, pytrees of arrays.
    """
    if not callable(loss_fn):
        raise wrong("backward_order", "loss_fn", "a function", repr(loss_fn), kind=TypeError)

    def loss(*args: PyTree) -> jax.Array:
        found = loss_fn(*args)
        return found[0] if isinstance(found, tuple) else found

    program = jax.make_jaxpr(jax.grad(loss, allow_int=True))(params, *args)
    return _programs.ready(program, len(jax.tree.leaves(params)))

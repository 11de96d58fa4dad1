"""The gradients of one rank's part of a batch: micro-batches, model state, random keys, weights."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxcgx import _programs
from jaxcgx.checks import check_flag, spell_array, wrong
from jaxcgx.collectives.gradients import own, vary
from jaxcgx.exchange.reduce import plain_reduce
from jaxcgx.exchange.resolve import without_constraints
from jaxcgx.train.arguments import changes
from jaxcgx.train.batch import OP
from jaxcgx.train.division import Division, after, wide
from jaxcgx.train.outputs import ModelState, Outputs, added, as_model_state
from jaxcgx.train.update import join, part
from jaxcgx.transports.base import Transport
from jaxcgx.typing import Batch, Key, Params, PyTree, Specs

FLAGS = "has_aux=True is for (loss, aux), weighted=True for (sum, weight)"


class Given(NamedTuple):
    """The arguments of a rank's loss function besides the parameters."""

    model_state: PyTree
    batch: Batch
    key: Key | None


class OfRank(NamedTuple):
    """What a rank finds. With weights, loss and gradients are sums, and averaged outputs are times the weight."""

    grads: PyTree
    loss: jax.Array
    weight: jax.Array | None
    model_state: PyTree
    aux: list[jax.Array]  # the leaves of the auxiliary outputs


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

    def __call__(self, params: Params, given: Given) -> tuple[jax.Array, tuple[Any, PyTree, PyTree]]:
        """Returns (loss, (weight, model state, aux)), with None for those that the function doesn't return."""
        loss, weight, model_state, aux = self.call(params, given)
        return loss, (weight if weight is None else _constant(weight), model_state, aux)

    def call(self, params: Params, given: Given) -> tuple[jax.Array, jax.Array | None, PyTree, PyTree]:
        """Returns what the function returns: (loss, weight, model state, aux), with None for what it doesn't."""
        # The loss function gets a copy, because NNX variables can be changed only in the trace that made them.
        states = (jax.tree_util.tree_map(lambda x: x, given.model_state),) if self.has_state else ()
        keys = () if given.key is None else (given.key,)
        return self.parts(self.function(params, *states, given.batch, *keys))

    def parts(self, found: Any) -> tuple[jax.Array, jax.Array | None, PyTree, PyTree]:
        """Returns the parts of what the function returns, as `call` does."""
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
        return loss, weight, model_state, aux

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
    """Returns the weight, which must not depend on the parameters: its derivative is an error.

    The sum of all weights is known only after the last micro-batch, so gradients can't include its derivative.
    """
    return weight


def _constant_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        expected, got = "a weight that doesn't depend on the parameters", "one that does"
        raise wrong(OP, "loss_fn", expected, got, "return (sum, jax.lax.stop_gradient(weight))")
    return primals[0], tangents[0]


_constant.defjvp(_constant_jvp, symbolic_zeros=True)


def _split(x: jax.Array, d: int, parts: int) -> jax.Array:
    """Returns [parts, ...]: the array, split into equal parts along dimension `d`."""
    if x.shape[d] % parts:
        expected = f"batches that every rank can split into {parts}"
        raise wrong(OP, "accumulate", expected, f"{spell_array(x)} on a rank")
    return jnp.moveaxis(x.reshape(*x.shape[:d], parts, x.shape[d] // parts, *x.shape[d + 1 :]), d, 0)


Arguments = tuple[list[Any], dict[str, Any]]  # those by position, and those by keyword


def call(loss: Loss, given: Arguments, net: Transport) -> tuple[Any, tuple[Any, dict[int, Any]]]:
    """Calls a loss function with arguments of any number.

    Returns (loss or (sum, weight), (aux, the leaves of its arguments that it has changed)).
    """
    before = jax.tree_util.tree_flatten_with_path(given)
    value, weight, _, aux = loss.parts(loss.function(*given[0], **given[1]))
    extras = aux, changes(loss.op, before, given)
    return own(loss.op, "loss_fn", net.names, value) if weight is None else vary((value, weight), net.names), extras


def differentiate(
    loss: Loss, arguments: Callable[[list[Any]], Arguments], params: list[Any], net: Transport
) -> tuple[jax.Array, list[Any], tuple[PyTree, dict[int, Any]], tuple[jax.Array, jax.Array] | None]:
    """Returns (the value of all ranks, the rank's gradients, what else the loss returns, the weights or None).

    `arguments` makes the arguments of the loss from the parameters. The weights are the rank's and the mean of all.
    """
    of_params, given = lambda params: call(loss, arguments(params), net), vary(params, net.names)
    with without_constraints(loss.op, "loss_fn", net.names):
        if not loss.weighted:
            (value, extras), grads = jax.value_and_grad(of_params, has_aux=True)(given)
            return plain_reduce(loss.op, value, net, mean=True), grads, extras, None
        (total, weight), back, extras = jax.vjp(of_params, given, has_aux=True)
        # Rank r of n returns (s_r, w_r). The value is S / W, with the means S and W of all s_r and w_r. Its
        # differential is the mean over r of ds_r / W - S / W^2 dw_r, so a rank's gradients are its term.
        mean, mean_weight = plain_reduce(loss.op, (total, weight), net, mean=True)
        value = mean / mean_weight
        (grads,) = back(vary((1 / mean_weight, -value / mean_weight), net.names))
    return value, grads, extras, (weight, mean_weight)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Gradient:
    """The gradients of one rank for the parameters that are not skipped."""

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
        of_trained = lambda trained, given: loss(join(trained, frozen), given)
        key = None if key is None else jax.random.fold_in(key, net.rank)
        given = Given(self.model_state.of_rank(model_state, net), batch, key)
        with without_constraints(OP, "loss_fn", net.names):
            found, renewed = self._find(of_trained, trained, given)
        if self.early:
            found = found._replace(loss=after(found.grads, found.loss))
        grads, value, aux = self._of_all(found, net)
        model_state = self.model_state.of_all(model_state, found.model_state, renewed, net)
        # An exchange that waits for the loss waits for the other means, too.
        return grads, after((aux["shared"], model_state), value), model_state, aux

    def _find(self, loss: Callable[[Params, Given], Any], params: Params, given: Given) -> tuple[OfRank, list[bool]]:
        """Returns (the rank's results, averaged over micro-batches; for each leaf of the model state if it is renewed).

        Each micro-batch gets another key, and the model state that the one before returned. Gradients are added up in
        at least float32.
        """
        differentiate, outputs, number = jax.value_and_grad(loss, has_aux=True), self.outputs, self.accumulate
        leaves, tree = jax.tree_util.tree_flatten(given.batch)
        renewed: list[bool] = []

        def of_part(given: Given) -> OfRank:
            nonlocal renewed
            (value, (weight, new, aux)), grads = differentiate(params, given)
            new, renewed = as_model_state(given.model_state, new)
            again = lambda leaves: loss(params, given._replace(batch=tree.unflatten(leaves)))[1][2]
            batch = list(zip(jax.tree_util.tree_leaves(given.batch), self.dims))
            found = [] if aux is None else outputs.learn(aux, again, batch)
            found = found if weight is None else outputs.weighted(found, weight)
            return OfRank(grads, jnp.asarray(value), weight, model_state=new, aux=found)

        if number == 1:
            return of_part(given), renewed
        split = [x if d is None else _split(x, d, number) for x, d in zip(leaves, self.dims)]

        def add(total: tuple[PyTree, PyTree], i: jax.Array) -> tuple[tuple[PyTree, PyTree], tuple[Any, ...]]:
            sums, state = total
            batch = tree.unflatten(x if d is None else x[i] for x, d in zip(split, self.dims))
            key = None if given.key is None else jax.random.fold_in(given.key, i)
            found = of_part(Given(state, batch, key))
            sums = jax.tree_util.tree_map(lambda t, x: t + x.astype(t.dtype), sums, found.grads)
            return (sums, found.model_state), (found.loss, found.weight, found.aux)

        zeros = jax.tree_util.tree_map(lambda x: jnp.zeros_like(x, wide(x.dtype)), params)
        (sums, state), (*each, aux) = lax.scan(add, (zeros, given.model_state), jnp.arange(number))
        grads = jax.tree_util.tree_map(lambda x, p: (x / number).astype(p.dtype), sums, params)
        value, weight = (None if x is None else added(x) / number for x in each)
        assert value is not None
        return OfRank(grads, value, weight, model_state=state, aux=outputs.joined(aux, number)), renewed

    def _of_all(self, found: OfRank, net: Transport) -> tuple[PyTree, jax.Array, dict[str, list[jax.Array]]]:
        """Returns (the rank's gradients, the mean loss of all ranks, the outputs of all ranks).

        With weights, all three are divided by the mean of the weights.
        """
        loss, weight, grads = plain_reduce(OP, found.loss, net, mean=True), None, found.grads
        if found.weight is not None:
            weight = plain_reduce(OP, found.weight, net, mean=True)
            loss = loss / weight
            divide = lambda x: (x.astype(wide(x.dtype)) / weight.astype(wide(x.dtype))).astype(x.dtype)
            grads = jax.tree_util.tree_map(divide, grads)
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
    return _programs.ready(program, len(jax.tree_util.tree_leaves(params)))

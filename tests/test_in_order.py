"""Tests calls in the order of an effect, of programs that JAX calls as if they had no effect (`_compat.InOrder`)."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_with
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx import _compat

pytestmark = pytest.mark.short  # JAX's own tokens may change in any version
ORDER = _compat.OrderedOnEachDevice()
turn_p = _compat.Primitive("turn")
turn_p.def_effectful_abstract_eval(lambda x: (x, _compat.effects_in_order(ORDER)))


def lower(ctx, x):
    ctx.set_tokens_out(_compat.mlir.TokenSet({ORDER: ctx.tokens_in.get(ORDER)}))
    return [x]


_compat.mlir.register_lowering(turn_p, lower)


class Waiting:
    """A function on a mesh whose operations have the effect. It ends after `go` is set."""

    def __init__(self, devices):
        self.mesh, self.go = mesh_with(data=devices), threading.Event()
        self.x = jax.device_put(np.ones((4, 400), np.float32), NamedSharding(self.mesh, P("data")))

    def __call__(self, state):
        add = lambda x: turn_p.bind(jax.pure_callback(self.wait, x, x) + 1)
        return {"x": jax.shard_map(add, mesh=self.mesh, in_specs=P("data"), out_specs=P("data"))(state["x"])}

    def wait(self, x):
        assert self.go.wait(60)
        return np.asarray(x)


@jax.jit
def slowly(n, x):
    """Returns x. On CPUs, a call with an array that isn't ready returns before its program begins."""
    return jax.lax.fori_loop(0, n, lambda _, x: x @ jnp.eye(400), x)


def steps_of_half_a_second(x):
    n, seconds = 1, 0.0
    while seconds < 0.5:
        n, began = 2 * n, time.monotonic()
        slowly(n, x).block_until_ready()
        seconds = time.monotonic() - began
    return n


@pytest.mark.parametrize("devices", [1, 4])
def test_calls_wait_for_one_another(devices):
    function = Waiting(devices)
    in_order, jitted = _compat.InOrder(function, ORDER, function.mesh, [0]), jax.jit(function)
    function.go.set()
    n, last = steps_of_half_a_second(function.x), in_order(in_order({"x": function.x + 0}))
    size = in_order._jitted._cache_size()
    jax.block_until_ready(last)  # before `go` is cleared
    for _ in range(2):
        function.go.clear()
        given = {"x": slowly(n, last["x"])}
        last = in_order(given)
        assert given["x"].is_deleted() and not last["x"].is_ready()
        # The next call waits for this one, and so do other programs with the effect, and jax.effects_barrier.
        assert not in_order._place().is_ready() and not _compat.runtime_tokens.current_tokens[ORDER]._buf.is_ready()
        function.go.set()
        jax.effects_barrier()
    last = in_order(last)
    place = in_order._place()
    assert in_order._place() is place
    last = jitted(last)
    assert in_order._place() is not place
    np.testing.assert_array_equal(in_order(last)["x"], function.x + 7)
    assert in_order._jitted._cache_size() == size


def test_other_effects_stay(capfd):
    function = Waiting(1)
    function.go.set()

    def printing(x):
        jax.debug.print("{}", x[0, 0], ordered=True)
        return function({"x": x})["x"]

    in_order = _compat.InOrder(printing, ORDER, function.mesh, [])
    in_order(in_order(function.x))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["1.0", "2.0"]


def test_names_references_and_calls_without_jit():
    mesh = mesh_with(data=2)

    def double(numbers):
        total = jax.new_ref(jnp.zeros(3))
        total[...] += numbers
        return turn_p.bind(total[...] * 2)

    in_order = _compat.InOrder(double, ORDER, mesh, [])
    np.testing.assert_array_equal(in_order(np.ones(3, np.float32)), [2, 2, 2])
    text = in_order.lower(np.ones(3, np.float32)).as_text(debug_info=True)
    assert "@jit_double" in text and "numbers" in text

    add = _compat.InOrder(lambda x: x + 1, ORDER, mesh, [])
    with jax.disable_jit():
        np.testing.assert_array_equal(add(np.ones(3, np.float32)), [2, 2, 2])

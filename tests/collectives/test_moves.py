"""Tests permutations, broadcasts and ragged exchanges: trees, bytes, noise and what a carry keeps.

tests/ranks.py has the first two among all collectives, whose values and derivatives are compared with those of lax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from helpers import as_bits, normal, sent
from jax import lax
from ranks import EXACT, mesh, on_ranks, pbroadcast, ring, whole_numbers

import jaxcgx as cgx

RING = ring(4)
PERMS = {"ring": RING, "pipeline": RING[:3], "swap": [(1, 3), (3, 1)], "own": [(2, 2), (0, 1)], "nobody": [], "from": 3}
TREE = {
    "w": whole_numbers((4, 8, 12)),
    "h": whole_numbers((4, 300), 1, jnp.bfloat16),
    "n": jnp.arange(20, dtype=jnp.int32).reshape(4, 5),
    "empty": jnp.zeros((4, 0)),
}


def move(perm, plan=EXACT, axis="a", **options):
    """Returns a permutation or, of the number of a rank, a broadcast."""
    if isinstance(perm, int):
        return lambda x: cgx.compressed_pbroadcast(x, axis, perm, plan, **options)
    return lambda x: cgx.compressed_ppermute(x, axis, perm, plan, **options)


def plain(perm):
    of_leaf = lambda x: pbroadcast(x, "a", perm) if isinstance(perm, int) else lax.ppermute(x, "a", perm)
    return lambda tree: jax.tree.map(of_leaf, tree)


def same(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("plan", [EXACT, cgx.Raw(), cgx.Plan(EXACT, min_size=100)], ids=["exact", "raw", "guarded"])
def test_trees(plan):
    each = lambda run: lambda tree: {name: run(perm)(tree) for name, perm in PERMS.items()}
    runs = each(functools.partial(move, plan=plan)), each(plain)
    same(*(on_ranks(f, mesh(4), check_vma=plan == EXACT)(TREE) for f in runs))


@pytest.mark.parametrize("check_vma", [True, False])
def test_raw_leaves_of_a_broadcast_have_all_bits_and_the_gradient_of_compressed_ones(check_vma):
    x = jnp.tile(jnp.array([-0.0, 1e-40, -1e-45, 3]), (4, 1))
    run = on_ranks(move(1, cgx.Raw(), to="invarying"), mesh(4), check_vma)
    np.testing.assert_array_equal(as_bits(run(x)), as_bits(x))
    for codec in cgx.Raw(), EXACT:
        loss = lambda x, codec=codec: (move(1, codec, to="invarying")(x) * 2).sum()
        np.testing.assert_array_equal(on_ranks(jax.grad(loss), mesh(4), check_vma)(x), jnp.zeros_like(x).at[1].set(2))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_any_number_of_ranks(ranks):
    x, perms = whole_numbers((ranks, 33), ranks), (ring(ranks), ranks - 1)
    same(*(on_ranks(lambda x, run=run: [run(perm)(x) for perm in perms], mesh(ranks))(x) for run in (move, plain)))


def test_ranks_of_several_axes_count_in_the_order_of_the_names():
    x = whole_numbers((2, 3, 7))
    for axes in ("a", "b"), ("b", "a"):
        moved, cast = (on_ranks(move(perm, axis=axes), mesh(2, 3))(x) for perm in (ring(6), 4))
        flat = (x if axes == ("a", "b") else jnp.swapaxes(x, 0, 1)).reshape(6, 7)
        rolled = jnp.roll(flat, 1, 0).reshape(2, 3, 7) if axes == ("a", "b") else jnp.roll(flat, 1, 0).reshape(3, 2, 7)
        np.testing.assert_array_equal(moved, rolled if axes == ("a", "b") else jnp.swapaxes(rolled, 0, 1))
        np.testing.assert_array_equal(cast, jnp.broadcast_to(flat[4], x.shape))


@pytest.mark.parametrize("codec", [cgx.MaxMin(4), cgx.AbsMax(8), cgx.Micro("mxfp4"), cgx.TopK(0.1), cgx.Lossless()])
def test_a_receiver_decodes_what_a_sender_encodes(codec):
    x = normal((4, 5000))
    decoded = jax.vmap(lambda x: cgx.roundtrip(x, codec))(x)
    moved, cast = on_ranks(lambda x: (move(RING, codec)(x), move(2, codec)(x)), mesh(4))(x)
    np.testing.assert_array_equal(moved, jnp.roll(decoded, 1, 0))
    np.testing.assert_array_equal(cast, jnp.broadcast_to(decoded[2], x.shape))


def test_what_is_sent():
    codec, x = cgx.MaxMin(4), normal((4, 5120))
    wire = codec.wire_bytes((5120,), "float32")
    broadcast = dict.fromkeys(("all-to-all", "all-gather"), wire / 4 * 3)
    for perm, expected in (RING, {"collective-permute": wire}), (1, broadcast):
        run = on_ranks(move(perm, codec), mesh(4))
        back = on_ranks(jax.grad(lambda x, perm=perm: move(perm, codec)(x).sum()), mesh(4))
        assert sent(run.lower(x).compile().as_text()) == {(operation, "u8") for operation in expected}
        assert {dtype for _, dtype in sent(back.lower(x).compile().as_text())} == {"u8"}
        found = cgx.explain(run, x, show=False).collectives
        assert {c.operation: c.bytes for c in found} == expected
        assert {c.function for c in found} == {"compressed_ppermute" if perm is RING else "compressed_pbroadcast"}
        assert {c.codec for c in found} == {"MaxMin(bits=4)"} and found[0].raw_bytes > 7 * found[0].bytes


def test_the_transpose_has_its_own_codec():
    x, back = normal((4, 4096)), cgx.MaxMin(8)
    run = move(RING, cgx.MaxMin(4, rounding="stochastic"), key=jax.random.key(0), backward_plan=back)
    expected = jnp.roll(jax.vmap(lambda x: cgx.roundtrip(x, back))(x), -1, 0)
    np.testing.assert_array_equal(on_ranks(lambda x: jax.vjp(run, x)[1](x)[0], mesh(4))(x), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_differences(check_vma):
    """A receiver has exactly what its sender expects, and the error is that of the last difference."""
    codec, x = cgx.MaxMin(4, 64), {"w": normal((4, 500)), "h": normal((4, 64), 1, jnp.bfloat16), "n": TREE["n"]}
    x["few"], plan = normal((4, 8), 2), cgx.Plan(codec, min_size=40, skip_1d=False)  # raw there, compressed back
    slow = [jax.tree.map(lambda y, t=t: y if y.dtype == jnp.int32 else y * (1 + t / 50), x) for t in range(3)]
    run = on_ranks(lambda x, carry: move(RING[:3], plan, carry=carry, backward_plan=codec)(x), mesh(4), check_vma)
    carry = jax.tree.map(jnp.zeros_like, cgx.init_carry(plan, x, ends=True))
    for t, tree in enumerate(slow):
        before, (moved, carry) = carry, run(tree, carry)
        for name in ("w", "h"):
            sent, received = carry.sent[name], carry.received[name]
            np.testing.assert_array_equal(received[1:], sent[:3])
            np.testing.assert_array_equal(moved[name], received.astype(moved[name].dtype))
            assert not received[0].any() and not sent[3].any()
            decoded = jax.vmap(lambda x: cgx.roundtrip(x, codec))(tree[name].astype(jnp.float32) - before.sent[name])
            np.testing.assert_array_equal(sent[:3], (before.sent[name] + decoded)[:3])
        assert np.abs(moved["w"][1:] - tree["w"][:3]).max() < (0.3 if t == 0 else 0.02)
        for name in ("n", "few"):
            assert carry.sent[name] is None and (moved[name][1:] == tree[name][:3]).all()
    # What isn't finite stays in one step.
    moved, broken = run(jax.tree.map(lambda y: y * jnp.nan if y.dtype == jnp.float32 else y, x), carry)
    assert np.isnan(moved["w"][1:]).all()
    same((broken.sent["w"], broken.received["w"]), (carry.sent["w"], carry.received["w"]))


def test_differences_in_a_scan_that_is_differentiated():
    """The cotangents are those without a carry, because what was sent and received is constant."""
    codec, weights = cgx.MaxMin(4), normal((4, 3, 64), 1)

    def loss(x, fed):
        def step(state, w):
            x, carry = state
            moved = cgx.compressed_ppermute(x, "a", RING, codec, backward_plan=EXACT, carry=carry)
            x, carry = moved if fed else (moved, None)
            return (x * w, carry), None

        zeros = lax.pcast(jnp.zeros(64), "a", to="varying")
        carry = cgx.Carry(sent=zeros, received=zeros) if fed else None
        (x, carry), _ = lax.scan(jax.checkpoint(step), (x, carry), weights[0])
        return x.sum()

    gradient = lambda fed: on_ranks(jax.grad(functools.partial(loss, fed=fed)), mesh(4))(normal((4, 64)))
    got, expected = gradient(True), gradient(False)
    np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.02)


def ragged(ranks, slices, seed=0):
    """Returns the arguments of ragged_all_to_all on all ranks, and what lax's documentation says that they give."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 4, (ranks, ranks, slices))  # [sender, receiver, slice]
    operand = random.integers(-4, 5, (ranks, 4 * ranks * slices, 6)).astype(np.float32)
    output = random.integers(-4, 5, (ranks, 4 * ranks * slices + 3, 6)).astype(np.float32)
    arriving = sizes.swapaxes(0, 1)  # [receiver, sender, slice]
    # Each slice is one row behind the one before it.
    behind = lambda sizes: np.cumsum(sizes.reshape(ranks, -1) + 1, 1).reshape(sizes.shape) - sizes
    starts, places = behind(sizes), (behind(arriving) + 1).swapaxes(0, 1)
    expected = output.copy()
    for r, s, i in np.ndindex(sizes.shape):
        expected[s, places[r, s, i] :][: sizes[r, s, i]] = operand[r, starts[r, s, i] :][: sizes[r, s, i]]
    flat = lambda x: np.ascontiguousarray(x, np.int32).reshape(ranks, -1)
    return (operand, output, flat(starts), flat(sizes), flat(places), flat(arriving)), expected


def experts(*args, plan=EXACT, **options):
    return cgx.compressed_ragged_all_to_all(*args, axis_name="a", plan=plan, **options)


@pytest.mark.parametrize(
    ("ranks", "slices", "plan"), [(1, 1, EXACT), (3, 2, EXACT), (8, 1, EXACT), (2, 3, cgx.Raw()), (5, 1, cgx.Raw())]
)
def test_ragged(ranks, slices, plan):
    """Values are those of lax's documentation. The transpose is the adjoint: both products below are the same."""
    args, expected = ragged(ranks, slices)
    weights = np.random.default_rng(1).integers(-3, 4, expected.shape).astype(np.float32)

    def run(operand, output, *rest):
        *slices, weights = rest
        move = lambda operand, output: experts(operand, output, *slices, plan=plan)
        result, back = jax.vjp(jax.checkpoint(move), operand, output)
        both = jax.vmap(move)(jnp.stack([operand, 2 * operand]), jnp.stack([output, 2 * output]))
        once = lax.scan(lambda c, x: (c, move(*x)), 0, (operand[None], output[None]))[1][0]
        return result, back(weights), both, once

    found = on_ranks(run, mesh(ranks), plan == EXACT)(*args, weights)
    result, (to_operand, to_output), both, once = jax.tree.map(np.asarray, found)
    for got in result, both[:, 0], both[:, 1] / 2, once:
        np.testing.assert_array_equal(got, expected)
    assert (to_operand * args[0]).sum() + (to_output * args[1]).sum() == (weights * expected).sum()
    assert (to_output == weights * (to_output != 0)).all() and (to_operand[:, 0] == 0).all()  # nobody sends row 0
    np.testing.assert_array_equal(jax.vmap(functools.partial(experts, plan=plan), axis_name="a")(*args), expected)


def test_ragged_capacity():
    """It decides the bytes. The result of a rank that should get more is NaN."""
    args, expected = ragged(4, 2, seed=2)
    most = int(args[5].reshape(4, 4, 2).sum(2).max())
    run = lambda capacity, codec=EXACT: on_ranks(functools.partial(experts, plan=codec, capacity=capacity), mesh(4))
    np.testing.assert_array_equal(run(most)(*args), expected)
    too_many = (args[5].reshape(4, 4, 2).sum(2) == most).any(1)[:, None, None]
    assert too_many.any() and not too_many.all()
    np.testing.assert_array_equal(run(most - 1)(*args), np.where(too_many, np.nan, expected))
    codec = cgx.MaxMin(4)
    program = run(most, codec).lower(*args).compile()
    assert sent(program.as_text()) == {("all-to-all", "u8"), ("all-to-all", "s32")}
    (found,) = (c for c in cgx.explain(program, show=False).collectives if c.dtype == "uint8")
    assert (found.function, found.bytes) == ("compressed_ragged_all_to_all", 3 * codec.wire_bytes((most, 6), "float32"))


@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_ragged_integers(dtype):
    (operand, output, *slices), expected = ragged(4, 1)
    args = np.abs(operand).astype(dtype), np.abs(output).astype(dtype), *slices
    same(on_ranks(functools.partial(experts, plan=cgx.MaxMin(4)), mesh(4))(*args), np.abs(expected).astype(dtype))


@pytest.mark.parametrize("capacity", [None, 3])
def test_ragged_without_rows(capacity):
    args, _ = ragged(4, 1)
    args = args[0][:, :0], args[1], *(np.zeros_like(each) for each in args[2:])
    run = jax.value_and_grad(lambda *args: experts(*args, capacity=capacity).sum(), (0, 1))
    value, grads = on_ranks(run, mesh(4))(*args)
    same((value, *grads), (args[1].sum((1, 2)), args[0], np.ones_like(args[1])))


def test_ragged_padding_is_zero_and_a_key_without_use_is_warned_of_once():
    """No bucket of sent rows has the row at offset 0, which padding takes from the operand, or the last one."""
    (operand, output, *slices), expected = ragged(4, 1)
    operand[:, 0] = operand[:, -1] = 1e6
    with pytest.warns(UserWarning, match="key") as found:
        run = on_ranks(functools.partial(experts, plan=cgx.AbsMax(8, 4096), key=jax.random.key(0)), mesh(4))
        np.testing.assert_allclose(run(operand, output, *slices), expected, atol=0.05)
    assert len(found) == 1


def call_ragged(number, wrong, operand=lambda x: x, **options):
    args = list(ragged(4, 2)[0])
    args[0] = operand(args[0])
    args[number] = wrong(args[number])
    return lambda: on_ranks(functools.partial(experts, **options), mesh(4))(*args)


call = lambda perm=RING, plan=EXACT, **options: lambda: on_ranks(move(perm, plan, **options), mesh(4))(TREE["w"])
ERRORS = {
    "compressed_ppermute": [
        (call([(0, 4)]), ValueError, "perm", "[(0, 4)]", "pairs"),
        (call([(-1, 0)]), ValueError, "perm", "[(-1, 0)]"),
        (call([(0, 1), (0, 2)]), ValueError, "perm", "[(0, 1), (0, 2)]", "sender"),
        (call([(0, 1), (2, 1)]), ValueError, "perm", "[(0, 1), (2, 1)]", "receiver"),
        (call([0, 1]), TypeError, "perm", "[0, 1]"),
        (call([(0.5, 1)]), TypeError, "perm", "[(0.5, 1)]"),
        (call("next"), TypeError, "perm", "'next'"),
        (call(plan={"a": EXACT}), ValueError, "plan", "{'a': Cast("),
        (call(backward_plan={"a": EXACT}), ValueError, "backward_plan", "{'a': Cast("),
        (call(plan=cgx.PowerSGD(2)), ValueError, "plan", "PowerSGD("),
        (call(plan=cgx.Skip()), ValueError, "plan", "Skip()"),
        (call(carry=cgx.Carry(residuals=TREE["w"][0])), ValueError, "carry.residuals", "a tree", "None sums"),
        (call(carry=cgx.Carry(sent=TREE["w"][0])), ValueError, "carry", "one of them", "both jaxcgx.init_carry"),
    ],
    "compressed_pbroadcast": [
        (call(4), ValueError, "source", "4"),
        (call(1, to="all"), ValueError, "to", "'all'"),
        (call(1, {"a": EXACT}), ValueError, "plan", "{'a': Cast("),
    ],
    "compressed_ragged_all_to_all": [
        (call_ragged(1, lambda x: x[..., :5]), ValueError, "output", "float32[35, 5]", "rows"),
        (call_ragged(2, lambda x: x[:, :7]), ValueError, "input_offsets", "int32[7]", "integers"),
        (call_ragged(5, lambda x: x.astype(np.float32)), ValueError, "recv_sizes", "float32[8]", "integers"),
        (call_ragged(0, lambda x: x, capacity=0), ValueError, "capacity", "0"),
        (call_ragged(1, lambda x: x[..., 0, 0], operand=lambda x: x[..., 0]), ValueError, "output", "float32[]"),
        (call_ragged(0, lambda x: {"w": x}), TypeError, "operand", "{'w'"),
        (call_ragged(0, lambda x: x, plan=cgx.PowerSGD(2)), ValueError, "plan", "PowerSGD("),
        (call_ragged(1, np.int32, operand=np.int32, capacity=31), ValueError, "capacity", "31", "32 NaN"),
    ],
}
test_errors = table(ERRORS)

"""Tests the operations under every transformation that a training step may use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CODECS, KEY, Truncate, assert_same_bytes, assert_trees, custom_calls, each_codec, native_key, normal
from jax import lax
from jax.sharding import PartitionSpec as P
from training import mesh_of

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

NOISY = cgx.MaxMin(8, 33, "stochastic"), cgx.Cast("bfloat16", "stochastic")
SOME = [cgx.MaxMin(4, 64), cgx.ByteGrad(), cgx.Raw(), *NOISY]


@pytest.mark.parametrize("codec", **each_codec(SOME))
def test_vmap_is_one_call_and_the_same_as_a_loop(codec):
    x, keys = normal((5, 40)), jax.random.split(jax.random.key(1), 5)
    f, args = lambda x, *key: cgx.roundtrip(x, codec, *key), (x, *[keys] * codec.stochastic)
    assert custom_calls(jax.vmap(f), *args) == dict(encode=1, decode=1, reduce=0)
    looped = jnp.stack([f(*(a[i] for a in args)) for i in range(5)])
    assert_same_bytes(jax.vmap(f)(*args), looped)
    assert_same_bytes(jax.vmap(f, in_axes=(1, 0)[: len(args)], out_axes=1)(x.T, *args[1:]), looped.T)


def test_vmap_of_feedback_and_reduce():
    codec = cgx.MaxMin(3, 32, "stochastic")
    layout = Layout(codec, ((40,), (9,)), (jnp.float32, jnp.bfloat16), chunks=2)
    a, b = normal((4, 40)), normal((4, 9), dtype=jnp.bfloat16)
    lost = [normal((4, 40), 1), normal((9,), 2)]  # the second is not mapped
    keys = jnp.stack([KEY + i for i in range(4)])

    def step(a, b, r, key, chunk):
        payload, new = ops.encode_fed(layout, [a, b], [r, lost[1]], key)
        payloads = jnp.stack([payload[1], payload[1]])
        mine = ops.reduce_encoded(layout, payloads, chunk=1, own=ops.Own([a, b], 1), divisor=2, key=key)
        payloads = jnp.stack([payload[chunk]] * 2)
        both = ops.reduce_fed(layout, payloads, [r, lost[1]], chunk=chunk, divisor=3, key=key)
        return payload, new, mine, both

    chunks = jnp.array([1, 0, 0, 1])
    got = jax.vmap(step)(a, b, lost[0], keys, chunks)
    one = [step(a[i], b[i], lost[0][i], keys[i], chunks[i]) for i in range(4)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *one)
    assert_trees(assert_same_bytes, got, expected)


@pytest.mark.parametrize("codec", **each_codec(SOME))
def test_roundtrip_is_straight_through(codec):
    x, w, key = normal(100), normal(100, 1), jax.random.key(0) if codec.stochastic else None
    loss = lambda x: (cgx.roundtrip(x, codec, key) * w).sum()
    np.testing.assert_array_equal(jax.grad(loss)(x), w)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), w)
    value, tangent = jax.jvp(lambda x: cgx.roundtrip(x, codec, key), (x,), (w,))
    assert_same_bytes(value, cgx.roundtrip(x, codec, key))
    np.testing.assert_array_equal(tangent, w)
    slopes = jax.vmap(jax.grad(lambda x: cgx.roundtrip(x, codec, key).sum()))(normal((3, 8)))
    np.testing.assert_array_equal(slopes, np.ones((3, 8)))
    hessian = jax.hessian(lambda x: (cgx.roundtrip(x, codec, key) ** 2).sum())(x[:3])
    np.testing.assert_array_equal(hessian, 2 * np.eye(3))


def test_residuals_have_no_tangent():
    x = normal(100)
    layout = Layout.of(cgx.MaxMin(4, 64), [x])
    payload = ops.encode(layout, [x])
    for lossy in (lambda r: ops.encode_fed(layout, [x], [r]), lambda r: ops.reduce_fed(layout, payload, [r])):
        assert (jax.grad(lambda r: lossy(r)[1][0].sum())(jnp.zeros(100)) == 0).all()


def test_reduce_is_linear_in_what_is_raw():
    layout = Layout(cgx.MaxMin(4, 64), ((30,),), (jnp.float32,))
    payloads = jnp.stack([ops.encode(layout, [normal(30, s)])[0] for s in range(3)])
    f = lambda own: ops.reduce(layout, payloads, own=ops.Own([own], 1), divisor=3)[0]
    np.testing.assert_allclose(jax.jacobian(f)(normal(30)), np.eye(30) / 3, rtol=1e-6)
    with_none = jax.grad(lambda x: ops.reduce(layout, payloads + x.astype(jnp.uint8))[0].sum())(jnp.zeros(()))
    assert with_none == 0


@pytest.mark.parametrize("op", ("encode", "reduce"))
def test_donated_residual_is_overwritten_in_place(op):
    codec = cgx.MaxMin(4, 64)
    layout = Layout(codec, ((1000,),), (jnp.float32,), chunks=2)

    def step(x, residual):
        if op == "encode":
            payload, (residual,) = ops.encode_fed(layout, [x], [residual])
        else:
            payload, (residual,) = ops.reduce_fed(layout, x, [residual], chunk=1)
        return payload, residual

    x, residual = normal(1000), normal(1000, 1)
    if op == "reduce":
        x = ops.encode(layout, [x])[1:]
    expected = step(x, residual)
    compiled = jax.jit(step, donate_argnums=1).lower(x, residual).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == residual.nbytes
    assert "copy(" not in compiled.as_text()
    residual = jnp.array(residual)
    address = residual.unsafe_buffer_pointer()
    payload, new = jax.jit(step, donate_argnums=1)(x, residual)
    assert new.unsafe_buffer_pointer() == address and residual.is_deleted()
    assert_same_bytes(payload, expected[0])
    assert_same_bytes(new, expected[1])


def test_not_donated_residual_is_left_alone():
    layout = Layout(cgx.MaxMin(4, 64), ((100,),), (jnp.float32,))
    x, residual = normal(100), normal(100, 1)
    before = np.array(residual)
    payload, _ = ops.encode_fed(layout, [x], [residual])
    ops.reduce_fed(layout, payload, [residual])
    np.testing.assert_array_equal(residual, before)


@pytest.mark.parametrize("codec", **each_codec(SOME))
def test_reduce_leaves_the_residuals_of_other_chunks(codec):
    """They stay the same if buffers are donated or copied, in a scan, and if one array is passed twice."""
    leaves = [normal(500), normal((9, 70), 1)]
    layout, key = Layout.of(codec, leaves, chunks=3), native_key(codec)
    payloads = jnp.stack([ops.encode(layout, leaves, key)] * 2)

    def step(residuals, chunk):
        payload, new = ops.reduce_fed(layout, payloads[:, chunk], residuals, chunk=chunk, divisor=2, key=key)
        return new, payload

    residuals = [normal(x.shape, 3, scale=0.1) for x in leaves]
    alone = []
    for chunk, pieces in enumerate(layout.pieces):
        new, payload = step(residuals, chunk)
        mine = [np.zeros(x.size, bool) for x in leaves]
        for p in pieces:
            mine[p.leaf][p.start : p.start + p.coded + p.raw] = True
        for a, b, m in zip(new, residuals, mine):
            assert_same_bytes(a.reshape(-1)[~m], b.reshape(-1)[~m])
        donated, same = jax.jit(step, donate_argnums=0)([jnp.array(r) for r in residuals], chunk)
        assert_trees(assert_same_bytes, (donated, same), (new, payload))
        alone.append((new, mine, payload))
    together = [sum(np.where(m[i].reshape(r.shape), new[i], 0) for new, m, _ in alone) for i, r in enumerate(residuals)]
    new, stacked = jax.jit(lambda r: lax.scan(step, r, jnp.arange(3)))(residuals)
    assert_trees(np.testing.assert_array_equal, new, together)
    assert_same_bytes(stacked, jnp.stack([payload for _, _, payload in alone]))
    square = Layout.of(codec, leaves[:1] * 2)
    payload = ops.encode(square, leaves[:1] * 2, key)
    _, twice = ops.reduce_fed(square, payload, residuals[:1] * 2, key=key)
    _, apart = ops.reduce_fed(square, payload, [jnp.array(residuals[0]) for _ in "ab"], key=key)
    assert_trees(assert_same_bytes, twice, apart)


@pytest.mark.parametrize("codec", **each_codec([*SOME, cgx.MaxMin(3, 100, skip_incomplete=True), Truncate()]))
@pytest.mark.parametrize("divisor", (1, 3))
def test_nothing_is_lost_twice(codec, divisor):
    """The inputs plus the old residuals of all ranks equal the result times the divisor plus the new residuals."""
    shapes, key = ((300,), (17, 3)), native_key(codec)
    layout = Layout(codec, shapes, (jnp.float32,) * 2, chunks=3)
    given = [[normal(s, 10 * rank + i) for i, s in enumerate(shapes)] for rank in range(3)]
    owed = [[normal(s, 50 * rank + i, scale=0.1) for i, s in enumerate(shapes)] for rank in range(3)]
    payloads, left = zip(*(ops.encode_fed(layout, x, e, key) for x, e in zip(given, owed)))
    payloads = jnp.stack(payloads)
    of_rank = lambda r: ops.reduce_fed(layout, payloads[:, r], left[r], chunk=r, divisor=divisor, key=key)
    sums, left = zip(*map(of_rank, range(3)))
    for i, decoded in enumerate(ops.decode(layout, jnp.stack(sums))):
        total = lambda trees: sum(np.asarray(tree[i], np.float64) for tree in trees)
        kept = total(left) + divisor * np.asarray(decoded, np.float64)
        np.testing.assert_allclose(kept, total(given) + total(owed), atol=2e-6)


@pytest.mark.parametrize("codec", **each_codec([codec for codec in CODECS if codec.native is not None][::6]))
def test_many_leaves_are_one_call_without_copies(codec):
    leaves = [normal((1 + i % 7, 11), i) for i in range(50)]
    layout = Layout.of(codec, leaves, chunks=2)
    key = native_key(codec)

    def step(leaves):
        return ops.decode(layout, ops.encode(layout, leaves, key))

    assert custom_calls(step, leaves) == dict(encode=1, decode=1, reduce=0)
    text = jax.jit(step).lower(leaves).compile().as_text()
    assert "concatenate" not in text and "copy(" not in text
    for a, b in zip(step(leaves), leaves):
        if not codec.stochastic and codec.bucket_size:  # otherwise the leaf's place in the message matters
            assert_same_bytes(a, cgx.roundtrip(b, codec))


def test_no_temporary_larger_than_the_wire():
    layout = Layout(cgx.MaxMin(4), ((1 << 20,),), (jnp.float32,))
    x = normal(1 << 20)
    temporary = lambda f, *args: jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporary(lambda x: ops.encode(layout, [x]), x) == 0
    assert temporary(lambda x: ops.encode_fed(layout, [x], [x]), x) <= layout.chunk_bytes
    payload = ops.encode(layout, [x])
    assert temporary(lambda p: ops.decode(layout, p), payload) <= layout.chunk_bytes
    payloads = jnp.tile(payload, (4, 1))
    assert temporary(lambda p: ops.reduce_encoded(layout, p), payloads) <= layout.chunk_bytes
    assert temporary(lambda p, x: ops.reduce_fed(layout, p, [x]), payloads, x) <= layout.chunk_bytes


# In shard_map, the types say that the bytes of each device differ.
SIXTY = Layout(cgx.MaxMin(4, 64), ((60,),), (jnp.float32,))
VARYING = {
    "encode": lambda x: ops.encode(SIXTY, [x]),
    "decode": lambda x: ops.decode(SIXTY, ops.encode(SIXTY, [x]))[0],
    "feedback": lambda x: ops.encode_fed(SIXTY, [x], [jnp.zeros(60)])[1][0],
    "reduce": lambda x: ops.reduce(SIXTY, jnp.zeros((2, SIXTY.chunk_bytes), jnp.uint8), own=ops.Own([x], 1))[0],
    "reduce with feedback": lambda x: ops.reduce_fed(SIXTY, ops.encode(SIXTY, [x]), [jnp.zeros(60)])[1][0],
}


@pytest.mark.parametrize("f", VARYING.values(), ids=VARYING)
def test_varying_results_may_not_leave_as_replicated(f):
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(f, mesh=mesh_of(4), in_specs=P("data"), out_specs=P()))(normal(240))


def test_invariant_inputs_stay_invariant():
    codec = cgx.MaxMin(4, 64)
    f = jax.shard_map(lambda x: cgx.roundtrip(x, codec), mesh=mesh_of(4), in_specs=P(), out_specs=P())
    assert_same_bytes(jax.jit(f)(normal(60)), cgx.roundtrip(normal(60), codec))


def test_empty_messages():
    layout = Layout(cgx.MaxMin(4), ((0,), (3, 0)), (jnp.float32, jnp.bfloat16))
    leaves = [jnp.zeros(0), jnp.zeros((3, 0), jnp.bfloat16)]
    payload, new = ops.encode_fed(layout, leaves, [jnp.zeros(0), jnp.zeros((3, 0))])
    assert payload.shape == (1, 0) and [n.shape for n in new] == [(0,), (3, 0)]
    assert [x.shape for x in ops.decode(layout, payload)] == [(0,), (3, 0)]
    assert [n.shape for n in ops.reduce_fed(layout, payload, new)[1]] == [(0,), (3, 0)]
    assert cgx.roundtrip(jnp.zeros((2, 0)), cgx.Sign()).shape == (2, 0)
    nothing = Layout(cgx.MaxMin(4), (), (), chunks=3)
    payload = ops.encode(nothing, [])
    assert payload.shape == (3, 0) and ops.encode_fed(nothing, [], [])[1] == [] and ops.decode(nothing, payload) == []
    assert ops.reduce_encoded(nothing, payload).shape == (0,)
    assert ops.reduce_fed(nothing, payload, [])[1] == []
    assert cgx.roundtrip(jnp.float32(2.5), cgx.MaxMin(4)) == 2.5

"""Tests stochastic rounding: unbiased sums, and independent noise for ranks, elements, exchanges and steps."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, planned
from ranks import mesh, on_ranks

import jaxcgx as cgx
from jaxcgx.exchange import trees
from jaxcgx.native import ops
from jaxcgx.native.reference import Reduce
from jaxcgx.plan.overlay import Overlay, Tree

CODEC = cgx.MaxMin(2, 128, rounding="stochastic")


def test_a_key_may_differ_along_other_axes():
    """Then the results differ, too."""

    def body(x):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("b"))
        return cgx.compressed_psum(x, "a", CODEC, key=key)

    got = on_ranks(body, mesh(2, 4))(jnp.broadcast_to(normal((2, 1, 300)), (2, 4, 300)))
    assert (got[0] == got[1]).all() and (got[0, 0] != got[0, 1]).any()


@pytest.fixture
def draws(monkeypatch):
    """Returns (what programs encode with noise: {(key, leaf, chunk): payloads}, the keys that they fold).

    Chunk -1 is all chunks. The key of correlated noise has the offset of the rank.
    """
    found, folded, used = collections.defaultdict(set), set(), [True]
    bind, fold_in, sum_of_tree = ops._bind, jax.random.fold_in, trees._Climb._sum

    def record(ids, keys, chunks, payloads, used):
        assert len(set(ids)) == len(ids)
        keys = keys.reshape(-1, 3).tolist()
        rows = zip(keys, chunks.flat, payloads.reshape(len(keys), -1), used.flat, strict=True)
        for key, chunk, payload, mine in rows:
            for leaf in ids if mine else ():
                found[tuple(key), leaf, int(chunk)].add(payload.tobytes())

    def watch(function, x, *args):
        """Returns x. All ranks together call function(*args), with the axes of the ranks in front."""

        def call(*args):
            function(*map(np.asarray, args))
            return np.zeros(args[0].shape[:-1], x.dtype)

        return x + jax.pure_callback(call, jax.ShapeDtypeStruct((), x.dtype), *args, vmap_method="broadcast_all")

    def watched_bind(primitive, operands, **params):
        results = bind(primitive, operands, **params)
        if getattr(operands, "key", None) is None or "layout" not in params:
            return results
        chunk = operands.where[0] if isinstance(operands, Reduce) else jnp.int32(-1)
        function = functools.partial(record, params["layout"].ids)
        return [watch(function, results[0], operands.key, chunk, results[0], jnp.asarray(used[-1])), *results[1:]]

    def watched_fold(key, data):
        words, add = jax.random.key_data(key), lambda words: folded.update(map(tuple, words.reshape(-1, 2).tolist()))
        return fold_in(jax.random.wrap_key_data(watch(add, words, words), impl="threefry2x32"), data)

    def watched_sum(climb, t, depth, ranks, rows, level):  # all ranks compute the sum, and these ranks use it
        used.append(jnp.isin(climb.net.rank, jnp.asarray(ranks)))
        sum_of_tree(climb, t, depth, ranks=ranks, rows=rows, level=level)
        used.pop()

    monkeypatch.setattr(ops, "_bind", watched_bind)
    monkeypatch.setattr(jax.random, "fold_in", watched_fold)
    monkeypatch.setattr(trees._Climb, "_sum", watched_sum)
    return found, folded


EIGHT, CORRELATED = (cgx.MaxMin(8, 16, rounding) for rounding in ("stochastic", "correlated"))
TOP = cgx.TopK(0.5, EIGHT, pull="top")
CHAIN = Overlay((Tree((-1, 0, 1, 2)),))
ONE, TWO, THREE = {"a": 4}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}


def case(op, axes=ONE, codec=EIGHT, fed=False, back=False, **options):
    """Returns (axes, a function of a rank's numbers): a collective, with its transpose or with feedback."""
    fields = {name: options.pop(name) for name in ("schedule", "leader") if name in options}
    plan = planned(codec if len(axes) == 1 else dict.fromkeys(axes, codec), **fields)

    def run(x, y):
        carry = dict(carry=cgx.Carry(residuals=y)) if fed else {}
        f = lambda tree: getattr(cgx, f"compressed_{op}")(
            tree, tuple(axes), plan=plan, key=jax.random.key(0), **carry, **options
        )
        if not back:
            return f(x)
        results, transpose = jax.vjp(f, x)
        return results, transpose(jnp.cos(results + y.sum()))

    return axes, run


def calls(x, y):
    """Two steps with a message for each leaf. The leaves have the same numbers."""
    mean = cgx.compress_gradients("a", cgx.Plan(EIGHT, min_size=0, fusion_mb=1e-6), axis_size=4)
    state, found = mean.init({"u": x, "v": x}), []
    for _ in range(2):
        grads, state = mean.update({"u": x + len(found), "v": y}, state)
        found.append(grads)
    return found


SLICES = dict(scatter_dimension=0, tiled=True)
CASES = {
    "one_shot": case("psum", schedule="one_shot"),
    "two_shot": case("psum", schedule="two_shot", back=True),
    "ring": case("psum", schedule="ring"),
    "tree": case("psum", schedule=CHAIN),
    "top": case("psum", codec=TOP, schedule="one_shot"),
    "correlated": case("all_to_all", TWO, CORRELATED, split_axis=0, concat_axis=0, tiled=True),
    "rows": case("all_to_all", TWO, back=True, split_axis=0, concat_axis=0, tiled=True),
    "permutation": case("ppermute", back=True, perm=[(0, 1), (1, 2), (2, 0)]),
    "broadcast": case("pbroadcast", back=True, source=1),
    "slices": case("psum_scatter", TWO, back=True, **SLICES),
    "gather and back": case("all_gather", TWO, back=True),
    "two levels and back": case("psum", TWO, back=True),
    "a ring in a node": case("psum", TWO, schedule={"a": "two_shot", "b": "ring"}),
    "correlated levels": case("psum", TWO, CORRELATED),
    "three levels and back": case("psum", THREE, back=True),
    "leaders and back": case("psum", THREE, leader=True, back=True),
    "feedback": case("psum", fed=True, schedule="two_shot"),
    "feedback of slices": case("psum_scatter", fed=True, **SLICES),
    "calls": (ONE, calls),
}


@pytest.mark.parametrize(("axes", "run"), CASES.values(), ids=CASES)
def test_no_two_encodings_of_an_element_share_their_noise(axes, run, draws):
    """Two draws of one key are one encoding on replicas. No key draws noise and makes other keys."""
    for name in reversed(axes):
        run = jax.vmap(run, axis_name=name)
    sizes = tuple(axes.values())
    jax.block_until_ready(jax.jit(run)(normal((*sizes, 12, 8)), normal((*sizes, 12, 8), 1)))
    found, folded = draws
    assert found and all(len(payloads) == 1 for payloads in found.values())
    assert not folded & {key[:2] for key, _, _ in found}
    chunks = collections.defaultdict(set)
    for key, leaf, chunk in found:
        chunks[key, leaf].add(chunk)
    assert all(-1 not in each or len(each) == 1 for each in chunks.values())


def test_the_transpose_of_ranks_of_vmap():
    f = jax.vmap(lambda x: cgx.compressed_psum(x, "a", EIGHT, key=jax.random.key(0)), axis_name="a")
    jax.grad(lambda x: f(x).sum())(normal((4, 12, 8)))

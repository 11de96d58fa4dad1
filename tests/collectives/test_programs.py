"""Tests the compiled programs: bytes on the wire, one exchange per message, and nothing else."""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same_trees, bare, normal, planned
from jax import lax
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx

CODEC = cgx.MaxMin(4)
OPERATIONS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")


def compiled(tree, **fields):
    """Returns the program of a sum over four ranks. `fields` are those of its plan."""
    psum = lambda t: cgx.compressed_psum([x[0] for x in t], "a", planned(CODEC, **fields))
    return jax.jit(jax.shard_map(psum, mesh=mesh(4), in_specs=P("a"), out_specs=P())).lower(tree).compile()


@pytest.mark.parametrize("schedule", ["two_shot", "one_shot"])
def test_many_leaves_are_as_many_exchanges_as_messages(schedule):
    tree = [jnp.zeros((4, 25, 20))] * 300  # 2,000 bytes each, so 65 of them fit into an eighth of a MiB
    once = {"two_shot": {"all-to-all": 1, "all-gather": 1}, "one_shot": {"all-gather": 1}}[schedule]
    for mb, messages in (64, 1), (0.125, 5):
        text = compiled(tree, schedule=schedule, fusion_mb=mb).as_text()
        found = {op: len(re.findall(rf" {op}(?:-start)?\(", text)) for op in OPERATIONS}
        assert {op: n for op, n in found.items() if n} == dict.fromkeys(once, messages)
        # One call encodes all leaves for all ranks.
        assert text.count('custom_call_target="jaxcgx_encode"') == messages


def test_no_copies_of_leaves():
    """Kernels read leaves in place. A program allocates only its results and the bytes that travel."""
    tree = [normal((4, 50_000 + i)) for i in range(20)]
    wire = sum(CODEC.wire_bytes(x[0].shape, x.dtype) for x in tree)
    temporary = compiled(tree, schedule="two_shot").memory_analysis().temp_size_in_bytes
    assert temporary < 3 * wire < sum(x[0].nbytes for x in tree)


@pytest.mark.parametrize("argument", [0, 1], ids=["leaf", "residual"])
def test_a_donated_array_is_overwritten_in_place(argument):
    plan, given = planned(CODEC, schedule="two_shot"), [normal((2, 2**20), seed) for seed in (0, 1)]
    f = lambda x, residuals: cgx.compressed_pmean(x, "a", plan, carry=cgx.Carry(residuals=residuals))
    run = on_ranks(f, mesh(2))
    donating = jax.jit(run, donate_argnums=argument)
    memory, of_a_rank = donating.lower(*given).compile().memory_analysis(), given[0].nbytes // 2
    assert memory.alias_size_in_bytes == of_a_rank > 3 * memory.temp_size_in_bytes
    assert_same_trees(donating(*map(jnp.array, given)), run(*given))


@pytest.mark.parametrize("check_vma", [True, False])
def test_raw_is_the_program_of_lax(check_vma):
    raw = cgx.Raw()
    tree = dict(w=normal((2, 4, 4, 24)), h=normal((2, 4, 4, 8), 0, jnp.bfloat16), n=jnp.ones((2, 4, 4, 8), jnp.int32))
    pairs = [
        (lambda t: cgx.compressed_psum(t, ("a", "b"), raw), lambda t: lax.psum(t, ("a", "b"))),
        (lambda t: cgx.compressed_pmean(t, "a", raw), lambda t: lax.pmean(t, "a")),
        (lambda t: cgx.compressed_pmean(t, "a", cgx.Plan(raw)), lambda t: lax.pmean(t, "a")),
        (lambda t: cgx.compressed_pmean(t, "a", cgx.Plan.from_env(environ={})), lambda t: lax.pmean(t, "a")),
        (
            lambda t: cgx.compressed_psum_scatter(t, "b", raw, scatter_dimension=1, tiled=True),
            lambda t: jax.tree.map(lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True), t),
        ),
        (
            lambda t: cgx.compressed_all_gather(t, ("a", "b"), raw, axis=1),
            lambda t: lax.all_gather(t, ("a", "b"), axis=1),
        ),
        (
            lambda t: cgx.compressed_all_to_all(t, "b", 0, 1, raw, tiled=True),
            lambda t: lax.all_to_all(t, "b", 0, 1, tiled=True),
        ),
        (
            lambda t: jax.grad(lambda w: (cgx.compressed_psum(w, "a", raw) ** 2).sum())(t["w"]),
            lambda t: jax.grad(lambda w: (lax.psum(w, "a") ** 2).sum())(t["w"]),
        ),
    ]
    for pair in pairs:
        ours, plain = (bare(on_ranks(f, mesh(2, 4), check_vma).lower(tree).compile()) for f in pair)
        assert ours == plain

"""Tests that all ranks agree on whether gradients are finite, and the guide's step with flax's DynamicScale."""

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from jax.sharding import PartitionSpec as P
from ranks import mesh, on_ranks

import jaxcgx as cgx


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("bad", [None, np.nan, -np.inf])
def test_all_ranks_get_one_answer(bad, check_vma):
    x = np.ones((4, 3), np.float32)
    x[2, 1] = x[2, 1] if bad is None else bad
    tree = {"x": jnp.asarray(x), "count": jnp.ones((4, 2), jnp.int32)}
    assert (on_ranks(lambda tree: cgx.all_finite(tree, "a"), mesh(4), check_vma)(tree) == (bad is None)).all()
    nothing = lambda x: (cgx.all_finite({}, "a"), cgx.all_finite({"same": jnp.full(3, jnp.nan)}, "a"))
    empty, same = on_ranks(nothing, mesh(4), check_vma)(x)
    assert empty.all() and not same.any()


@pytest.mark.parametrize("overflows", [True, False])
def test_flax_dynamic_scale(overflows):
    scaling = pytest.importorskip("flax.training.dynamic_scale", reason="needs the extra `test`")
    names = pages.given() | dict(plan=cgx.MaxMin(4))
    exec(pages.programs("docs/training")[11], names)
    x, y = names["batch"]
    batch = x.at[5, 0].set(jnp.inf) if overflows else x, y  # of rank 1
    step = jax.shard_map(
        lambda *given: jax.tree.map(lambda x: x[None], names["step"](*given)),
        mesh=pages.make_mesh(),
        in_specs=(P(), P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    params, scale, _ = jax.jit(step)(names["params"], scaling.DynamicScale(scale=8.0), batch)
    assert (scale.scale == (4 if overflows else 8)).all() and (scale.fin_steps == (0 if overflows else 1)).all()
    for name, x in params.items():
        assert (x == x[0]).all() and bool((x[0] == names["params"][name]).all()) == overflows

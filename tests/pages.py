"""The Python programs of README and docs, and the names that their pages leave to the reader.

As a program it is one of two processes that run the pages between processes: `python tests/pages.py PORT RANK PAGE...`.
With names of `VARIABLES` in place of pages, it is one of four that run docs/wan's program with GeoMX's variables.
"""

import ast
import functools
import os
import pathlib
import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
CODE = r"^```python\n((?:(?!^```).)*)^```$"
# What pages take as imported.
IMPORTS = dict(P=P, AxisType=AxisType, NamedSharding=NamedSharding, cgx=cgx, functools=functools, jax=jax, jnp=jnp)
IMPORTS |= dict(lax=lax, np=np, optax=optax, os=os, sys=sys)


def programs(page):
    """The programs of a page, such as "docs/training", in their order."""
    return [textwrap.dedent(match[2]) for match in BLOCK.finditer((ROOT / f"{page}.md").read_text())]


def pairs(text):
    """Returns {title: (program before, program after)} of the sections of a page that begin with two programs."""
    pair = rf"^## ([^\n]+)\n(?:(?!^## ).)*?{CODE}\n{CODE}"
    return {name: (before, after) for name, before, after in re.findall(pair, text, re.DOTALL | re.MULTILINE)}


def new_lines(before, after):
    """Returns the lines of a program that the one before it lacks, if no statement was broken into several."""
    lines = lambda program: {*ast.unparse(ast.parse(program)).splitlines()} - {""}
    return lines(after) - lines(before)


def make_mesh(sizes=(4,), names=("data",)):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: np.prod(sizes)])


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def loss_fn(params, batch):
    x, y = batch
    return ((predict(params, x) - y) ** 2).mean()


def biased_loss(params, batch):
    x, y = batch
    return ((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2).mean()


def given(mesh=None):
    """What pages take as given: imports, a model, its data and a mesh. All new, as programs donate their arguments."""
    x, w, v = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((16, 8), (8, 256), (256, 4))))
    batch = x, jnp.sin(x[:, :4])
    return IMPORTS | dict(
        batch=batch,
        batches=[batch, batch],
        codec=cgx.MaxMin(4),
        key=jax.random.key(9),
        loss_fn=loss_fn,
        mesh=mesh,
        optimizer=optax.sgd(0.1),
        params=dict(w=w, v=0.1 * v),
        plan=cgx.Plan(cgx.MaxMin(4)),
        schedule=optax.constant_schedule(0.1),
    )


def join(port, rank, processes):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, int(rank))


def given_to_all(sizes, axes=("data",)):
    """Returns what pages take as given, on a mesh of all processes."""
    names = given(make_mesh(sizes, axes))
    over_all = NamedSharding(names["mesh"], P(axes))
    split = lambda x: jax.make_array_from_process_local_data(over_all, np.asarray(x))
    names["batch"] = jax.tree.map(split, names["batch"])
    names["batches"] = [names["batch"]] * 2
    return names


def run_pages(*pages):
    """Runs pages on meshes of two data centers, or of ranks, over connections between processes."""
    for page in pages:
        names = given_to_all((2, 1), ("dc", "local")) if page == "docs/wan" else given_to_all((2,))
        start = names["params"]
        for program in programs(page):
            if "scaled_matmul" in program:  # tests/collectives/test_codecs.py runs it
                continue
            if page == "docs/collectives" and "cgx.compressed_" in program:
                for axis in ("data", "node"):
                    if f'"{axis}"' in program:
                        sizes = [1 + (name == axis) for name in ("data", "node", "local")]
                        sum_over(make_mesh(sizes, ("data", "node", "local")), program, given())
            else:
                exec(program, names | dict(params=start))


TSENGINE = {"ENABLE_INTER_TS": "1", "ENABLE_INTRA_TS": "1", "MAX_GREED_RATE_TS": "0.9"}
OVERLAYS = TSENGINE | {"DMLC_NUM_GLOBAL_SERVER": "2", "DMLC_NUM_SERVER": "2"}
DGT = {"ENABLE_DGT": "2", "DMLC_UDP_CHANNEL_NUM": "3", "DMLC_K": "0.8", "ADAPTIVE_K_FLAG": "1"}
VARIABLES = dict(  # of runs of docs/wan's program, with the values of GeoMX's documentation
    dgt=OVERLAYS | DGT | {"ENABLE_P3": "1"},
    channels=DGT | {"ENABLE_DGT": "1", "ENABLE_P3": "1"},
    hfa=OVERLAYS | {"MXNET_KVSTORE_USE_HFA": "1", "MXNET_KVSTORE_HFA_K1": "1", "MXNET_KVSTORE_HFA_K2": "1"},
)


def run_with_variables(*runs):
    """Runs docs/wan's program with GeoMX's variables, in two centers of two. The bias travels raw."""
    names = given_to_all((2, 2), ("dc", "local"))
    (program,) = (each for each in programs("docs/wan") if "from_env" in each)
    params = given()["params"] | dict(b=jnp.zeros(256))
    plain = params
    for _ in names["batches"]:  # every rank has these examples
        plain = jax.tree.map(lambda p, g: p - 0.05 * g, plain, jax.grad(biased_loss)(plain, given()["batch"]))
    for variables in map(VARIABLES.get, runs):
        os.environ |= variables
        exec(program, found := names | dict(params=jax.tree.map(jnp.copy, params), loss_fn=biased_loss))
        for name in variables:
            del os.environ[name]
        bias = np.asarray(found["state"].params["b"])
        np.testing.assert_allclose(bias, plain["b"], atol=0.02 * np.abs(plain["b"]).max())


def sum_over(mesh, program, names):
    """Runs a program that sums gradients, which are the same on all ranks, and checks the sums."""
    grads = names["params"]

    def local(grads):
        found = names | dict(grads=grads, activations=grads, params=grads)
        exec(program, found)
        return {name: found[name] for name in ("sums", "means") if name in found}

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    for name, sums in jax.jit(mapped)(grads).items():
        ranks = 2 if name == "sums" else 1
        for got, whole in zip(jax.tree.leaves(sums), jax.tree.leaves(grads)):
            assert jnp.linalg.norm(got.addressable_data(0) - ranks * whole) < 0.9 * ranks * jnp.linalg.norm(whole)


if __name__ == "__main__":
    port, rank, *what = sys.argv[1:]
    join(port, rank, 4 if what[0] in VARIABLES else 2)
    run_with_variables(*what) if what[0] in VARIABLES else run_pages(*what)
    jax.distributed.shutdown()

"""Tests the CUDA half as far as is possible without a GPU: the lowered calls, and what handlers report to XLA.

`make cuda` runs these tests with a build that has the CUDA half.
"""

import ctypes
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import KEY, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcgx as cgx
from jaxcgx.native import ops, registration
from jaxcgx.native.layout import Layout

pytestmark = pytest.mark.skipif(
    not (registration.MODULE and registration.MODULE.build_info()["cuda"]),
    reason="this build has no CUDA half (`make cuda` tests one that has)",
)

LEAVES = (normal((3, 100)), normal(20_000, dtype=jnp.bfloat16))
LARGE = cgx.MaxMin(4, 10_000)  # buckets that several blocks share


def lower(f, *args, **options):
    return jax.jit(f, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def the_call(text):
    """Returns (target, attributes, operand types, result types) of the only custom call in a lowered program."""
    (found,) = re.findall(r"stablehlo\.custom_call @(\w+)\((.*)\n?", text)
    target, rest = found
    operands, results = re.search(r": \((.*?)\) -> (.*)$", rest).groups()
    types = lambda s: re.findall(r"tensor<([^>]*)>", s)
    return target, rest, types(operands), types(results)


def encode(layout, key=None):
    return lambda leaves: ops.encode(layout, leaves, key)


def test_the_workspace_is_a_hidden_result():
    layout = Layout.of(LARGE, LEAVES)
    target, attributes, operands, results = the_call(lower(encode(layout), LEAVES))
    assert target == "jaxcgx_encode" and operands == ["3x100xf32", "20000xbf16"]
    assert "operand_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<0> : tensor<1xindex>]" in attributes
    # a bucket of the first leaf and two buckets of the second, with two parts each
    assert results == [f"1x{layout.chunk_bytes}xui8", f"{4 * 3 * (8 + 2 * 2)}xui8"]
    assert "result_layouts = [dense<[1, 0]> : tensor<2xindex>, dense<0> : tensor<1xindex>]" in attributes
    assert jax.eval_shape(encode(layout), LEAVES).shape == (1, layout.chunk_bytes)
    text = lower(jax.vmap(encode(layout)), [jnp.stack([x] * 5) for x in LEAVES])
    assert the_call(text)[3] == [f"5x1x{layout.chunk_bytes}xui8", f"{5 * 4 * 3 * (8 + 2 * 2)}xui8"]


@pytest.mark.parametrize(
    ("codec", "floats"),
    [
        (cgx.MaxMin(4, 8192), 0),
        (cgx.MaxMin(4, 8193), 3 * (8 + 2 * 2)),
        (cgx.Sign(8193), 3 * (8 + 2 * 66)),
        (cgx.AbsMax(4, 30_000), 8 + 4 * 2),
        (cgx.ByteGrad(), 8 + 3 * 2),
        (cgx.Raw(), 0),
        (cgx.Cast(), 0),
    ],
)
def test_the_size_of_the_workspace(codec, floats):
    layout = Layout.of(codec, [normal(20_000)])
    size = functools.partial(registration.MODULE.workspace_bytes, layout.attributes | {"batch": 7})
    assert size(payloads=0, encodes=True) == size(payloads=3, encodes=True) == 4 * 7 * floats
    assert size(payloads=1, encodes=False) == 0


def test_the_workspace_of_the_largest_elements():
    """They always need a workspace. For a sum, it is for a chunk, the payloads and the sum."""
    layout = Layout.of(cgx.TopK(0.01), [normal(100_000)], chunks=4)
    payload = jnp.zeros((4, layout.chunk_bytes), jnp.uint8)
    size = functools.partial(registration.MODULE.workspace_bytes, layout.attributes | {"batch": 1})
    for f, args, (payloads, encodes) in (
        (encode(layout), ([normal(100_000)],), (0, True)),
        (functools.partial(ops.decode, layout), (payload,), (1, False)),
        (functools.partial(ops.clear, layout), (payload, [normal(100_000)]), (1, False)),
        (functools.partial(ops.reduce_encoded, layout), (payload,), (4, True)),
    ):
        assert the_call(lower(f, *args))[3][-1] == f"{size(payloads=payloads, encodes=encodes)}xui8"
    assert 4 * 25_000 < size(payloads=4, encodes=True) < 3 * 4 * 25_000
    assert size(payloads=0, encodes=True) < 240_000 and size(payloads=1, encodes=False) < 10_000


def test_the_size_of_an_impossible_workspace_is_refused():
    with pytest.raises(ValueError, match="batch out of range: -1"):
        message = Layout.of(LARGE, LEAVES).attributes | {"batch": -1}
        registration.MODULE.workspace_bytes(message, payloads=0, encodes=True)


@pytest.mark.parametrize("reduces", (False, True))
def test_feedback_overwrites_the_residuals(reduces):
    layout = Layout.of(cgx.MaxMin(4, 10_000, "stochastic"), LEAVES)
    if reduces:
        f, x = lambda p, r: ops.reduce_fed(layout, p, r, key=KEY), jnp.zeros((4, layout.chunk_bytes), jnp.uint8)
        first, payload = [f"4x{layout.chunk_bytes}xui8", "2xi32"], f"{layout.chunk_bytes}xui8"
    else:
        f, x = lambda x, r: ops.encode_fed(layout, x, r, KEY), LEAVES
        first, payload = ["3x100xf32", "20000xbf16"], f"1x{layout.chunk_bytes}xui8"
    text = lower(f, x, [leaf.astype(jnp.float32) for leaf in LEAVES], donate_argnums=1)
    _, attributes, operands, results = the_call(text)
    assert operands == [*first, "3x100xf32", "20000xf32", "3xui32"]
    assert results == [payload, "3x100xf32", "20000xf32", "144xui8"]  # the workspace comes last
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", attributes)
    assert aliases == [("1", "2"), ("2", "3")]


def test_decode():
    layout = Layout.of(LARGE, LEAVES)
    payload = jnp.zeros((1, layout.chunk_bytes), jnp.uint8)
    target, _, operands, results = the_call(lower(functools.partial(ops.decode, layout), payload))
    assert target == "jaxcgx_decode"
    assert operands == [f"1x{layout.chunk_bytes}xui8"] and results == ["3x100xf32", "20000xbf16"]


@pytest.mark.parametrize("encoded", (False, True))
def test_reduce(encoded):
    layout = Layout.of(LARGE, LEAVES)
    payloads = jnp.zeros((4, layout.chunk_bytes), jnp.uint8)
    reduce = ops.reduce_encoded if encoded else ops.reduce
    text = lower(lambda p, x: reduce(layout, p, own=ops.Own(x, 0)), payloads, LEAVES)
    target, _, operands, results = the_call(text)
    assert target == "jaxcgx_reduce" and operands == [f"4x{layout.chunk_bytes}xui8", "2xi32", "3x100xf32", "20000xbf16"]
    assert results == ([f"{layout.chunk_bytes}xui8", "144xui8"] if encoded else ["3x100xf32", "20000xf32"])


@pytest.mark.parametrize("check_vma", (True, False))
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def step(x):
        payloads = jax.lax.all_gather(cgx.encode(x, LARGE), "d")
        return ops.reduce(Layout.of(LARGE, [x]), payloads, divisor=4)[0]

    f = jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)
    text = lower(f, jax.ShapeDtypeStruct((80_000,), jnp.float32))
    assert re.findall(r"@(jaxcgx_\w+)", text) == ["jaxcgx_encode", "jaxcgx_reduce"] and "tensor<96xui8>" in text


def test_xla_is_told_that_the_handlers_may_be_captured_into_graphs():
    """By XLA_FFI_Metadata in xla/ffi/api/c_api.h, which extends the call frame. Those with kernels load them before."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    word = ctypes.c_size_t

    def traits(capsule):
        metadata = (word * 8)(64, 24)  # size, version (size, extension, numbers), traits
        extension = (word * 4)(32, 1, 0, ctypes.addressof(metadata))  # size, "metadata", next, metadata
        frame = (word * 21)(21 * 8, ctypes.addressof(extension))
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(pointer_of(capsule, None))
        assert not handler(ctypes.addressof(frame))
        return metadata[4] & 0xFFFFFFFF

    handlers = registration.MODULE.handlers()
    for_others = "jaxcgx_tcp_", "jaxcgx_exchange"  # they wait for other processes
    waits = {name for name in handlers["CUDA"] if name.startswith(for_others)}
    only_copies = {"jaxcgx_exchange"} | {f"jaxcgx_tcp_exchange{part}" for part in ("", "_begin", "_end")}
    stages = {name: h if name in only_copies else h["execute"] for name, h in handlers["CUDA"].items()}
    assert {name: traits(h) for name, h in stages.items()} == {n: n not in waits for n in stages}
    loads = [h for h in handlers["CUDA"].values() if isinstance(h, dict)]
    assert all(traits(h["initialize"]) == traits(h["execute"]) for h in loads)
    assert not any(traits(h) for h in handlers["cpu"].values())
    own = {"jaxcgx_patch_apply", "jaxcgx_patch_encode"}  # on CPUs, patches are made outside of XLA
    assert handlers["CUDA"].keys() - own == handlers["cpu"].keys() and len(waits) == 6


def test_what_the_build_says():
    cuda = registration.MODULE.build_info()["cuda"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", cuda["toolkit"])
    assert all(re.fullmatch(r"(sm|compute)_\d+[af]?", a) for a in cuda["architectures"])

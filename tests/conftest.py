"""Gives tests eight CPU devices, strict dtypes and hypothesis profiles, and keeps programs in build/programs.

Only `pytest -m gpu` uses GPUs.
"""

import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# "default" has fewer examples of each property than "full", which `make test-full` uses.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("full", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def promotion():
    """The type promotion of users, on which optax and flax rely. That of the tests is strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def keep_programs(first):
    """Keeps compiled programs for all processes of a run, and for the next run of the same sources.

    JAX identifies a program by its operations and XLA's flags and version. These don't depend on what a kernel does: a
    program has only the kernel's name, and calls the current kernel. They also don't depend on how jaxcgx partitions an
    operation or names a scope. So each state of its Python files has its own folder. `first` says whether to remove the
    other folders.
    """
    digest = hashlib.sha256()
    for file in sorted((ROOT / "jaxcgx").rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    programs = ROOT / "build/programs"
    folder = programs / digest.hexdigest()[:16]
    if first:
        for old in set(programs.glob("*")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)
    for name, value in dict(
        jax_compilation_cache_dir=str(folder),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ).items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the processes that tests start


def check_import():
    """Raises an error if tests would import this folder's package where another one is installed.

    `python -m pytest` looks in the current folder first. The package there has no native module.
    """
    installed = importlib.metadata.distribution("jaxcgx").locate_file("jaxcgx/__init__.py")  # not of editable ones
    found = importlib.util.find_spec("jaxcgx").origin
    if installed.exists() and not installed.samefile(found):
        raise pytest.UsageError(
            f"tests would import {found}, but jaxcgx is installed as {installed}: run `python -P -m pytest`, which "
            "imports the installed one, or `make build`, whose .venv has the one of this folder"
        )


def for_gpu(config):
    return bool(re.search(r"(?<!not )\bgpu\b", config.option.markexpr))


def pytest_configure(config):
    check_import()
    # pytest deletes the folders of older runs when it ends. If several processes end at the same time, such as the
    # ranks of mpirun, one deletes what another one is deleting, and pytest 9.2 ends with an error. So each run has its
    # own folder.
    if config.option.basetemp is None:
        config.option.basetemp = tempfile.mkdtemp(prefix="jaxcgx-tests-")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))
    if not for_gpu(config):
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
        keep_programs(first=not {"PYTEST_XDIST_WORKER", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & set(os.environ))


@functools.cache
def why_no_gpu(config):
    if not for_gpu(config):
        return "needs a GPU and a process of its own: pytest -m gpu"
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"JAX sees no GPU ({error})"
    return None


def pytest_collection_modifyitems(items):
    """Runs tests that wait for their own processes first.

    Other tests run meanwhile, and no such test is left for the end.
    """
    items.sort(key=lambda item: item.path.parent.name not in ("mpi", "multiprocess", "transports"))


def pytest_collection_finish():
    """Excludes the objects that live as long as the tests from every garbage collection."""
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (why := why_no_gpu(item.config)):
        pytest.skip(why)


# The reasons for a skip where everything is installed, as in `make test`. There, another one is a failure.
EXPECTED = (
    *("needs a GPU", "needs nvcc", "this build has", "this processor does not run"),
    *("needs 2 ranks", "needs 3 ranks", "needs 4 ranks", "starts mpirun itself", "a matter of programs, not of ranks"),
    *("jax 0.9 can't lower", "jax.grad of a product", "JAX has mutual TLS", "JAX keeps all names"),
    "runs in the full tests",
    *("network namespaces need root", "no network namespaces here", "install iproute2", "malloc is not glibc's"),
)


def refuse_skip(report):
    why = report.longrepr[2].removeprefix("Skipped: ") if report.skipped and isinstance(report.longrepr, tuple) else ""
    if why and os.environ.get("JAXCGX_REQUIRE_TESTS") and not any(words in why for words in EXPECTED):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure in `make test`: {why} (EXPECTED in tests/conftest.py)"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return refuse_skip((yield))


def pytest_report_header():
    import jaxlib

    import jaxcgx
    from jaxcgx.native import registration

    native = registration.MODULE.build_info() if registration.MODULE else "JAXCGX_REFERENCE=1"
    return (
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, jaxcgx from {os.path.dirname(jaxcgx.__file__)}: {native}"
    )

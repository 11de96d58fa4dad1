"""Eight CPU devices in every test, strict dtypes, and the hypothesis profiles. GPUs are for `pytest -m gpu` alone."""

import functools
import os
import re

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def for_gpu(config):
    return bool(re.search(r"(?<!not )\bgpu\b", config.option.markexpr))


def pytest_configure(config):
    if not for_gpu(config):
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes that tests start


@functools.cache
def why_no_gpu(config):
    if not for_gpu(config):
        return "needs a GPU and a process of its own: pytest -m gpu"
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"JAX sees no GPU ({error})"
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (why := why_no_gpu(item.config)):
        pytest.skip(why)


def pytest_report_header():
    import jaxlib

    import jaxcgx
    from jaxcgx.native import registration

    native = registration.MODULE.build_info() if registration.MODULE else "JAXCGX_REFERENCE=1"
    return (
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, jaxcgx from {os.path.dirname(jaxcgx.__file__)}: {native}"
    )

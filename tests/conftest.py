"""Eight CPU devices in every test, strict dtypes, and the hypothesis profiles."""
import os

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header():
    import jaxlib

    import jaxcgx
    from jaxcgx.native import ops

    native = ops._native.build_info() if ops._native else "JAXCGX_REFERENCE=1"
    return f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, jaxcgx from {os.path.dirname(jaxcgx.__file__)}: {native}"

"""Compressed versions of JAX's collectives, and of `jax.value_and_grad`."""

from jaxcgx.collectives.all_gather import compressed_all_gather
from jaxcgx.collectives.all_to_all import compressed_all_to_all
from jaxcgx.collectives.crossing import begin_pmean, end_pmean
from jaxcgx.collectives.finite import all_finite
from jaxcgx.collectives.gradients import local_value_and_grad, sync_in_backward
from jaxcgx.collectives.psum import compressed_pmean, compressed_psum
from jaxcgx.collectives.psum_scatter import compressed_psum_scatter
from jaxcgx.collectives.replicas import check_replicas
from jaxcgx.collectives.state import init_factors
from jaxcgx.collectives.value_and_grad import grad, value_and_grad

__all__ = [
    "all_finite",
    "begin_pmean",
    "check_replicas",
    "compressed_all_gather",
    "compressed_all_to_all",
    "compressed_pmean",
    "compressed_psum",
    "compressed_psum_scatter",
    "end_pmean",
    "grad",
    "init_factors",
    "local_value_and_grad",
    "sync_in_backward",
    "value_and_grad",
]

"""Compressed versions of JAX's collectives, and of `jax.value_and_grad`."""

from jaxcgx.collectives.all_gather import compressed_all_gather
from jaxcgx.collectives.all_to_all import compressed_all_to_all
from jaxcgx.collectives.finite import all_finite
from jaxcgx.collectives.gradients import local_value_and_grad
from jaxcgx.collectives.psum import compressed_pmean, compressed_psum, init_carry
from jaxcgx.collectives.psum_scatter import compressed_psum_scatter
from jaxcgx.collectives.replicas import check_replicas
from jaxcgx.collectives.statistics import gradient_statistics
from jaxcgx.collectives.sync_in_backward import sync_in_backward

__all__ = [
    "all_finite",
    "check_replicas",
    "compressed_all_gather",
    "compressed_all_to_all",
    "compressed_pmean",
    "compressed_psum",
    "compressed_psum_scatter",
    "gradient_statistics",
    "init_carry",
    "local_value_and_grad",
    "sync_in_backward",
]

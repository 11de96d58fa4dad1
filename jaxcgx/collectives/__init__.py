"""Compressed versions of JAX's collectives, and of `jax.value_and_grad`."""

from jaxcgx.collectives.compressed import (
    compressed_all_gather,
    compressed_all_to_all,
    compressed_pmean,
    compressed_psum,
    compressed_psum_scatter,
    init_carry,
)
from jaxcgx.collectives.gradients import local_value_and_grad
from jaxcgx.collectives.replicas import check_replicas
from jaxcgx.collectives.statistics import all_finite, gradient_statistics
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

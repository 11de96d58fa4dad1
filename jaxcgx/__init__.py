"""jaxcgx: compressed gradient exchange for JAX."""

import importlib
import importlib.metadata
import types

from jaxcgx import wan
from jaxcgx.codecs import (
    AbsMax,
    ByteGrad,
    Cast,
    Codec,
    Eden,
    Float8,
    Lossless,
    MaxMin,
    Micro,
    PowerSGD,
    Raw,
    Sampled,
    Sign,
    Skip,
    TopK,
    decode,
    encode,
    roundtrip,
)
from jaxcgx.collectives import (
    all_finite,
    begin_pmean,
    check_replicas,
    compressed_all_gather,
    compressed_all_to_all,
    compressed_pmean,
    compressed_psum,
    compressed_psum_scatter,
    end_pmean,
    grad,
    init_factors,
    local_value_and_grad,
    sync_in_backward,
    value_and_grad,
)
from jaxcgx.native.pages import keep_pages
from jaxcgx.optim import (
    backward_order,
    bsc,
    compress_gradients,
    compressed,
    dgc,
    gather_state,
    make_train_step,
    mpq,
    reshard_state,
    restore_state,
    shard_specs,
    state_specs,
)
from jaxcgx.plan import Plan, Rule, gradient_statistics
from jaxcgx.report.advise import advise
from jaxcgx.report.cluster import Cluster
from jaxcgx.report.explain import explain
from jaxcgx.transports.axes import Tcp
from jaxcgx.transports.network import Network

__all__ = [
    "AbsMax",
    "ByteGrad",
    "Cast",
    "Cluster",
    "Codec",
    "Eden",
    "Float8",
    "Lossless",
    "MaxMin",
    "Micro",
    "Network",
    "Plan",
    "PowerSGD",
    "Raw",
    "Rule",
    "Sampled",
    "Sign",
    "Skip",
    "Tcp",
    "TopK",
    "advise",
    "all_finite",
    "backward_order",
    "begin_pmean",
    "bsc",
    "check_replicas",
    "compress_gradients",
    "compressed",
    "compressed_all_gather",
    "compressed_all_to_all",
    "compressed_pmean",
    "compressed_psum",
    "compressed_psum_scatter",
    "decode",
    "dgc",
    "encode",
    "end_pmean",
    "explain",
    "gather_state",
    "grad",
    "gradient_statistics",
    "init_factors",
    "keep_pages",
    "local_value_and_grad",
    "make_train_step",
    "mpq",
    "reshard_state",
    "restore_state",
    "roundtrip",
    "shard_specs",
    "state_specs",
    "sync_in_backward",
    "value_and_grad",
    "wan",
]


__version__ = importlib.metadata.version("jaxcgx")


def __getattr__(name: str) -> types.ModuleType:
    if name == "mpi":  # imported on first use, because the import starts MPI, which is optional
        return importlib.import_module("jaxcgx.mpi")
    raise AttributeError(f"module 'jaxcgx' has no attribute {name!r}")

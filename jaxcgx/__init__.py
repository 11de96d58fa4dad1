"""jaxcgx: compressed gradient exchange for JAX."""

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

from jaxcgx.native import COMMAND

if TYPE_CHECKING or not COMMAND:  # every command imports what it needs
    from jaxcgx import patch, wan
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
        Quantized,
        Raw,
        Sampled,
        Sign,
        Skip,
        TopK,
        decode,
        encode,
        roundtrip,
    )
    from jaxcgx.collectives.compressed import (
        compressed_all_gather,
        compressed_all_to_all,
        compressed_pbroadcast,
        compressed_pmean,
        compressed_ppermute,
        compressed_psum,
        compressed_psum_scatter,
        compressed_ragged_all_to_all,
        init_carry,
    )
    from jaxcgx.collectives.gradients import local_value_and_grad
    from jaxcgx.collectives.replicas import check_replicas
    from jaxcgx.collectives.statistics import all_finite, gradient_statistics
    from jaxcgx.collectives.sync_in_backward import sync_in_backward
    from jaxcgx.exchange.message import Carry
    from jaxcgx.native.registration import EXPORT_CHECKS, keep_pages
    from jaxcgx.plan import Plan, Rule
    from jaxcgx.report.advise import advise
    from jaxcgx.report.cluster import Cluster
    from jaxcgx.report.explain import explain
    from jaxcgx.report.watch import watch
    from jaxcgx.train.check_loss import check_loss
    from jaxcgx.train.dion import Dion
    from jaxcgx.train.feedback import Feedback, from_env
    from jaxcgx.train.gradient import backward_order
    from jaxcgx.train.loop import make_train_step
    from jaxcgx.train.momentum import Momentum
    from jaxcgx.train.saved import gather_state, reshard_state, restore_state, state_specs
    from jaxcgx.train.sharded import shard_specs
    from jaxcgx.train.sparse import BSC, DGC, MPQ, WarmUp
    from jaxcgx.train.stacks import Stacks
    from jaxcgx.train.state import ExchangeState, Metrics, Priority, Sharding, TrainState
    from jaxcgx.train.transformation import compress_gradients
    from jaxcgx.train.value_and_grad import grad, value_and_grad
    from jaxcgx.transports.axes import Tcp
    from jaxcgx.transports.network import Network

__all__ = [
    "BSC",
    "DGC",
    "EXPORT_CHECKS",
    "MPQ",
    "AbsMax",
    "ByteGrad",
    "Carry",
    "Cast",
    "Cluster",
    "Codec",
    "Dion",
    "Eden",
    "ExchangeState",
    "Feedback",
    "Float8",
    "Lossless",
    "MaxMin",
    "Metrics",
    "Micro",
    "Momentum",
    "Network",
    "Plan",
    "PowerSGD",
    "Priority",
    "Quantized",
    "Raw",
    "Rule",
    "Sampled",
    "Sharding",
    "Sign",
    "Skip",
    "Stacks",
    "Tcp",
    "TopK",
    "TrainState",
    "WarmUp",
    "advise",
    "all_finite",
    "backward_order",
    "check_loss",
    "check_replicas",
    "compress_gradients",
    "compressed_all_gather",
    "compressed_all_to_all",
    "compressed_pbroadcast",
    "compressed_pmean",
    "compressed_ppermute",
    "compressed_psum",
    "compressed_psum_scatter",
    "compressed_ragged_all_to_all",
    "decode",
    "encode",
    "explain",
    "from_env",
    "gather_state",
    "grad",
    "gradient_statistics",
    "init_carry",
    "keep_pages",
    "local_value_and_grad",
    "make_train_step",
    "patch",
    "reshard_state",
    "restore_state",
    "roundtrip",
    "shard_specs",
    "state_specs",
    "sync_in_backward",
    "value_and_grad",
    "wan",
    "watch",
]


__version__ = importlib.metadata.version("jaxcgx")


def __getattr__(name: str) -> Any:
    if name == "mpi":  # imported on first use, because the import starts MPI, which is optional
        return importlib.import_module("jaxcgx.mpi")
    if name in __all__ and COMMAND:  # another program that is called jaxcgx
        vars(sys.modules["jaxcgx.native"])["COMMAND"] = False
        return getattr(importlib.reload(sys.modules[__name__]), name)
    raise AttributeError(f"module 'jaxcgx' has no attribute {name!r}")

"""jaxcgx: compressed gradient exchange for JAX."""

import importlib
import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from jaxcgx.native import COMMAND

if TYPE_CHECKING or not COMMAND:  # every command imports what it needs
    from jaxcgx import patch as patch
    from jaxcgx import wan as wan
    from jaxcgx.codecs import AbsMax as AbsMax
    from jaxcgx.codecs import ByteGrad as ByteGrad
    from jaxcgx.codecs import Cast as Cast
    from jaxcgx.codecs import Codec as Codec
    from jaxcgx.codecs import Eden as Eden
    from jaxcgx.codecs import Float8 as Float8
    from jaxcgx.codecs import Lossless as Lossless
    from jaxcgx.codecs import MaxMin as MaxMin
    from jaxcgx.codecs import Micro as Micro
    from jaxcgx.codecs import PowerSGD as PowerSGD
    from jaxcgx.codecs import Quantized as Quantized
    from jaxcgx.codecs import Raw as Raw
    from jaxcgx.codecs import Sampled as Sampled
    from jaxcgx.codecs import Sign as Sign
    from jaxcgx.codecs import Skip as Skip
    from jaxcgx.codecs import TopK as TopK
    from jaxcgx.codecs import decode as decode
    from jaxcgx.codecs import encode as encode
    from jaxcgx.codecs import roundtrip as roundtrip
    from jaxcgx.collectives.compressed import compressed_all_gather as compressed_all_gather
    from jaxcgx.collectives.compressed import compressed_all_to_all as compressed_all_to_all
    from jaxcgx.collectives.compressed import compressed_pbroadcast as compressed_pbroadcast
    from jaxcgx.collectives.compressed import compressed_pmean as compressed_pmean
    from jaxcgx.collectives.compressed import compressed_ppermute as compressed_ppermute
    from jaxcgx.collectives.compressed import compressed_psum as compressed_psum
    from jaxcgx.collectives.compressed import compressed_psum_scatter as compressed_psum_scatter
    from jaxcgx.collectives.compressed import compressed_ragged_all_to_all as compressed_ragged_all_to_all
    from jaxcgx.collectives.compressed import init_carry as init_carry
    from jaxcgx.collectives.replicas import check_replicas as check_replicas
    from jaxcgx.collectives.statistics import all_finite as all_finite
    from jaxcgx.collectives.statistics import gradient_statistics as gradient_statistics
    from jaxcgx.collectives.sync_in_backward import sync_in_backward as sync_in_backward
    from jaxcgx.exchange.message import Carry as Carry
    from jaxcgx.native.registration import EXPORT_CHECKS as EXPORT_CHECKS
    from jaxcgx.native.registration import keep_pages as keep_pages
    from jaxcgx.plan import Plan as Plan
    from jaxcgx.plan import Rule as Rule
    from jaxcgx.report.advise import advise as advise
    from jaxcgx.report.cluster import Cluster as Cluster
    from jaxcgx.report.explain import explain as explain
    from jaxcgx.report.watch import watch as watch
    from jaxcgx.train.check_loss import check_loss as check_loss
    from jaxcgx.train.dion import Dion as Dion
    from jaxcgx.train.feedback import Feedback as Feedback
    from jaxcgx.train.feedback import from_env as from_env
    from jaxcgx.train.gradient import backward_order as backward_order
    from jaxcgx.train.loop import make_train_step as make_train_step
    from jaxcgx.train.momentum import Momentum as Momentum
    from jaxcgx.train.saved import gather_state as gather_state
    from jaxcgx.train.saved import reshard_state as reshard_state
    from jaxcgx.train.saved import restore_state as restore_state
    from jaxcgx.train.saved import state_specs as state_specs
    from jaxcgx.train.sharded import shard_specs as shard_specs
    from jaxcgx.train.sparse import BSC as BSC
    from jaxcgx.train.sparse import DGC as DGC
    from jaxcgx.train.sparse import MPQ as MPQ
    from jaxcgx.train.sparse import WarmUp as WarmUp
    from jaxcgx.train.stacks import Stacks as Stacks
    from jaxcgx.train.state import ExchangeState as ExchangeState
    from jaxcgx.train.state import Metrics as Metrics
    from jaxcgx.train.state import Priority as Priority
    from jaxcgx.train.state import Sharding as Sharding
    from jaxcgx.train.state import TrainState as TrainState
    from jaxcgx.train.transformation import compress_gradients as compress_gradients
    from jaxcgx.train.value_and_grad import grad as grad
    from jaxcgx.train.value_and_grad import value_and_grad as value_and_grad
    from jaxcgx.transports.axes import Tcp as Tcp
    from jaxcgx.transports.network import Network as Network


__version__ = importlib.metadata.version("jaxcgx")


def __getattr__(name: str) -> Any:
    if name in ("mpi", "patch", "wan"):  # on first use, because importing mpi starts MPI, which is optional
        return importlib.import_module(f"jaxcgx.{name}")
    if COMMAND and importlib.util.find_spec(f"jaxcgx.{name}") is None:  # another program that is called jaxcgx
        vars(sys.modules["jaxcgx.native"])["COMMAND"] = False
        return getattr(importlib.reload(sys.modules[__name__]), name)
    raise AttributeError(f"module 'jaxcgx' has no attribute {name!r}")

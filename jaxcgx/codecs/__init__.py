"""Codecs, one file each. base.py has the contract of a codec."""

from jaxcgx.codecs.absmax import AbsMax
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.bytegrad import ByteGrad
from jaxcgx.codecs.cast import Cast
from jaxcgx.codecs.coding import decode, encode, roundtrip
from jaxcgx.codecs.eden import Eden
from jaxcgx.codecs.float8 import Float8
from jaxcgx.codecs.lossless import Lossless
from jaxcgx.codecs.maxmin import MaxMin
from jaxcgx.codecs.micro import Micro
from jaxcgx.codecs.powersgd import PowerSGD
from jaxcgx.codecs.quantized import Quantized
from jaxcgx.codecs.raw import Raw, Skip
from jaxcgx.codecs.sign import Sign
from jaxcgx.codecs.topk import Sampled, TopK

__all__ = [
    "AbsMax",
    "ByteGrad",
    "Cast",
    "Codec",
    "Eden",
    "Float8",
    "Lossless",
    "MaxMin",
    "Micro",
    "PowerSGD",
    "Quantized",
    "Raw",
    "Sampled",
    "Sign",
    "Skip",
    "TopK",
    "decode",
    "encode",
    "roundtrip",
]

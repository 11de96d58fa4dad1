"""Codecs, one file each. base.py has the contract of a codec."""

from jaxcgx.codecs.absmax import AbsMax as AbsMax
from jaxcgx.codecs.base import Codec as Codec
from jaxcgx.codecs.bytegrad import ByteGrad as ByteGrad
from jaxcgx.codecs.cast import Cast as Cast
from jaxcgx.codecs.coding import decode as decode
from jaxcgx.codecs.coding import encode as encode
from jaxcgx.codecs.coding import roundtrip as roundtrip
from jaxcgx.codecs.eden import Eden as Eden
from jaxcgx.codecs.float8 import Float8 as Float8
from jaxcgx.codecs.lossless import Lossless as Lossless
from jaxcgx.codecs.maxmin import MaxMin as MaxMin
from jaxcgx.codecs.micro import Micro as Micro
from jaxcgx.codecs.powersgd import PowerSGD as PowerSGD
from jaxcgx.codecs.quantized import Quantized as Quantized
from jaxcgx.codecs.raw import Raw as Raw
from jaxcgx.codecs.raw import Skip as Skip
from jaxcgx.codecs.sign import Sign as Sign
from jaxcgx.codecs.topk import Sampled as Sampled
from jaxcgx.codecs.topk import TopK as TopK

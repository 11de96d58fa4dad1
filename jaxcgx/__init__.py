"""jaxcgx: compressed gradient exchange for JAX."""
from jaxcgx.codecs import AbsMax, ByteGrad, Cast, Codec, Float8, MaxMin, Raw, Sign, decode, encode, roundtrip

__all__ = ["AbsMax", "ByteGrad", "Cast", "Codec", "Float8", "MaxMin", "Raw", "Sign", "decode", "encode", "roundtrip"]

"""jaxcgx: compressed gradient exchange for JAX."""
from jaxcgx.codecs import AbsMax, ByteGrad, Cast, Codec, Float8, MaxMin, Raw, Sign, decode, encode, roundtrip
from jaxcgx.collectives import (compressed_all_gather, compressed_all_to_all, compressed_pmean, compressed_psum,
                                compressed_psum_scatter)

__all__ = ["AbsMax", "ByteGrad", "Cast", "Codec", "Float8", "MaxMin", "Raw", "Sign", "compressed_all_gather",
           "compressed_all_to_all", "compressed_pmean", "compressed_psum", "compressed_psum_scatter", "decode", "encode",
           "roundtrip"]

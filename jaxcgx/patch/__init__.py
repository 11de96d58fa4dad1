"""Weights as bit-exact patches: from a trainer to the programs that sample, evaluate or join."""

from jaxcgx.patch.codec import Patch, apply, checksum, encode
from jaxcgx.patch.publisher import Publisher
from jaxcgx.patch.subscriber import Subscriber

__all__ = ["Patch", "Publisher", "Subscriber", "apply", "checksum", "encode"]

"""Weights as bit-exact patches: from a trainer to the programs that sample, evaluate or join."""

from jaxcgx.patch.publisher import Publisher
from jaxcgx.patch.subscriber import Subscriber
from jaxcgx.patch.trees import Patch, apply, checksum, encode

__all__ = ["Patch", "Publisher", "Subscriber", "apply", "checksum", "encode"]

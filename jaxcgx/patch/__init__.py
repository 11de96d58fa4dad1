"""Weights as patches: what changed from one version to the next, bit for bit (docs/patches.md, docs/publishing.md)."""

from jaxcgx.patch.publisher import Publisher
from jaxcgx.patch.subscriber import Subscriber
from jaxcgx.patch.trees import Patch, apply, checksum, encode

__all__ = ["Patch", "Publisher", "Subscriber", "apply", "checksum", "encode"]

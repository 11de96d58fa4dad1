"""Weights as patches: what changed from one version to the next, bit for bit (docs/patches.md)."""

from jaxcgx.patch.trees import Patch, apply, checksum, encode

__all__ = ["Patch", "apply", "checksum", "encode"]

"""Weights as patches: what changed from one version to the next, bit for bit (docs/patches.md, docs/publishing.md)."""

from jaxcgx.patch.publisher import Publisher as Publisher
from jaxcgx.patch.subscriber import Subscriber as Subscriber
from jaxcgx.patch.trees import Patch as Patch
from jaxcgx.patch.trees import apply as apply
from jaxcgx.patch.trees import checksum as checksum
from jaxcgx.patch.trees import encode as encode

"""Weights go from Tunix's trainer to its samplers as patches.

The orchestrator of Tunix syncs weights in rounds, over any `WeightSyncHandler`. Here, the trainer publishes a version
in each round, and every sampler fetches what has changed, from the trainer itself. Written for Tunix's repository of
August 2026 (tunix/experimental/orchestrator). The release 0.1.7 of google-tunix doesn't have this interface yet.

    coordinator = WeightSyncCoordinator(registry, handler=PatchHandler(), ...)
    trainer worker:  patches = PatchSource("trainer.example:7500", lambda: state.params)
    sampler worker:  patches = PatchDestination("sampler-0", like=params)

A worker passes its phases on. The source's two are the trainer's. A sampler stages what `fetch` returns in its
`weight_sync`, and swaps it in its `post_weight_sync`:

    async def weight_sync(self, sync_request=None, **kwargs):
        self.staged = await self.patches.fetch(sync_request)
"""

import asyncio

import jax
from tunix.experimental.orchestrator.weight_sync import (
    TensorMetadata,
    TransferResult,
    WeightSyncHandler,
    WorkUnitId,
    WorkUnitMetadata,
)

import jaxcgx as cgx


class PatchHandler(WeightSyncHandler):
    """The coordinator's side. It moves no bytes, so it only checks that all units of a round have registered."""

    def __init__(self):
        self.units = {}

    def register_work_unit(self, metadata):
        self.units[metadata.unit] = metadata

    def transfer(self, src_units, dst_units, req_id=None, generation=None):
        missing = [unit.job_name for unit in (*src_units, *dst_units) if unit not in self.units]
        if not src_units or not dst_units:
            missing.append("a source and a destination")
        message = f"not registered: {', '.join(missing)}" if missing else ""
        return TransferResult(req_id or "", success=not missing, message=message)


class PatchSource:
    """The trainer's side of a round. `weights()` returns the tree to publish, such as parameters in bfloat16."""

    def __init__(self, address, weights, **options):
        self.address, self.weights = address, weights
        self.publisher = cgx.patch.Publisher(address, **options)

    async def prepare_weight_sync(self, sync_request=None, **kwargs):
        weights = self.weights()
        version = await asyncio.to_thread(self.publisher.publish, weights)
        return [unit("trainer", weights, shards=(f"{self.address}/{version}",))]

    async def release_weight_sync(self, sync_request=None, **kwargs):
        """Subscribers may still come, so the version stays."""


class PatchDestination:
    """A sampler's side. `like` is the tree to fetch, of arrays or jax.ShapeDtypeStructs in the sampler's sharding."""

    def __init__(self, name, like, **options):
        self.name, self.like, self.options, self.subscriber = name, like, options, None

    async def bind_weight_sync(self):
        """The first round connects."""

    async def get_weight_sync_metadata(self):
        return [unit(self.name, self.like)]

    async def fetch(self, sync_request):
        """Returns the weights of a round."""
        address, version = sync_request.source_metadata[0].shards[0].rsplit("/", 1)
        if self.subscriber and int(version) <= self.subscriber.version:  # a trainer that restarts counts from 1 again
            await asyncio.to_thread(self.subscriber.close)
            self.subscriber = None
        if self.subscriber is None:
            self.subscriber = cgx.patch.Subscriber(address, self.like, **self.options)
        return await asyncio.to_thread(self.subscriber.latest, int(version))


def unit(name, tree, shards=()):
    """Returns what Tunix compares before a round: the names, shapes and bytes of all leaves."""
    variables = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        shape = x.shape or (1,)
        ones, order = (1,) * len(shape), tuple(reversed(range(len(shape))))
        name_of = jax.tree_util.keystr(path)
        variables.append(TensorMetadata(name_of, shape, mesh_shape=ones, layout=order, item_size=x.dtype.itemsize))
    return WorkUnitMetadata(WorkUnitId(name), shards=shards, variables=tuple(variables))

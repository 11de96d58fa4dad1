"""What an exchange of gradients must return and keep, in NumPy, for all ranks of one or two axes.

Only the codecs come from jaxcgx. They must draw no noise.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcgx as cgx

UNIT = 512  # codecs without buckets are cut at multiples of this number of elements


@functools.partial(jax.jit, static_argnums=0)
def _decode(codec, rows):
    return jax.vmap(lambda row: cgx.roundtrip(row, codec))(rows)


def decoded(codec, x):
    """Returns x [..., n] after encoding and decoding each row."""
    return np.array(_decode(codec, jnp.asarray(x.reshape(-1, x.shape[-1])))).reshape(x.shape) if x.size else x


def total(rows):
    """Returns the sum over the first axis, in the order of the ranks."""
    return functools.reduce(np.add, rows)


def finite_or(new, old):
    return np.where(np.isfinite(new), new, old)


class How(NamedTuple):
    schedule: str
    own: str
    divisor: float = 1.0


class Sum(NamedTuple):
    mean: Any  # [n]
    lost: Any  # [ranks, n]
    sent: Any = None  # [ranks, n]: whether the rank sent the element


def flat(codec, leaves, held, how):
    """Sums a message, a list of leaves [ranks, n], over one axis. Where a loss is not finite, it is `held`."""
    ranks, divisor = len(leaves[0]), np.float32(how.divisor)
    chunks, unit, found = 1 if how.schedule == "one_shot" or codec.raw else ranks, codec.bucket_size or UNIT, []
    scales = 4 * codec.meta if codec.bucket_size else 0
    length = lambda n: scales + codec.weight(n, np.dtype(np.float32)) if n else 0  # bytes of a bucket
    ends = np.cumsum([0, *(x.shape[1] // unit * length(unit) + length(x.shape[1] % unit) for x in leaves)])
    for x, r, before in zip(leaves, held, ends):
        n, y = x.shape[1], np.zeros_like(x)
        starts = [-(-(-(-c * ends[-1] // chunks) - before) // length(unit)) * unit for c in range(chunks)]
        bounds = np.clip([*starts, n], 0, n)
        pieces = [slice(*each) for each in itertools.pairwise(bounds)]
        for piece in pieces:
            y[:, piece] = decoded(codec, x[:, piece])
        mean, lost, sent = total(y) / divisor, finite_or(x - y, r), y != 0
        for owner, piece in enumerate([] if chunks == 1 or codec.sparse else pieces):
            if how.own == "raw":
                y[owner, piece] = x[owner, piece]
            sums = total(y[:, piece])
            mean[piece] = decoded(codec, sums / divisor)
            if how.own == "raw":  # the owner keeps the loss of encoding the sum
                lost[owner, piece] = finite_or(sums - divisor * mean[piece], lost[owner, piece])
        found.append(Sum(mean, lost, sent))
    return found


def inside(codec, leaves, own):
    """Sums leaves [nodes, ranks, n] inside nodes: [nodes, n]."""
    nodes = [flat(codec, list(each), list(each), How("two_shot", own)) for each in zip(*leaves)]
    return [np.stack([leaf.mean for leaf in leaf_of_nodes]) for leaf_of_nodes in zip(*nodes)]


def by_shards(outer, inner, leaves, how):
    """Sums leaves [nodes, ranks, n]. Each rank of a node sums a share of them over the nodes."""
    nodes, ranks = leaves[0].shape[:2]
    shares, means, losses, sents = [], [], [], []
    for x in leaves:
        pad = np.repeat(np.zeros_like(x[..., -1:]) if outer.sparse else x[..., -1:], -x.shape[2] % ranks, -1)
        x = np.concatenate([x, pad], -1).reshape(nodes, ranks, ranks, -1)  # node, rank, share
        y = decoded(inner, x)
        for r in range(ranks if how.own == "raw" else 0):
            y[:, r, r] = x[:, r, r]
        shares.append(total(np.moveaxis(y, 1, 0)))  # [nodes, shares, m]
    for r in range(ranks):
        mine = [x[:, r] for x in shares]
        found = flat(outer, mine, list(map(np.zeros_like, mine)), how)
        means.append([decoded(inner, s.mean) for s in found])
        losses.append([np.eye(ranks, dtype=np.float32)[r][:, None] * s.lost[:, None] for s in found])
        sents.append([s.sent for s in found])
    for x, mean, lost, sent in zip(leaves, zip(*means), zip(*losses), zip(*sents)):
        n, sent = x.shape[2], np.concatenate(sent, -1)[:, None]
        yield Sum(np.concatenate(mean)[:n], np.concatenate(lost, -1)[..., :n], np.repeat(sent[..., :n], ranks, 1))


def by_leaders(outer, inner, leaves, how):
    """Sums leaves [nodes, ranks, n]. The first rank of a node exchanges the node's sum."""
    sums = inside(inner, leaves, how.own)
    for x, s in zip(leaves, flat(outer, sums, list(map(np.zeros_like, sums)), how)):
        lost = np.zeros_like(x)
        lost[:, 0] = s.lost
        yield Sum(s.mean, lost, np.repeat(s.sent[:, None], x.shape[1], 1))


def to_slices(codec, x, cut, held, own):
    """Sums a leaf [ranks, *shape] whose slices along a dimension go to the ranks. Returns the whole mean."""
    ranks = len(x)
    split = lambda x: np.stack(np.split(x, ranks, cut + 1), 1)  # [ranks, slices, *shape of a slice]
    y = decoded(codec, split(x).reshape(ranks, ranks, -1)).reshape(split(x).shape)
    for r in range(ranks if own == "raw" else 0):
        y[r, r] = split(x)[r, r]
    join = lambda rows: np.concatenate(list(rows), cut)
    return Sum(join(total(y)) / np.float32(ranks), finite_or(x - np.stack(list(map(join, y))), held))


def low_rank(codec, x, q, ranks):
    """Sums matrices [nodes, m, n] by their factors. Returns the sum, and the new factor."""
    p = total(x) @ np.asarray(codec.begin(q[None])[0]).T
    if not np.isfinite(p).all():
        return Sum(np.full_like(x[0], np.nan), x), q
    basis, r = np.linalg.qr(p)
    basis = basis * np.sign(np.diag(r))
    near = basis @ (basis.T @ x)
    return Sum(total(near) / np.float32(ranks), x - near), basis.T @ total(x) / np.float32(ranks)


class State(NamedTuple):
    """Each field has only the leaves that have such a state. Residuals and momentum have a row for each rank."""

    residuals: dict[str, Any]
    momentum: dict[str, Any]
    trace: dict[str, Any]
    factors: dict[str, Any]


@dataclasses.dataclass
class Model:
    """All ranks of an exchange, and their `state`.

    Args:
      plans: {first step: {leaf: codec}}. A codec is one for all ranks, or a pair for two axes, outermost first.
      ranks: the number of ranks of each axis, outermost first.
      params: {leaf: parameter}.
      cuts: {leaf: the dimension whose slices go to the ranks}. `step` joins the slices.
    The other arguments are options of the exchange. The schedule is "one_shot" or "two_shot".
    """

    plans: Mapping[int, Mapping[str, Any]]
    ranks: tuple[int, ...]
    params: Mapping[str, Any]
    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    schedule: str = "two_shot"
    own: str = "raw"
    leader: bool = False
    feedback: bool = True
    momentum: float | None = None
    nesterov: bool = False
    momentum_masking: bool = False
    weight_decay: float | None = None
    beta: float = 1.0
    reset_every: int | None = None
    skip_nonfinite: bool = False

    def __post_init__(self):
        self.count, self.size = 0, math.prod(self.ranks)
        self.how = How(self.schedule, self.own, self.size)
        used = {k: [_pair(plan[k]) for plan in self.plans.values()] for k in self.params}
        encoded = {k: p for k, p in self.params.items() if not all(c.raw for pair in used[k] for c in pair)}
        zeros = lambda params, *rows: {k: np.zeros((*rows, *p.shape), np.float32) for k, p in params.items()}
        traced = {k: p for k, p in self.params.items() if self.weight_decay is not None or k not in encoded}
        factors = {}
        for k, pairs in used.items():
            if shapes := [outer.factor_shape(self.params[k].shape) for outer, *_ in pairs if outer.low_rank]:
                factors[k] = np.zeros(max(shapes), np.float32)
        self.state = State(
            zeros(encoded if self.feedback else {}, self.size),
            zeros(encoded if self.momentum is not None else {}, self.size),
            zeros(traced if self.momentum is not None else {}),
            factors,
        )

    @np.errstate(invalid="ignore")
    def step(self, grads):
        """Returns {leaf: what every rank gets} from {leaf: gradients [ranks, *shape]}."""
        old, plan = self.state, self.plans[max(start for start in self.plans if start <= self.count)]
        new = State(*map(dict, old))
        self.count += 1
        terms = dict(grads)
        for k, u in old.momentum.items():
            new.momentum[k], terms[k] = self._accelerate(u, grads[k])
        messages = {}
        for k in grads:
            messages.setdefault((_pair(plan[k]), k in self.cuts), []).append(k)
        means = {}
        for (codecs, _), names in messages.items():
            held = [old.residuals.get(k, np.zeros_like(terms[k])) for k in names]
            sums = self._sum(codecs, names, [terms[k] + r for k, r in zip(names, held)], held, new.factors)
            for k, r, (mean, lost, sent) in zip(names, held, sums):
                means[k] = mean.reshape(self.params[k].shape)
                if k in new.residuals:
                    new.residuals[k] = (1 - np.float32(self.beta)) * r + np.float32(self.beta) * lost.reshape(r.shape)
                if self.momentum_masking and codecs[0].sparse:
                    new.momentum[k] = np.where(sent.reshape(r.shape), 0, new.momentum[k])
        bad, results = not all(np.isfinite(mean).all() for mean in means.values()), dict(means)
        for k, u in new.momentum.items():
            new.momentum[k] = np.where(np.isfinite(means[k]), finite_or(u, old.momentum[k]), old.momentum[k])
        for k, t in old.trace.items():
            own = k in new.momentum
            rest = (0 if own else means[k]) + np.float32(self.weight_decay or 0) * self.params[k]
            moved, late = self._accelerate(t, rest)
            new.trace[k], results[k] = finite_or(moved, t), (means[k] if own else 0) + late
        self.state = old if bad and self.skip_nonfinite else new
        if self.reset_every and self.count % self.reset_every == 0:
            self.state = self.state._replace(residuals={k: 0 * r for k, r in old.residuals.items()})
        return results

    def _accelerate(self, u, g):
        rate = np.float32(self.momentum)
        moved = rate * (u + g) if self.nesterov else rate * u + g
        return moved, moved + g if self.nesterov else moved

    def _sum(self, codecs, names, leaves, held, factors):
        outer, *inner = codecs
        if any(k in self.cuts for k in names):
            return [to_slices(outer, x, self.cuts[k], r, self.own) for k, x, r in zip(names, leaves, held)]
        if (not inner and not outer.low_rank) or all(codec.raw for codec in codecs):
            rows = lambda arrays: [x.reshape(self.size, -1) for x in arrays]
            return flat(outer, rows(leaves), rows(held), self.how)
        local = self.ranks[1] if inner else 1
        rows = [x.reshape(-1, local, x[0].size) for x in leaves]
        if outer.low_rank:
            sums = []
            for k, x in zip(names, inside(inner[0], rows, self.own) if inner else [x[:, 0] for x in rows]):
                shape = outer.matrix(self.params[k].shape)
                q, rest = np.split(factors[k], [outer.rank])
                found, q = low_rank(outer, x.reshape(-1, *shape), q, self.size)
                factors[k] = np.concatenate([q, rest])
                sums.append(found._replace(lost=np.repeat(found.lost / np.float32(local), local, 0)))
        else:
            sums = (by_leaders if self.leader else by_shards)(outer, *inner, rows, self.how)
        return [
            s._replace(lost=np.where(np.isfinite(s.mean.reshape(r.shape[1:])), s.lost.reshape(r.shape), r))
            for s, r in zip(sums, held)
        ]


def _pair(codec):
    return codec if isinstance(codec, tuple) else (codec,)

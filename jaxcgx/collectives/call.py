"""A call of a collective: its arguments checked, its leaves put into messages."""
import math
import numbers
import operator
import sys
import warnings
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcgx import _compat, plan
from jaxcgx.codecs.base import check_codec
from jaxcgx.collectives import costs, schedules, scopes
from jaxcgx.native.layout import DTYPES
from jaxcgx.native.rng import key_words


def check_axes(op, axis_name):
    """The names as a tuple, every one of them bound."""
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    single = all(isinstance(name, Hashable) and not isinstance(name, (int, tuple)) for name in names)
    if not names or not single or len(set(names)) < len(names):
        raise ValueError(f"{op}: argument 'axis_name': expected a name or a tuple of different names, got {axis_name!r}")
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise NameError(f"{op}: argument 'axis_name': no axis {name!r} is bound here; call {op} inside jax.shard_map over "
                            f"a mesh with that axis (or pmap, or vmap with axis_name={name!r})") from None
    return names


def check_codecs(op, argument, codec, names):
    """((axes, codec), ...), outermost first: one exchange over all axes together, or one for each axis."""
    if not isinstance(codec, dict):
        return ((names, check_codec(op, codec, argument)),)
    missing, unknown = [n for n in names if n not in codec], [n for n in codec if n not in names]
    if missing or unknown:
        wrong = [f"{', '.join(map(repr, found))} {what}" for found, what in ((missing, "missing"), (unknown, "not among them")) if found]
        raise ValueError(f"{op}: argument '{argument}': expected a codec for each axis of {names}, got {codec} ({'; '.join(wrong)})")
    return tuple(((name,), check_codec(op, codec[name], argument)) for name in names)


def check_choice(op, argument, value, choices):
    if value not in choices:
        raise ValueError(f"{op}: argument '{argument}': expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_key(op, codecs, key, names):
    """The key's words if a codec draws noise, else None."""
    drawing = [codec for codec in codecs if codec.stochastic]
    if key is None:
        if drawing:
            raise ValueError(f"{op}: argument 'key': {drawing[0]} rounds stochastically and needs a random key, got None; "
                             "pass key=jax.random.key(...), the same on every rank and another one every step")
        return None
    if not drawing:
        warnings.warn(f"{op}: argument 'key': {', '.join(map(str, dict.fromkeys(codecs)))} draws no random numbers: the key is not used",
                      stacklevel=_callers_level())
        return None
    words = key_words(op, key)
    if axes := [name for name in names if name in _compat.varying_axes(words)]:
        raise ValueError(f"{op}: argument 'key': expected the same key on every rank, got one that varies over "
                         f"{', '.join(map(repr, axes))}; the noise of every rank is another one all the same")
    return words


def _callers_level():
    """The stacklevel of a warning that points to the first line outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("jaxcgx."):
        level, frame = level + 1, frame.f_back
    return level


def check_own(op, own, schedule):
    check_choice(op, "own", own, ("raw", "encoded"))
    if own == "encoded" and schedule == "ring":
        raise ValueError(f"{op}: argument 'own': expected \"raw\" with schedule=\"ring\", got \"encoded\": a ring adds every rank's "
                         "part as it is")


def check_tracked(op, names):
    """Whether JAX tracks what varies over the axes (shard_map's check_vma): over all of them or none."""
    tracked = _compat.tracked_axes(names)
    if tracked and (others := [name for name in names if name not in tracked]):
        raise ValueError(f"{op}: argument 'axis_name': expected axes of a mesh or axes of vmap, got both: vmap's {', '.join(map(repr, others))} "
                         "among axes over which shard_map checks what varies; call it for one after the other, or pass check_vma=False")
    return bool(tracked)


def check_varying(op, names, paths, leaves):
    """That every leaf varies over the axes, where JAX tracks that (shard_map's check_vma)."""
    found = _compat.tracked_axes(names)
    tracked = [name for name in names if name in found]
    for path, leaf in zip(paths, leaves):
        same = [name for name in tracked if name not in _compat.varying_axes(leaf)]
        if same:
            raise ValueError(
                f"{op}: argument 'x'{_at(path)}: expected an array that varies over {', '.join(map(repr, names))}, got one that "
                f"is the same on every rank of {', '.join(map(repr, same))} ({jax.typeof(leaf)}). If it is a gradient, JAX has reduced it "
                "already, uncompressed, because the parameters don't vary over that axis. Take it with "
                "jaxcgx.local_value_and_grad, or differentiate with respect to "
                "jax.lax.pcast(params, axis_name, to='varying').")


def check_positive(op, argument, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value > 0:
        raise ValueError(f"{op}: argument '{argument}': expected a positive number, got {value!r}")
    return value


def check_flag(op, argument, value):
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: argument '{argument}': expected True or False, got {value!r}")


def check_array(op, argument, path, leaf):
    try:
        leaf = jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: argument '{argument}'{_at(path)}: expected an array, got {leaf!r}") from None
    if cut := [axis for axis in jax.typeof(leaf).sharding.spec if axis is not None]:
        raise ValueError(f"{op}: argument '{argument}'{_at(path)}: expected an array that a device has as it is, got {jax.typeof(leaf)}, sharded over "
                         f"{', '.join(map(repr, cut))}. To compress the local shards, wrap the call in a jax.shard_map over these axes, "
                         "as docs/meshes.md shows")
    return leaf


def _at(path):
    name = jax.tree_util.keystr(path)
    return f", leaf {name}" if name else ""


def check_dimension(op, argument, dimension, leaf, path, extra=0):
    """`dimension` counted from the front, of an array with `extra` more dimensions than the leaf."""
    ndim = leaf.ndim + extra
    try:
        d = operator.index(dimension)
    except TypeError:
        raise TypeError(f"{op}: argument '{argument}': expected an integer, got {dimension!r}") from None
    if not -ndim <= d < ndim:
        raise ValueError(f"{op}: argument '{argument}'{_at(path)}: expected a dimension of {leaf.dtype}{list(leaf.shape)}"
                         f"{' with one more' if extra else ''}, got {dimension}")
    return d % ndim


def check_divisible(op, argument, dimension, leaf, path, size, tiled):
    """That a dimension can be split among `size` ranks."""
    n = leaf.shape[dimension]
    if n % size if tiled else n != size:
        expected = f"a multiple of {size}" if tiled else f"{size}"
        raise ValueError(f"{op}: argument '{argument}'{_at(path)}: expected dimension {dimension} to have {expected} elements, "
                         f"one{' share' if tiled else ''} for each rank, got {leaf.dtype}{list(leaf.shape)}"
                         + ("" if tiled else "; pass tiled=True to split a longer one"))


class Call:
    """The checked arguments that every collective has."""

    def __init__(self, op, x, axis_name, codec, key, strict, fusion_mb, backward_codec=None, argument="x", local=True):
        self.op, self.names = op, check_axes(op, axis_name)
        self.stages = check_codecs(op, "codec", codec, self.names)
        self.backward = [c for _, c in check_codecs(op, "backward_codec", codec if backward_codec is None else backward_codec, self.names)]
        self.size = math.prod(map(lax.axis_size, self.names))
        codecs = [codec for _, codec in self.stages] + self.backward
        self.key = check_key(op, codecs, key, self.names)
        check_flag(op, "strict", strict)
        self.limit = check_positive(op, "fusion_mb", fusion_mb) * 2**20
        found, self.tree = jax.tree_util.tree_flatten_with_path(x)
        self.paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
        self.leaves = [check_array(op, argument, path, leaf) for path, leaf in zip(self.paths, leaves)]
        self.tracked = check_tracked(op, self.names)
        if local:  # the leaves are what is exchanged: each rank's own
            check_varying(op, self.names, self.paths, self.leaves)
        self.raw = {}  # why a leaf travels as it is
        for i, leaf in enumerate(self.leaves):
            reason = plan.why_raw(leaf, codecs) or (self.size == 1 and "there is one rank") or None
            if reason and strict and leaf.dtype not in DTYPES:
                raise TypeError(f"{op}: argument '{argument}'{_at(self.paths[i])}: {reason}, and strict=True allows no such leaf")
            if reason:
                self.raw[i] = reason

    def others(self, j):
        """The stages but one."""
        return self.stages[:j] + self.stages[j + 1 :]

    def stage_key(self, key, j, stages):
        """The key of stage j: other noise for ranks that differ in the axes of `stages`."""
        return schedules.stage_key(key, j, stages) if len(self.stages) > 1 else key

    def schedule(self, leader):
        """What "auto" takes for the exchange over the outermost axes, for all messages of the call alike."""
        (names, codec), coded = self.stages[0], [x for i, x in enumerate(self.leaves) if i not in self.raw]
        ranks = math.prod(map(lax.axis_size, names))
        share = 1 if leader else self.size // ranks  # inner ranks take a share each
        return costs.choose(ranks, sum(4 * x.size for x in coded) // share,
                            sum(codec.wire_bytes(x.shape, x.dtype) for x in coded) // share)

    def run(self, plain, compressed, schedule):
        """The tree of results: of `plain(leaf, its number)` for what travels raw, of `compressed(leaves, key, ids)` for each message.
        The scopes are what `explain` finds in the compiled program."""
        results = [None] * len(self.leaves)
        for i, reason in self.raw.items():
            leaf, path = self.leaves[i], jax.tree_util.keystr(self.paths[i])
            size = leaf.size * leaf.dtype.itemsize
            with scopes.scope(scopes.Leaf(self.op, self.names, path, str(leaf.dtype), size, reason)):
                results[i] = plain(self.leaves[i], i)
        coded = [i for i in range(len(self.leaves)) if i not in self.raw]
        for message in plan.messages([self.leaves[i] for i in coded], self.limit):
            ids = tuple(coded[k] for k in message)
            paths = tuple(jax.tree_util.keystr(self.paths[i]) for i in ids)
            with scopes.scope(scopes.Message(self.op, self.names, paths)):
                done = compressed([self.leaves[i] for i in ids], self.key, ids)
            for i, y in zip(ids, done):
                results[i] = y
        return jax.tree_util.tree_unflatten(self.tree, results)

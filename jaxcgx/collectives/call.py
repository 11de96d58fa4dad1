"""A call of a collective: its arguments checked, its leaves put into messages."""

import dataclasses
import operator
import warnings

import jax

from jaxcgx import _compat, plan
from jaxcgx.checks import at, callers_level, check_array, check_choice, check_flag, check_positive, check_varying, wrong
from jaxcgx.codecs.checks import check_codec, check_encodes
from jaxcgx.codecs.spelling import spell
from jaxcgx.exchange import schedules, scopes
from jaxcgx.native.layout import DTYPES
from jaxcgx.native.rng import key_words
from jaxcgx.plan.leaves import factor_shape


def check_each(op, argument, given, net, what):
    """Of a dict its values for the parts of a transport, outermost first."""
    missing, unknown = [n for n in net.parts if n not in given], [n for n in given if n not in net.parts]
    if missing or unknown:
        wrong = [
            f"{', '.join(map(repr, found))} {what}"
            for found, what in ((missing, "missing"), (unknown, "not among them"))
            if found
        ]
        raise ValueError(
            f"{op}: argument '{argument}': expected {what} for each axis of {tuple(net.parts)}, got {given} "
            f"({'; '.join(wrong)})"
        )
    return [given[name] for name in net.parts]


def check_stages(op, argument, codec, net):
    """((transport, codec), ...), outermost first: one exchange over all ranks together, or one for each part."""
    if not isinstance(codec, dict):
        return ((net, check_codec(op, codec, argument)),)
    codecs = [check_codec(op, codec, argument) for codec in check_each(op, argument, codec, net, "a codec")]
    return tuple(zip(net.parts.values(), codecs))


def check_low_rank(op, argument, stages, sums):
    """That codecs for sums are those of sums (`sums`), over all axes together or over the outermost one."""
    for there in dict.fromkeys(stages):
        for j, (_, codec) in enumerate(there):
            if not sums:
                check_encodes(op, codec, argument)
            if j and codec.low_rank:
                raise ValueError(
                    f"{op}: argument '{argument}': expected {spell(codec)} for the outermost axis alone or for all "
                    "together, got "
                    "it for an inner one; over inner axes jaxcgx.Raw() sums exactly"
                )


def check_key(op, codecs, possible, key, names):
    """The key's words if one of the codecs draws noise, else None. possible: codecs that another tree would travel
    with."""
    drawing = [codec for codec in codecs if codec.stochastic]
    if key is None:
        if drawing:
            raise ValueError(
                f"{op}: argument 'key': {drawing[0]} rounds stochastically and needs a random key, got None; "
                "pass key=jax.random.key(...), the same on every rank and another one every step"
            )
        return None
    if not drawing:
        if any(codec.stochastic for codec in possible):
            return None
        warnings.warn(
            f"{op}: argument 'key': {', '.join(map(str, dict.fromkeys(possible)))} draws no random numbers: the key is "
            "not used",
            stacklevel=callers_level(),
        )
        return None
    words = key_words(op, key)
    if axes := [name for name in names if name in _compat.varying_axes(words)]:
        raise ValueError(
            f"{op}: argument 'key': expected the same key on every rank, got one that varies over "
            f"{', '.join(map(repr, axes))}; the noise of every rank is another one all the same"
        )
    return words


def check_own(op, own, schedule):
    check_choice(op, "own", own, ("raw", "encoded"))
    if own == "encoded" and schedule == "ring":
        raise ValueError(
            f'{op}: argument \'own\': expected "raw" with schedule="ring", got "encoded": a ring adds every rank\'s '
            "part as it is"
        )


def check_hops(op, schedule, codec):
    """That a codec can go from neighbour to neighbour: what a rank passes on is a sum already, in as many bytes
    again."""
    if schedule == "ring" and codec.of_sum(2) != codec:
        raise ValueError(
            f'{op}: argument \'schedule\': expected "two_shot" or "one_shot" with {spell(codec)}, whose sums grow from rank to '
            'rank, got "ring"; pass schedule="two_shot", or a codec with pull="top"'
        )


def check_tracked(op, names):
    """Whether JAX tracks what varies over the axes (shard_map's check_vma): over all of them or none."""
    tracked = _compat.tracked_axes(names)
    if tracked and (others := [name for name in names if name not in tracked]):
        raise ValueError(
            f"{op}: argument 'axis_name': expected axes of a mesh or axes of vmap, got both: vmap's "
            f"{', '.join(map(repr, others))} "
            "among axes over which shard_map checks what varies; call it for one after the other, or pass "
            "check_vma=False"
        )
    return bool(tracked)


def check_residuals(op, call, residuals):
    """A residual for each leaf, or None."""
    return _check_state(
        op, "residuals", call, residuals, [leaf.shape if leaf.dtype in DTYPES else None for leaf in call.leaves]
    )


def check_momentum(op, call, momentum):
    """What of each leaf loses what is sent, or None."""
    found = _check_state(
        op, "momentum", call, momentum, [leaf.shape for leaf in call.leaves], [leaf.dtype for leaf in call.leaves]
    )
    for i, given in enumerate(found):
        codec = call.codecs[i][0]
        if given is not None and i not in call.raw and not codec.sparse:
            raise ValueError(
                f"{op}: argument 'momentum'{at(call.paths[i])}: expected None for a leaf whose every element is sent, "
                "with "
                f"{spell(codec)}, got an array; take jaxcgx.TopK"
            )
    return found


def check_factors(op, call, factors):
    """For each leaf what its low rank begins with, or None."""
    found = _check_state(op, "factors", call, factors, list(map(factor_shape, call.leaves, call.codecs)))
    for path, given in zip(call.paths, found):
        if given is not None and (axes := [name for name in call.net.names if name in _compat.varying_axes(given)]):
            raise ValueError(
                f"{op}: argument 'factors'{at(path)}: expected the same array on every rank, got one that varies over "
                f"{', '.join(map(repr, axes))}; pass on what the call before returned, through P() in shard_map's specs"
            )
    return found


def _check_state(op, argument, call, state, shapes, dtypes=None):
    """For each leaf an array of its shape and dtype, float32 by default, or None."""
    try:
        found = call.tree.flatten_up_to(state)
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: argument '{argument}': expected a tree like x, {call.tree}, got "
            f"{jax.tree_util.tree_structure(state)}"
        ) from None
    for path, leaf, given, shape, dtype in zip(
        call.paths, call.leaves, found, shapes, dtypes or ["float32"] * len(shapes)
    ):
        if given is None:
            continue
        expected = "None" if shape is None else f"{dtype}{list(shape)}"
        got = f"{given.dtype}{list(given.shape)}" if hasattr(given, "dtype") else repr(given)
        if got != expected:
            raise ValueError(
                f"{op}: argument '{argument}'{at(path)}: expected {expected} for {leaf.dtype}{list(leaf.shape)}, got "
                f"{got}"
            )
    return found


def check_leaf(op, argument, path, leaf):
    """The leaf as an array that a device has whole."""
    leaf = check_array(op, argument, leaf, path)
    if cut := [axis for axis in jax.typeof(leaf).sharding.spec if axis is not None]:
        raise wrong(
            op,
            argument,
            "an array that a device has as it is",
            f"{jax.typeof(leaf)}, sharded over {', '.join(map(repr, cut))}",
            "to compress the local shards, wrap the call in a jax.shard_map over these axes, as docs/meshes.md shows",
            path=path,
        )
    return leaf


def check_dimension(op, argument, dimension, leaf, path, extra=0):
    """`dimension` counted from the front, of an array with `extra` more dimensions than the leaf."""
    ndim = leaf.ndim + extra
    try:
        d = operator.index(dimension)
    except TypeError:
        raise TypeError(f"{op}: argument '{argument}': expected an integer, got {dimension!r}") from None
    if not -ndim <= d < ndim:
        raise ValueError(
            f"{op}: argument '{argument}'{at(path)}: expected a dimension of {leaf.dtype}{list(leaf.shape)}"
            f"{' with one more' if extra else ''}, got {dimension}"
        )
    return d % ndim


def check_divisible(op, argument, dimension, leaf, path, size, tiled):
    """That a dimension can be split among `size` ranks."""
    n = leaf.shape[dimension]
    if n % size if tiled else n != size:
        expected = f"a multiple of {size}" if tiled else f"{size}"
        raise ValueError(
            f"{op}: argument '{argument}'{at(path)}: expected dimension {dimension} to have {expected} elements, "
            f"one{' share' if tiled else ''} for each rank, got {leaf.dtype}{list(leaf.shape)}"
            + ("" if tiled else "; pass tiled=True to split a longer one")
        )


@dataclasses.dataclass(frozen=True)
class Route:
    """How leaves travel: over one transport after another, outermost first, with a codec for each."""

    stages: tuple  # ((transport, codec), ...)
    backward: tuple  # the codecs of the transpose

    @classmethod
    def of(cls, stages, backward):
        """A part of one rank is no stage."""
        kept = [j for j, (net, _) in enumerate(stages) if net.size > 1] or [0]
        return cls(tuple(stages[j] for j in kept), tuple(backward[j][1] for j in kept))

    @property
    def codecs(self):
        return [codec for _, codec in self.stages] + list(self.backward)

    def others(self, j):
        """The stages but one."""
        return self.stages[:j] + self.stages[j + 1 :]

    def key(self, key, j, stages):
        """The key of stage j: other noise for ranks that differ in the transports of `stages`."""
        return schedules.stage_key(key, j, stages) if len(self.stages) > 1 else key


class Call:
    """The checked arguments that every collective has. Leaves of one route share messages."""

    def __init__(
        self, op, x, net, codec, key, strict, fusion_mb, backward_codec=None, argument="x", local=True, sums=False
    ):
        self.op, self.net = op, net
        check_flag(op, "strict", strict)
        found, self.tree = jax.tree_util.tree_flatten_with_path(x)
        self.paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
        self.leaves = [check_leaf(op, argument, path, leaf) for path, leaf in zip(self.paths, leaves)]
        self.tracked = check_tracked(op, net.names)
        if local:  # the leaves are what is exchanged: each rank's own
            check_varying(op, net.names, self.paths, self.leaves)
        self.size = net.size
        stages, guarded, used, possible = self._assign("codec", codec)
        backward = stages
        if backward_codec is not None:
            backward, _, used_back, possible_back = self._assign("backward_codec", backward_codec)
            used, possible = used + used_back, possible + possible_back
        check_low_rank(op, "codec", stages, sums)
        check_low_rank(op, "backward_codec", backward, sums)
        self.codecs = [[codec for _, codec in there] for there in stages]
        self.key = check_key(op, used, possible, key, net.names)
        self.hierarchy = any(len(there) > 1 for there in stages)
        self.routes = [Route.of(*self._alike(there, back)) for there, back in zip(stages, backward)]
        if fusion_mb is None:
            fusion_mb = codec.fusion_mb if isinstance(codec, plan.Plan) else 64
        self.limit = check_positive(op, "fusion_mb", fusion_mb) * 2**20
        self.raw = {}  # why a leaf travels as it is
        for i, (leaf, route) in enumerate(zip(self.leaves, self.routes)):
            reason = plan.why_raw(leaf, route.codecs) or (self.size == 1 and "there is one rank") or None
            refused = not guarded[i] and any(codec.why_raw(leaf.shape, leaf.dtype) for codec in route.codecs)
            if reason and strict and (refused or leaf.dtype not in DTYPES):
                error = ValueError if refused else TypeError
                raise error(
                    f"{op}: argument '{argument}'{at(self.paths[i])}: {reason}, and strict=True allows no such leaf"
                )
            if reason:
                self.raw[i] = guarded[i] or reason
        self.groups = {}  # of the others, those of a route
        for i, route in enumerate(self.routes):
            if i not in self.raw:
                self.groups.setdefault(route, []).append(i)

    def _assign(self, argument, codec):
        """Of each leaf the stages, and why a plan leaves it raw; the codecs in use, and those of another tree (see
        check_key)."""
        if isinstance(codec, plan.Plan):
            assigned = codec.assign(self.op, argument, self.paths, self.leaves)
            stages = [check_stages(self.op, argument, chosen, self.net) for chosen, _ in assigned]
            return (
                stages,
                [reason for _, reason in assigned],
                [used for there in stages for _, used in there],
                codec.codecs,
            )
        stages = check_stages(self.op, argument, codec, self.net)
        codecs = [used for _, used in stages]
        return [stages] * len(self.leaves), [None] * len(self.leaves), codecs, codecs

    def _alike(self, there, back):
        """Both of as many stages: what travels raw over all ranks together does over each part, too."""
        if len(there) == len(back):
            return there, back
        flat, parts = sorted((there, back), key=len)
        if not flat[0][1].raw:
            raise ValueError(
                f"{self.op}: argument 'backward_codec': expected a codec for each axis where 'codec' has one for each, "
                "and one for all "
                f"where it has one for all, got {len(back)} beside {len(there)}"
            )
        flat = tuple((net, flat[0][1]) for net, _ in parts)
        return (flat, parts) if len(there) < len(back) else (parts, flat)

    def run(self, plain, compressed):
        """The tree of results: of `plain(leaf, its number)` for what travels raw, of `compressed(leaves, key, ids,
        route)` for
        each message. The scopes are what `explain` finds in the compiled program."""
        results = [None] * len(self.leaves)
        for i, reason in self.raw.items():
            leaf, path = self.leaves[i], jax.tree_util.keystr(self.paths[i])
            size = leaf.size * leaf.dtype.itemsize
            with scopes.scope(scopes.Leaf(self.op, self.net.names, path, str(leaf.dtype), size, reason)):
                results[i] = plain(self.leaves[i], i)
        for route, coded in self.groups.items():
            key = self.key if any(codec.stochastic for codec in route.codecs) else None
            for message in plan.messages([self.leaves[i] for i in coded], self.limit):
                ids = tuple(coded[k] for k in message)
                paths = tuple(jax.tree_util.keystr(self.paths[i]) for i in ids)
                with scopes.scope(scopes.Message(self.op, self.net.names, paths)):
                    done = compressed([self.leaves[i] for i in ids], key, ids, route)
                for i, y in zip(ids, done):
                    results[i] = y
        return jax.tree_util.tree_unflatten(self.tree, results)

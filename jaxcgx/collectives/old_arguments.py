"""The options that all collectives share, and the checks of their arguments."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcgx import _compat
from jaxcgx.checks import callers_level, check_array, check_choice, check_integer, is_integer, spell_array, wrong
from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.checks import check_codec, check_encodes, check_key
from jaxcgx.codecs.spelling import spell
from jaxcgx.exchange.message import Stage
from jaxcgx.plan import SCHEDULES
from jaxcgx.plan.overlay import Overlay
from jaxcgx.transports.base import Transport


class Options(NamedTuple):
    """The options of a call. The docstring of the called function explains them."""

    key: Any = None
    schedule: Any = "auto"
    own: str = "raw"
    leader: bool = False
    strict: bool = False
    fusion_mb: Any = None
    backward_codec: Any = None
    # whether leaves of Raw() also share messages; otherwise each leaf has its own collective, which XLA may join
    join_raw: bool = False
    # the numbers of the leaves in the order in which messages are sent; None: the order of the tree
    order: tuple[int, ...] | None = None
    # the elements of a slice; with slices, messages are made in the order of the tree, and slices of a later message
    # may overtake an earlier message
    slice_elements: int | None = None
    # the names that the called function has for these two arguments, for errors
    codec_name: str = "codec"
    key_name: str = "key"


class Dimension(NamedTuple):
    """The dimension along which arrays are split among ranks or joined."""

    axis: Any  # one dimension for all leaves, or a tree with one for each leaf
    tiled: bool  # as in lax: whether the dimension is kept


class Dimensions(NamedTuple):
    """The dimensions of an all_to_all, as in lax."""

    split_axis: int
    concat_axis: int
    tiled: bool


def check_each(
    op: str, argument: str, given: dict[Any, Any], *, parts: Collection[Any], what: str, net: Transport | None = None
) -> list[Any]:
    """Returns the values of a dict that has a key for each part of a transport, outermost first.

    `what` describes a value in errors. `net` is the transport; None: it may be a communicator, which has no axes.
    """
    if not parts and net is not None and net.names:
        kind = type(net).__name__
        raise wrong(op, argument, f"{what} for all ranks of {net.names}", given, f"{kind} has no levels: pass {what}")
    if not parts:  # a communicator without levels
        raise wrong(op, argument, f"{what} for all ranks of a communicator", given, "pass jaxcgx.mpi.hierarchy()")
    missing, unknown = [n for n in parts if n not in given], [n for n in given if n not in parts]
    if missing or unknown:
        problems = [(missing, "missing"), (unknown, "not among them")]
        spelled = "; ".join(f"{', '.join(map(repr, names))} {problem}" for names, problem in problems if names)
        steps = any(isinstance(n, int) for n in unknown)
        remedy = "a schedule of plans, by steps, is for compress_gradients and make_train_step" if steps else ""
        raise wrong(op, argument, f"{what} for each axis of {tuple(parts)}", f"{given} ({spelled})", remedy)
    return [given[name] for name in parts]


def check_stages(op: str, argument: str, codec: Any, net: Transport) -> tuple[Stage, ...]:
    """Returns the stages, outermost first: one stage over all ranks together or, for a dict, one for each part.

    Their schedules are chosen later.
    """
    if not isinstance(codec, dict):
        one = check_codec(op, codec, argument)
        return (Stage(net, one, schedule="auto", backward=one),)
    each = check_each(op, argument, codec, parts=net.parts, what="a codec", net=net)
    codecs = [check_codec(op, codec, argument) for codec in each]
    return tuple(Stage(part, codec, schedule="auto", backward=codec) for part, codec in zip(net.parts.values(), codecs))


def check_low_rank(op: str, argument: str, stages: Sequence[tuple[Stage, ...]], sums: bool) -> None:
    """Checks that low-rank codecs are used only for sums, over all axes together or over the outermost axis."""
    for there in dict.fromkeys(stages):
        for j, stage in enumerate(there):
            if not sums:
                check_encodes(op, stage.codec, argument)
            if j and stage.codec.low_rank:
                raise wrong(
                    op,
                    argument,
                    f"{spell(stage.codec)} for the outermost axis alone or for all together",
                    "it for an inner one",
                    "over inner axes jaxcgx.Raw() sums exactly",
                )


def check_shared_key(
    op: str, used: list[Codec], possible: list[Codec], options: Options, names: tuple[Any, ...]
) -> jax.Array | None:
    """Returns the words of the key if a codec in use draws noise, else None.

    The key must be the same on every rank.

    Args:
      op: the function that errors name.
      used: the codecs in use.
      possible: the codecs that another tree of leaves could use. If none of these draws noise either, a key causes a
        warning.
      options: the options of the call.
      names: the axes of the ranks.
    """
    drawing = [codec for codec in used if codec.stochastic]
    key, argument = options.key, options.key_name
    if not drawing:
        if key is not None and not any(codec.stochastic for codec in possible):
            codecs = ", ".join(map(spell, dict.fromkeys(possible)))
            warnings.warn(
                f"{op}: argument '{argument}' is not used: {codecs} draws no random numbers", stacklevel=callers_level()
            )
        return None
    which = "the same on every rank and another one every step"
    words = check_key(op, drawing[0], key, which=which, argument=argument)
    if axes := [name for name in names if name in _compat.varying_axes(words)]:
        raise wrong(
            op,
            argument,
            "the same key on every rank",
            f"one that varies over {', '.join(map(repr, axes))}",
            "every rank draws its own noise from the same key",
        )
    return words


def check_schedules(op: str, schedule: Any, parts: Collection[Any], net: Transport | None = None) -> list[Any]:
    """Returns the schedules that a caller asks for: a single one or, for a dict, one for each part, outermost first.

    `net` is as in `check_each`.
    """
    by_axis = isinstance(schedule, dict)
    asked = check_each(op, "schedule", schedule, parts=parts, what="a schedule", net=net) if by_axis else [schedule]
    for i, each in enumerate(asked):
        if i and (each == "tree" or isinstance(each, Overlay)):
            remedy = 'pass "auto" for inner axes'
            raise wrong(op, "schedule", "a tree or an overlay over the outermost axis alone", schedule, remedy)
        if not isinstance(each, Overlay):
            check_choice(op, "schedule", each, SCHEDULES)
    return asked


def check_order(op: str, order: Any, leaves: int | None = None) -> None:
    """Checks an order of leaves, as far as this is possible if their number isn't known."""
    remedy = "jaxcgx.backward_order(loss_fn, params, ...)"
    if not isinstance(order, Sequence) or not all(map(is_integer, order)):
        raise wrong(op, "order", "the numbers of the leaves", repr(order), remedy, kind=TypeError)
    if leaves is not None and sorted(order) != list(range(leaves)):
        raise wrong(op, "order", f"the numbers of the {leaves} leaves, each once", order, remedy)


def check_own(op: str, own: str, schedule: Any) -> None:
    check_choice(op, "own", own, ("raw", "encoded"))
    if own == "encoded" and schedule == "ring":
        raise wrong(
            op,
            "own",
            '"raw" with schedule="ring", which adds every rank\'s part as it is',
            '"encoded"',
            'pass own="raw"',
        )


def check_hops(op: str, stage: Stage, asked: str | Overlay = "auto") -> None:
    """Checks that an overlay has as many ranks as the stage, and that the codec works with an overlay or a ring.

    `asked` is the schedule that the user gave. A stage with a low-rank codec has the schedule "psum" instead.
    """
    schedule, ranks = stage.schedule, stage.net.size
    if isinstance(asked, Overlay) and stage.codec.low_rank:
        expected = f"a schedule's name with {spell(stage.codec)}, whose factors are summed by lax.psum"
        raise wrong(op, "schedule", expected, "an overlay", "pass another codec, such as jaxcgx.MaxMin(4)")
    if isinstance(schedule, Overlay) and schedule.ranks != ranks:
        raise wrong(op, "schedule", f"an overlay of the {ranks} ranks", f"one of {schedule.ranks}")
    hops = schedule == "ring" or (isinstance(schedule, Overlay) and schedule.depth > 1)
    if hops and stage.codec.sums_grow:  # along hops, sums must take no more bytes than leaves
        raise wrong(
            op,
            "schedule",
            f'"two_shot" or "one_shot" with {spell(stage.codec)}, whose sums grow from rank to rank',
            '"ring"' if schedule == "ring" else "trees of several levels",
            'pass schedule="two_shot", or a codec with pull="top"; jaxcgx.wan.Topology(shape="owners") has one level',
        )


def check_tracked(op: str, names: tuple[Any, ...]) -> bool:
    """Returns whether JAX tracks which values vary over the axes (shard_map's check_vma).

    JAX must track this for all of the axes or for none.
    """
    tracked = _compat.tracked_axes(names)
    if tracked and (others := [name for name in names if name not in tracked]):
        raise wrong(
            op,
            "axis_name",
            "axes of a mesh or axes of vmap",
            f"both: vmap's {', '.join(map(repr, others))} among axes over which shard_map checks what varies",
            "call it for one after the other, or pass check_vma=False",
        )
    return bool(tracked)


def check_whole(op: str, argument: str, path: Any, leaf: Any) -> jax.Array:
    """Returns the leaf as an array. Its type must not be sharded: every device has the whole array."""
    leaf = check_array(op, argument, leaf, path)
    if cut := [axis for axis in jax.typeof(leaf).sharding.spec if axis is not None]:
        raise wrong(
            op,
            argument,
            "an array that a device has whole",
            f"{jax.typeof(leaf)}, sharded over {', '.join(map(repr, cut))}",
            "to compress the local shards, wrap the call in a jax.shard_map over these axes, as docs/meshes.md shows",
            path=path,
        )
    return leaf


def check_summable(op: str, x: Any) -> None:
    """Checks that no leaf is a random key, because keys can't be added."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            remedy = "take it out of the tree, or pass jax.random.key_data(key) to add its words"
            raise wrong(
                op, "x", "arrays of numbers", f"{spell_array(leaf)}, a random key", remedy, path=path, kind=TypeError
            )


def per_leaf(op: str, argument: str, dimension: Any, call: Any) -> list[Any]:
    """Returns the dimension of each leaf: an integer is for all leaves, a tree has a dimension for each."""
    if hasattr(dimension, "__index__"):
        return [dimension] * len(call.leaves)
    try:
        return call.tree.flatten_up_to(dimension)
    except (TypeError, ValueError):
        raise wrong(op, argument, f"an integer, or a tree of them like x, {call.tree}", repr(dimension)) from None


def check_dimension(op: str, argument: str, dimension: Any, leaf: Any, path: Any, extra: int = 0) -> int:
    """Returns `dimension` counted from the front, for an array with `extra` more dimensions than the leaf."""
    ndim = leaf.ndim + extra
    d = check_integer(op, argument, dimension)
    if not -ndim <= d < ndim:
        expected = f"a dimension of {spell_array(leaf)}{' with one more' if extra else ''}"
        raise wrong(op, argument, expected, dimension, path=path)
    return d % ndim


def check_divisible(op: str, argument: str, dimension: int, leaf: Any, path: Any, *, size: int, tiled: bool) -> None:
    """Checks that a dimension can be split among `size` ranks."""
    n = leaf.shape[dimension]
    if n % size if tiled else n != size:
        expected = f"dimension {dimension} to have " + (
            f"a multiple of {size} elements, one share for each rank"
            if tiled
            else f"{size} elements, one for each rank"
        )
        remedy = "" if tiled else "pass tiled=True to split a longer one"
        raise wrong(op, argument, expected, spell_array(leaf), remedy, path=path)

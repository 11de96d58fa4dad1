"""explain: lists every collective in a compiled program, with the bytes that it sends."""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxcgx import _programs
from jaxcgx.checks import wrong
from jaxcgx.codecs.base import spell
from jaxcgx.exchange import scopes
from jaxcgx.report import hlo
from jaxcgx.text import Totals, table

# The primitives that send: JAX's, and that of MPI.
_SENDS = re.compile(r"(psum|all_gather|all_to_all|reduce_scatter|ppermute)\w*\)*$|^jaxcgx_mpi$")

# All other functions sum.
_ROWS = ("compressed_psum_scatter", "compressed_all_gather", "compressed_all_to_all", "compressed_ppermute")
# The argument that has the leaves, for functions that don't call it x. It is shown for a leaf that has no path.
_PARAMETER = {"sync_in_backward": "params", "check_replicas": "tree"}

Names = tuple[Any, ...]  # of mesh axes, outermost first
Pairs = tuple[tuple[Any, int], ...]  # a mesh, as (axis name, size) pairs


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of the compiled program.

    Attributes:
      operation: XLA's name, such as "all-to-all".
      over: who moves the bytes: "Tcp", "MPI" or "shared memory"; "" for XLA.
      axes: the names of mesh axes, outermost first; None: the ranks match no axes of a mesh.
      ranks: the number of ranks that exchange with one another.
      dtype: the name of the dtype that travels.
      bytes: the bytes that a rank sends to other ranks each time.
      raw_bytes: the same without compression.
      times: how often it runs in a call; None: it is in a loop of unknown length.
      branch: whether it is in a branch of a conditional, and so may not run at all.
      function: the function of jaxcgx that made it; "" for other collectives.
      codec: the codec as text; "" for other collectives.
      schedule: the schedule; "" for other collectives.
      leaves: the paths of the leaves. JAX 0.9 keeps only one name of collectives that XLA joined.
      name: XLA's op_name, the collective's place in the traced program. For results that jit gathers, it begins with
        "out_shardings of".
    """

    operation: str
    over: str
    axes: Names | None
    ranks: int
    dtype: str
    bytes: int
    raw_bytes: int
    times: int | None
    branch: bool
    function: str
    codec: str
    schedule: str
    leaves: tuple[str, ...]
    name: str


# {sentence: which collectives need it}
_NOTES: dict[str, Callable[[Collective], bool]] = {
    'An exchange by "one_shot" sends more bytes than the sum without compression would, in fewer rows. schedule="auto" '
    'takes what is faster, at 1 Gbit/s unless the plan has a network; a plan with prefer="bytes" sends the fewest.': (
        lambda c: c.schedule == "one_shot" and c.function not in _ROWS and c.bytes > c.raw_bytes
    ),
    "jit's out_shardings gather results that are sharded. For residuals, pass the shardings that "
    "jaxcgx.state_specs(state, axis_name) says, or none.": lambda c: c.name.startswith("out_shardings"),
    "What is in a loop of unknown length counts once.": lambda c: c.times is None,
    "Every branch of a conditional counts.": lambda c: c.branch,
}


@dataclasses.dataclass(frozen=True)
class Explanation(Totals):
    """The result of `explain`. str() is a table.

    Attributes:
      collectives: all collectives, in the order of the program.
      raw: the leaves that travel raw or that a plan skips, with the reasons.
      jnp: whether codecs run in plain jnp, with the same bytes, as the platform or the codec has no kernels.
    """

    collectives: tuple[Collective, ...]
    raw: tuple[scopes.LeafScope, ...]
    jnp: bool = False

    @property  # it overrides an attribute of Totals, which is fine because nobody assigns it
    def totals(self) -> dict[Any, tuple[int, int]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bytes that a rank sends in a call, and the same without compression, over each axis or tuple of axes.

        A collective in a loop of unknown length counts once. Collectives in all branches of a conditional count.
        """
        found: dict[Any, tuple[int, int]] = {}
        for c in self.collectives:
            sent, raw = found.get(c.axes, (0, 0))
            times = 1 if c.times is None else c.times
            found[c.axes] = sent + times * c.bytes, raw + times * c.raw_bytes
        return found

    def __repr__(self) -> str:
        counts = f"collectives: {len(self.collectives)}, raw leaves: {len(self.raw)}"
        return f"<Explanation of {counts}, bytes: {self.bytes:,}>"

    def __str__(self) -> str:
        parts: list[str] = []
        if self.collectives:
            rows = [_row(c, count) for c, count in collections.Counter(self.collectives).items()]
            head = "operation", "axes", "dtype", "bytes", "times", "function", "codec", "schedule", "leaves or origin"
            parts.append(table(head, rows))
        if self.raw:
            head = "left raw", "dtype", "bytes", "function", "because"
            paths = [leaf.path or _PARAMETER.get(leaf.function, "x") for leaf in self.raw]
            rest = [(leaf.dtype, f"{leaf.bytes:,}", leaf.function, leaf.reason) for leaf in self.raw]
            parts.append(table(head, [(path, *cells) for path, cells in zip(paths, rest)]))
        sent = [(_spell_axes(axes), *sizes) for axes, sizes in self.totals.items() if sizes[0]]
        parts.append(self.spell_totals("a rank sends over", sent))
        if self.jnp:
            parts.append("The codecs run in plain jnp, which gives the same bytes: there are no kernels for them here.")
        return "\n\n".join([*parts, *(text for text, needs in _NOTES.items() if any(map(needs, self.collectives)))])


def explain(fn: Callable[..., Any], /, *args: Any, show: bool = True, **kwargs: Any) -> Explanation:
    """Lists every collective in the compiled `fn`, and every leaf that jaxcgx left raw, with the reason.

    `fn` is compiled but not run. All collectives are listed, compressed or not. Their bytes are the bytes that one rank
    sends to other ranks each time the collective runs. If ranks send different amounts, it is the largest. For W ranks
    and operands of B bytes, they are 2 (W - 1) / W B for an all-reduce, (W - 1) / W B for a reduce-scatter or
    all-to-all, (W - 1) B for an all-gather, and B for a collective-permute or collective-broadcast. Exchanges over Tcp,
    MPI and shared memory are listed as the collectives that send the same bytes.

    Args:
      fn: a function, which may be jitted by jax.jit, jax.pmap, nnx.jit or eqx.filter_jit; or the result of its `lower`
        or `compile`, without further arguments. If it is compiled, leaves whose collectives XLA joined and names of
        axes may be missing.
      *args: the arguments of `fn`. A jax.ShapeDtypeStruct may take the place of an array.
      show: whether the result is printed as a table.
      **kwargs: the keyword arguments of `fn`.

    Returns:
      An `Explanation`, which has the same information as data.
    """
    compiled, jaxpr, lowered_text = _compile(fn, args, kwargs)
    text: str = compiled.as_text()
    meshes: dict[Pairs, None] = {}
    raw: list[scopes.LeafScope] = []
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        _note_mesh(sharding, meshes)
    # In a jaxpr are the leaves that aren't compressed, some of which XLA's text lacks.
    for path in () if jaxpr is None else _programs.operations(jaxpr):
        eqn, name = path[-1], "/".join(str(each.source_info.name_stack) for each in path)
        sends = _SENDS.search(eqn.primitive.name) and scopes.INNER not in name
        if sends or eqn.params.get("name") in (scopes.SKIPPED, scopes.JOINED):
            raw += [meaning for _, meaning in scopes.read(name) if isinstance(meaning, scopes.LeafScope)]
        for value in jax.tree.leaves(list(eqn.params.values())):
            _note_mesh(value, meshes)
    if jaxpr is None:
        meshes.update(dict.fromkeys(hlo.meshes(lowered_text)))
        named = scopes.read(lowered_text or text)
        raw += [meaning for _, meaning in named if isinstance(meaning, scopes.LeafScope)]
    axes = _Axes([dict(mesh) for mesh in meshes if math.prod(n for _, n in mesh) == hlo.ranks(text)])
    results = jax.tree_util.tree_leaves_with_path(compiled.out_tree.unflatten(range(compiled.out_tree.num_leaves)))
    names = [jax.tree_util.keystr(path) for path, _ in results]
    found = tuple(_collective(c, axes) for c in hlo.collectives(text, names))
    in_jnp = any(c.schedule and c.dtype == "uint8" for c in found) and 'custom_call_target="jaxcgx_' not in text
    result = Explanation(found, tuple(raw), in_jnp)
    if show:
        print(result)
    return result


def _compile(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, str]:
    """Returns (compiled program, jaxpr or None, text of StableHLO or "") of a function, whoever has jitted it."""
    compiled, lowered = _stage(fn, "compiled", jax.stages.Compiled), _stage(fn, "lowered", jax.stages.Lowered)
    if (compiled or lowered) and (args or kwargs):
        got = f"{len(args) + len(kwargs)} behind {type(fn).__name__}"
        raise wrong("explain", "args", "none behind a program that is lowered or compiled", got, kind=TypeError)
    if not (compiled or lowered or callable(fn)):
        expected = "a function, jitted or not, and behind it its arguments; or a program, lowered or compiled"
        raise wrong("explain", "fn", expected, repr(fn), kind=TypeError)
    if compiled:
        return compiled, None, ""
    if not lowered:
        jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
        if hasattr(jitted, "trace"):
            traced = jitted.trace(*args, **kwargs)
            traced = getattr(traced, "traced", traced)  # nnx.jit wraps JAX's object
            return traced.lower().compile(), traced.jaxpr, ""
        made = jitted.lower(*args, **kwargs)
        lowered = _stage(made, "lowered", jax.stages.Lowered)
        if made is lowered:  # pmap
            return made.compile(), jax.make_jaxpr(jitted)(*args, **kwargs), ""
    return lowered.compile(), None, lowered.as_text(debug_info=True)


def _stage(given: Any, name: str, kind: type[Any]) -> Any:
    """Returns a stage of JAX, which may be inside a stage of eqx.filter_jit or nnx.jit; None for anything else."""
    found = given if isinstance(given, kind) else getattr(given, name, None)
    return found if isinstance(found, kind) else None


def _note_mesh(value: Any, meshes: dict[Pairs, None]) -> None:
    mesh = getattr(value, "mesh", value)
    if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        meshes[tuple(mesh.shape.items())] = None


class _Axes:
    """Finds the mesh axes over which a collective of the program communicates."""

    def __init__(self, meshes: list[dict[Any, int]]) -> None:
        self.meshes, self._known = meshes, functools.cache(self._find)

    def of(self, found: hlo.Instruction, wanted: Names) -> tuple[Names | None, int]:
        """Returns (names of axes or None, number of ranks). Meshes with the `wanted` axes are tried first."""
        if found.over not in ("", "Tcp"):
            ranks = len(found.groups[0])
            return (f"{ranks} ranks over MPI" if found.over == "MPI" else found.over,), ranks
        return self._known(found.groups, found.operation == "collective-permute" and not found.over, wanted)

    def _find(self, groups: hlo.Groups, permutes: bool, wanted: Names) -> tuple[Names | None, int]:
        for mesh in sorted(self.meshes, key=lambda mesh: len(set(wanted) - set(mesh))):
            names = _permuted(groups, mesh) if permutes else _grouped(groups, mesh)
            if names is not None:
                return names, math.prod(mesh[name] for name in names)
        return None, len(set(itertools.chain(*groups))) if permutes else max(map(len, groups))


def _grouped(groups: hlo.Groups, mesh: dict[Any, int]) -> Names | None:
    """Returns the axes along which the ranks of a group differ, or None if no axes give these groups."""
    ranks = set(map(frozenset, groups))
    for n in range(len(mesh) + 1):
        for names in itertools.combinations(mesh, n):
            if set(map(frozenset, hlo.mesh_groups(mesh, [(name, 1, mesh[name]) for name in names]))) == ranks:
                return names
    return None


def _permuted(pairs: hlo.Groups, mesh: dict[Any, int]) -> Names:
    places = np.unravel_index(np.array(pairs), tuple(mesh.values()))  # for each axis: [pairs, 2]
    return tuple(name for name, place in zip(mesh, places) if (place[:, 0] != place[:, 1]).any())


def _sent(operation: str, size: int, ranks: int) -> int:
    """Returns the bytes that a rank sends to other ranks, for operands of `size` bytes."""
    if ranks == 1:
        return 0
    if operation in ("collective-permute", "collective-broadcast"):
        return size
    share = {"all-reduce": 2 / ranks, "all-gather": 1}.get(operation, 1 / ranks)
    return round((ranks - 1) * share * size)


def _collective(found: hlo.Instruction, axes: _Axes) -> Collective:
    # A collective that the partitioner inserts has the name of the operation that it was inserted for. That operation
    # may be no collective, or may be a collective over other axes.
    scope = scopes.read(found.name) if found.over or _SENDS.search(found.name) else []
    calls = [meaning for _, meaning in scope if isinstance(meaning, scopes.MessageScope)]
    names, ranks = axes.of(found, calls[0].axes if calls else ())
    if calls and not found.over and names is not None and not set(names) <= set(calls[0].axes):
        scope, calls = [], []
    exchanges = [meaning for _, meaning in scope if isinstance(meaning, scopes.ExchangeScope)]
    size = sum(size for _, size in found.operands)
    sent = _sent(found.operation, size, ranks)
    saving = min((e.saving for e in exchanges), default=1.0)
    if found.operation == "all-reduce" and any(e.schedule == "one_shot" for e in exchanges):
        saving /= 2  # a leader passes its result on, which takes half the bytes of a sum
    # The fraction of the bytes that isn't factors, if XLA joined the collectives of factors and of other arrays.
    plain = (sum(c.bytes for c in calls) + _others(found)) / max(size, 1) if exchanges else 0
    unknown = [name for name, meaning in scope if meaning is None]
    return Collective(
        operation=found.operation,
        over=found.over,
        axes=names,
        ranks=ranks,
        dtype=_joined(_dtype(dtype) for dtype, _ in found.operands),
        bytes=sent,
        raw_bytes=round(sent * (plain + (1 - plain) * saving)),
        times=found.times,
        branch=found.branch,
        function=_joined([c.function for c in calls] or [name.split(".")[0] for name in unknown[:1]]),
        codec="unknown" if unknown else _joined(spell(e.codec) for e in exchanges) or ("Raw()" if calls else ""),
        schedule=_joined(e.schedule for e in exchanges),
        leaves=tuple(itertools.chain(*(c.leaves for c in calls))),
        name=found.name,
    )


def _others(found: hlo.Instruction) -> int:
    """Returns the bytes of the operands that aren't jaxcgx's. For operands a/b and a/c, XLA writes the name a/(b:c)."""
    front, _, ends = found.name.partition("/(")
    names = ends.split(":")
    if scopes.read(front) or len(names) != len(found.operands):
        return 0
    return sum(size for name, (_, size) in zip(names, found.operands) if not scopes.read(name))


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _dtype(name: str) -> str:
    """Returns NumPy's name of a dtype, from XLA's name."""
    kinds = {"u": "uint", "s": "int", "f": "float", "bf": "bfloat", "c": "complex"}
    m = re.fullmatch(r"([a-z]+)(\d+)", name)
    return "bool" if name == "pred" else kinds.get(m[1], m[1]) + m[2] if m else name


def _spell_axes(names: Names | None) -> str:
    return "groups of no axis" if names is None else ", ".join(map(str, names)) or "none"


def _row(c: Collective, count: int) -> tuple[str, ...]:
    often = f"{count} in a loop" if c.times is None else str(count * c.times)
    bare = _PARAMETER.get(c.function, "x")
    first, more = (c.leaves[0] or bare) if c.leaves else c.name, len(c.leaves) - 1
    return (
        f"{c.operation} over Tcp" if c.over == "Tcp" else c.operation,
        _spell_axes(c.axes),
        c.dtype,
        f"{c.bytes:,}",
        often + " at most" * c.branch,
        c.function or "not jaxcgx",
        c.codec,
        c.schedule,
        f"{first} and {more} more" if more > 0 else first,
    )

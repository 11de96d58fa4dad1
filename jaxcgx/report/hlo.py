"""The collectives in XLA's text of a compiled program."""

import dataclasses
import math
import re

import numpy as np

OPERATIONS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)")
_COLLECTIVE = re.compile(rf" ({'|'.join(OPERATIONS)})(?:-start)?(?=\()")
_CALLED = re.compile(r"\b(body|condition|\w*calls|to_apply|\w+_computations?)=(%[\w.-]+|\{[^}]*\})")
_MESH = re.compile(r"@?mesh[\[<](.*?)[\]>](?:, device_ids=\((\[.*?|[\d,]+)\))? ?\{(.*?)\}")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One in the program. Groups are of ranks, as XLA counts them: the place of a device in the mesh."""

    operation: str
    operands: tuple  # (dtype, bytes) of each
    groups: tuple  # of those that exchange with one another; of a permute the pairs (from, to)
    name: str  # op_name
    times: int | None  # that it runs; None: it is in a loop of unknown length
    branch: bool  # it is in a branch of a conditional

    @property
    def permutes(self):
        return self.operation == "collective-permute"


def collectives(text):
    """Every collective of a program, in each place that it is called from."""
    computations, shapes, entry, lines = {}, {}, None, []
    for line in text.splitlines():
        if m := _INSTRUCTION.match(line):
            shapes[m[1]] = m[2]
            lines.append(m[2])
        elif m := _COMPUTATION.match(line):
            lines = computations[m[2]] = []
            entry = m[2] if m[1] else entry
    everybody = ranks(text)

    def walk(name, times, branch):
        for line in computations.get(name, ()):
            bare = _STRING.sub('""', line)
            if m := _COLLECTIVE.search(bare):
                end = _closing(bare, m.end())
                operands = [_shape(shapes[x]) for x in re.findall(r"%([\w.-]+)", bare[m.end() : end])]
                op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
                yield Collective(
                    m[1],
                    tuple(x for shape in operands for x in shape),
                    _groups(bare[end:], everybody),
                    op_name[1] if op_name else "",
                    times,
                    branch,
                )
                continue
            for kind, called in _CALLED.findall(bare):
                often, choice = (
                    times,
                    branch or kind in ("branch_computations", "true_computation", "false_computation"),
                )
                if kind in ("body", "condition"):
                    n = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
                    often = times * int(n[1]) if n and times is not None else None
                for callee in re.findall(r"%([\w.-]+)", called):
                    yield from walk(callee, often, choice)

    return list(walk(entry, 1, False))


def ranks(text):
    """How many devices a program runs on."""
    return math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))


def _closing(text, start):
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    return len(text)


def _shape(definition):
    """[(dtype, bytes)] of the arrays that an instruction results in."""
    text = definition[: _closing(definition, 0) if definition[0] == "(" else definition.index(" ")]
    found = []
    for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", text):
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or ["0"])[0])
        found.append((dtype, math.prod(int(n.strip("<=")) for n in dims.split(",") if n) * bits // 8))
    return found


def _groups(attributes, ranks):
    """The groups of ranks, from any of the forms that XLA writes."""
    m = re.search(r"(?:replica_groups|source_target_pairs)=(.*)", attributes)
    text = m[1] if m else "{}"
    if m := _MESH.match(text):
        return _mesh_groups(*m.groups())
    if m := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return tuple(map(tuple, _iota(m[2], m[3]).reshape(_numbers(m[1])).tolist()))
    groups = re.match(r"\{((?:\{[\d,]*\},?)*)\}", text)
    found = tuple(tuple(_numbers(g)) for g in re.findall(r"\{([\d,]*)\}", groups[1])) if groups else ()
    return found or (tuple(range(ranks)),)


def _mesh_groups(mesh, devices, axes):
    """mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}: axes, and of 'b' only the outer half."""
    sizes = {name.strip("'"): int(n) for name, n in (item.split("=") for item in mesh.split(","))}
    ids = np.arange(math.prod(sizes.values()))
    if devices and (m := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)):
        ids = _iota(m[1], m[2])
    elif devices:
        ids = np.array(_numbers(devices))
    chosen = []
    for name, outer, size in re.findall(r"([^,:{}]+)(?::\((\d+)\)(\d+))?", axes):
        name = name.strip("' ")
        chosen.append((name, int(outer or 1), int(size or sizes[name])))
    return mesh_groups(sizes, chosen, ids.reshape(-1))


def mesh_groups(sizes, axes, ids=None):
    """The groups that differ only along `axes`, [(name, outer, size)]: of an axis of outer * size * inner the
    middle."""
    total = math.prod(sizes.values())
    places = dict(zip(sizes, np.unravel_index(np.arange(total), tuple(sizes.values())))) if sizes else {}
    for name, outer, size in axes:
        stride = sizes[name] // (outer * size)
        places[name] = places[name] - places[name] // stride % size * stride
    groups = {}
    for i in range(total):
        groups.setdefault(tuple(int(p[i]) for p in places.values()), []).append(i if ids is None else int(ids[i]))
    return tuple(map(tuple, groups.values()))


def _numbers(text):
    return [int(n) for n in text.split(",") if n]


def _iota(dims, order):
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order)) if order else ids

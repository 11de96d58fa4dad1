"""Finds the collectives in XLA's text of a compiled program, and the custom calls that exchange as they do."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcgx.native import tcp
from jaxcgx.transports.shm import OPERATIONS

Groups = tuple[tuple[int, ...], ...]  # groups of ranks that exchange with one another
Operands = tuple[tuple[str, int], ...]  # (dtype, bytes) of each array

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*)")
_OPERATIONS = "all-reduce|all-gather|(?:ragged-)?all-to-all|reduce-scatter|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf" ({_OPERATIONS})(?:-start)?(?=\()")
_CUSTOM = re.compile(r" custom-call\(")
_CALLED = re.compile(r"\b(body|condition|\w*calls|to_apply|\w+_computations?)=(%[\w.-]+|\{[^}]*\})")
_MESH = re.compile(r"@?mesh[\[<](.*?)[\]>](?:, device_ids=\((\[.*?|[\d,]+)\))? ?\{(.*?)\}")
_MOVED = re.compile(r" (?:copy|bitcast|reshape|copy-done|all-gather-done)\(%([\w.-]+)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# The collectives of XLA that send as many bytes as the operations of the transports and of mpi4jax.
_ALIKE = {
    **dict.fromkeys(("all_to_all", "alltoall"), "all-to-all"),
    **dict.fromkeys(("all_gather", "allgather"), "all-gather"),
    **dict.fromkeys(("permute", "shift", "sendrecv"), "collective-permute"),
    **dict.fromkeys(("broadcast", "bcast"), "collective-broadcast"),
    "allreduce": "all-reduce",
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A collective of the program. In XLA, a rank is the place of a device in the mesh."""

    operation: str
    operands: Operands
    groups: Groups  # for a permute, the pairs (from, to)
    over: str = ""  # who moves the bytes; "" for XLA. Over MPI and shared memory, the only group is (0, ..., ranks - 1)
    name: str = ""  # op_name, or the result of the program that it gathers
    times: int | None = 1  # how often it runs; None: it is in a loop of unknown length
    branch: bool = False  # whether it is in a branch of a conditional


class _Array(NamedTuple):
    dtype: str  # XLA's name
    bytes: int
    shape: tuple[int, ...]


def collectives(text: str, results: Sequence[str] = ()) -> list[Instruction]:
    """Returns every collective of a program. It is listed again for each place that calls its computation."""
    # `results` are the names of the program's results. XLA gives a gather that jit's out_shardings cause no op_name.
    computations: dict[str, list[tuple[str, str]]] = {}
    shapes: dict[str, str] = {}
    entry, root, lines = "", "", list[tuple[str, str]]()
    for line in text.splitlines():
        if m := _INSTRUCTION.match(line):
            shapes[m[2]] = m[3]
            lines.append((m[2], m[3]))
            root = m[2] if m[1] and lines is computations.get(entry) else root
        elif m := _COMPUTATION.match(line):
            lines = computations[m[2]] = []
            entry = m[2] if m[1] else entry
    everybody, gathered = ranks(text), _results(shapes, root, results)

    def walk(name: str, times: int | None, branch: bool) -> Iterator[Instruction]:
        for instruction, line in computations.get(name, ()):
            bare = _STRING.sub('""', line)
            if found := _collective(bare, shapes, everybody) or _custom_call(line, bare, shapes):
                m = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
                op_name = m[1] if m else gathered.get(instruction, "")
                yield dataclasses.replace(found, name=op_name, times=times, branch=branch)
                continue
            for kind, called in _CALLED.findall(bare):
                often = times
                choice = branch or kind in ("branch_computations", "true_computation", "false_computation")
                if kind in ("body", "condition"):
                    n = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
                    often = times * int(n[1]) if n and times is not None else None
                for callee in re.findall(r"%([\w.-]+)", called):
                    yield from walk(callee, often, choice)

    return list(walk(entry, 1, False))


def _results(shapes: Mapping[str, str], root: str, results: Sequence[str]) -> dict[str, str]:
    """Returns {instruction: name} of the instructions that make a program's results, before they are copied."""
    made = re.findall(r"%([\w.-]+)", shapes.get(root, "").partition(" tuple(")[2]) or [root]
    found: dict[str, str] = {}
    for instruction, result in zip(made, results) if len(made) == len(results) else ():
        while m := _MOVED.search(shapes[instruction]):
            instruction = m[1]
        found[instruction] = f"out_shardings of {result}"
    return found


def ranks(text: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))


def _collective(bare: str, shapes: Mapping[str, str], everybody: int) -> Instruction | None:
    """Returns a collective of XLA, or None if it is none. `bare`: its text without strings."""
    if not (m := _COLLECTIVE.search(bare)):
        return None
    end = _closing(bare, m.end())
    operands = [x for name in re.findall(r"%([\w.-]+)", bare[m.end() : end]) for x in _arrays(shapes[name])]
    return Instruction(m[1], tuple((x.dtype, x.bytes) for x in operands), _groups(bare[end:], everybody))


def _custom_call(line: str, bare: str, shapes: Mapping[str, str]) -> Instruction | None:
    """Returns an exchange over Tcp, MPI or shared memory as the collective that sends as many bytes, or None."""
    target, m = re.search(r'custom_call_target="([^"]*)"', line), _CUSTOM.search(bare)
    names = re.findall(r"%([\w.-]+)", bare[m.end() : _closing(bare, m.end() - 1)]) if m else []
    operand = next((array for name in names[:1] for array in _arrays(shapes[name])), None)
    if target is None or operand is None:
        return None

    def number(name: str) -> int:
        found = re.search(rf"\b{name} = (\d+)", line)
        return int(found[1]) if found else 0

    if target[1] == "jaxcgx_tcp_allreduce":
        operation = "all-reduce" if "two_shot = true" in line else "all-gather"
        return Instruction(operation, (("u8", number("bytes")),), _tcp_groups(line, number("ranks")), "Tcp")
    if target[1] in ("jaxcgx_tcp_exchange", "jaxcgx_tcp_exchange_begin"):
        operation = _ALIKE[tcp.OPERATIONS[number("operation")]]
        return Instruction(operation, ((operand.dtype, operand.bytes),), _tcp_groups(line, number("ranks")), "Tcp")
    if target[1] == "jaxcgx_exchange":
        name, over = OPERATIONS[number("operation")], "shared memory"
    elif (m := re.fullmatch(r"mpi_([a-z]+)(?:_ffi)?", target[1])) and m[1] in _ALIKE:
        name, over = m[1], "MPI"
    else:
        return None
    operation, ranks = _ALIKE[name], 2  # unless the shapes or the attributes say more
    if operation == "all-to-all":
        ranks = operand.shape[0]
    elif operation == "all-gather":
        ranks = math.prod(_arrays(line)[0].shape) // max(math.prod(operand.shape), 1)
    elif over == "MPI" and "mpi4py.MPI" in sys.modules:  # the handle is valid in the process that traced the program
        mpi: Any = sys.modules["mpi4py.MPI"]
        ranks = mpi.Intracomm.fromhandle(number("comm")).size
    return Instruction(operation, ((operand.dtype, operand.bytes),), (tuple(range(ranks)),), over)


def _tcp_groups(line: str, ranks: int) -> Groups:
    """Returns the groups of an exchange over Tcp, which MLIR writes in hexadecimal digits if there are many numbers."""
    m = re.search(r'\bgroups = dense<(?:"0x([0-9A-F]+)"|\[?([\d, ]+)\]?)>', line)
    places = [*range(ranks)] if m is None else _numbers(m[2]) if m[2] else np.frombuffer(bytes.fromhex(m[1]), "<i8")
    return tuple(tuple(map(int, places[i : i + ranks])) for i in range(0, len(places), ranks))


def meshes(lowered: str) -> list[tuple[tuple[str, int], ...]]:
    """Returns the meshes in StableHLO's text. A mesh is the (name, size) of each axis."""
    found = re.findall(r"sdy\.mesh @\S+ = <\[(.*?)\]", lowered)
    return [tuple((name, int(n)) for name, n in re.findall(r'"([^"]+)"=(\d+)', axes)) for axes in found]


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the parenthesis at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    return len(text)


def _arrays(definition: str) -> list[_Array]:
    """Returns the arrays in the result of an instruction. A token is an array of 0 bytes."""
    text = definition[: _closing(definition, 0) if definition[0] == "(" else definition.index(" ")]
    found: list[_Array] = []
    for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", text):
        shape = tuple(_numbers(dims.replace("<=", "")))
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or ["0"])[0])
        found.append(_Array(dtype, math.prod(shape) * bits // 8, shape))
    return found


def _groups(attributes: str, ranks: int) -> Groups:
    m = re.search(r"(?:replica_groups|source_target_pairs)=(.*)", attributes)
    text = m[1] if m else "{}"
    if m := _MESH.match(text):
        return _mesh_groups(m[1], m[2], m[3])
    if m := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return tuple(map(tuple, _iota(m[2], m[3]).reshape(_numbers(m[1])).tolist()))
    groups = re.match(r"\{((?:\{[\d,]*\},?)*)\}", text)
    found = tuple(tuple(_numbers(g)) for g in re.findall(r"\{([\d,]*)\}", groups[1])) if groups else ()
    return found or (tuple(range(ranks)),)


def _mesh_groups(mesh: str, devices: str | None, axes: str) -> Groups:
    # In mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}, the ranks of a group differ along 'a' and along the
    # outer half of 'b'.
    sizes = {name.strip("'"): int(n) for name, n in (item.split("=") for item in mesh.split(","))}
    ids = np.arange(math.prod(sizes.values()))
    if devices and (m := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)):
        ids = _iota(m[1], m[2])
    elif devices:
        ids = np.array(_numbers(devices))
    chosen: list[tuple[str, int, int]] = []
    for name, outer, size in re.findall(r"([^,:{}]+)(?::\((\d+)\)(\d+))?", axes):
        name = name.strip("' ")
        chosen.append((name, int(outer or 1), int(size or sizes[name])))
    return mesh_groups(sizes, chosen, ids.reshape(-1))


def mesh_groups(
    sizes: Mapping[Any, int], axes: Sequence[tuple[Any, int, int]], ids: np.ndarray[Any, Any] | None = None
) -> Groups:
    """Returns the groups of ranks that differ only along `axes` of a mesh, {axis name: size}."""
    # `axes` has (name, outer, size) of each. The axis has outer * size * inner ranks, and ranks of a group differ only
    # along the middle part, `size`. `ids` has the rank at each place of the mesh; by default, they are in order.
    total = math.prod(sizes.values())
    places = dict(zip(sizes, np.unravel_index(np.arange(total), tuple(sizes.values())))) if sizes else {}
    for name, outer, size in axes:
        stride = sizes[name] // (outer * size)
        places[name] = places[name] - places[name] // stride % size * stride
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in range(total):
        groups.setdefault(tuple(int(p[i]) for p in places.values()), []).append(i if ids is None else int(ids[i]))
    return tuple(map(tuple, groups.values()))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _iota(dims: str, order: str | None) -> np.ndarray[Any, Any]:
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order)) if order else ids

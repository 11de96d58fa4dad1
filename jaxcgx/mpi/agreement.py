"""Checks that all ranks make the same call, by comparing descriptions of their arguments as text.

With `jaxcgx.mpi.CHECK`, the ranks compare these descriptions over mpi4py before anything is compiled.
"""

import hashlib
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcgx.checks import at, spell_array, unexpected
from jaxcgx.mpi.waiting import Communicator, wait

_SHOWN = 5  # the most differences that an error names
_NEAR = 100  # the characters that are shown on each side of a difference


def describe(op: str, arrays: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the description of a call. It has the types of the leaves of `arrays`, and the values of `settings`."""
    mine = {"function": op, "version of jaxcgx": importlib.metadata.version("jaxcgx")}
    mine |= {f"argument '{argument}'": _spell(value) for argument, value in settings.items()}
    for argument, tree in arrays.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = jax.tree_util.keystr(path)
            where = f"leaf {name or 'x'}" if argument == "x" else f"argument '{argument}'{at(path)}"
            mine[where] = _type(leaf)
    return mine


def agree(comm: Communicator, mine: Mapping[str, str]) -> None:
    """Raises an error on every rank if the ranks' descriptions differ (`jaxcgx.mpi.CHECK`)."""
    op = mine["function"]
    jax.effects_barrier()  # programs that are still running may use the same communicator
    digest = np.frombuffer(hashlib.blake2b(repr(mine).encode()).digest(), np.uint8)
    digests = np.zeros((comm.size, digest.size), np.uint8)
    wait(op, comm, comm.Iallgather(digest, digests))
    wait(op, comm, comm.Ibarrier())  # a digest may be from a call that its rank gave up; such a rank doesn't come here
    if not (digests == digest).all():
        compare(op, comm.allgather(mine))


def compare(op: str, every: Sequence[Mapping[str, str]]) -> None:
    """Raises an error that names the differences between the ranks' descriptions. Equal descriptions pass."""
    said = dict.fromkeys(what for one in every for what in one)
    different = [what for what in said if len({one.get(what) for one in every}) > 1]
    if not different:
        return
    if "function" in different:
        different = ["function"]  # each function has its own arguments
    shown = [_difference(what, every) for what in different[:_SHOWN]]
    more = [f"and {len(different) - _SHOWN} more differences"] if len(different) > _SHOWN else []
    raise unexpected(every[0].get("function", op), "the same on every rank", "; ".join(shown + more))


def _difference(what: str, every: Sequence[Mapping[str, str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(every):
        ranks.setdefault(one.get(what, "nothing"), []).append(rank)
    # Of long values, such as plans, only the part is shown in which they differ, and some text before and behind it.
    first = max(_alike(list(ranks)) - _NEAR, 0)
    last = max(_alike([value[:first:-1] for value in ranks]) - _NEAR, 0)
    shown = {
        f"{'...' * (first > 0)}{value[first : len(value) - last]}{'...' * (last > 0)}": found
        for value, found in ranks.items()
    }
    return f"{what}: " + ", ".join(f"{value} on rank {' '.join(map(str, found))}" for value, found in shown.items())


def _alike(values: Sequence[str]) -> int:
    """Returns the number of characters with which all values begin alike."""
    return next((i for i, each in enumerate(zip(*values)) if len(set(each)) > 1), min(map(len, values)))


def _type(leaf: Any) -> str:
    """Returns the leaf's dtype and shape as JAX sees them. So Python numbers may have different values on the ranks."""
    try:
        return spell_array(jax.typeof(leaf))
    except TypeError:
        return _spell(leaf)


def _spell(value: Any) -> str:
    """Returns a setting as text, without the addresses of objects. It may be a tree of settings and arrays."""
    leaves, tree = jax.tree_util.tree_flatten(value)
    if tree == jax.tree_util.tree_structure(0):
        return re.sub(" at 0x[0-9a-f]+", "", spell_array(value))
    return repr(jax.tree_util.tree_unflatten(tree, list(map(_spell, leaves))))

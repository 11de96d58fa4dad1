"""Reads the exchanges that are custom calls of a compiled program: those over Tcp, MPI and shared memory."""

import math
import re
import sys
from typing import Any, NamedTuple

from jaxcgx.native import shm, tcp

# XLA's names for the operations of the transports and of mpi4jax.
_NAMES = {
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "permute": "collective-permute",
    "shift": "collective-permute",
    "broadcast": "collective-broadcast",
    "alltoall": "all-to-all",
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "sendrecv": "collective-permute",
    "bcast": "collective-broadcast",
}


class Exchange(NamedTuple):
    """An exchange, described as the collective of XLA that sends the same number of bytes."""

    operation: str
    dtype: str  # XLA's name
    bytes: int  # the bytes of the collective's operand
    ranks: int
    over: str  # who moves the bytes


class Array(NamedTuple):
    """An operand or a result."""

    dtype: str  # XLA's name
    bytes: int
    shape: tuple[int, ...]


def read(target: str, attributes: str, operand: Array, results: list[Array]) -> Exchange | None:
    """Returns the exchange of a custom call, or None if the call is no exchange.

    Args:
      target: the call's target.
      attributes: the text of the call, with its attributes.
      operand: the call's first operand.
      results: the call's results.
    """
    if target == "jaxcgx_tcp_allreduce":
        ranks, two_shot = _number(attributes, "ranks"), "two_shot = true" in attributes
        operation, message = "all-reduce" if two_shot else "all-gather", _number(attributes, "bytes")
        return Exchange(operation, "u8", message, ranks=ranks, over="Tcp")
    if target == "jaxcgx_tcp_exchange":
        operation = tcp.OPERATIONS[_number(attributes, "operation")]
        targets = re.search(r"targets = dense<.*?> : tensor<(\d+)xi64>", attributes)
        ranks = int(targets[1]) if targets and operation == "permute" else _ranks(_NAMES[operation], operand, results)
        return Exchange(_NAMES[operation], operand.dtype, operand.bytes, ranks=ranks, over="Tcp")
    if target == "jaxcgx_exchange":
        operation = _NAMES[shm.OPERATIONS[_number(attributes, "operation")]]
        ranks = _ranks(operation, operand, results)
        return Exchange(operation, operand.dtype, operand.bytes, ranks=ranks, over="shared memory")
    if (m := re.fullmatch(r"mpi_([a-z]+)(?:_ffi)?", target)) and m[1] in _NAMES:
        operation = _NAMES[m[1]]
        known = operation in ("all-to-all", "all-gather")
        ranks = _ranks(operation, operand, results) if known else _size_of_communicator(_number(attributes, "comm"))
        return Exchange(operation, operand.dtype, operand.bytes, ranks=ranks, over="MPI")
    return None


def _number(attributes: str, name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)", attributes)
    return int(found[1]) if found else 0


def _ranks(operation: str, operand: Array, results: list[Array]) -> int:
    """Returns the number of ranks, or 2 if it doesn't follow from the shapes."""
    if operation == "all-to-all":
        return operand.shape[0]
    if operation == "all-gather":
        return math.prod(results[0].shape) // max(math.prod(operand.shape), 1)
    return 2


def _size_of_communicator(handle: int) -> int:
    """Returns the size of a communicator, or 2 if this process hasn't imported mpi4py.

    The handle is valid only in the process that traced the program.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return 2 if mpi is None else mpi.Intracomm.fromhandle(handle).size

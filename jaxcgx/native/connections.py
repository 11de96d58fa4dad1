"""The TCP connections among the processes of jax.distributed, which a process makes once."""

import functools
import secrets
import socket
import threading
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx.native.registration import module

CONNECT = 1800.0  # seconds that processes wait for each other to come to the first exchange
_ONE = threading.Lock()


def connect() -> None:
    """Connects the processes of jax.distributed, unless they are connected."""
    if _compat.rendezvous()[0] is None:
        raise RuntimeError(
            "Tcp: expected processes that know each other, got one alone; call jax.distributed.initialize first"
        )
    with _ONE:
        if why := _failure():
            raise RuntimeError(f"Tcp: {why}; start the processes again")


@functools.cache
def _failure() -> str | None:
    """Why the processes are not connected. There is no second try: other processes may have given up."""
    store, process, processes, coordinator = _compat.rendezvous()
    assert coordinator, "jax.distributed has a store, but no coordinator"
    try:
        _connect(store, process, processes=processes, coordinator=coordinator)
    except RuntimeError as error:
        return str(error)
    return None


def _connect(store: Any, process: int, processes: int, coordinator: str) -> None:
    """Each process tells the others through the store where it listens. A common secret keeps strangers out."""
    # Every process reaches the host of process 0 where it reaches the coordinator, which runs there.
    host = _host(coordinator) if process else ""
    store.key_value_set(f"jaxcgx/tcp/{process}", f"{module().tcp_listen()} {host}")
    if process == 0:
        store.key_value_set("jaxcgx/tcp/token", secrets.token_hex(16))

    def get(key: Any, whose: int) -> str:
        try:
            return store.blocking_key_value_get(f"jaxcgx/tcp/{key}", int(CONNECT * 1000))
        except jax.errors.JaxRuntimeError as error:
            late = "DEADLINE_EXCEEDED" in str(error)
            raise RuntimeError(f"process {whose} has not come within {CONNECT:g} s" if late else str(error)) from None

    token, addresses = get("token", 0), []
    for other in range(processes):
        port, host = get(other, other).split(" ")
        addresses.append((host or coordinator.rpartition(":")[0].strip("[]"), int(port)))
    module().tcp_connect(process, addresses, bytes.fromhex(token), CONNECT)


def _host(coordinator: str) -> str:
    """The address of this host in the network where the coordinator is."""
    host, _, port = coordinator.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # it sends nothing
        probe.connect(address)
        return probe.getsockname()[0]

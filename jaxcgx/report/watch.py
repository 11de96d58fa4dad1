"""Watches a step: if it doesn't end in time, a thread says which process it waits for."""

import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jaxcgx import _compat
from jaxcgx.checks import check_positive, wrong

LOG = logging.getLogger("jaxcgx")
ENDED = 1  # the status of a process that `end` ends
SMALL = 1024  # elements of the results that are kept until they are ready
_numbers = itertools.count()  # of the watched functions of this process


def watch(step: Callable[..., Any], seconds: float, *, end: float | None = None) -> "Watched":
    """Watches a training step. Its collectives wait without end for a process that lives, but doesn't come.

    Every process of a program wraps its step:

        step = jaxcgx.watch(train.step, seconds=60)

    If a call takes longer than `seconds`, until its results are ready, the logger "jaxcgx" gets a warning. It names the
    processes that have called the step less often: the call's first exchange waits for them. A thread looks, and calls
    don't wait for it. Exchanges over `Tcp` raise errors that name the rank, and need no watch.

    Processes find each other by `jax.distributed.initialize`. Without it, the warning names no process.

    Args:
      step: a function, such as a jitted one.
      seconds: the time that a call may take. The first call also compiles.
      end: the time after which the process ends, with status 1, so that whoever started it can start it again. None:
        it doesn't end.

    Returns:
      The function. Its other attributes are those of `step`.
    """
    if not callable(step):
        raise wrong("watch", "step", "a function", repr(step), "write jaxcgx.watch(train.step, 60)", kind=TypeError)
    check_positive("watch", "seconds", seconds)
    if end is not None:
        check_positive("watch", "end", end)
    return Watched(step, seconds, end)


class WatchedCall:
    def __init__(self, number: int) -> None:
        self.number = number  # counts from 1
        self.begun: float = time.monotonic()
        self.results: list[Any] | None = None  # arrays. None: the function hasn't returned

    def ended(self) -> bool:
        """Returns whether the results are ready. Those that were donated to a later call are left out."""
        return self.results is not None and all(x.is_deleted() or x.is_ready() for x in self.results)


class Watched:
    """A function whose calls are watched."""

    def __init__(self, step: Callable[..., Any], seconds: float, end: float | None) -> None:
        self._step, self._seconds, self._end = step, seconds, end
        self._calls: deque[WatchedCall] = deque()  # those that may not have ended
        self._made = self._told = 0  # the number of calls so far, and of those that the other processes know of
        self._since: float = time.monotonic()  # when a call ended, or a warning was given
        self._key: str = f"jaxcgx/watch/{next(_numbers)}/"
        threading.Thread(target=_look, args=(weakref.ref(self), seconds / 10), name="jaxcgx-watch", daemon=True).start()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._made += 1
        call = WatchedCall(self._made)
        self._calls.append(call)
        arrays: list[jax.Array] = []
        try:
            results = self._step(*args, **kwargs)
            arrays = [x for x in jax.tree_util.tree_leaves(results) if isinstance(x, jax.Array)]
            return results
        finally:
            # The others would keep memory that their owner has freed.
            call.results = [x for x in arrays if x.size <= SMALL] or sorted(arrays, key=lambda x: x.size)[:1]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_step"), name)

    def look(self) -> None:
        """Tells other processes of new calls, and warns if a call takes too long."""
        store, process, _, _ = _compat.rendezvous()
        if store is not None and self._told != self._made:
            self._told = self._made
            store.key_value_set(f"{self._key}{process}", f"{self._told} {socket.gethostname()}", allow_overwrite=True)
        while self._calls and self._calls[0].ended():
            self._calls.popleft()
            self._since = time.monotonic()
        if not self._calls:
            return
        call, now = self._calls[0], time.monotonic()
        if now - max(self._since, call.begun) > self._seconds:
            self._since = now
            LOG.warning("%s", self._why(call, [] if store is None else store.key_value_dir_get(self._key)))
        if self._end is not None and now - call.begun > self._end:
            LOG.error("watch: the process ends, as a call took longer than end=%g s", self._end)
            logging.shutdown()
            os._exit(ENDED)

    def _why(self, call: WatchedCall, told: list[tuple[str, str]]) -> str:
        """Returns the text of a warning. `told` has (key, number of calls and host) of each process."""
        name = getattr(self._step, "__name__", "the function")
        text = f"watch: call {call.number} of {name} began {time.monotonic() - call.begun:.0f} s ago and hasn't ended"
        if jax.process_count() == 1:
            return f"{text}. A device or a callback hangs in it, or a process that jax.distributed doesn't know"
        made = {int(key.rpartition("/")[2]): value.split(" ", 1) for key, value in told}
        late = [p for p in range(jax.process_count()) if int(made.get(p, ["0"])[0]) < call.number]
        if not late:
            return f"{text}. Every process has made this call: a device, a callback or the network hangs in it"
        return f"{text}. Its first exchange waits for " + " and ".join(_spelled(p, *made.get(p, ["0"])) for p in late)


def _spelled(process: int, made: str, host: str = "") -> str:
    devices = ", ".join(str(device.id) for device in jax.devices() if device.process_index == process)
    return f"process {process}{f' at {host}' if host else ''} (devices {devices}), which has made {made} calls"


def _look(watched: "weakref.ref[Watched]", period: float) -> None:
    while (found := watched()) is not None:
        found.look()
        del found
        time.sleep(period)

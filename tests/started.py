"""Starts the ranks of a test as processes."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

RESERVED = []  # a socket with a name for each port, until this process ends


def free_port():
    """Returns a port that no process listens on, that no other caller gets and that the system gives no connection."""
    while True:
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0jaxcgx-port-{(port := random.randrange(20_000, 32_000))}")
            with socket.socket() as s:
                s.bind(("127.0.0.1", port))
        except OSError:
            name.close()
        else:
            RESERVED.append(name)
            return port


class Processes:
    """Runs Python with the words of each rank. At the end or after `limit` seconds, they and their children are killed.

    XLA crashes if it has to keep a program of several processes, so programs are not kept.
    """

    def __init__(self, *words, limit=300, stderr=None, **env):
        self.words, self.limit = words, threading.Timer(limit, self.kill)
        env = os.environ | dict(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false") | env
        self.options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env)

    def __enter__(self):
        options = self.options | dict(text=True, bufsize=1, process_group=0)
        commands = [[sys.executable, *map(str, words)] for words in self.words]
        self.running = [subprocess.Popen(command, **options) for command in commands]
        self.limit.start()
        return self

    def kill(self):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def __exit__(self, *_):
        self.limit.cancel()
        self.kill()
        for process in self.running:
            with process:  # closes its pipes
                pass


def results(*words, limit=300):
    """Returns what each rank printed after the word RESULT, in JSON, or None for a rank that ended without a result."""
    with Processes(*words, limit=limit) as ranks:
        found = [re.search("^RESULT (.*)$", each.communicate()[0], re.MULTILINE) for each in ranks.running]
    return [json.loads(each[1]) if each else None for each in found]


def until(done, act=lambda: None, limit=60):
    """Calls `act` until `done` accepts its result, and returns this result. After some seconds, this is an error."""
    deadline = time.monotonic() + limit
    while not done(found := act()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found

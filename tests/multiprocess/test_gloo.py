"""Tests several processes over Gloo: they give the bits of one process, and they end when a rank fails."""

import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jax
import pytest
from errors import named

RANKS = pathlib.Path(__file__).with_name("ranks.py")
LIMIT = 150  # seconds, after which processes count as hung; they need a tenth of it
HEARTBEAT = 8  # seconds, after which a silent process counts as dead


def free_port():
    """Returns a port on which no process listens, and which the system doesn't give to connections by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Processes:
    """Runs ranks.py in one process per action.

    At the end, no process is left. On a failure, their output is shown.
    """

    def __init__(self, *actions, flags=""):
        self.port, self.actions, self.flags = free_port(), actions, flags

    def __enter__(self):
        # the files live as long as the processes
        self.outputs = [tempfile.TemporaryFile("w+") for _ in self.actions]  # noqa: SIM115
        flags = f"{os.environ.get('XLA_FLAGS', '')} {self.flags}".strip()
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # as in transports/test_tcp.py
        self.running = []
        for rank, (action, output) in enumerate(zip(self.actions, self.outputs)):
            command = [sys.executable, RANKS, action, self.port, rank, len(self.actions), HEARTBEAT]
            self.running.append(
                subprocess.Popen(
                    list(map(str, command)),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        self.deadline = time.monotonic() + LIMIT
        return self

    def __exit__(self, error, *_):
        for process in self.running:
            process.send_signal(signal.SIGKILL)  # JAX would also wait for a SIGTERM
            process.wait()
        for rank in range(len(self.actions)):
            if error:
                print(
                    f"--- {self.actions[rank]}, rank {rank}, status "
                    f"{self.running[rank].returncode}:\n{self.text(rank)[-4000:]}"
                )
            self.outputs[rank].close()

    def wait(self, rank):
        """Returns the exit status of a rank."""
        return self.running[rank].wait(max(0, self.deadline - time.monotonic()))

    def text(self, rank):
        self.outputs[rank].seek(0)
        return self.outputs[rank].read()

    def printed(self, rank, what):
        assert self.wait(rank) == 0
        (line,) = [line for line in self.text(rank).splitlines() if line.startswith(f"{what} ")]
        return json.loads(line.removeprefix(f"{what} "))


@pytest.fixture(scope="module")
def digests():
    """Returns {case: {leaf: {device: digest}}} for one process with four devices and for two with two each.

    It also returns the cases that use XLA's reduce-scatter in one process and in two.
    """
    with Processes("collectives") as one:
        expected, alone = one.printed(0, "DIGESTS"), one.printed(0, "SCATTERS")
    with Processes("collectives", "collectives") as two:
        first, second = two.printed(0, "DIGESTS"), two.printed(1, "DIGESTS")
        apart = two.printed(0, "SCATTERS")
    together = {
        case: {leaf: first[case][leaf] | second[case][leaf] for leaf in leaves} for case, leaves in first.items()
    }
    return expected, together, (alone, apart)


def test_two_processes_give_the_bits_of_one(digests):
    expected, together, (_, apart) = digests
    assert all(len(devices) == 4 for leaves in together.values() for devices in leaves.values())
    ours = together.keys() - set(apart)  # XLA's own sums have another order between processes
    assert len(ours) >= 15 and {name: together[name] for name in ours} == {name: expected[name] for name in ours}


def test_reduce_scatters_that_are_wrong_are_not_used(digests):
    """This is lax.psum_scatter over Gloo before JAX 0.12, which is also the gradient of a gather."""
    alone, apart = digests[2]
    assert alone == ["gradient of all_gather raw", "psum_scatter raw"]
    assert apart == ([] if jax.__version_info__ < (0, 12) else alone)


def test_replicas_are_identical_in_all_processes(digests):
    for case, leaves in digests[1].items():
        if case.startswith(("psum ", "pmean", "all_gather")) and not case.startswith("psum over"):
            assert {leaf for leaf, devices in leaves.items() if len(set(devices.values())) > 1} == set(), case


def test_a_process_own_batch_is_not_the_batch_of_all():
    with Processes("batch", "batch") as processes:
        for rank in (0, 1):
            assert processes.wait(rank) == 0
            refused = re.findall("REFUSED (.*)", processes.text(rank))
            assert len(refused) == 3
            assert refused.pop().startswith("value_and_grad: argument 'batch_specs', leaf [0][0]: expected")
            for text in refused:
                named(text, "train.step batch leaf ['x'] float32[2, 3] jax.make_array_from_process_local_data")
            text = processes.text(rank)
            # Gradients are 2 * (1 + 1 + 2 + 2) / 4 = 3, with a learning rate of 2.
            assert "PARAMETERS [-6. -6. -6.]" in text
            key, _ = jax.random.split(jax.random.fold_in(jax.random.key(5), 0))  # the key of the first rank
            assert f"STATE [1.5, 1.5, 1.5] 1 {jax.random.key_data(key).tolist()}" in text
            assert "GRADIENTS [1.5 1.5 1.5]" in text
            assert "SHARDS [[-1.5, -1.5], [-1.5, -1.5]]" in text


def test_a_rank_that_dies_in_a_collective_ends_the_others():
    with Processes("exchange", "die") as processes:
        assert processes.wait(1) == -signal.SIGKILL
        assert processes.wait(0) != 0
        assert re.search("JaxRuntimeError: .*Gloo .* failed|stopped sending heartbeats", processes.text(0))


def test_the_coordinator_dying_ends_the_others():
    with Processes("die", "exchange") as processes:
        assert processes.wait(0) == -signal.SIGKILL
        assert processes.wait(1) != 0
        assert "Gloo" in processes.text(1) or "another task died" in processes.text(1)


def test_a_rank_that_stops_counts_as_dead_after_the_heartbeat_timeout():
    with Processes("exchange", "stop") as processes:
        assert processes.wait(0) != 0
        assert "stopped sending heartbeats" in processes.text(0)


def test_a_rank_that_stays_away_is_waited_for_as_long_as_the_collective_timeout():
    with Processes("exchange", "leave", flags="--xla_cpu_collective_timeout_seconds=4") as processes:
        assert processes.wait(0) != 0
        assert "Timed out waiting" in processes.text(0)

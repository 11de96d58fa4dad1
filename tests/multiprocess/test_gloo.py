"""Tests several processes over Gloo: they give the bits of one process, and they end when a rank fails."""

import json
import os
import pathlib
import re
import signal
import subprocess

import jax
import pytest
from errors import named
from helpers import FULL
from started import Processes, free_port

RANKS = pathlib.Path(__file__).with_name("ranks.py")
LIMIT = 150  # seconds, after which processes count as hung; they need a tenth of it
HEARTBEAT = 8  # seconds, after which a silent process counts as dead


class Ranks(Processes):
    """Runs ranks.py in one process per action."""

    def __init__(self, *actions, flags=""):
        port, count, self.texts = free_port(), len(actions), {}
        words = ([RANKS, action, port, rank, count, HEARTBEAT] for rank, action in enumerate(actions))
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        super().__init__(*words, limit=LIMIT, stderr=subprocess.STDOUT, XLA_FLAGS=flags)

    def text(self, rank):
        """Returns all that a rank prints until it ends."""
        if rank not in self.texts:
            self.texts[rank], _ = self.running[rank].communicate()
            print(f"--- rank {rank}, status {self.running[rank].returncode}:\n{self.texts[rank][-4000:]}")
        return self.texts[rank]

    def wait(self, rank):
        """Returns the exit status of a rank."""
        self.text(rank)
        return self.running[rank].returncode

    def printed(self, rank, what):
        assert self.wait(rank) == 0
        (line,) = [line for line in self.text(rank).splitlines() if line.startswith(f"{what} ")]
        return json.loads(line.removeprefix(f"{what} "))


@pytest.fixture(scope="module")
def digests():
    """Returns {case: {leaf: {device: digest}}} for one process with four devices and for two with two each.

    It also returns the cases that use XLA's reduce-scatter in one process and in two, and what the two print.
    """
    with Ranks("collectives") as one:
        expected, alone = one.printed(0, "DIGESTS"), one.printed(0, "SCATTERS")
    with Ranks("collectives", "collectives") as two:
        first, second = two.printed(0, "DIGESTS"), two.printed(1, "DIGESTS")
        apart = two.printed(0, "SCATTERS")
    together = {
        case: {leaf: first[case][leaf] | second[case][leaf] for leaf in leaves} for case, leaves in first.items()
    }
    return expected, together, (alone, apart), two.texts


def test_two_processes_give_the_bits_of_one(digests):
    expected, together, (_, apart), _ = digests
    assert all(len(devices) == 4 for leaves in together.values() for devices in leaves.values())
    ours = together.keys() - set(apart)  # XLA's own sums have another order between processes
    assert len(ours) >= 7 and {name: together[name] for name in ours} == {name: expected[name] for name in ours}


def test_reduce_scatters_that_are_wrong_are_not_used(digests):
    """This is lax.psum_scatter over Gloo before JAX 0.12, also as the gradient of a gather and in a schedule."""
    alone, apart = digests[2]
    assert alone == ["gradient of all_gather raw", "psum gather", "psum_scatter raw"]
    assert apart == ([] if jax.__version_info__ < (0, 12) else alone)


def test_replicas_are_identical_in_all_processes(digests):
    for case, leaves in digests[1].items():
        if case.startswith("psum ") and not case.startswith("psum over"):
            assert {leaf for leaf, devices in leaves.items() if len(set(devices.values())) > 1} == set(), case


def test_a_process_own_batch_is_not_the_batch_of_all(digests):
    for text in digests[3].values():
        refused = re.findall("REFUSED (.*)", text)
        assert len(refused) == 3
        assert refused.pop().startswith("value_and_grad: argument 'batch_specs', leaf [1]: expected")
        for words in refused:
            named(words, "train.step batch leaf ['x'] float32[2, 3] jax.make_array_from_process_local_data")
        # Gradients are 2 * (1 + 1 + 2 + 2) / 4 = 3, with a learning rate of 2.
        assert "PARAMETERS [-6. -6. -6.]" in text
        key, _ = jax.random.split(jax.random.key(5))  # as plain JAX has it
        assert f"STATE [1.5, 1.5, 1.5] 1 {jax.random.key_data(key).tolist()}" in text
        assert "GRADIENTS [1.5 1.5 1.5]" in text
        assert "SHARDS [[-1.5, -1.5], [-1.5, -1.5]]" in text


# What JAX does if a rank fails. docs/failures.md promises it, and no code of jaxcgx has a part in it.
@pytest.mark.skipif(not FULL, reason="runs in the full tests")
@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (("exchange", "die"), "JaxRuntimeError: .*Gloo .* failed|stopped sending heartbeats"),
        (("die", "exchange"), "Gloo|another task died"),  # the coordinator
        (("exchange", "stop"), "stopped sending heartbeats"),
        (("exchange", "leave"), "Timed out waiting"),
    ],
)
def test_a_rank_that_fails_ends_the_others(actions, words):
    """The heartbeat timeout ends the wait for one that stops, the collective timeout that for one that stays away."""
    rank = actions.index("exchange")
    with Ranks(*actions, flags="--xla_cpu_collective_timeout_seconds=4" * ("leave" in actions)) as processes:
        assert "die" not in actions or processes.wait(1 - rank) == -signal.SIGKILL
        assert processes.wait(rank) != 0
        assert re.search(words, processes.text(rank))


def test_watch_names_the_process_that_stays_away():
    with Ranks("watch", "leave") as processes:
        assert processes.wait(0) == 1
        text = processes.text(0)
        expected = "watch: call 4 of run began . s ago and hasn't ended. Its first exchange waits for process 1 at"
        assert re.search(expected + r" \S+ \(devices \d+, \d+\), which has made 3 calls", text)

"""Tests how processes meet: who is accepted, what is sent, and the error if a process doesn't come."""

import contextlib
import hmac
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxcgx.native import meeting
from jaxcgx.native.meeting import MAGIC, PLAIN, Links, Meeting, MeetingError, Other
from jaxcgx.native.sockets import HELLO, PROOF, STRANGERS

SECRET, ANOTHER = "s" * 64, "a" * 64
LIMIT = 30  # seconds, after which a test counts as hung; it needs a thousandth of it


def process(number, processes=2, secret=SECRET, links=PLAIN):
    return Meeting(number, processes, secret, ["127.0.0.1"], links)


def at(one):
    return Other(one.process, "127.0.0.1", one.port)


def go_on(*meetings, until):
    deadline = time.monotonic() + LIMIT
    while not until():
        assert time.monotonic() < deadline, "hangs"
        for one in meetings:
            one.step(0.01)


def connected(*meetings):
    return lambda: not any(one.missing for one in meetings)


def take(sock, number):
    """Returns `number` bytes of a connection, or fewer if the connection ends."""
    sock.settimeout(LIMIT)
    found = b""
    while len(found) < number and (some := sock.recv(number - len(found))):
        found += some
    return found


def stranger(one):
    return socket.create_connection(("127.0.0.1", one.port))


def test_three_meet_and_hand_over_their_connections():
    first, second, third = (process(number, 3, links=Links(2, 1e6)) for number in range(3))
    with first, second, third:
        second.call(at(first)), third.call(at(first)), third.call(at(second))
        go_on(first, second, third, until=connected(first, second, third))
        ours, theirs = first.hand_over(), third.hand_over()
        assert ours[0] == ("", [], -1) and ours[2][0] == "127.0.0.1" and theirs[0][0] == "127.0.0.1"
        pairs = list(zip([*ours[2][1], ours[2][2]], [*theirs[0][1], theirs[0][2]]))
        assert len(pairs) == 3
        for number, (one, other) in enumerate(pairs):
            with socket.socket(fileno=one) as here, socket.socket(fileno=other) as there:
                here.setblocking(True)
                there.setblocking(True)
                here.sendall(bytes([number]))
                assert take(there, 1) == bytes([number])
        for _, data, beats in ours[1:2] + theirs[1:2]:
            for number in (*data, beats):
                socket.socket(fileno=number).close()


@pytest.mark.parametrize("theirs", [Links(4), Links(1, 1.25e7)], ids=str)
def test_processes_with_other_connections_or_another_pace(theirs):
    words = "expected the same Tcp in every process, got {} in process {} and {} in process {}"
    with process(0) as first, process(1, links=theirs) as second:
        second.call(at(first))
        with pytest.raises(MeetingError, match=words.format(theirs, 1, Links(), 0)):
            go_on(second, first, until=lambda: False)
        with pytest.raises(MeetingError, match=words.format(Links(), 0, theirs, 1)):
            go_on(first, until=lambda: False)


def test_those_who_wait_for_more_give_signs_of_life(monkeypatch):
    monkeypatch.setattr(meeting, "BEAT", 0.01)
    with process(0, 3) as first, process(1, 3) as second:
        second.call(at(first))
        go_on(first, second, until=lambda: first.missing == second.missing == [2])
        beats, data = first.found[1, meeting.BEATS], first.found[1, meeting.DATA]
        for _ in range(3):
            second.step(0.02)
        assert len(take(beats, 2)) == 2
        with pytest.raises(BlockingIOError):
            data.recv(1)


def test_a_process_of_another_job_is_turned_away():
    with process(0) as first, process(1, secret=ANOTHER) as other, process(1) as second:
        other.call(at(first))
        words = r"process 0 at 127.0.0.1, port \d+ is not one of this job: it has another secret"
        with pytest.raises(MeetingError, match=words):
            go_on(first, other, until=lambda: False)
        go_on(first, until=lambda: first.hint)
        assert first.hint == "; a program has called that isn't one: it has another secret"
        second.call(at(first))
        go_on(first, second, until=connected(first, second))


def proof(mine, theirs):
    return hmac.digest(SECRET.encode(), mine + theirs, "sha256")


@pytest.mark.parametrize("number", [0, 2, 10**9])
def test_a_process_that_can_not_be_one_is_turned_away(number):
    with process(0) as first, stranger(first) as sock:
        sock.sendall(HELLO.pack(MAGIC, number, bytes(32)))
        go_on(first, until=lambda: first.hint)
        assert first.hint == f"; a program has called that isn't one: it says that it is process {number}"
        assert len(take(sock, HELLO.size + 1)) == HELLO.size and first.missing == [1]


def test_the_secret_does_not_travel_to_whoever_listens():
    with socket.create_server(("127.0.0.1", 0)) as liar, process(1) as second:
        second.call(Other(0, "127.0.0.1", liar.getsockname()[1]))
        with liar.accept()[0] as sock:
            sock.sendall(HELLO.pack(MAGIC, 0, bytes(32)))
            said = take(sock, HELLO.size + PROOF)
            assert len(said) == HELLO.size + PROOF and SECRET.encode() not in said
            sock.sendall(said[-PROOF:])  # the impostor knows no other proof
            with pytest.raises(MeetingError, match="is not one of this job: it has another secret"):
                second.step(LIMIT)


def test_an_old_proof_opens_nothing():
    with process(0) as first, stranger(first) as once, stranger(first) as again:
        hello = HELLO.pack(MAGIC, 1, bytes(32))
        answer = take(once, HELLO.size)
        assert take(again, HELLO.size) != answer
        again.sendall(hello + proof(hello, answer) + bytes(100))
        go_on(first, until=lambda: first.hint)
        assert first.missing == [1]


def test_another_version(words=r"another program, or another version of jaxcgx: it says b'cgt\x01', not b'cgt\x03'"):
    old = HELLO.pack(b"cgt\x01", 0, bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as server, process(1, 3) as second, stranger(second) as caller:
        caller.sendall(old)
        go_on(second, until=lambda: second.hint)
        assert second.hint == f"; a program has called that isn't one: {words}"
        assert second.missing == [0, 2]
        second.call(Other(0, "127.0.0.1", server.getsockname()[1]))
        with server.accept()[0] as sock:
            sock.sendall(old)
            with pytest.raises(MeetingError, match=re.escape(f"is not one of this job: {words}")):
                go_on(second, until=lambda: False)


def test_nobody_listens():
    with process(1) as second, socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
        nobody.close()
        second.call(Other(0, "127.0.0.1", port))
        with pytest.raises(MeetingError, match=f"process 0 at 127.0.0.1, port {port} can't be reached: Connection ref"):
            go_on(second, until=lambda: False)


def test_one_that_ends_while_another_is_missing_is_noticed_by_all():
    with process(0, 4) as first, process(1, 4) as second:
        with process(2, 4) as third:
            second.call(at(first)), third.call(at(first)), third.call(at(second))
            go_on(first, second, third, until=lambda: [one.missing for one in (first, second, third)] == [[3]] * 3)
        for one in first, second:
            with pytest.raises(MeetingError, match=r"process 2 at 127.0.0.1 has ended or left"):
                go_on(one, until=lambda: False)


def test_it_listens_at_the_addresses_it_is_told():
    with process(0) as first, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", first.port))


FORKING = """
one = meeting.Meeting(1, 3, "s" * 64, ["127.0.0.1"])
one.call(meeting.Other(0, "127.0.0.1", int(sys.argv[1])))
while one.missing != [2]:
    one.step(1)
if os.fork() == 0:
    os.close(1)
    sys.stdin.read()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
CROWDED = """
one = meeting.Meeting(0, 2, "s" * 64, ["127.0.0.1"])
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + int(sys.argv[1]), 1000))
print(one.port, flush=True)
while one.missing:
    one.step(10)
print("met", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start():
    """Starts a process with its own meeting, and with a number as its argument."""
    running = []

    def run(script, argument):
        script = "import os, resource, signal, sys\nfrom jaxcgx.native import meeting" + script
        command = [sys.executable, "-c", script, str(argument)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield run
    for one in running:
        one.kill()
        one.communicate()


def test_a_child_does_not_keep_the_connections_of_a_process_that_is_killed(start):
    with process(0, 3) as first:
        one = start(FORKING, first.port)
        with pytest.raises(MeetingError, match=r"process 1 at 127.0.0.1 has ended or left"):
            go_on(first, until=lambda: False)
        assert one.wait() == -signal.SIGKILL


def test_strangers_that_take_all_descriptors_lock_nobody_out(start):
    one = start(CROWDED, 20)
    there = Other(0, "127.0.0.1", int(one.stdout.readline()))
    strangers = [socket.create_connection((there.host, there.port)) for _ in range(60)]
    with process(1) as second:
        second.call(there)
        go_on(second, until=connected(second))
        assert one.stdout.readline() == "met\n"
    for sock in strangers:
        sock.close()


def test_the_oldest_stranger_makes_room():
    with process(0) as first, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger(first)) for _ in range(STRANGERS + 1)]
        assert len(take(strangers[-1], HELLO.size)) == HELLO.size
        assert len(take(strangers[0], HELLO.size + 1)) <= HELLO.size
        with pytest.raises(BlockingIOError):
            strangers[1].setblocking(False) or (strangers[1].recv(HELLO.size) and strangers[1].recv(1))


def test_too_few_descriptors_are_an_error_that_names_the_limit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    words = r"this process may open 4, has opened \d+, and needs 4 for 2 processes; raise the limit \(ulimit -n\)"
    with pytest.raises(MeetingError, match=f"out of file descriptors: {words}"):
        process(0)

"""Tests how processes meet: who is accepted, what is sent, and the error if a process doesn't come."""

import errno
import hashlib
import hmac
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxcgx.native import meeting
from jaxcgx.native.meeting import HELLO, MAGIC, PLAIN, PROOF, Links, Meeting, MeetingError, Other

SECRET, ANOTHER = b"s" * 32, b"a" * 32
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


def fails(words, *meetings):
    """Checks that one of the meetings raises an error."""
    with pytest.raises(MeetingError, match=words):
        go_on(*meetings, until=lambda: False)


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
        fails(words.format(theirs, 1, Links(), 0), second, first)
        fails(words.format(Links(), 0, theirs, 1), first)


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
        fails(r"process 0 at 127.0.0.1, port \d+ turned this process away", first, other)
        second.call(at(first))
        go_on(first, second, until=connected(first, second))


@pytest.mark.parametrize("number", [0, -1, 2, 10**9])
def test_a_process_that_can_not_be_one_is_turned_away(number):
    with process(0) as first, stranger(first) as sock:
        first.step(1)
        answer, hello = take(sock, HELLO.size), HELLO.pack(MAGIC, bytes(32), number, 0, 1, 0)
        sock.sendall(hello + hmac.digest(SECRET, b"calls" + hello + answer, hashlib.sha256))
        for _ in range(3):
            first.step(0.1)
        assert take(sock, PROOF + 1) == bytes(PROOF) and first.missing == [1]


def test_the_secret_does_not_travel_to_whoever_listens():
    with socket.create_server(("127.0.0.1", 0)) as liar, process(1) as second:
        second.call(Other(0, "127.0.0.1", liar.getsockname()[1]))
        second.step(1)
        with liar.accept()[0] as sock:
            sock.sendall(HELLO.pack(MAGIC, bytes(32), 0, 0, 1, 0))
            second.step(1)
            said = take(sock, HELLO.size + PROOF)
            assert len(said) == HELLO.size + PROOF and SECRET not in said
            sock.sendall(said[-PROOF:])  # the impostor knows no other proof
            fails("is not that process: it does not know the job's secret", second)


def test_an_old_proof_opens_nothing():
    with process(0) as first, stranger(first) as once, stranger(first) as again:
        first.step(1), first.step(1)
        hello, answer = HELLO.pack(MAGIC, bytes(32), 1, 0, 1, 0), take(once, HELLO.size)
        said = hello + hmac.digest(SECRET, b"calls" + hello + answer, hashlib.sha256)
        assert take(again, HELLO.size) != answer
        again.sendall(said)
        for _ in range(3):
            first.step(0.1)
        assert take(again, PROOF + 1) == bytes(PROOF)


@pytest.mark.parametrize(
    ("magic", "words"),
    [
        (b"", "another one, or another version of jaxcgx, listens there"),
        (b"jaxcgx\x20\x01", f"has version 2001 of jaxcgx's protocol, this process has version {MAGIC[6:].hex()}"),
    ],
)
def test_another_version_listens(magic, words):
    with socket.create_server(("127.0.0.1", 0)) as old, process(1) as second:
        second.call(Other(0, "127.0.0.1", old.getsockname()[1]))
        second.step(1)
        with old.accept()[0] as sock:
            sock.sendall(HELLO.pack(magic, bytes(32), 0, 0, 1, 0))
            fails(words, second)


def test_another_version_calls():
    with process(0) as first, stranger(first) as old:
        old.sendall(HELLO.pack(b"jaxcgx\x20\x01", bytes(32), 1, 0, 1, 0))
        go_on(first, until=lambda: first.hint)
        ours = MAGIC[6:].hex()
        assert first.hint == f"; one has called with version 2001 of jaxcgx's protocol, this process has version {ours}"
        assert first.missing == [1]


def test_nobody_listens():
    with process(1) as second, socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
        nobody.close()
        second.call(Other(0, "127.0.0.1", port))
        fails(f"process 0 at 127.0.0.1, port {port} can't be reached: Connection ref", second)


def test_one_that_ends_while_another_is_missing_is_noticed_by_all():
    with process(0, 4) as first, process(1, 4) as second:
        with process(2, 4) as third:
            second.call(at(first)), third.call(at(first)), third.call(at(second))
            go_on(first, second, third, until=lambda: [one.missing for one in (first, second, third)] == [[3]] * 3)
        for one in first, second:
            fails(r"process 2 at 127.0.0.1 has ended or left", one)


def test_it_listens_at_the_addresses_it_is_told():
    with process(0) as first, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", first.port))


FORKING = """
import meeting
one = meeting.Meeting(1, 3, b"s" * 32, ["127.0.0.1"])
one.call(meeting.Other(0, "127.0.0.1", int(sys.argv[2])))
while one.missing != [2]:
    one.step(1)
if os.fork() == 0:
    os.close(1)
    sys.stdin.read()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
CROWDED = """
import meeting
one = meeting.Meeting(0, 2, b"s" * 32, ["127.0.0.1"])
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 1000))
print(one.port, flush=True)
try:
    while one.missing:
        one.step(10)
    print("met", flush=True)
except meeting.MeetingError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def test_a_port_that_is_taken_at_another_address_is_given_up(monkeypatch):
    real, taken = socket.socket.bind, ["127.0.0.2"]

    def bind(sock, address):
        if address[0] in taken:
            taken.clear()
            raise OSError(errno.EADDRINUSE, "in use")
        real(sock, address)

    monkeypatch.setattr(socket.socket, "bind", bind)
    with Meeting(0, 2, SECRET, ["127.0.0.1", "127.0.0.2"]) as zero, process(1) as one:
        one.call(at(zero))
        go_on(zero, one, until=connected(zero, one))


def test_a_connection_that_ends_with_its_handshake(monkeypatch):
    real, ended = socket.socket.getpeername, []

    def getpeername(sock):
        if not ended:
            ended.append(sock)
            raise OSError(errno.ENOTCONN, "not connected")
        return real(sock)

    monkeypatch.setattr(socket.socket, "getpeername", getpeername)
    with process(0) as zero, process(1) as one:
        one.call(at(zero))
        fails("process 0 .* has ended or left", zero, one)


@pytest.fixture
def start():
    """Starts a process with its own meeting, and with a number as its argument."""
    running = []

    def run(script, argument):
        script = "import os, resource, signal, sys\nsys.path.insert(0, sys.argv[1])" + script
        command = [sys.executable, "-c", script, str(pathlib.Path(meeting.__file__).parent), str(argument)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield run
    for one in running:
        one.kill()
        one.communicate()


def crowded(one):
    return Other(0, "127.0.0.1", int(one.stdout.readline()))


def test_a_child_does_not_keep_the_connections_of_a_process_that_is_killed(start):
    with process(0, 3) as first:
        one = start(FORKING, first.port)
        fails(r"process 1 at 127.0.0.1 has ended or left", first)
        assert one.wait() == -signal.SIGKILL


def test_strangers_that_take_all_descriptors_lock_nobody_out(start):
    one = start(CROWDED, 20)
    there = crowded(one)
    strangers = [socket.create_connection((there.host, there.port)) for _ in range(60)]
    with process(1) as second:
        second.call(there)
        go_on(second, until=connected(second))
        assert one.stdout.readline() == "met\n"
    for sock in strangers:
        sock.close()


def test_out_of_descriptors_is_an_error_that_names_the_limit(start):
    one = start(CROWDED, 4)
    there = crowded(one)
    with socket.create_connection((there.host, there.port)):
        assert re.match(
            r"out of file descriptors: this process may open 4, and needs 4 for 2 processes, besides its own; raise "
            r"the limit \(ulimit -n\)",
            one.stdout.readline(),
        )

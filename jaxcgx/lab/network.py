"""A network of virtual hosts on one machine, with links of a limited rate.

A host is a network namespace with a name that resolves to its address. A virtual cable connects the host to a switch. A
switch is a bridge in another namespace. A token bucket at each end of the cable limits the rate of one direction. The
queues are so long that few packets are dropped. The packets that a host sends can be delayed and lost: by netem if the
kernel has it, otherwise by a relay (relay.py) between the cable and the switch. The module needs root and iproute2.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from typing import IO, Any

from jaxcgx.checks import check_integer, check_number, check_positive, set_field, wrong
from jaxcgx.text import parse_rate

PREFIX = "jaxcgx-lab"
BURST = 1e-3  # the size of a bucket, in seconds at the full rate; with less, a busy machine doesn't reach the rate
QUEUE = "400ms"  # the longest time that a packet waits in a bucket's queue
CONGESTION = "cubic"
MOST = 200  # the most hosts: 200 fit into one subnet, and are more than a machine can run


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of a host.

    Args:
      up: the rate at which the host sends, in bit/s.
      down: the rate at which the host receives, in bit/s.
      delay: the seconds that packets from the host are delayed. The delays of both hosts add to a round trip.
      jitter: the most seconds by which the delay of a packet is longer.
      loss: the share of packets from the host that are lost, from 0 to 1.
    """

    up: int
    down: int
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for rate in "up", "down":
            set_field(self, rate, check_positive)
        for seconds in "delay", "jitter":
            set_field(self, seconds, check_number, lambda x: x >= 0, "at least 0 seconds")
        set_field(self, "loss", check_number, lambda x: 0 <= x <= 1, "a share from 0 to 1")

    @property
    def plain(self) -> bool:
        """Whether packets are neither delayed nor lost."""
        return not (self.delay or self.jitter or self.loss)


def why_not() -> str:
    """Returns the reason why this machine can't have virtual hosts, or "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "setpriv") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def _run(words: str) -> None:
    done = subprocess.run(words.split(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"lab: {words}: {done.stderr.strip()}")


def _burst(rate: int) -> int:
    return max(16_000, int(rate / 8 * BURST))


def _limit(action: str, namespace: str, place: str, rate: int) -> None:
    _run(f"tc -n {namespace} qdisc {action} dev {place} tbf rate {rate}bit burst {_burst(rate)} latency {QUEUE}")


def _send_whole(namespace: str, device: str, rate: int) -> None:
    """Limits the size of a host's packets, so that they pass a link of this rate whole."""
    # A bucket cuts longer packets into frames of 1,500 bytes, and the processor that all hosts share has to handle each
    # frame. A real host's network card would do that.
    _run(f"ip -n {namespace} link set {device} gso_max_size {min(65_536, _burst(rate) * 9 // 10)}")


def _use_cubic(namespace: str) -> bool:
    """Makes a host's TCP use cubic, Linux's default. Returns False if the machine doesn't allow it."""
    # bbr sends by timers, which are late if all hosts share the processors.
    setting = f"echo {CONGESTION} >/proc/sys/net/ipv4/tcp_congestion_control"
    return not subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", setting], capture_output=True).returncode


def _has_netem(namespace: str) -> bool:
    """Returns whether the kernel can delay packets. It tries this on the loopback device of a namespace."""
    words = f"tc -n {namespace} qdisc %s dev lo root netem delay 1ms"
    if subprocess.run((words % "add").split(), capture_output=True).returncode:
        return False
    _run(words % "delete")
    return True


def _sweep() -> None:
    """Removes the namespaces of labs that were killed. Their names end in the ids of the labs' processes."""
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not os.path.exists(f"/proc/{name.split('-')[-1]}"):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


class Lab:
    """Hosts 0 to n - 1. A `with` statement makes them. At its end, it ends their processes and removes them.

    Args:
      hosts: the number of hosts.
      link: the rate of every link in both directions, such as "1gbit"; a Link; or a Link for each host.

    Attributes:
      links: the Link of each host.
      netem: whether netem delays packets. Otherwise the relay does.
      relay: the process of the relay; None if all links are plain, and with netem.
      running: the processes that `start` has started.
      names: the file that is /etc/hosts in every host.
    """

    def __init__(self, hosts: int, link: str | Link | Sequence[Link]) -> None:
        self.hosts: int = check_integer("Lab", "hosts", hosts, 1, MOST)
        if isinstance(link, str):
            rate = parse_rate("Lab: argument 'link'", link)
            link = Link(rate, rate)
        self.netem: bool = False
        links = [link] * hosts if isinstance(link, Link) else link
        # not every caller is typed
        typed = isinstance(links, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not typed or not all(isinstance(each, Link) for each in links):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong("Lab", "link", 'a rate such as "1gbit", a Link, or a list of Links', repr(link), kind=TypeError)
        if len(links) != hosts:
            raise wrong("Lab", "link", f"one for each of {hosts} hosts", f"{len(links)}")
        self.links: list[Link] = list(links)
        self.running: list[subprocess.Popen[Any]] = []
        self.relay: subprocess.Popen[str] | None = None

    def address(self, host: int) -> str:
        """Returns the IP address of a host."""
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int | str) -> str:
        """Returns the name of the namespace of a host, or of the "switch"."""
        return f"{PREFIX}-{host}-{os.getpid()}"

    def __enter__(self) -> "Lab":
        if why := why_not():
            raise RuntimeError(f"lab: {why}")
        _sweep()
        self.names: IO[str] = tempfile.NamedTemporaryFile("w", prefix=PREFIX)
        self.names.write("127.0.0.1 localhost\n" + "".join(f"{self.address(i)} host{i}\n" for i in range(self.hosts)))
        self.names.flush()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        switch = self.namespace("switch")
        _run(f"ip netns add {switch}")
        if not all(link.plain for link in self.links):
            self.netem = _has_netem(switch)
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge addrgenmode none up")
        held: list[str] = []  # arguments of the relay
        cubic = True
        for i, link in enumerate(self.links):
            host, port, end = self.namespace(i), f"port{i}", f"port{i}"
            _run(f"ip netns add {host}")
            if not link.plain and not self.netem:
                end = f"inner{i}"
                held += [str(link.delay), str(link.jitter), str(link.loss), end, f"outer{i}"]
                _run(f"ip -n {switch} link add {port} type veth peer name outer{i}")
                _run(f"ip -n {switch} link set outer{i} addrgenmode none up")
            _run(f"ip -n {switch} link add {end} type veth peer name eth0 netns {host}")
            _run(f"ip -n {switch} link set {end} addrgenmode none up")
            _run(f"ip -n {switch} link set {port} addrgenmode none master bridge up")
            _run(f"ip -n {host} address add {self.address(i)}/24 dev eth0")
            _run(f"ip -n {host} link set eth0 addrgenmode none up")
            _run(f"ip -n {host} link set lo up")
            cubic = cubic and _use_cubic(host)
            if not link.plain and self.netem:
                # netem draws a delay on both sides of the middle
                delay = f"delay {(link.delay + link.jitter / 2) * 1e6:.0f}us"
                delay += f" {link.jitter / 2 * 1e6:.0f}us" * bool(link.jitter)
                loss = f" loss {link.loss * 100:g}%" * bool(link.loss)
                _run(f"tc -n {host} qdisc add dev eth0 root handle 1: netem {delay}{loss} limit 1000000")
            self._set("add", i, link)
        self._fit_slowest()
        if held:
            self._relay(held)
        if not cubic:
            allowed = f'net.ipv4.tcp_allowed_congestion_control="reno {CONGESTION}"'
            words = f"lab: hosts use the machine's congestion control; for {CONGESTION}, sysctl -w {allowed}"
            print(words, file=sys.stderr)

    def _relay(self, arguments: Sequence[str]) -> None:
        """Starts the relay, and waits until it is ready."""
        enter = f"setpriv --pdeathsig KILL ip netns exec {self.namespace('switch')}".split()
        program = pathlib.Path(__file__).with_name("relay.py")
        words = [*enter, sys.executable, "-I", str(program), *arguments]
        self.relay = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        if not (self.relay.stdout and self.relay.stdout.readline()):
            raise RuntimeError("lab: the relay that delays packets did not start; see its error above")

    def _set(self, action: str, host: int, link: Link) -> None:
        inside = "root" if link.plain or not self.netem else "parent 1:1 handle 2:"
        _limit(action, self.namespace(host), f"eth0 {inside}", link.up)
        _limit(action, self.namespace("switch"), f"port{host} root", link.down)

    def _fit_slowest(self) -> None:
        slowest = min(rate for link in self.links for rate in (link.up, link.down))
        for host in range(self.hosts):
            _send_whole(self.namespace(host), "eth0", slowest)

    def start(self, host: int, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process in a host. Its own /etc/hosts has the addresses of all hosts, in which Gloo finds them.

        Args:
          host: the number of the host.
          command: the words of the command.
          **options: options of subprocess.Popen.
        """
        inside = f'hostname host{host} && mount --bind "$0" /etc/hosts && exec "$@"'
        enter = f"setpriv --pdeathsig KILL ip netns exec {self.namespace(host)} unshare --uts sh -c".split()
        process = subprocess.Popen([*enter, inside, self.names.name, *map(str, command)], **options)
        self.running.append(process)
        return process

    def change(self, host: int, link: Link) -> None:
        """Changes the rates of a host's link. Delays and losses stay the same."""
        link = dataclasses.replace(self.links[host], up=link.up, down=link.down)
        self.links[host] = link
        self._set("change", host, link)
        self._fit_slowest()

    def join(self, one: int, other: int, rate: str) -> None:
        """Connects the hosts `one` and `other` by a direct cable that has this rate in each direction.

        The traffic between them then uses the cable, and no longer their links. `part` removes the cable.
        """
        bits, names = parse_rate("Lab.join: argument 'rate'", rate), (f"to{other}", f"to{one}")
        first, second = self.namespace(one), self.namespace(other)
        _run(f"ip -n {first} link add {names[0]} type veth peer name {names[1]} netns {second}")
        for here, name, there in ((one, names[0], other), (other, names[1], one)):
            namespace = self.namespace(here)
            _run(f"ip -n {namespace} link set {name} addrgenmode none up")
            _limit("add", namespace, f"{name} root", bits)
            _send_whole(namespace, name, bits)
            _run(f"ip -n {namespace} route add {self.address(there)}/32 dev {name} src {self.address(here)}")

    def part(self, one: int, other: int) -> None:
        """Removes the cable between the hosts `one` and `other`. Their traffic then uses their links again."""
        _run(f"ip -n {self.namespace(one)} link delete to{other}")

    def cut(self, host: int) -> None:
        """Takes a host's link down. Packets from and to the host are lost, and no process is told."""
        _run(f"ip -n {self.namespace('switch')} link set port{host} down")

    def mend(self, host: int) -> None:
        """Takes up a host's link again that was cut."""
        _run(f"ip -n {self.namespace('switch')} link set port{host} up")

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        if self.relay:
            self.relay.kill()
            self.relay.communicate()
        for host in [*range(self.hosts), "switch"]:  # which also removes their devices and cables
            subprocess.run(["ip", "netns", "delete", self.namespace(host)], stderr=subprocess.DEVNULL)
        self.names.close()


@contextlib.contextmanager
def signals_raise() -> Generator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that `with` statements clean up."""

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

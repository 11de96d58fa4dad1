"""A network of hosts on one machine, with links of a limited rate.

A host is a network namespace with a name that resolves to its address. A virtual cable joins it to a switch, which is a
bridge in a namespace of its own. A token bucket at each end of the cable limits the rate of one direction. The queues
are long enough that little is dropped. What a host sends can be delayed: by netem where the kernel has it, otherwise by
a relay (relay.py) between the cable and the switch. Needs root and iproute2.
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

from jaxcgx.checks import check_integer, wrong
from jaxcgx.units import parse_rate

PREFIX = "jaxcgx-lab"
BURST = 1e-3  # seconds at the full rate that may pass at once; with less, a busy machine doesn't reach the rate
QUEUE = "400ms"
CONGESTION = "cubic"
MOST = 200  # hosts: what one subnet has, and more than a machine can run


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of a host.

    Args:
      up: bit/s of what the host sends.
      down: bit/s of what it receives.
      delay: extra seconds of what the host sends. A round trip takes longer by the delays of both hosts.
    """

    up: int
    down: int
    delay: float = 0.0


def why_not() -> str:
    """Why hosts are impossible on this machine, or ""."""
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
    """Bytes that may pass at once."""
    return max(16_000, int(rate / 8 * BURST))


def _limit(action: str, namespace: str, place: str, rate: int) -> None:
    _run(f"tc -n {namespace} qdisc {action} dev {place} tbf rate {rate}bit burst {_burst(rate)} latency {QUEUE}")


def _send_whole(namespace: str, device: str, rate: int) -> None:
    """Has a host send packets that pass a link of this rate whole.

    A bucket cuts a longer one into frames of 1,500 bytes, and the processor, which hosts share, handles each of them. A
    network card would do that for a real host.
    """
    _run(f"ip -n {namespace} link set {device} gso_max_size {min(65_536, _burst(rate) * 9 // 10)}")


def _use_cubic(namespace: str) -> bool:
    """Has a host's TCP use cubic, Linux's own default. False: the machine doesn't allow hosts to.

    bbr would send by timers, which come late where all hosts share the processors.
    """
    setting = f"echo {CONGESTION} >/proc/sys/net/ipv4/tcp_congestion_control"
    return not subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", setting], capture_output=True).returncode


def _has_netem(namespace: str) -> bool:
    """Whether the kernel can delay packets, tried on the loopback device of a namespace."""
    words = f"tc -n {namespace} qdisc %s dev lo root netem delay 1ms"
    if subprocess.run((words % "add").split(), capture_output=True).returncode:
        return False
    _run(words % "delete")
    return True


def _sweep() -> None:
    """Removes what a killed lab left behind. Names end in the number of the process that made them."""
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not os.path.exists(f"/proc/{name.split('-')[-1]}"):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


class Lab:
    """Hosts 0 to n - 1. `with` makes them; its end removes them and ends what runs in them.

    Args:
      hosts: how many.
      link: the rate of every link in both directions, as in "1gbit"; a Link; or a Link for each host.
    """

    def __init__(self, hosts: int, link: str | Link | Sequence[Link]) -> None:
        self.hosts: int = check_integer("Lab", "hosts", hosts, 1, MOST)
        if isinstance(link, str):
            rate = parse_rate("Lab: argument 'link'", link)
            link = Link(rate, rate)
        self.netem: bool = False  # whether the kernel delays, not the relay
        self.links: list[Link] = [link] * hosts if isinstance(link, Link) else list(link)
        if len(self.links) != hosts:
            raise wrong("Lab", "link", f"one for each of {hosts} hosts", f"{len(self.links)}")
        self.running: list[subprocess.Popen[Any]] = []
        self.relay: subprocess.Popen[str] | None = None

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int | str) -> str:
        """The name of the namespace of a host, or of the "switch"."""
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
        if any(link.delay for link in self.links):
            self.netem = _has_netem(switch)
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge addrgenmode none up")
        slowest = min(rate for link in self.links for rate in (link.up, link.down))
        held: list[str] = []  # arguments of the relay
        cubic = True
        for i, link in enumerate(self.links):
            host, port, end = self.namespace(i), f"port{i}", f"port{i}"
            _run(f"ip netns add {host}")
            if link.delay and not self.netem:
                end = f"inner{i}"
                held += [str(link.delay), end, f"outer{i}"]
                _run(f"ip -n {switch} link add {port} type veth peer name outer{i}")
                _run(f"ip -n {switch} link set outer{i} addrgenmode none up")
            _run(f"ip -n {switch} link add {end} type veth peer name eth0 netns {host}")
            _run(f"ip -n {switch} link set {end} addrgenmode none up")
            _run(f"ip -n {switch} link set {port} addrgenmode none master bridge up")
            _run(f"ip -n {host} address add {self.address(i)}/24 dev eth0")
            _run(f"ip -n {host} link set eth0 addrgenmode none up")
            _send_whole(host, "eth0", slowest)
            _run(f"ip -n {host} link set lo up")
            cubic = cubic and _use_cubic(host)
            if link.delay and self.netem:
                delay = f"delay {link.delay * 1e6:.0f}us limit 1000000"
                _run(f"tc -n {host} qdisc add dev eth0 root handle 1: netem {delay}")
            self._set("add", i, link)
        if held:
            self._relay(held)
        if not cubic:
            allowed = f'net.ipv4.tcp_allowed_congestion_control="reno {CONGESTION}"'
            print(
                f"lab: hosts use the machine's congestion control; for {CONGESTION}, sysctl -w {allowed}",
                file=sys.stderr,
            )

    def _relay(self, arguments: Sequence[str]) -> None:
        """Starts the relay, and waits until it is ready."""
        enter = f"setpriv --pdeathsig KILL ip netns exec {self.namespace('switch')}".split()
        program = pathlib.Path(__file__).with_name("relay.py")
        words = [*enter, sys.executable, "-I", str(program), *arguments]
        self.relay = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        if not (self.relay.stdout and self.relay.stdout.readline()):
            raise RuntimeError("lab: the relay that delays packets did not start; see its error above")

    def _set(self, action: str, host: int, link: Link) -> None:
        inside = "parent 1:1 handle 2:" if link.delay and self.netem else "root"
        _limit(action, self.namespace(host), f"eth0 {inside}", link.up)
        _limit(action, self.namespace("switch"), f"port{host} root", link.down)

    def start(self, host: int, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process in a host, with its own mounts: Gloo finds the address in an /etc/hosts of its own.

        Args:
          host: which one.
          command: the words of the command.
          **options: of subprocess.Popen.
        """
        inside = f'hostname host{host} && mount --bind "$0" /etc/hosts && exec "$@"'
        enter = f"setpriv --pdeathsig KILL ip netns exec {self.namespace(host)} unshare --uts sh -c".split()
        process = subprocess.Popen([*enter, inside, self.names.name, *map(str, command)], **options)
        self.running.append(process)
        return process

    def change(self, host: int, link: Link) -> None:
        """Gives a host's link other rates. Its delay stays."""
        link = dataclasses.replace(link, delay=self.links[host].delay)
        self.links[host] = link
        self._set("change", host, link)

    def join(self, one: int, other: int, rate: str) -> None:
        """Gives what two hosts send each other a cable of its own, of a rate in each direction.

        It leaves their links to what they send to others. `part` takes it away.
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
        """Takes away the cable between two hosts. What they send goes over their links again."""
        _run(f"ip -n {self.namespace(one)} link delete to{other}")

    def cut(self, host: int) -> None:
        """Takes a host's link down: nothing that is sent to it arrives, and nobody is told."""
        _run(f"ip -n {self.namespace('switch')} link set port{host} down")

    def mend(self, host: int) -> None:
        """Takes a link up again that was cut."""
        _run(f"ip -n {self.namespace('switch')} link set port{host} up")

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        if self.relay:
            self.relay.kill()
            self.relay.communicate()
        for host in [*range(self.hosts), "switch"]:  # their devices and cables go with them
            subprocess.run(["ip", "netns", "delete", self.namespace(host)], stderr=subprocess.DEVNULL)
        self.names.close()


@contextlib.contextmanager
def signals_raise() -> Generator[None]:
    """Makes SIGTERM and SIGHUP end the program as Ctrl-C does, so that `with` cleans up."""

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

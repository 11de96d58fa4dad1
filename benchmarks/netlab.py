"""A network of hosts on one machine, with links of a limited rate.

A host is a network namespace with a name that resolves to its address. A virtual cable joins it to a switch, which is a
bridge in a namespace of its own. A token bucket at each end of the cable limits the rate. The queues are long enough
that nothing is dropped, and they are the only source of delay. Needs root and iproute2.

    python benchmarks/netlab.py --hosts 2 --mbit 1000 -- python train.py {rank} {hosts} {address}

runs a command in every host at once, where {address} is that of host 0, and exits with the worst status.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile

PREFIX = "jaxcgx-lab"
BURST = 1e-3  # seconds at the full rate that may pass at once; with less, a busy machine doesn't reach the rate
QUEUE = "400ms"


def why_not():
    """Why hosts are impossible on this machine, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "setpriv") if not shutil.which(tool)]
    return f"{', '.join(missing)} not found: install iproute2 and util-linux" if missing else ""


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _limit(namespace, device, mbit):
    burst = max(16_000, int(mbit * 1e6 / 8 * BURST))  # bytes
    _ip(
        "netns",
        "exec",
        namespace,
        "tc",
        "qdisc",
        "add",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        f"{mbit}mbit",
        "burst",
        str(burst),
        "latency",
        QUEUE,
    )


def _sweep():
    """Removes what a killed lab left behind. Names end in the number of the process that made them."""
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not os.path.exists(f"/proc/{name.split('-')[-1]}"):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


class Lab:
    """Hosts 0 to n - 1, on links of `mbit` Mbit/s each way. `with` removes them and ends what runs in them."""

    def __init__(self, hosts, mbit):
        self.hosts, self.mbit, self.running = hosts, mbit, []

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def _namespace(self, host):
        return f"{PREFIX}-{host}-{os.getpid()}"

    def __enter__(self):
        if why := why_not():
            raise RuntimeError(f"netlab: {why}")
        _sweep()
        self.names = tempfile.NamedTemporaryFile("w", prefix=PREFIX)
        self.names.write("127.0.0.1 localhost\n" + "".join(f"{self.address(i)} host{i}\n" for i in range(self.hosts)))
        self.names.flush()
        try:
            self._build()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, subprocess.CalledProcessError):
                raise RuntimeError(f"netlab: {' '.join(error.cmd)}: {error.stderr.strip()}") from None
            raise
        return self

    def _build(self):
        switch = self._namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for i in range(self.hosts):
            host, port = self._namespace(i), f"port{i}"
            _ip("netns", "add", host)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host, "address", "add", f"{self.address(i)}/24", "dev", "eth0")
            for device in "eth0", "lo":
                _ip("-n", host, "link", "set", device, "up")
            _limit(host, "eth0", self.mbit)
            _limit(switch, port, self.mbit)

    def start(self, host, command, **options):
        """Starts a process in a host, with its own mounts: Gloo finds the address in an /etc/hosts of its own."""
        inside = f'hostname host{host} && mount --bind "$0" /etc/hosts && exec "$@"'
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "ip",
            "netns",
            "exec",
            self._namespace(host),
            "unshare",
            "--uts",
            "sh",
            "-c",
            inside,
            self.names.name,
            *map(str, command),
        ]
        self.running.append(subprocess.Popen(command, **options))
        return self.running[-1]

    def cut(self, host):
        """Takes a host's link down: nothing that is sent to it arrives, and nobody is told."""
        _ip("-n", self._namespace("switch"), "link", "set", f"port{host}", "down")

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.wait()
        for host in [*range(self.hosts), "switch"]:  # their devices and cables go with them
            subprocess.run(["ip", "netns", "delete", self._namespace(host)], stderr=subprocess.DEVNULL)
        self.names.close()


@contextlib.contextmanager
def signals_raise():
    """Makes SIGTERM and SIGHUP end the program as Ctrl-C does, so that `with` cleans up."""

    def stop(number, frame):
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main():
    parser = argparse.ArgumentParser(description="Run a command in every host of a network with limited links.")
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument(
        "--mbit", type=int, default=1000, metavar="N", help="Mbit/s of every link, each way (default: 1000)"
    )
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    with signals_raise(), Lab(args.hosts, args.mbit) as lab:

        def fill(word, rank):
            return (
                word.replace("{rank}", str(rank))
                .replace("{hosts}", str(args.hosts))
                .replace("{address}", lab.address(0))
            )

        for rank in range(args.hosts):
            lab.start(rank, [fill(word, rank) for word in args.command])
        sys.exit(max(abs(process.wait()) for process in lab.running))


if __name__ == "__main__":
    main()

"""The processes of a benchmark in the hosts of a lab. They train when it is their turn, and report results.

host.py is the other end.
"""

import json
import os
import re
import subprocess

from report import free_port


class Hosts:
    """The processes of each framework, in every host of a network.

    Attributes:
      methods: {method: (framework, kind)} of the chosen methods, and of those without exchange.
    """

    def __init__(self, stack, lab, commands, settings, *, methods=None, ranks=1):
        """Starts the processes.

        Args:
          stack: an ExitStack that ends the processes.
          lab: the network.
          commands: {framework: the command of a process}. It gets the settings as JSON, with its address, its rank and
            the number of ranks.
          settings: a dict that all processes get.
          methods: a regex that chooses the methods. Methods without exchange are always chosen.
          ranks: the number of processes of a framework in each host.
        """
        self._lab, self._ranks, self.methods, self._running = lab, ranks, {}, {}
        for framework, command in commands.items():
            self._running[framework] = self._start(stack, command, settings)
        for framework in commands:
            for kind, known in self._hear(framework, "READY")[0].items():
                chosen = [m for m in known if kind == "alone" or re.search(methods or "", m)]
                self.methods |= dict.fromkeys(chosen, (framework, kind))

    def _start(self, stack, command, settings):
        """Starts the processes of a framework, each on its own processors if there are enough.

        With SCHED_BATCH, a thread that wakes up interrupts no other one. Otherwise, Gloo's thread for events often
        interrupts the thread that holds the lock of a connection, and polls until Linux stops it, up to 4 ms
        (benchmarks/notes/collectives.md, "Slow and quick days").
        """
        processors, count = sorted(os.sched_getaffinity(0)), self._lab.hosts * self._ranks
        share = max(1, len(processors) // count)
        address, running = f"{self._lab.address(0)}:{free_port()}", []
        for rank in range(count):
            mine = [processors[(rank * share + i) % len(processors)] for i in range(share)]
            given = json.dumps(settings | dict(address=address, rank=rank, ranks=count))
            pinned = ["chrt", "--batch", "0", "taskset", "--cpu-list", ",".join(map(str, mine)), *command, given]
            options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            host = rank // self._ranks
            running.append(self._lab.start(host, pinned, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **options))
            stack.callback(running[-1].wait)
            stack.callback(running[-1].kill)
        return running

    def _hear(self, framework, word):
        """Returns what each process prints after a word."""
        found = []
        for process in self._running[framework]:
            said = next((text for text in process.stdout if text.startswith(word + " ")), None)
            if said is None:
                raise RuntimeError(f"hosts.py: a process of {framework} ended, see above")
            found.append(json.loads(said.removeprefix(word + " ")))
        return found

    def ask(self, method, steps, batch=None):
        """Makes all processes train `steps` steps by a method, or report their losses if `steps` is 0.

        With the number of a batch, the method begins again, with this batch. Returns {name of a figure: its value in
        each process}.
        """
        framework, _ = self.methods[method]
        for process in self._running[framework]:
            process.stdin.write(json.dumps([method, steps, batch]) + "\n")
            process.stdin.flush()
        found = self._hear(framework, "DONE")
        return {what: [f[what] for f in found] for what in found[0]}

    def limit(self, link):
        """Changes the links of all hosts."""
        for host in range(self._lab.hosts):
            self._lab.change(host, link)

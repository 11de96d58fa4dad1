"""The processes of a benchmark in the hosts of a lab: they train when it is their turn, and say what they found.

host.py has the other side.
"""

import json
import os
import random
import re
import subprocess


class Hosts:
    """The processes of each framework, in every host of a network.

    Attributes:
      methods: {method: (framework, kind)} of those that were asked for, and of those without exchange.
    """

    def __init__(self, stack, lab, commands, settings, *, methods=None, ranks=1):
        """
        Args:
          stack: an ExitStack that ends the processes.
          lab: the network.
          commands: {framework: the command of a process}. It gets the settings as JSON, with its address, its rank and
            how many ranks there are.
          settings: what all processes are told.
          methods: a regex, of which methods.
          ranks: the processes of a framework in each host.
        """
        self._lab, self._ranks, self.methods, self._running = lab, ranks, {}, {}
        for framework, command in commands.items():
            self._running[framework] = self._start(stack, command, settings)
        for framework in commands:
            for kind, known in self._hear(framework, "READY")[0].items():
                chosen = [m for m in known if kind == "alone" or re.search(methods or "", m)]
                self.methods |= dict.fromkeys(chosen, (framework, kind))

    def _start(self, stack, command, settings):
        """The processes of a framework, each on processors of its own if there are enough."""
        processors, count = sorted(os.sched_getaffinity(0)), self._lab.hosts * self._ranks
        share = max(1, len(processors) // count)
        address, running = f"{self._lab.address(0)}:{random.randrange(20_000, 32_000)}", []
        for rank in range(count):
            mine = [processors[(rank * share + i) % len(processors)] for i in range(share)]
            given = json.dumps(settings | dict(address=address, rank=rank, ranks=count))
            pinned = ["taskset", "--cpu-list", ",".join(map(str, mine)), *command, given]
            options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            host = rank // self._ranks
            running.append(self._lab.start(host, pinned, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **options))
            stack.callback(running[-1].wait)
            stack.callback(running[-1].kill)
        return running

    def _hear(self, framework, word):
        """What each process prints after a word."""
        found = []
        for process in self._running[framework]:
            said = next((text for text in process.stdout if text.startswith(word + " ")), None)
            if said is None:
                raise RuntimeError(f"hosts.py: a process of {framework} ended, see above")
            found.append(json.loads(said.removeprefix(word + " ")))
        return found

    def ask(self, method, steps):
        """Lets all processes train by a method, or with 0 steps say their losses. {what: the value of each process}"""
        framework, _ = self.methods[method]
        for process in self._running[framework]:
            process.stdin.write(json.dumps([method, steps]) + "\n")
            process.stdin.flush()
        found = self._hear(framework, "DONE")
        return {what: [f[what] for f in found] for what in found[0]}

    def limit(self, link):
        """Changes every host's link."""
        for host in range(self._lab.hosts):
            self._lab.change(host, link)

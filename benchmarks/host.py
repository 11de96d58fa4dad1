"""The work of a process of hosts.py in every framework. Needs only numpy, because PyTorch's environment has no JAX."""

import functools
import json
import pathlib
import sys
import time

import numpy as np


class Data:
    """A rank's part of the data that training_speed_data.py wrote.

    Attributes:
      weights: {name: array}, the first weights, in the order in which the model uses them.
      held_out: (inputs, targets).
    """

    def __init__(self, path, rank, ranks):
        arrays = np.load(path)
        self.weights = {n.removeprefix("weights/"): arrays[n] for n in arrays.files if n.startswith("weights/")}
        self._batches = [np.split(arrays[name], ranks, axis=1)[rank].copy() for name in ("inputs", "targets")]
        self.held_out = [np.split(arrays[name], ranks)[rank] for name in ("held_inputs", "held_targets")]

    def batch(self, step):
        """Returns the (inputs, targets) of a step. After the last batch, the first one follows again."""
        return [array[step % len(array)] for array in self._batches]


def counted(device):
    """Returns the bytes that the kernel has counted on a network device, sent and received."""
    counters = pathlib.Path(f"/sys/class/net/{device}/statistics")
    return np.array([int((counters / f"{direction}_bytes").read_text()) for direction in ("tx", "rx")])


def serve(makers, device="eth0"):
    """Executes the lines of the input, `["METHOD", steps, batch]`, and prints the results.

    With 0 steps, the result is the loss. With the number of a batch, the method first begins again with the first
    weights, at this batch.

    Args:
      makers: {kind: {method: a function without arguments that returns an object with `run(steps)`, `loss()` and
        `begin(batch)`, which only lines with a batch need}}. The function is called when the method is first asked for.
      device: the network device whose bytes are counted.
    """
    print("READY", json.dumps({kind: list(methods) for kind, methods in makers.items()}), flush=True)
    flat = {method: make for methods in makers.values() for method, make in methods.items()}
    get = functools.cache(lambda method: flat[method]())
    for line in sys.stdin:
        method, steps, batch = json.loads(line)
        program = get(method)
        if batch is not None:
            program.begin(batch)
        if not steps:
            found = dict(loss=program.loss())
        else:
            before, start = counted(device), time.perf_counter()
            program.run(steps)
            ms = (time.perf_counter() - start) * 1e3 / steps
            sent, received = (counted(device) - before) / steps
            found = dict(ms=ms, sent=sent, received=received)
        print("DONE", json.dumps(found), flush=True)

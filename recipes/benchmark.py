"""Measures how many examples or tokens a second a network trains on, with each way to exchange gradients.

    pip install ".[recipes]"
    python recipes/benchmark.py --config=recipes/configs/imagenet/vgg16.py --ways none bytegrad cgx4
    mpirun -n 4 python recipes/benchmark.py --config=recipes/configs/text/gpt.py --config.train.batch_size=64

Data are synthetic, so no data set is needed. Other options are those of train.py.
"""

import argparse
import sys
import time
from typing import Any, NamedTuple

import config
import jax
import jax.numpy as jnp
import launch
import numpy as np
from checks import Wrong, call, check_least
from data.split import trained
from jax.sharding import PartitionSpec as P
from job import prepare
from tqdm import tqdm
from train import end

import jaxcgx as cgx

WAYS = "none", "fp16", "bytegrad", "cgx4", "powersgd"
PROBE = 2**22  # float32 numbers, in the sum that measures the network


class Row(NamedTuple):
    """What was measured of one way."""

    way: str
    seconds: list[float]  # of a step, in each turn
    done: int  # examples or tokens in a step
    sent: float  # bytes that a rank sends in a step


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], add_help=False, allow_abbrev=False)
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WORD", help="words for --compression")
    parser.add_argument("--turns", type=int, default=10, metavar="N", help="measurements of each way (default: 10)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps in a measurement (default: 10)")
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
    given, rest = parser.parse_known_args(arguments)
    try:
        call(check_least, "--turns, --steps", 1, turns=given.turns, steps=given.steps)
        commands = [config.parse([*rest, f"--compression={way}", "--config.data.synthetic=True"]) for way in given.ways]
        command = commands[0]
        world = launch.start(command.launch, command.devices, command.nodes, command.locals)
        rate = network(world)
        rows = [measure(each, world, turns=given.turns, steps=given.steps) for each in commands]
    except (Wrong, OSError) as error:
        end(f"benchmark.py: {error}")
    if world.speaks:
        show(rows, "tokens" if command.config.data.name == "text" else "examples")
        print(f"{world.ranks} ranks; an uncompressed sum: a rank sends {rate / 1e6:,.0f} Mbit/s")


def network(world: launch.World) -> float:
    """Returns the bits a second that a rank sends in a large uncompressed sum. All ranks send at the same time."""
    mesh, x = world.mesh, world.put(jnp.ones(PROBE * world.here))
    axis = world.sharding.axis if mesh is not None else world.nodes or world.comm
    total = lambda x: cgx.compressed_psum(x, axis, cgx.Raw())
    program = jax.jit(total if mesh is None else jax.shard_map(total, mesh=mesh, in_specs=P(axis), out_specs=P()))
    run = program.lower(x).compile()
    seconds = [timed(lambda: run(x), world) for _ in range(4)][1:]
    return 8 * cgx.explain(run, show=False).bytes / float(np.median(seconds))


def measure(command: config.Command, world: launch.World, turns: int, steps: int) -> Row:
    """Trains one way for some turns."""
    job = prepare(command.config, world)
    way = job.exchange.settled or job.exchange.made
    train = call(job.make_step, "config.compression", way)
    batches = trained(job.dataset.train, job.settings.batch_size, job.share, seed=0, start=0, stop=1)
    batch, state = world.put(next(iter(batches))), train.init(job.model.params, job.model.state)
    steps += -steps % job.exchange.every  # an exchange ends each turn

    def turn() -> None:
        nonlocal state
        for _ in range(steps):
            state, _ = train.step(state, batch)
            if jax.default_backend() == "cpu":  # as train.py
                jax.block_until_ready(state)
        jax.block_until_ready(state)

    sent = job.sent(train.step.programs(state, batch), state, batch)["bytes"]
    timed(turn, world)
    word = command.config.compression.word
    bar = tqdm(range(turns), desc=word, unit="turn", disable=None if world.speaks else True)
    seconds = [timed(turn, world) / steps for _ in bar]
    done = job.examples * (job.dataset.shape[0] if command.config.data.name == "text" else 1)
    return Row(word, seconds, done, sent)


def timed(function: Any, world: launch.World) -> float:
    """Returns the seconds that a call takes on the slowest process."""
    begun = time.perf_counter()
    jax.block_until_ready(function())
    return max(world.gather(round(1e6 * (time.perf_counter() - begun)))) / 1e6


def show(rows: list[Row], unit: str) -> None:
    line = "{:<12}{:>12}{:>18}{:>24}{:>20}".format
    print(line("way", "ms a step", f"{unit} a second", "slowest, fastest turn", "MB a rank sends"))
    for way, seconds, done, sent in rows:
        middle, least, most = (done / x for x in (np.median(seconds), max(seconds), min(seconds)))
        each = f"{least:,.1f}, {most:,.1f}"
        print(line(way, f"{1e3 * np.median(seconds):.1f}", f"{middle:,.1f}", each, f"{sent / 1e6:.3f}"))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Trains a named network on named data with compressed gradients.

    pip install ".[recipes]"
    python recipes/train.py --config=recipes/configs/digits/mlp.py --compression=dgc
    python recipes/train.py --config=recipes/configs/cifar/resnet20.py --config.compression=dgc \
        --config.train.num_epochs=500 --suffix=x

Each run has a folder in runs/. To continue an interrupted run, give the same command again (docs/recipes.md).
"""

import dataclasses
import functools
import sys
import time
from typing import Any

import config
import data
import exchanges
import jax
import jax.numpy as jnp
import launch
import models
import numpy as np
import optimizers
import plot
from checkpoints import Checkpoints
from checks import Wrong, call
from data.split import tested, trained
from run_folder import RunFolder
from tqdm import tqdm

import jaxcgx as cgx
from jaxcgx.optim import PerRank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The section `train` of a config."""

    batch_size: int  # examples per step, of all ranks together
    num_epochs: float
    steps: int  # stops after this many steps, with the same schedule; 0: after num_epochs
    seed: int
    log_every: int  # steps between two lines of metrics
    test_every: float  # epochs between two tests
    test_examples: int  # 0: all
    save_every: int  # steps between two checkpoints

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_epochs", "log_every", "test_every", "save_every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"expected a positive {name}, got {getattr(self, name)}")
        for name in ("steps", "seed", "test_examples"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected a {name} of at least 0, got {getattr(self, name)}")


def main(arguments: list[str]) -> None:
    try:
        command = config.parse(arguments)
        train(command, launch.start(command.launch, command.devices))
    except (Wrong, OSError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted; the same command goes on from the last checkpoint, or begins anew without one")


def train(command: config.Command, world: launch.World) -> dict[str, Any]:
    """Trains, and returns the last value of each metric, such as the test accuracy and the bytes of a step.

    Processes that don't write the run's files return {}.
    """
    sections = {name: section.to_dict() for name, section in command.config.items()}
    settings = call(Train, "config.train", **sections["train"])
    dataset = data.load(**sections["data"])
    model = models.make(dataset, settings.seed, **sections["model"])
    each = len(dataset.train) // settings.batch_size  # steps of an epoch
    if not each:
        raise Wrong(f"config.train.batch_size: expected at most {len(dataset.train)} examples of {dataset.name}")
    stop = max(int(settings.num_epochs * each), 1)
    stop = min(settings.steps or stop, stop)

    schedule = optimizers.make_schedule(each, settings.num_epochs, **sections["schedule"])
    kind = sections["compression"]["kind"]
    optimizer, moved = optimizers.make(
        schedule, exchanges.has_momentum(kind), clips=kind == "dgc", **sections["optimizer"]
    )
    exchange = exchanges.make(exchanges.Around(optimizer, moved, each), **sections["compression"])
    make_step = functools.partial(
        cgx.make_train_step, model.loss, optimizer, world.mesh, data_axis=world.data_axis, model_state="mean"
    )
    step = call(make_step, "config.compression", **exchange.options)

    run = RunFolder(command.runs / command.name, command.config, world)
    checkpoints = Checkpoints(run.path / "checkpoints", world, run.say)
    start, state = checkpoints.restore(step.init(model.params, model.state))
    run.begin(start)
    run.say(
        f"{command.name}: {dataset.name}, {sum(x.size for x in jax.tree.leaves(model.params)):,} parameters, "
        f"{world.ranks} ranks, " + (f"goes on from step {start} of {stop}" if start else f"{stop} steps")
    )
    share = world.share(settings.batch_size)
    examples = settings.batch_size // world.ranks * world.ranks  # per step
    score = jax.jit(functools.partial(_score, model.score))
    # One program: on virtual devices, several programs with collectives at the same time can deadlock.
    mean = jax.jit(
        functools.partial(jax.tree.map, lambda x: x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0])
    )

    def test() -> dict[str, float]:
        params, rest = state[0], state[1]
        if isinstance(rest, PerRank):  # with DiLoCo, each center has its own state
            rest = jax.block_until_ready(mean(rest.rows))
        batches = tested(dataset.test, examples, share, most=settings.test_examples)
        sums = np.sum([world.total(score(params, rest, world.put(batch))) for batch in batches], axis=0)
        return dict(test_loss=float(sums[0] / sums[2]), test_accuracy=float(sums[1] / sums[2]))

    batches = trained(dataset.train, settings.batch_size, share, seed=settings.seed, start=start, stop=stop)
    bar = tqdm(batches, initial=start, total=stop, unit="step", disable=None if world.speaks else True)
    # On virtual devices, a second step in flight can exhaust the thread pool. Accelerators queue steps.
    waits = jax.default_backend() == "cpu"
    compiled: Any = None
    done, seconds, begun = start, 0.0, time.perf_counter()
    for number, batch in enumerate(bar, start + 1):
        placed = world.put(batch)
        if compiled is None:
            compiled = step.step.lower(*state, placed).compile()
            run.write(start, **_bytes(compiled, make_step, exchange, (*state, placed)))
            begun = time.perf_counter()
        *state, metrics = compiled(*state, placed)
        last = number == stop
        logs = number % settings.log_every == 0 or last
        if waits or logs:
            jax.block_until_ready((state, metrics))
        seconds += time.perf_counter() - begun
        if logs:
            loss = float(np.mean([shard.data for shard in metrics.loss.addressable_shards], dtype=np.float64))
            rate, speed = float(schedule(number - 1)), (number - done) * examples / seconds
            run.write(number, loss=loss, epoch=number / each, rate=rate, examples_per_second=speed)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            done, seconds = number, 0.0
            if not np.isfinite(loss):
                raise Wrong(f"step {number}: the loss is {loss}; try a lower config.schedule.rate")
        if number % max(int(settings.test_every * each), 1) == 0 or last:
            run.write(number, **test())
        if number % settings.save_every == 0 or last:
            checkpoints.save(number, tuple(state))
        begun = time.perf_counter()
    return _finish(command, dataset.name, world, run, warmed=bool(exchange.settled))


def _score(score: Any, params: Any, state: Any, batch: Any) -> jax.Array:
    """Returns [loss, right predictions, examples], each summed over a batch."""
    inputs, labels, weights = batch
    losses, right = (x.reshape(len(x), -1).mean(1) for x in score(params, state, (inputs, labels)))
    return jnp.stack([(losses * weights).sum(), (right * weights).sum(), weights.sum()])


def _bytes(compiled: Any, make_step: Any, exchange: exchanges.Exchange, args: tuple[Any, ...]) -> dict[str, float]:
    """Returns {"bytes": ..., "raw_bytes": ...}: the bytes that a rank sends per step, with compression and without it.

    Both are for steps after any warm-up. If not every step exchanges, "bytes" is the mean over all steps.
    """
    step = make_step(**exchange.settled).step.lower(*args) if exchange.settled else compiled
    found = cgx.explain(step, show=False)
    return dict(bytes=found.bytes / exchange.every, raw_bytes=found.raw_bytes)


def _finish(command: config.Command, data: str, world: launch.World, run: RunFolder, *, warmed: bool) -> dict[str, Any]:
    """Prints and draws the results. Returns the last value of each metric.

    `warmed` says that the bytes are those of steps after a warm-up.
    """
    run.close()
    if not world.speaks:
        return {}
    lines = run.read()
    results: dict[str, Any] = {}
    for line in lines:
        results |= line
    word = command.config.compression.word
    when = " after the warm-up" if warmed else ""
    sent = f"{results['bytes']:,.0f} bytes a step{when}, uncompressed {results['raw_bytes']:,.0f}"
    title = f"{data}, {command.config.model.name}, {word}, {world.ranks} ranks: a rank sends {sent}"
    plot.draw(lines, title, run.path / "plot.png")
    run.say(
        f"{data}, step {results['step']}: test accuracy {results['test_accuracy']:.1%}, "
        f"test loss {results['test_loss']:.4f}\n"
        f"a rank sends {sent}\n"
        f"plot: {run.path / 'plot.png'}   curves: tensorboard --logdir {run.path.parent}\n"
        f"next: {command.with_compression('dgc' if word == 'none' else 'none')}"
    )
    return results


if __name__ == "__main__":
    main(sys.argv[1:])

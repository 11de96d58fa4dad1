"""Trains a named network on named data with compressed gradients.

    pip install ".[recipes]"
    python recipes/train.py --config=recipes/configs/digits/mlp.py --compression=dgc
    python recipes/train.py --config=recipes/configs/cifar/resnet20.py --config.compression=dgc \
        --config.train.num_epochs=500 --suffix=x

Each run has a folder in runs/. To continue an interrupted run, give the same command again (docs/recipes.md).
"""

import contextlib
import functools
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import config
import jax
import jax.numpy as jnp
import launch
import numpy as np
import plot
from checkpoints import Checkpoints
from checks import Interrupted, Wrong, call
from data.split import tested, trained
from job import Job, check_same, prepare
from run_folder import RunFolder
from tqdm import tqdm

import jaxcgx as cgx
from jaxcgx.train.state import PerRank, TrainState


def main(arguments: list[str]) -> None:
    try:
        command = config.parse(arguments)
        train(command, launch.start(command.launch, command.devices, command.nodes, command.locals))
    except Interrupted:  # the log says so
        sys.exit(1)
    except (Wrong, OSError) as error:
        end(f"train.py: {error}")
    except KeyboardInterrupt:
        end("train.py: interrupted; the same command goes on from the last checkpoint, or begins anew without one")
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        end(traceback.format_exc())


def end(text: str) -> NoReturn:
    """Ends this process with an error."""
    if jax.distributed.is_initialized():  # at its exit, JAX would wait for the others, which may wait for this process
        print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.exit(text)


def train(command: config.Command, world: launch.World) -> dict[str, Any]:
    """Trains, and returns the last value of each metric, such as the test accuracy and the bytes of a step.

    Processes that don't write the run's files return {}.
    """
    with world.together():  # a host may lack the data
        job = prepare(command.config, world)
        content = job.dataset.content()
    check_same(content, world)
    step = call(job.make_step, "config.compression", job.exchange.made)
    with contextlib.closing(RunFolder(command.runs / command.name, command.config, content, world)) as run:
        if command.evaluate:
            return _evaluate(job, step, run, world)
        _steps(command, job, step, run, world)
        return _finish(command, job, run, world)


def _evaluate(job: Job, step: Any, run: RunFolder, world: launch.World) -> dict[str, Any]:
    """Tests the last checkpoint."""
    checkpoints = Checkpoints(run.path / "checkpoints", world, run.say)
    start, state = checkpoints.restore(step.init(job.model.params, job.model.state))
    if not start:
        raise Wrong(f"--evaluate: there is no checkpoint in {run.path / 'checkpoints'}; train first")
    found = Tester(job, world)(state)
    run.say(f"step {start}: {_spelled(found)}")
    return found


def _steps(command: config.Command, job: Job, step: Any, run: RunFolder, world: launch.World) -> None:
    """Trains from the last checkpoint on, and writes the files of the run."""
    settings, dataset, stop = job.settings, job.dataset, job.stop
    checkpoints = Checkpoints(run.path / "checkpoints", world, run.say)
    start, state = checkpoints.restore(step.init(job.model.params, job.model.state))
    if command.init and not start:
        found, other = Checkpoints(command.init / "checkpoints", world, run.say).restore(state)
        if not found:
            raise Wrong(f"--init: there is no checkpoint in {command.init / 'checkpoints'}")
        # With DiLoCo, each center has weights of its own, too.
        state = step.init(other.params, job.model.state).replace(model_state=other.model_state)
    if start > stop:
        raise Wrong(f"config.train.steps: expected at least {start}, the step of the last checkpoint, got {stop}")
    run.begin(start)
    parameters = sum(x.size for x in jax.tree.leaves(job.model.params))
    run.say(
        f"{command.name}: {dataset.name}, {parameters:,} parameters, {world.ranks} ranks, "
        + (f"goes on from step {start} of {stop}" if start else f"{stop} steps")
    )
    if job.exchange.said:
        run.say(job.exchange.said)
    # On average, an element is sent once in 1 / ratio steps.
    if isinstance(job.exchange.made, cgx.DGC) and not job.exchange.settled and stop * job.exchange.made.ratio < 10:
        ratio = job.exchange.made.ratio
        run.say(f"{stop} steps are few for a ratio of {ratio} without a warm-up: --compression=dgc has one")
    test = Tester(job, world)
    batches = trained(dataset.train, settings.batch_size, job.share, seed=settings.seed, start=start, stop=stop)
    bar = tqdm(batches, initial=start, total=stop, unit="step", disable=None if world.speaks else True)
    # On virtual devices, a second step in flight can exhaust the thread pool. Accelerators queue steps.
    waits = jax.default_backend() == "cpu"
    done, seconds, begun = start, 0.0, time.perf_counter()
    with launch.Signals(world) as signals, _published(command, world) as publish:
        for number, batch in enumerate(bar, start + 1):
            placed = world.put(batch)
            if number == start + 1:
                programs = step.step.programs(state, placed)
                run.write(start, **job.sent(programs, state, placed))
                begun = time.perf_counter()
            state, metrics = step.step(state, placed)
            publish(state.params)
            last = number == stop
            logs = number % settings.log_every == 0 or last
            if waits or logs:
                jax.block_until_ready((state, metrics))
            seconds += time.perf_counter() - begun
            if logs:
                loss = _loss(number, metrics, world)
                rate, speed = float(job.schedule(number - 1)), (number - done) * job.examples / seconds
                run.write(number, loss=loss, epoch=number / job.steps_per_epoch, rate=rate, examples_per_second=speed)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                done, seconds = number, 0.0
            if number % max(int(settings.test_every * job.steps_per_epoch), 1) == 0 or last:
                run.write(number, **test(state))
            ends = signals.end() and not last
            if number % settings.save_every == 0 or last or ends:
                _loss(number, metrics, world)
                checkpoints.save(number, state)
            if ends:
                bar.close()
                run.say(f"interrupted: step {number} of {stop} is saved, and the same command goes on from there")
                world.all(True)  # mpirun kills the others when one ends
                raise Interrupted(f"step {number} of {stop}")
            begun = time.perf_counter()


@contextlib.contextmanager
def _published(command: config.Command, world: launch.World) -> Generator[Callable[[Any], Any]]:
    """Returns a function that publishes parameters, in a `with` block."""
    if not (command.publish and world.speaks):
        yield lambda params: None
        return
    with cgx.patch.Publisher(command.publish, secret=os.environ.get("PUBLISH_SECRET", "")) as publisher:
        yield lambda params: publisher.publish(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def _loss(number: int, metrics: Any, world: launch.World) -> float:
    """Returns the mean loss of all ranks in a step."""
    loss = world.mean(metrics.loss)
    if not np.isfinite(loss):
        raise Wrong(f"step {number}: the loss is {loss}; try a lower config.schedule.rate")
    return loss


class Tester:
    """Tests the parameters of a run on the examples of the test split."""

    def __init__(self, job: Job, world: launch.World) -> None:
        self.job, self.world = job, world
        self.score = jax.jit(self._score)
        # One program: on virtual devices, several programs with collectives at the same time can deadlock.
        self.mean = jax.jit(
            functools.partial(jax.tree.map, lambda x: x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0])
        )

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Returns the mean loss and the accuracy of a step's state."""
        params, rest = state.params, state.model_state
        if isinstance(rest, PerRank):  # with DiLoCo, each center has its own state
            rest = jax.block_until_ready(self.mean(rest.rows))
        job = self.job
        batches = tested(job.dataset.test, job.examples, job.share, most=job.settings.test_examples)
        each = [self.world.total(self.score(params, rest, self.world.put(batch))) for batch in batches]
        sums = {name: sum(x[name] for x in each) for name in each[0]}
        count = sums.pop("examples")
        found = {f"test_{name}": float(x / count) for name, x in sums.items()}
        if job.dataset.name.endswith("text"):
            found["test_perplexity"] = math.exp(min(found["test_loss"], 700))  # more is no float
        return found

    def _score(self, params: Any, state: Any, batch: Any) -> dict[str, jax.Array]:
        """Returns the sums of all scores over a batch, and the number of its examples."""
        inputs, labels, weights = batch
        found = self.job.model.score(params, state, (inputs, labels))
        return {name: (x * weights).sum() for name, x in found.items()} | {"examples": weights.sum()}


def _spelled(found: dict[str, float]) -> str:
    """Returns the results of a test for the log."""
    more = [f"test {name} {found[f'test_{name}']:.3f}" for name in ("perplexity", "f1") if f"test_{name}" in found]
    return ", ".join([f"test accuracy {found['test_accuracy']:.1%}", f"test loss {found['test_loss']:.4f}", *more])


def _finish(command: config.Command, job: Job, run: RunFolder, world: launch.World) -> dict[str, Any]:
    """Prints and draws the results. Returns the last value of each metric."""
    if not world.speaks:
        return {}
    lines = run.read()
    results: dict[str, Any] = {}
    for line in lines:
        results |= line
    if not {"bytes", "test_accuracy"} <= results.keys():
        raise Wrong(f"{run.metrics}: the results of this run, which has ended, aren't there; remove the run's folder")
    word, data = command.config.compression.word, job.dataset.name
    other = "dgc" if word == "none" else "none"
    alone = world.comm is None and jax.process_count() == 1
    next_command = command.with_compression(other) if alone else f"the same command with --compression={other}"
    when = " after the warm-up" if job.exchange.settled else ""
    sent = f"{results['bytes']:,.0f} bytes a step{when}, uncompressed {results['raw_bytes']:,.0f}"
    short = job.stop <= job.exchange.warmup_epochs * job.steps_per_epoch
    warm = f"all {job.stop} steps belong to the warm-up, in which a rank sends more\n" if short else ""
    title = f"{data}, {command.config.model.name}, {word}, {world.ranks} ranks: a rank sends {sent}"
    plot.draw(lines, title, run.path / "plot.png")
    run.say(
        f"{data}, step {results['step']}: {_spelled(results)}\n"
        f"a rank sends {sent}\n{warm}"
        f"plot: {run.path / 'plot.png'}   curves: tensorboard --logdir {run.path.parent}\n"
        f"next: {next_command}"
    )
    return results


if __name__ == "__main__":
    for number in launch.Signals.NUMBERS:
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: KeyboardInterrupt
    main(sys.argv[1:])

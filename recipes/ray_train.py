"""Trains on Ray: each rank is an actor, and jax.distributed connects the processes of the actors.

    pip install ".[recipes,ray]"
    python recipes/ray_train.py --workers=4 --config=recipes/configs/digits/mlp.py --compression=dgc

When a worker dies, all workers end, and new workers, one fewer than before, continue from the last checkpoint. There
are fewer still if a host with several workers died. If a worker gets SIGTERM, all save a checkpoint first, and then the
same happens. If Ray has no room for all workers, fewer begin. After the next checkpoint, the number of workers grows
again if Ray has room, up to --workers. RAY_ADDRESS names a cluster. Without it, Ray starts on this machine, apart from
any cluster that already runs there. All hosts need this folder at the same path, and must see --runs.
"""

import argparse
import os
import pathlib
import socket
import sys
import time
from typing import Any

import config
import ray
from checks import Interrupted, Wrong
from ray.exceptions import RayActorError, RayError, RayTaskError

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 120  # seconds for workers to start, and for Ray to notice that a worker died


class Worker:
    """A rank. It ends with its world, because a process can join jax.distributed only once."""

    def find(self) -> tuple[str, int]:
        """Returns (an address of this host with a free port, the id of this process)."""
        with socket.socket() as port:
            port.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{port.getsockname()[1]}", os.getpid()

    def train(self, arguments: list[str], folder: str, world: dict[str, str]) -> dict[str, Any]:
        """Trains in a folder. `world`: environment variables that describe the world and this rank."""
        os.chdir(folder)
        os.environ |= world
        sys.path.insert(0, str(HERE))  # before the folder of the command, which may have another train.py
        import launch  # not earlier, because it imports JAX, which reads the environment
        import train

        command = config.parse(arguments)
        return train.train(command, launch.start("distributed", command.devices))


class Team:
    """The workers of a world."""

    def __init__(self, ranks: int, resource: str, arguments: list[str]) -> None:
        """resource: "CPU" or "GPU". Each worker has one of this kind."""
        one = ray.remote(**{f"num_{resource.lower()}s": 1})(Worker)
        self.workers: list[Any] = [one.remote() for _ in range(ranks)]
        self._arguments, self._calls = arguments, []

    def start(self) -> int:
        """Waits until all workers run, and starts the training, unless Ray has no room for all of them.

        Returns the number of workers that run.
        """
        calls = [worker.find.remote() for worker in self.workers]
        running, waiting = ray.wait(calls, num_returns=len(calls), timeout=PATIENCE)
        if waiting:
            return len(running)
        found = ray.get(calls)
        ranks = len(found)
        print(f"{ranks} workers: processes {' '.join(str(number) for _, number in found)}", flush=True)
        world = dict(JAX_COORDINATOR_ADDRESS=found[0][0], JAX_NUM_PROCESSES=str(ranks))
        for i, worker in enumerate(self.workers):
            mine = world | {"JAX_PROCESS_ID": str(i)}
            self._calls.append(worker.train.remote(self._arguments, os.getcwd(), mine))
        return ranks

    def done(self) -> bool:
        """Waits for up to a second. Returns whether all workers are done, or raises the error of a worker."""
        ended, left = ray.wait(self._calls, num_returns=len(self._calls), timeout=1)
        ray.get(ended)
        return not left

    def lost(self) -> bool:
        """Returns whether a worker has died.

        The other workers then raise errors, too, because their exchanges and checkpoints fail.
        """
        until = time.monotonic() + PATIENCE
        left = self._calls
        while left and time.monotonic() < until:
            ended, left = ray.wait(left, timeout=1)
            try:
                ray.get(ended)
            except RayActorError:
                return True
            except RayError:
                pass
        return False

    def end(self) -> None:
        """Kills all workers. Otherwise, some would wait for a dead worker for minutes.

        The first one is the last, because the others would print that their coordinator is gone.
        """
        for worker in reversed(self.workers):
            ray.kill(worker)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workers", type=int, required=True, help="the number of ranks; other arguments: train.py's")
    wanted, rest = parser.parse_known_args(arguments)
    command = config.parse(rest)
    if wanted.workers < 1:
        raise Wrong(f"--workers: expected a positive number, got {wanted.workers}")
    if command.launch != "auto":
        raise Wrong(f"--launch: expected none, as Ray starts the processes, got {command.launch}")
    folder = command.runs / command.name / "checkpoints"
    last = lambda: max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)
    # Without "local", Ray would look for a cluster that somebody has started on this machine.
    here = dict(address="local", num_cpus=wanted.workers, include_dashboard=False)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}}, **({} if os.environ.get("RAY_ADDRESS") else here))
    resource = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
    whole = lambda: int(ray.cluster_resources().get(resource, 0))
    room = lambda ranks: min(wanted.workers, ranks + int(ray.available_resources().get(resource, 0)))

    ranks = wanted.workers
    while ranks > 0:
        team, begun = Team(ranks, resource, rest), last()
        try:
            if (running := team.start()) < ranks:
                print(f"Ray has room for only {running} of {ranks} workers", flush=True)
                ranks = running
                continue
            while not team.done():
                if (more := room(ranks)) > ranks and last() > begun:
                    ranks = more
                    print(f"room for {ranks} workers: they go on from step {last()}", flush=True)
                    break
            else:
                return
        except RayError as error:
            ended = isinstance(error, RayTaskError)
            told = ended and isinstance(error.cause, Interrupted)  # a worker got SIGTERM; its host will kill it
            if ended and not told and not team.lost():  # the same error would come again
                raise Wrong(str(error.cause)) from error
            ranks = min(ranks - 1, whole())  # a host may have died with several workers
            what = "was interrupted" if told else f"died ({type(error).__name__})"
            print(f"a worker {what}: {ranks} go on from step {last()}", flush=True)
        finally:
            team.end()
    raise Wrong(f"no worker is left; the same command goes on from step {last()}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Wrong as error:
        sys.exit(f"ray_train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("ray_train.py: interrupted; the same command goes on from the last checkpoint")

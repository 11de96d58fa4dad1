"""Measures the claims of docs/failures.md: when one rank fails, how soon the other one gets an error, and which error.

    python benchmarks/failures.py [--over Tcp tree step centers update memory MPI Gloo] [--rows killed ...] [--out DIR]

Two processes send each other 64 MiB again and again, until something happens to the last one. With "tree" there are
three processes, which sum along a tree, and the first one has no connection to the last. With "step" they train. With
"centers" four processes in two centers train, and with "update" they only update a Topology. Rows run one after
another. Rows that cut a link need root, because each process, or each center, then runs in a host of jaxcgx.lab.
"""

import argparse
import contextlib
import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time

from report import RESULTS, Report, free_port

from jaxcgx.lab import Lab

OVER = "Tcp", "tree", "step", "centers", "update", "memory", "MPI", "Gloo"
ON_MESH = "Tcp", "tree", "step", "centers", "update", "Gloo"
IN_CENTERS = "centers", "update"  # two centers of two ranks; these rows only cut a link
ROWS = {
    "killed": "is killed (kill -9)",
    "forked": "has a child (fork), and is killed",
    "stopped": "is stopped (kill -STOP)",
    "raised": "raises an exception",
    "late": "comes 50 s late",
    "cut": "is on a host whose link goes down",
}
LATE = 50.0  # seconds
LIMIT = 150.0  # seconds, after which a row without a result is given up
KEPT = 330.0  # the same where JAX keeps a process for 300 s
ELEMENTS = 32 << 20  # of the array, each of which travels in two bytes
AT = 3  # the number of the exchange in which it happens
FIRST = 110  # characters of an error that are kept
CHARTS = [dict(table="rows", title="Seconds to the error", x="row", y=["seconds"], panel="over", log=True)]
NOTES = """\
- Seconds from the event to the error of the other rank, or to its end if JAX or mpirun ends it. "none" is the right
  answer for a rank that is late.
- tree: of three ranks over Tcp, with the schedule `Overlay([Tree.of([(0, 1), (1, 2)])])`, where the first rank sends
  only to the second one. step: a step of `make_train_step` over Tcp. Gloo: a plain axis. memory:
  `jaxcgx.transports.shm`, of processes without jax.distributed. MPI: `jaxcgx.mpi` under `mpirun python -m mpi4py`. All
  timeouts are the defaults.
- centers: a step of `make_train_step` on a mesh ("dc", "local") of 2 x 2 ranks, over Tcp between the centers and Gloo
  inside of them. update: `Topology.update()` on this mesh, which probes the links in every call (greed=0). Each center
  is a host.
"""


# A rank


class Files:
    """The part of a communicator that shared memory needs."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size, self.calls = folder, rank, size, 0

    def allgather(self, mine):
        self.calls += 1
        paths = [self.folder / f"gather-{self.calls}-{rank}" for rank in range(self.size)]
        unnamed = self.folder / f"unnamed-{self.rank}"
        unnamed.write_bytes(pickle.dumps(mine))
        unnamed.rename(paths[self.rank])
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        return [pickle.loads(path.read_bytes()) for path in paths]


def ranks_of(over):
    return 4 if over in IN_CENTERS else 3 if over == "tree" else 2


def on_mesh(over):
    """Returns the exchange over an axis of a mesh of all processes."""
    import jax
    import numpy as np

    import jaxcgx as cgx

    if over in IN_CENTERS:
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("dc", "local"))
        if over == "centers":
            return training(mesh, (cgx.Tcp("dc"), "local"), {"dc": cgx.MaxMin(4), "local": cgx.Raw()})
        topology = cgx.wan.Topology(mesh, cgx.Tcp("dc"), greed=0)
        return lambda _: topology.update(), None
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spec = jax.P("data")
    if over == "step":
        return training(mesh, cgx.Tcp("data"), cgx.MaxMin(4))
    array = np.ones(ELEMENTS * mesh.size, np.float32)
    x = jax.make_array_from_callback(array.shape, jax.NamedSharding(mesh, spec), lambda at: array[at])
    axis, codec = "data" if over == "Gloo" else cgx.Tcp("data"), cgx.Cast("bfloat16")

    def exchange(x):
        if over == "tree":
            path = cgx.wan.Overlay([cgx.wan.Tree.of([(0, 1), (1, 2)])])
            return cgx.compressed_psum(x, axis, cgx.Plan.every(codec, schedule=path))
        return cgx.compressed_all_gather(x, axis, codec)

    return jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)), x


def training(mesh, axes, plan):
    """Returns a program of one training step over these axes, and its batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxcgx as cgx

    loss_fn = lambda weights, x: jnp.mean((x @ weights) ** 2)
    train = cgx.make_train_step(loss_fn, optax.sgd(0.1), mesh, plan, sharding=cgx.Sharding(axes))
    state = train.init(np.zeros((4096, 4096), np.float32))
    batch = np.ones((4 * mesh.size, 4096), np.float32)

    def step(x):
        nonlocal state
        state, metrics = train.step(state, x)
        return metrics

    sharding = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    return step, jax.make_array_from_callback(batch.shape, sharding, lambda at: batch[at])


def exchange_over(over, folder, rank, address):
    """Returns a program of one exchange, and its array."""
    import jax
    import jax.numpy as jnp

    import jaxcgx as cgx

    if over in ON_MESH:
        jax.distributed.initialize(address, ranks_of(over), rank)
        return on_mesh(over)
    x = jnp.ones(ELEMENTS, jnp.bfloat16)
    if over == "memory":
        from jaxcgx.transports.shm import Shm

        return jax.jit(Shm.over(Files(folder, rank, 2)).all_gather), x
    from mpi4py import MPI

    return jax.jit(lambda x: cgx.compressed_all_gather(x, MPI.COMM_WORLD, cgx.Cast("bfloat16"))), x.astype(jnp.float32)


def happen(what):
    """Does to this rank what the row says."""
    if what == "forked" and os.fork() == 0:
        time.sleep(KEPT)
        os._exit(0)
    if what in ("killed", "forked"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raised":
        raise ValueError("an error of one rank")
    if what == "late":
        time.sleep(LATE)


def rank_main(over, row, folder, rank, address):
    import jax

    def say(what, text=""):
        with open(folder / f"rank-{rank}", "a") as out:
            out.write(json.dumps([what, time.monotonic(), text]) + "\n")

    if over == "MPI":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
    step, x = exchange_over(over, folder, rank, address)
    for i in range(10**9):
        if i == AT and rank == ranks_of(over) - 1:
            say("event")
            happen(row)
        try:
            jax.block_until_ready(step(x))
        except jax.errors.JaxRuntimeError as error:
            say("error", str(error))
            break
        if row == "late" and i == AT:
            say("done")
            break
    time.sleep(KEPT)


# All ranks


@contextlib.contextmanager
def hosts(over, row, folder, port):
    """Starts each rank, or each center, in its own host.

    Yields the first rank's process, and a function that cuts the last host's link.
    """
    ranks, together = ranks_of(over), 2 if over in IN_CENTERS else 1
    with Lab(ranks // together, "10gbit") as lab, contextlib.ExitStack() as files:
        each = [
            lab.start(
                rank // together, [*row, folder, rank, f"{lab.address(0)}:{port}"], **options(folder, rank, files)
            )
            for rank in range(ranks)
        ]
        yield each[0], lambda: lab.cut(lab.hosts - 1)


@contextlib.contextmanager
def processes(over, row, folder, port):
    """Starts the ranks, or mpirun. Yields the first process, and a function that does nothing."""
    mpi = ["-n", "2", sys.executable, "-m", "mpi4py", *row[1:], folder, 0, ""]
    if over == "MPI":
        commands = [[pathlib.Path(sys.executable).with_name("mpirun"), *mpi]]
    else:
        commands = [[*row, folder, rank, f"127.0.0.1:{port}"] for rank in range(ranks_of(over))]
    with contextlib.ExitStack() as files:
        each = [
            subprocess.Popen(list(map(str, words)), process_group=0, **options(folder, i, files))
            for i, words in enumerate(commands)
        ]
        try:
            yield each[0], lambda: None
        finally:
            for process in each:
                if over == "MPI":  # mpirun ends its ranks, which are in groups of their own
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its children
                process.wait()


def options(folder, rank, files):
    """Returns the options of Popen for a rank."""
    environment = dict(
        JAX_PLATFORMS="cpu",
        JAX_ENABLE_COMPILATION_CACHE="false",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )
    errors = files.enter_context((folder / f"errors-{rank}").open("w"))
    return dict(env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)


def said(folder, rank, what):
    """Returns the time and the text of a rank's message `what`, or None if there is none yet."""
    path = folder / f"rank-{rank}"
    for line in path.read_text().splitlines() if path.exists() else []:
        found = json.loads(line)
        if found[0] == what:
            return found[1:]
    return None


def last_words(folder):
    """Returns why a process without an error ended."""
    text = (folder / "errors-0").read_text()
    reasons = r"The following tasks are unhealthy.*|.*exited on signal.*|.*MPI_ABORT.*|.*[Tt]erminating process.*"
    found = re.findall(reasons, text) or re.findall(r".*\w.*", text) or ["nothing"]
    return "(ended) " + found[0].strip()


def measure(over, row):
    """Returns (seconds or None, a description)."""
    with tempfile.TemporaryDirectory() as name:
        folder, event, port = pathlib.Path(name), None, free_port()
        start = hosts if row == "cut" else processes
        with start(over, [sys.executable, __file__, "--rank", over, row], folder, port) as (first, cut):
            limit = KEPT if (over, row) == ("Gloo", "raised") else LIMIT
            end = time.monotonic() + limit
            while time.monotonic() < end:
                if event is None and (found := said(folder, ranks_of(over) - 1, "event")):
                    cut()
                    event = time.monotonic() if row == "cut" else found[0]
                if event and (found := said(folder, 0, "error")):
                    return found[0] - event, found[1]
                if event and (found := said(folder, 0, "done")):
                    return None, f"none; it went on after {found[0] - event:.0f} s"
                if first.poll() is not None:
                    return (time.monotonic() - event) if event else None, last_words(folder)
                time.sleep(0.005)
        return None, f"none after {limit:.0f} s"


def possible(over, row):
    """Returns whether the row exists. Shared memory and mpirun run on one host, without a link to cut."""
    if row != "cut":
        return over not in IN_CENTERS
    return over in ON_MESH and os.geteuid() == 0


def main():
    if sys.argv[1:2] == ["--rank"]:
        over, row, folder, rank, address = sys.argv[2:]
        return rank_main(over, row, pathlib.Path(folder), int(rank), address)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--over", nargs="+", choices=OVER, default=OVER)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--out", type=pathlib.Path, help="where the results are written; without options: results/")
    args = parser.parse_args()
    report = Report("make bench-failures", charts=CHARTS)
    report.show("", "| over | the last rank | seconds | the first rank's error |", "|---|---|---:|---|")
    report.data["rows"] = []
    for over in args.over:
        for row in args.rows:
            if not possible(over, row):
                continue
            seconds, words = measure(over, row)
            words = re.sub(r"\s+", " ", words)
            report.data["rows"].append(dict(over=over, row=row, seconds=seconds and round(seconds, 2), words=words))
            shown = re.sub(r": jaxcgx_\w+: .*?, which", ": ... which", words)
            shown = shown[:FIRST].replace("|", "/") + ("..." if len(shown) > FIRST else "")
            report.show(f"| {over} | {ROWS[row]} | {'' if seconds is None else f'{seconds:.2f}'} | `{shown}` |")
    report.show("", NOTES.rstrip())
    if args.out or (tuple(args.over) == OVER and args.rows == list(ROWS)):
        report.write(args.out or RESULTS, "failures")
    return None


if __name__ == "__main__":
    main()

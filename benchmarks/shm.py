"""Shared memory against MPI between the processes of this host: all_to_all of bytes, and a sum of float32.

    mpirun -np 2 python benchmarks/shm.py [--mib 64] [--repeats 21]

The programs take turns, a barrier before each. Times are of rank 0, of a call of a compiled program whose result lies on
fresh pages.
"""
import argparse
import time

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

import jaxcgx as cgx
from jaxcgx.collectives import schedules
from jaxcgx.transports.shm import Shm

GOALS = {"all_to_all": 2, "sum": 6}  # times as fast as MPI


def programs(comm, mib):
    """{what: {how: (program, operand)}}."""
    net, codec = Shm.over(comm), cgx.MaxMin(4)
    rows = jnp.ones((comm.size, (mib << 20) // comm.size), jnp.uint8)
    x = jnp.asarray(np.random.RandomState(comm.rank).standard_normal((mib << 18,)).astype(np.float32))

    def compressed(schedule):
        return lambda x: schedules.allreduce(schedule, net, codec, [x], None, (0,), None, "raw", 1.0)[0]

    sums = {f"shm, {codec}, {schedule}": compressed(schedule) for schedule in ("two_shot", "one_shot")}
    return {
        "all_to_all": {"mpi4jax": (jax.jit(lambda x: mpi4jax.alltoall(x, comm=comm)), rows), "shm": (jax.jit(net.all_to_all), rows)},
        "sum": {"mpi4jax": (jax.jit(lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=comm)), x)}
        | {name: (jax.jit(f), x) for name, f in ({"shm, plain": net.plain_psum} | sums).items()},
    }


def measure(comm, mib=64, repeats=21):
    """{what: {how: ms of each turn}}."""
    all_programs = programs(comm, mib)
    times = {what: {how: [] for how in ways} for what, ways in all_programs.items()}
    for turn in range(repeats + 1):
        for what, ways in all_programs.items():
            for how, (program, operand) in ways.items():
                comm.Barrier()
                start = time.perf_counter()
                jax.block_until_ready(program(operand))
                if turn:  # the first one compiles
                    times[what][how].append(1e3 * (time.perf_counter() - start))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="of a rank's operand")
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    times = measure(comm, args.mib, args.repeats)
    if comm.rank == 0:
        for what, ways in times.items():
            print(f"{what}, {args.mib} MiB, {comm.size} ranks; the goal is {GOALS[what]} times as fast as mpi4jax")
            for how, ms in ways.items():
                ratio = np.median(np.array(ways["mpi4jax"]) / ms)
                print(f"  {how:<40} {min(ms):8.2f} ms at least, median {np.median(ms):8.2f}, {ratio:6.2f} times as fast")


if __name__ == "__main__":
    main()

"""Measures how long the first three steps take with all of GeoMX's variables together (`make bench-variables`).

Four processes of one machine are two data centers of two ranks, and run the program of docs/wan.md over Tcp. They
compile their steps at the same time.
"""

import json
import os
import sys
import time

from report import RESULTS, Report, free_port, header, line, mark, rounded
from started import results

GOAL = 15  # seconds
CHARTS = [dict(table="rows", title="Three steps with GeoMX's variables", x="variables", y=["steps_seconds"])]
NOTES = f"""\
- A model of four leaves, two of them biases. steps: from the call of `make_train_step` to the end of the third step.
  finish: `train.finish`, which compiles one more program with P3. Times are those of the slowest process. Goal: steps
  take at most {GOAL} s.
"""


def run_rank(port, rank, variables):
    import jax
    import jax.numpy as jnp
    import pages  # of tests/, which report.py puts on the path

    pages.join(port, rank, 4)
    names = pages.given_to_all((2, 2), ("dc", "local"))
    (program,) = (each for each in pages.programs("docs/wan") if "from_env" in each)
    params = names["params"] | dict(b=jnp.zeros(256), c=jnp.zeros(4))

    def loss_fn(params, batch):
        x, y = batch
        return ((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] + params["c"] - y) ** 2).mean()

    os.environ |= pages.VARIABLES[variables]
    steps, rest = program.split("state = train.finish")
    names |= dict(params=params, loss_fn=loss_fn, batches=[names["batch"]] * 3)
    times = [time.perf_counter()]
    for part in steps, "state = train.finish" + rest:
        exec(part, names)
        jax.block_until_ready(names["state"])
        times.append(time.perf_counter())
    print("RESULT", json.dumps(rounded([times[1] - times[0], times[2] - times[1]])), flush=True)
    jax.distributed.shutdown()


def run(variables):
    """Returns the seconds of (three steps, finish) of the slowest of four processes."""
    port = free_port()
    times = results(*([__file__, "--rank", port, rank, variables] for rank in range(4)))
    if None in times:
        sys.exit("variables: a process failed, see above")
    return map(max, zip(*times))


def main():
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(*sys.argv[2:])
    import pages

    report = Report("make bench-variables", rows=[], charts=CHARTS)
    report.show("", *header("seconds", "steps", "finish", "goal", ""))
    for name, variables in pages.VARIABLES.items():
        steps, finish = run(name)
        said = " ".join(f"{variable}={value}" for variable, value in variables.items())
        report.data["rows"].append(dict(variables=name, given=said, steps_seconds=steps, finish_seconds=finish))
        report.show(line([f"`{said}`", f"{steps:.1f}", f"{finish:.1f}", f"<= {GOAL}", mark(steps <= GOAL)]))
    report.show("", *NOTES.splitlines())
    report.write(RESULTS, "variables")
    return None


if __name__ == "__main__":
    main()

"""Runs a script in two hosts, and draws the events that its rank 0 reports."""

import json
import os
import subprocess
import sys

from report import free_port

from jaxcgx.lab import Lab


def of_rank_0(command, rate, limit, **worker):
    """Returns the JSON that rank 0 prints after "RESULTS ".

    Args:
      command: the script and its arguments. `worker` follows them as JSON, with the address, the rank and the number of
        processes.
      rate: the rate of the hosts' links.
      limit: the seconds after which the script has failed.
      **worker: settings for both ranks.
    """
    with Lab(2, rate) as lab:
        address, running = f"{lab.address(0)}:{free_port()}", []
        for rank in range(2):
            given = json.dumps(worker | dict(address=address, rank=rank, processes=2))
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            running.append(
                lab.start(rank, [sys.executable, *command, given], stdout=output, text=True, env=environment)
            )
        output, _ = running[0].communicate(timeout=limit)
    for found in output.splitlines():
        if found.startswith("RESULTS "):
            return json.loads(found.removeprefix("RESULTS "))
    raise RuntimeError(f"{command[0]}: rank 0 failed")


def most_alike(data, spans, ratio):
    """Returns (its spans, its name) of the row whose `ratio` is nearest to 1. These spans become a table of `data`."""
    row, chosen = min(zip(data["rows"], spans, strict=True), key=lambda each: abs(each[0][ratio] - 1))
    data["events"] = [dict(what=what, start_ms=start, end_ms=end) for what, start, end in chosen]
    return chosen, f"with batch {row['batch']} at {row['rate']}"


def draw(path, spans, title):
    """Draws spans [what, ms of its start, ms of its end]: a lane for each exchange, and one for "compute"."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lanes = [*sorted({what for what, *_ in spans} - {"compute"}, reverse=True), "compute"]
    figure, axes = plt.subplots(figsize=(10, 1.9 + 0.17 * len(lanes)), layout="constrained")
    for y, lane in enumerate(lanes):
        bars = [(start, max(end - start, 0.05)) for what, start, end in spans if what == lane]
        color = "tab:blue" if lane == "compute" else "tab:orange"
        axes.broken_barh(bars, (y - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.5)
    axes.set(yticks=range(len(lanes)), yticklabels=lanes, xlabel="ms", title=title)
    figure.savefig(path, dpi=120)

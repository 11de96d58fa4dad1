"""Measures cgx.wan.Decoupled with four centers, one of which is killed or frozen and comes back after a minute.

    python benchmarks/decoupled.py [--seeds 1] [--rounds 32] [--out DIR]

Each center is a separate process without jax.distributed. All of them run on this host.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from report import RESULTS, Report, free_port, mark

CENTERS, VICTIM = 4, 3
EVERY, QUORUM, GRACE, BITS = 10, 2, 5.0, 4
BATCH, RATE = 8, 2e-3  # windows per center and step; the learning rate of Adam
# The number of bytes before the predicted one, and the sizes of their embedding and of the network.
SEEN, WIDTH, HIDDEN, BYTES = 6, 16, 128, 256
PACE = 0.6  # the least seconds of a step
AWAY = 60.0  # seconds
LIMIT = 3000.0  # seconds for a run
LATE = 0.1  # seconds that the system may need to wake a process
WORSE = 0.02  # goal: the largest allowed increase of the loss over the undisturbed run
HELD_OUT = 256  # windows
ROWS = {
    "undisturbed": "undisturbed",
    "killed": f"killed, started anew {AWAY:g} s later",
    "frozen": f"frozen for {AWAY:g} s",
}
CHARTS = [dict(table="rounds", title="Centers in a round", x="seconds", y=["centers"], by="row")]
NOTES = f"""\
- A network of one hidden layer predicts bytes of the documentation that Python ships from the {SEEN} before them: Adam
  inside, SGD of rate 1 outside, {EVERY} steps a round, {BITS} bits with feedback, quorum {QUORUM}, grace {GRACE:g} s. A
  step takes at least {PACE:g} s. All runs end after the same number of rounds. At a quarter of them the last center is
  killed (kill -9) or frozen (kill -STOP). The process that takes the place of a killed one has compiled its programs
  before, and has no other state. A frozen process goes on where it was (kill -CONT).
- longest wait: the longest time that a step of the three other centers waited for a round. Goal: at most the grace (and
  {LATE:g} s, in which the system wakes a process).
- rounds of three: rounds that ended without the last center. away: seconds from the event to the first round that has
  it again. For {AWAY:g} s of these, its process didn't run. A frozen center's connections stay open, so the others
  notice only after 10 s of silence that it is gone. Until then, each of their rounds waits half of the grace for it.
- loss: the final loss of the outer parameters on held-out text. Goal: at most {WORSE:.0%} more than undisturbed, the
  mean over seeds. agree: whether all four centers end with the same outer parameters, bit for bit.
"""


# A center


def center_main(folder, place, life, seed, rounds, addresses):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import training_speed_data as data

    import jaxcgx as cgx

    rng = np.random.default_rng(seed)
    shapes = {"embed": (BYTES, WIDTH), "up": (SEEN * WIDTH, HIDDEN), "down": (HIDDEN, BYTES)}
    weights = {name: np.float32(0.05 * rng.standard_normal(shape)) for name, shape in shapes.items()}
    inner = optax.adam(RATE)
    batches, _ = data.text(np.random.default_rng([seed, place, life]), (4000, BATCH), 1)
    _, held_out = data.text(np.random.default_rng(0), (1, 1), HELD_OUT)

    def loss(w, batch):
        inputs, targets = batch
        before = jnp.concatenate([w["embed"][jnp.roll(inputs, shift, 1)] for shift in range(SEEN)], -1)
        logits = jax.nn.gelu(before @ w["up"]) @ w["down"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)[:, SEEN:].mean()

    @jax.jit
    def step(params, state, batch):
        updates, state = inner.update(jax.grad(loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    state, outer = jax.jit(inner.init)(weights), optax.sgd(1.0)
    options = dict(place=place, outer=outer, plan=cgx.MaxMin(BITS))
    # Compile everything: a step, and two rounds of one center alone.
    params, _ = step(jax.tree.map(jnp.asarray, weights), state, tuple(each[0] for each in batches))
    _, alone = cgx.wan.Decoupled(addresses=free_addresses(), every=1, grace=0.1, **options).join(weights)
    with alone:
        while alone.last is None or alone.last.number < 2:
            params = alone.step(params)
    decoupled = cgx.wan.Decoupled(addresses=addresses, every=EVERY, quorum=QUORUM, grace=GRACE, **options)
    while life and not (folder / "go").exists():
        time.sleep(0.1)
    params, member = decoupled.join(weights)
    with member, open(folder / f"center-{place}", "a") as out:
        t = lonely = 0
        # The other centers may have ended.
        while (member.last is None or member.last.number < rounds) and lonely < EVERY:
            start = time.monotonic()
            batch = tuple(each[t % len(each)] for each in batches)
            params, state = jax.block_until_ready(step(params, state, batch))
            computed, last = time.monotonic(), member.last
            params = member.step(params, tokens=BATCH * data.CONTEXT)
            ended = time.monotonic()
            line = dict(at=ended, computed=computed - start, exchanged=ended - computed, waited=member.waited)
            if member.last != last:
                line |= dict(round=member.last.number, centers=member.last.centers)
            print(json.dumps(line), file=out, flush=True)
            time.sleep(max(0.0, PACE - (time.monotonic() - start)))
            t, lonely = t + 1, lonely + 1 if len(member.centers) == 1 else 0
        bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(member.params))).hexdigest()
        final = float(jax.jit(loss)(member.params, held_out)) if place == 0 else None
        print(json.dumps(dict(bits=bits, loss=final, round=member.last.number)), file=out, flush=True)


# All centers


def free_addresses():
    return [f"127.0.0.1:{free_port()}" for _ in range(CENTERS)]


def lines(folder, place):
    """Returns what a center has written so far. The last line may be incomplete."""
    path = folder / f"center-{place}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def measure(row, seed, rounds):
    """Returns what the centers wrote, and the time of the event."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as files:
        folder, addresses = pathlib.Path(name), free_addresses()

        def start(place, life):
            words = [sys.executable, __file__, "--center", folder, place, life, seed, rounds, *addresses]
            environment = os.environ | dict(JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1")
            return subprocess.Popen(list(map(str, words)), env=environment, stdin=subprocess.DEVNULL)

        running = [start(place, 0) for place in range(CENTERS)]
        spare = start(VICTIM, 1) if row == "killed" else None
        if spare:
            files.callback(lambda: (spare.kill(), spare.wait()))
        files.callback(lambda: [(process.kill(), process.wait()) for process in running])
        deadline, event = time.monotonic() + LIMIT, None
        while any(process.poll() is None for process in running):
            time.sleep(0.2)
            if time.monotonic() > deadline or any(process.poll() for process in running[:VICTIM]):
                sys.exit(f"{row}: a center failed, or takes too long")
            begun = any(line.get("round", 0) >= rounds // 4 for line in lines(folder, 0))
            if row != "undisturbed" and event is None and begun:
                event, victim = time.monotonic(), running[VICTIM]
                victim.send_signal(signal.SIGKILL if spare else signal.SIGSTOP)
                time.sleep(AWAY)
                if spare:
                    victim.wait()
                    (folder / "go").touch()
                    running[VICTIM] = spare
                else:
                    victim.send_signal(signal.SIGCONT)
        return [lines(folder, place) for place in range(CENTERS)], event


def main():
    if sys.argv[1:2] == ["--center"]:
        folder, *numbers = sys.argv[2:7]
        place, life, seed, rounds = map(int, numbers)
        return center_main(pathlib.Path(folder), place, life, seed=seed, rounds=rounds, addresses=sys.argv[7:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    report = Report("make bench-decoupled", rows=[], rounds=[], goal=WORSE, charts=CHARTS)
    for seed in range(args.seeds):
        with concurrent.futures.ThreadPoolExecutor() as pool:  # all runs at the same time
            each = list(pool.map(lambda row, seed=seed: measure(row, seed, args.rounds), ROWS))
        for row, (found, event) in zip(ROWS, each):
            report.data["rows"].append(summary(row, seed, found, event))
            print(json.dumps(report.data["rows"][-1]), file=sys.stderr, flush=True)
            if seed == 0:
                start = found[0][0]["at"]
                report.data["rounds"] += [
                    dict(row=row, seconds=round(line["at"] - start, 1), centers=len(line["centers"]))
                    for line in found[0]
                    if "centers" in line
                ]
    show(report)
    report.write(args.out, "decoupled")
    return None


def summary(row, seed, found, event):
    """Returns a row of the report's data, made from the output of the centers."""
    steps = [line for each in found[:VICTIM] for line in each if "waited" in line]
    rounds = [line for line in found[0] if "centers" in line]
    back = [line["at"] for line in rounds if event and line["at"] > event + AWAY and VICTIM in line["centers"]]
    ends = [each[-1] for each in found]
    return dict(
        row=row,
        seed=seed,
        loss=round(ends[0]["loss"], 4),
        seconds=round(found[0][-2]["at"] - found[0][0]["at"], 1),
        waited=round(max(line["waited"] for line in steps), 3),
        exchanged=round(max(line["exchanged"] for line in steps), 3),
        rounds=len(rounds),
        without=sum(VICTIM not in line["centers"] for line in rounds),
        away=round(back[0] - event, 1) if back else None,
        agree=len({(end["bits"], end["round"]) for end in ends}) == 1,
    )


def show(report):
    """Shows the table."""
    rows = report.data["rows"]
    losses = {name: [row["loss"] for row in rows if row["row"] == name] for name in ROWS}
    means = {name: sum(each) / len(each) for name, each in losses.items()}
    cells = ("the last center", "seed", "loss", "seconds", "rounds", "of three", "away, s", "longest wait, s", "agree")
    report.show("", f"| {' | '.join(cells)} |", f"|---{'|---:' * (len(cells) - 1)}|")
    for row in rows:
        waited = f"{row['waited']:.2f} {mark(row['waited'] <= GRACE + LATE)}"
        away = "" if row["away"] is None else f"{row['away']:.0f}"
        values = (ROWS[row["row"]], row["seed"], row["loss"], f"{row['seconds']:.0f}", row["rounds"], row["without"])
        report.show(f"| {' | '.join(map(str, (*values, away, waited, mark(row['agree']))))} |")
    report.show("")
    for name in "killed", "frozen":
        more = means[name] / means["undisturbed"] - 1
        report.show(f"Loss with the last center {name}, over that undisturbed: {more:+.1%} {mark(more <= WORSE)}", "")
    report.show(NOTES.rstrip())


if __name__ == "__main__":
    main()

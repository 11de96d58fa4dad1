"""Measures how soon a sampler behind 100 Mbit/s has new weights: as patches, and whole. And checkpoints as patches.

    python benchmarks/publishing.py [--models REGEX] [--out DIR]

The hosts (jaxcgx.lab) need root. The trainer and the sampler are programs of their own.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import training_speed_data as data
from report import Report, between_hosts, free_port, header, line, mark, median, rounded

import jaxcgx as cgx
from jaxcgx.lab import Lab, Link, signals_raise
from jaxcgx.patch.carriers import Remote
from jaxcgx.patch.versions import File
from jaxcgx.report import shapes
from jaxcgx.report.figures import draw

LINK = Link(up=100_000_000, down=100_000_000)
RATE, WARM = 1e-6, 16  # Adam's learning rate; steps before the first version
LOOK = 0.05  # seconds between two looks of the sampler for a new version
MODELS = {"3.3 M": (0.5, 30), "124 M": (4.0, 16)}  # seconds from version to version, number of versions
WAYS = {"whole": dict(anchor_every=1, keep=8), "patches": dict(anchor_every=1000, keep=1000)}
EACH, CHECKPOINTS = 10, 10  # steps from one checkpoint to the next, checkpoints
BEHIND, SPACE = 1, 2  # goals: versions behind, and the space of checkpoints in that of one
CHART = dict(
    table="rows", title="From a new version to the sampler, 100 Mbit/s", x="model", y=["seconds"], by="way", log=True
)
NOTES = f"""\
- The trainer and the sampler are in two hosts, whose links have 100 Mbit/s. Weights are bfloat16, of float32 ones that
  Adam changes at a rate of {RATE:g}. 3.3 M: the transformer of bench-training-speed goes on from its first weights, on
  the text of Python's documentation. 124 M: a vector as long as GPT-2 small, with normal weights (deviation 0.02) and
  normal gradients, which repeat with shifts.
- patches: the sampler has a `Subscriber`. whole: for each version a new one, which fetches an anchor.
- step: the median of the seconds from one version to the next. The trainer waits until at least
  {MODELS["3.3 M"][0]:g} s (3.3 M) or {MODELS["124 M"][0]:g} s (124 M) have passed. A step and `publish` may take
  longer. So the two ways may have other steps, and with the longer ones a sampler is behind less easily.
- MB: the mean length of the files that the sampler fetches for a version.
- seconds: from the end of `publish` until `latest` has returned the version, the median of those that arrived. The
  table leaves out the first version, for which the trainer waits.
- behind: the most versions between the newest one and that of the sampler, from its first version on. Goal: at most
  {BEHIND}.
- Checkpoints: the transformer's weights every {EACH} steps, by `jaxcgx.patch.checkpoints` and Orbax. Space: the bytes
  of all files, each counted once, over those of one checkpoint. Goal: {CHECKPOINTS} in the space of {SPACE}.
"""


def first_weights():
    """Returns the transformer's weights before the fine-tuning, and its batches."""
    rng, model = np.random.default_rng(0), "transformer"
    weights, size = data.transformer_weights(rng), 2 * data.MODELS[model].batch
    weights = data.begun(weights, model, data.text(rng, (data.MODELS[model].begun, size), 1)[0])
    return weights, zip(*data.text(rng, (1000, size), 1)[0])


def transformer():
    """Yields the bfloat16 weights of the transformer after each step of fine-tuning."""
    import optax
    from training_speed_models import make_loss

    weights, batches = first_weights()
    optimizer, loss = optax.adam(RATE), make_loss("transformer")

    @jax.jit
    def step(weights, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(weights, batch), state, weights)
        return optax.apply_updates(weights, updates), state

    state = optimizer.init(weights)
    for batch in batches:
        weights, state = step(weights, state, batch)
        yield jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)


def gpt2():
    """Yields bfloat16 weights as long as GPT-2's, which Adam changes by random gradients."""
    size = sum(int(np.prod(leaf.shape)) for leaf in shapes.read("gpt2").values())
    noise = jax.random.normal(jax.random.key(0), (size,))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(w, m, v, noise, t):
        gradient = jnp.roll(noise, 1_000_003 * t)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        return w - RATE * m / (1 - 0.9**t) / jnp.sqrt(v / (1 - 0.999**t)), m, v

    state = 0.02 * noise[::-1], jnp.zeros(size), jnp.zeros(size)
    for t in range(1, 1000):
        state = step(*state, noise, t)
        yield {"w": state[0].astype(jnp.bfloat16)}


TRAININGS = {"3.3 M": transformer, "124 M": gpt2}


# In a host


def say(**what):
    print("SAID", json.dumps(what | dict(at=time.monotonic())), flush=True)


def train(model, way, address):
    """Publishes the versions of a model. The second one follows when the sampler has the first."""
    seconds, versions = MODELS[model]
    training = TRAININGS[model]()
    for _ in range(WARM):
        weights = next(training)
    say(like={name: x.shape for name, x in weights.items()})
    with cgx.patch.Publisher(address, **WAYS[way]) as publisher:
        for number in range(1, versions + 1):
            begun = time.monotonic()
            say(version=publisher.publish(weights))
            if number == 1:
                sys.stdin.readline()
                begun = time.monotonic()
            weights = jax.block_until_ready(next(training))
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
        files = names(address)
        say(bytes=np.mean([size for file, size in files.items() if file.anchor == (way == "whole")]))
        sys.stdin.readline()


def names(address):
    remote = Remote(tuple(address.rsplit(":", 1)), "")
    with contextlib.closing(remote):
        return File.of(remote.names())


def sample(way, address, like):
    """Fetches versions until it is killed."""
    like = {name: np.empty(shape, jnp.bfloat16) for name, shape in like.items()}
    version = 0
    if way == "patches":
        with cgx.patch.Subscriber(address, like, every=LOOK) as subscriber:
            while True:
                subscriber.latest(version + 1)
                version = subscriber.version
                say(version=version)
    while True:
        if max(file.version for file in names(address)) == version:
            time.sleep(LOOK)
            continue
        with cgx.patch.Subscriber(address, like, every=None) as subscriber:  # it has no version, so it takes an anchor
            subscriber.latest()
            version = subscriber.version
        say(version=version)


def run_rank(role, **given):
    jax.config.update("jax_platforms", "cpu")
    dict(train=train, sample=sample)[role](**given)


# In the process that starts the others


def heard(process):
    """Yields what a process says."""
    for text in process.stdout:
        if text.startswith("SAID "):
            yield json.loads(text.removeprefix("SAID "))


def measure(model, way):
    """Returns a row."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(2, LINK))
        address = f"{lab.address(0)}:{free_port()}"

        def start(host, **given):
            command = [sys.executable, pathlib.Path(__file__).resolve(), "--rank", json.dumps(given)]
            options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            process = lab.start(host, command, **options)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process, heard(process)

        trainer, of_trainer = start(0, role="train", model=model, way=way, address=address)
        like, published, arrived = next(of_trainer)["like"], [next(of_trainer)], []
        sampler, of_sampler = start(1, role="sample", way=way, address=address, like=like)
        arrived.append(next(of_sampler))
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        for said in of_trainer:
            if "bytes" in said:
                break
            published.append(said)
        if way == "patches":
            while arrived[-1]["version"] < published[-1]["version"]:
                arrived.append(next(of_sampler))
        sampler.kill()
        arrived += of_sampler
    return row_of(model, way, said["bytes"], published=published, arrived=arrived)


def row_of(model, way, size, *, published, arrived):
    when = {said["version"]: said["at"] for said in published}
    there = [(said["version"], said["at"]) for said in arrived]
    held = lambda at: max(version for version, came in there if came <= at)
    return dict(
        model=model,
        way=way,
        step=median(np.diff([at for _, at in sorted(when.items())][1:])),
        mb=round(size / 1e6, 3),
        seconds=rounded(at - when[version] for version, at in there[1:]),
        behind=max(version - held(at) for version, at in when.items() if at >= there[0][1]),
        arrived=len(there),
        versions=len(when),
    )


def checkpoints():
    """Returns the space of checkpoints, in that of one."""
    import orbax.checkpoint as ocp

    from jaxcgx.patch import checkpoints as patches

    with tempfile.TemporaryDirectory() as folder:
        handler = patches.handler(f"{folder}/patches")
        with ocp.CheckpointManager(f"{folder}/checkpoints", item_handlers=handler) as manager:
            for number, weights in enumerate(transformer()):
                if number == WARM + EACH * CHECKPOINTS:
                    break
                if number >= WARM and (number - WARM) % EACH == 0:
                    manager.save(number, args=patches.Save(weights))
            manager.wait_until_finished()
            last = manager.restore(manager.latest_step(), args=patches.Restore(weights))
        files = [path.stat() for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return sum({x.st_ino: x.st_size for x in files}.values()) / sum(x.nbytes for x in last.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="", metavar="REGEX", help="some of the models")
    args, command, out = between_hosts(parser, "make bench-publishing", run_rank)
    report = Report(command, rows=[], charts=[CHART])
    report.show("", *header("model, way", "step (s)", "MB", "seconds", "behind", "goal", ""))
    for model in MODELS:
        for way in WAYS if re.search(args.models, model) else ():
            row = measure(model, way)
            report.data["rows"].append(row)
            goals = [BEHIND, mark(row["behind"] <= BEHIND)] if way == "patches" else ["", ""]
            cells = f"{row['step']:.1f}", f"{row['mb']:.2f}", f"{median(row['seconds']):.2f}", row["behind"]
            report.show(line([f"{model}, {way}", *cells, *goals]))
    report.data["checkpoints"] = round(checkpoints(), 2)
    space = report.data["checkpoints"]
    report.show("", f"{CHECKPOINTS} checkpoints take the space of {space:.2f} {mark(space <= SPACE)}.")
    report.show("", *NOTES.splitlines())
    if out:
        report.write(out, "publishing")
        (out / "publishing.png").write_bytes(draw(CHART, report.data["rows"], CHART["title"]))


if __name__ == "__main__":
    with signals_raise():
        main()

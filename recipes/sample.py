"""Writes text with the newest weights of a run, which train.py publishes (docs/recipes.md).

python recipes/train.py --config=recipes/configs/text/gpt.py --publish=127.0.0.1:7500
python recipes/sample.py runs/text-gpt-none 127.0.0.1:7500    # in another terminal, or on another host
"""

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

import data
import jax
import jax.numpy as jnp
import models
import numpy as np
from checks import Wrong, call
from jax import lax

import jaxcgx as cgx


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="sample.py", description="Writes text with the newest weights of a run.")
    parser.add_argument("run", type=pathlib.Path, help="the folder of the run, or of one with the same model")
    parser.add_argument("where", help="as train.py's --publish")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--count", type=int, default=0, help="the number of texts (0: until it is interrupted)")
    given = parser.parse_args(arguments)
    try:
        sample(given.run, given.where, given.prompt, given.count)
    except KeyboardInterrupt:
        sys.exit("sample.py: interrupted")
    except (Wrong, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"sample.py: {error}")


def sample(run: pathlib.Path, where: str, prompt: str, count: int) -> None:
    """Prints texts, each with the version of its weights and the seconds for which it waited for them."""
    sections = json.loads((run / "config.json").read_text())
    dataset = call(data.load, "config.data", **sections["data"])
    if sections["data"].get("tokens") != 256:
        raise Wrong("config.data.tokens: expected a model of text whose tokens are bytes, 256")
    model = call(models.make, "config.model", dataset, 0, **sections["model"])
    text = np.zeros(dataset.shape, np.int32)
    begins = prompt.encode()[: len(text) - 1]
    text[: len(begins)] = list(begins)

    @jax.jit
    def written(params: Any, key: jax.Array) -> jax.Array:
        def token(i: jax.Array, text: jax.Array) -> jax.Array:
            logits = model.predict(params, model.state, text[None])[0, i - 1]
            return text.at[i].set(jax.random.categorical(jax.random.fold_in(key, i), logits.astype(jnp.float32)))

        return lax.fori_loop(len(begins), len(text), token, jnp.asarray(text))

    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), model.params)
    with cgx.patch.Subscriber(where, like, secret=os.environ.get("PUBLISH_SECRET", "")) as subscriber:
        number = 0
        while number < count or not count:
            began = time.monotonic()
            params = subscriber.latest()
            waited = time.monotonic() - began
            found = bytes(np.asarray(written(params, jax.random.key(number)), np.uint8)).decode(errors="replace")
            print(f"version {subscriber.version}, waited {waited:.2f} s: {found!r}", flush=True)
            number += 1


if __name__ == "__main__":
    main(sys.argv[1:])

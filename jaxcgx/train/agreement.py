"""The processes of a mesh compare the settings that they must share, before the first step."""

import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcgx.checks import wrong

BYTES = 1024  # of the settings of a process, as JSON
LONGEST = 64  # characters of a setting


def check_same(function: str, settings: dict[str, str], mesh: Mesh) -> None:
    """Checks that all processes of a mesh have the same settings. All of them call this at the same time.

    Args:
      function: the public function that got the settings.
      settings: {argument: its value as text}.
      mesh: the mesh.
    """
    text = json.dumps({name: value[:LONGEST] for name, value in settings.items()}).encode()
    own = np.frombuffer(text.ljust(BYTES), np.uint8)[None]
    rows = NamedSharding(mesh, P(mesh.axis_names))
    given = jax.make_array_from_callback((mesh.size, BYTES), rows, lambda _: own)
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(given)
    here = json.loads(text)
    for device, row in zip(mesh.devices.flat, np.asarray(gathered.addressable_data(0))):
        there = json.loads(row.tobytes())
        for name in here | there:
            mine, other = here.get(name, "none"), there.get(name, "none")
            if mine != other:
                got = f"{mine} in this process and {other} in process {device.process_index}"
                remedy = f"pass the same arguments to {function} in every process"
                raise wrong(function, name, "the same value in all processes", got, remedy)

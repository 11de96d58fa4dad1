"""from_env: the exchange that CGX's environment variables describe."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxcgx.plan import Plan
from jaxcgx.train.feedback import Feedback
from jaxcgx.transports.base import Transport


@dataclasses.dataclass(frozen=True)
class FromEnv(Feedback):
    """A `Feedback` whose plan follows from CGX's variables and from the axes that it travels over."""

    plan: Any = dataclasses.field(init=False, repr=False, compare=False)
    _: dataclasses.KW_ONLY
    variables: Mapping[str, str]  # those of CGX
    options: Mapping[str, Any]  # the arguments of `Plan.from_env`

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", Plan.from_env(None, self.variables, **self.options))
        super().__post_init__()

    @property
    def op(self) -> str:
        return "from_env"

    def _plan_over(self, phase: int, net: Transport) -> Plan:
        return Plan.from_env(tuple(net.parts) or None, self.variables, **self.options)


def from_env(
    environ: Mapping[str, str] | None = None,
    *,
    keep: bool = False,
    bits: int | None = None,
    bucket_size: int | None = None,
    min_size: int | None = None,
    skip_1d: bool = False,
) -> Feedback:
    """Returns the exchange that CGX's environment variables describe, for any ranks.

        train = cgx.make_train_step(loss_fn, optimizer, cgx.mpi.hierarchy(), cgx.from_env())

    It is `Feedback(Plan.from_env(axes), keep=False)` with the axes of the ranks: those of a mesh, or the nodes of
    `jaxcgx.mpi.hierarchy()`. docs/plans.md has a table of the variables.

    Args:
      environ: the environment variables; None: those of this process.
      keep: whether the errors of compression are kept and sent later, which CGX doesn't do. A ring, CGX's default
        between nodes, keeps none: set CGX_CROSS_REDUCTION_TYPE=SRA.
      bits, bucket_size, min_size, skip_1d: as in `Plan.from_env`.
    """
    given = os.environ if environ is None else environ
    variables = {name: value for name, value in given.items() if name.startswith("CGX_")}
    options = dict(bits=bits, bucket_size=bucket_size, min_size=min_size, skip_1d=skip_1d)
    return FromEnv(variables=variables, options=options, keep=keep)

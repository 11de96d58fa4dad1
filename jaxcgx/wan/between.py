"""The exchange of outer gradients between centers. It ends in the step in which it begins, or in a later step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcgx.codecs.base import Codec
from jaxcgx.codecs.raw import Raw
from jaxcgx.collectives.old_psum import compressed_pmean
from jaxcgx.exchange.keys import fold
from jaxcgx.optim.compress import compress_gradients
from jaxcgx.optim.halves import Halves
from jaxcgx.optim.leaves import flatten
from jaxcgx.optim.state import CompressState
from jaxcgx.plan import Plan
from jaxcgx.plan.by_axis import by_axis
from jaxcgx.plan.leaves import spell_path
from jaxcgx.plan.rules import Rule
from jaxcgx.transports.axes import axis_names, crosses


@dataclasses.dataclass(frozen=True)
class Between:
    """A compressed mean of outer gradients over the centers, with error feedback, for a part of the parameters.

    All ranks of a center have the same outer gradients. The exchange takes those of the first rank, and zeros from the
    other ranks. The same holds for residuals, unless each rank keeps its own ones. Inside a center, the ranks share the
    work and exchange uncompressed arrays.

    Attributes:
      axis: the axis of the centers, then the axes of a center's ranks. Some may be marked, as by Tcp.
      plan: the plan of the exchange, from `by_leaf`.
      feedback: whether centers keep residuals.
      seed: the seed of stochastic rounding.
      options: further options of compressed_pmean.
      own_residuals: whether each rank keeps its own residuals, because the state has a row for each rank. The sum of
        all rows is then that of the centers, on any number of ranks per center.
    """

    axis: Any
    plan: Plan
    feedback: bool
    seed: int
    options: dict[str, Any]
    own_residuals: bool = False

    @property
    def crosses(self) -> bool:
        """Whether an exchange goes on while the programs of later steps run."""
        return crosses(self.axis)

    @property
    def centers(self) -> int:
        """The number of centers, inside shard_map."""
        return lax.axis_size(axis_names(self.axis)[0])

    @property
    def _inner(self) -> tuple[Any, ...]:
        return axis_names(self.axis)[1:]

    @property
    def _parts(self) -> Plan:
        """The plan with codecs by axis. A codec that isn't given by axis is for the axis of the centers."""
        names, plan = axis_names(self.axis), self.plan
        by_name = lambda codec: by_axis(names, codec, Raw()) if isinstance(codec, Codec) and not codec.skips else codec
        rules = [dataclasses.replace(rule, codec=by_name(rule.codec)) for rule in plan.rules]
        return dataclasses.replace(plan, default=by_name(plan.default), rules=rules)

    def init(self, params: Any, number: int) -> CompressState:
        """Returns the state before the first exchange, for outer gradients like these params.

        `number` is the number of this part of the parameters. Parts with different numbers draw different noise.
        """
        made: Any = compress_gradients(self.axis, self._parts, feedback=self.feedback, seed=self.seed)
        state = made.init(params)
        return state._replace(key=fold(state.key, number)) if number else state

    def mean(self, moved: Any, sent: CompressState) -> tuple[Any, CompressState]:
        """Exchanges the outer gradients `moved`, with the state `sent`. Returns (mean, state)."""
        key = fold(sent.key, sent.count) if self.plan.stochastic else None
        residuals = jax.tree_util.tree_map(lambda r: r[0], sent.residuals)
        if self._inner:
            first = lax.axis_index(self._inner) == 0
            of_first = lambda tree: jax.tree_util.tree_map(lambda x: jnp.where(first, x, 0), tree)
            moved, residuals = of_first(moved), residuals if self.own_residuals else of_first(residuals)
        state = {"residuals": residuals, "factors": sent.factors}
        state = {name: tree for name, tree in state.items() if jax.tree_util.tree_leaves(tree)}
        found = compressed_pmean(moved, self.axis, self._parts, key=key, **state, **self.options)
        mean, *new = found if state else (found,)
        renewed = dict(zip(state, new))
        if self._inner:
            ranks = lax.axis_size(self._inner)
            mean = jax.tree_util.tree_map(lambda x: x * ranks, mean)
        if "residuals" in renewed:
            of_center = lambda r: lax.psum(r, self._inner) if self._inner and not self.own_residuals else r
            renewed["residuals"] = jax.tree_util.tree_map(lambda r: of_center(r)[None], renewed["residuals"])
        count = None if sent.count is None else sent.count + 1
        return mean, sent._replace(count=count, **renewed)

    def begin(self, moved: Any, sent: CompressState) -> list[Any]:
        """Begins an exchange of `moved` that a later step ends, with the state `sent`.

        Returns what `end` needs, as rows of this rank.
        """
        return self._halves(moved, sent).first(sent, moved)

    def end(self, rows: list[Any], like: Any, sent: CompressState) -> tuple[Any, CompressState]:
        """Ends an exchange. Returns (mean, state).

        Args:
          rows: what `begin` returned.
          like: arrays like the outer gradients.
          sent: the state that `begin` got.
        """
        return self._halves(like, sent).second(sent, rows)

    def _halves(self, moved: Any, sent: CompressState) -> Halves:
        return Halves.of(lambda sent, moved: self.mean(moved, sent), sent, moved)


def by_leaf(op: str, plan: Plan, params: Any) -> Plan:
    """Returns the plan that gives every part of a leaf the codec that `plan` gives the whole leaf.

    Guards and the conditions of rules then don't depend on the fragments into which leaves are cut.

    Args:
      op: the function that errors name.
      plan: the plan.
      params: the whole parameters.
    """
    leaves, names = flatten(params), dict[Any, set[str]]()
    assigned = plan.assign(op, "plan", paths=leaves.paths, leaves=leaves.values)
    for path, (codec, _) in zip(leaves.paths, assigned):
        names.setdefault(codec, set()).add(spell_path(path))
    rules = [Rule(codec, where=lambda name, _, of=of: name in of, optional=True) for codec, of in names.items()]
    return dataclasses.replace(plan, rules=rules, min_size=0, skip_1d=False)

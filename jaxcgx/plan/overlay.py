"""Overlays: trees along whose links the parts of a message travel.

An overlay is a set of rooted trees over all ranks. Each tree has a share of the message. This part goes up the tree,
from child to parent: every rank adds its own part to the received parts, and encodes the sum again. The root's sum goes
back down, as the same bytes for all ranks. `two_shot` is an overlay with a star around each rank, MultiGPS has stars
around some ranks. The trees of a ring are paths, each of which leaves out another link of the ring.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcgx.checks import check_integer, is_integer, is_number, wrong

MOST_SHARES = 2**20  # the largest sum of the shares of all trees; xla_ffi/handlers/message.h has the same limit


@dataclasses.dataclass(frozen=True)
class Tree:
    """A rooted tree over ranks 0 to n - 1.

    Args:
      parents: the parent of each rank; -1 for the root.
      share: the tree's share of the message, relative to the shares of the other trees.
    """

    parents: tuple[int, ...]
    share: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(self.parents))
        check_integer("Tree", "share", self.share, 1, MOST_SHARES)
        ranks = len(self.parents)
        each = all(is_integer(p) and -1 <= p < ranks for p in self.parents)
        if not each or self.parents.count(-1) != 1:
            expected = "the parent of each rank, and -1 for one of them, the root"
            raise wrong("Tree", "parents", expected, self.parents)
        for rank in range(ranks):
            at, steps = rank, 0
            while at >= 0 and steps < ranks:
                at, steps = self.parents[at], steps + 1
            if at >= 0:
                raise wrong("Tree", "parents", "parents that lead to the root", f"{self.parents}, a circle from {rank}")

    @classmethod
    def of(cls, links: Iterable[tuple[int, int]], share: int = 1, root: int | None = None) -> "Tree":
        """Returns the tree with these links and this share.

        Without `root`, the root is the first rank that gives the least depth.
        """
        links = list(links)
        roots = range(len(links) + 1) if root is None else [root]
        return min((cls(_parents(links, root), share) for root in roots), key=lambda tree: tree.depth)

    @property
    def root(self) -> int:
        """The rank without a parent."""
        return self.parents.index(-1)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """The number of links between each rank and the root."""

        def depth(rank: int) -> int:
            return 0 if self.parents[rank] < 0 else 1 + depth(self.parents[rank])

        return tuple(map(depth, range(len(self.parents))))

    @property
    def depth(self) -> int:
        """The largest number of links between a rank and the root."""
        return max(self.depths)

    def children(self, rank: int) -> list[int]:
        """Returns the ranks whose parent is `rank`."""
        return [child for child, parent in enumerate(self.parents) if parent == rank]

    @property
    def links(self) -> list[tuple[int, int]]:
        """(child, parent) of each link."""
        return [(child, parent) for child, parent in enumerate(self.parents) if parent >= 0]


def _parents(links: list[tuple[int, int]], root: int) -> tuple[int, ...]:
    parents, known = [-1] * (len(links) + 1), [root]
    for rank in known:
        for link in links:
            if rank in link:
                other = link[0] + link[1] - rank
                if other not in known:
                    parents[other] = rank
                    known.append(other)
    return tuple(parents)


@dataclasses.dataclass(frozen=True)
class Overlay:
    """Trees that share a message. Pass it instead of a schedule's name: `schedule=Overlay.owners(4, 2)`.

    Args:
      trees: trees over the same ranks.
    """

    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "trees", tuple(self.trees))
        if not self.trees:
            raise wrong("Overlay", "trees", "one tree or more", "none")
        if len({len(tree.parents) for tree in self.trees}) > 1:
            raise wrong("Overlay", "trees", "trees of the same ranks", self.trees)
        if sum(self.shares) > MOST_SHARES:
            raise wrong("Overlay", "trees", f"shares of at most {MOST_SHARES:,} together", f"{sum(self.shares):,}")

    @classmethod
    def owners(cls, ranks: int, owners: int | Sequence[float] | None = None) -> "Overlay":
        """Returns the overlay in which every rank sends each part of the message straight to the part's owner.

        Args:
          ranks: the number of ranks.
          owners: the number of owners, which are ranks 0, 1, ...; or a weight for each rank. The bytes of a rank's part
            are proportional to its weight. A rank of weight 0 owns no part. None: every rank owns an equal part.
        """
        ranks = check_integer("Overlay.owners", "ranks", ranks, 1)
        given: Any = ranks if owners is None else owners
        if is_integer(given):
            if not 1 <= given <= ranks:
                raise wrong("Overlay.owners", "owners", f"1 to {ranks} owners among {ranks} ranks", given)
            weights = [float(rank < given) for rank in range(ranks)]
        else:
            numbers = lambda: all(is_number(w) and 0 <= w < float("inf") for w in given) and any(given)
            if not hasattr(given, "__len__") or len(given) != ranks or not numbers():
                expected = f"a number of at least 0 for each of {ranks} ranks, and one above 0"
                raise wrong("Overlay.owners", "owners", expected, repr(given))
            weights = list(given)
        unit = 1 if len({w for w in weights if w}) == 1 else MOST_SHARES // (2 * ranks)
        shares = [round(unit * w / max(weights)) for w in weights]
        star = lambda root: tuple(-1 if rank == root else root for rank in range(ranks))
        return cls(tuple(Tree(star(rank), share) for rank, share in enumerate(shares) if share))

    @classmethod
    def ring(cls, order: Sequence[int]) -> "Overlay":
        """Returns the overlay in which ranks exchange with their neighbours in a closed `order` of all ranks."""
        if sorted(order) != list(range(len(order))) or not order:
            raise wrong("Overlay.ring", "order", "each rank once", order)
        n, links = len(order), list(zip(order, [*order[1:], order[0]]))
        if n < 3:
            return cls((Tree.of(links[: n - 1]),))
        return cls(tuple(Tree.of(links[:i] + links[i + 1 :]) for i in range(n)))

    @classmethod
    def tree(cls, ranks: int) -> "Overlay":
        """Returns the overlay with a binary tree rooted at each of the ranks, for links of equal speed."""
        check_integer("Overlay.tree", "ranks", ranks, 1)
        heap = [(i - 1) // 2 for i in range(ranks)]  # parents, if ranks are counted from the root
        trees = []
        for root in range(ranks):
            parents = [-1] * ranks
            for i in range(1, ranks):
                parents[(root + i) % ranks] = (root + heap[i]) % ranks
            trees.append(Tree(tuple(parents)))
        return cls(tuple(trees))

    def rooted(self, owners: int) -> "Overlay":
        """Returns the overlay with the same links whose sums are owned by the first `owners` ranks: its trees' roots.

        The loads of the links stay as they are, because a tree's share goes over each of its links, whatever its root.
        """
        shares = collections.Counter[tuple[int, ...]]()
        for tree in self.trees:
            found = [tree, *(Tree.of(tree.links, root=root) for root in range(owners))]
            best = min((each for each in found if each.root < owners), key=lambda each: each.depth)
            shares[best.parents] += tree.share
        return Overlay(tuple(Tree(parents, share) for parents, share in shares.items()))

    def is_of_outermost(self, sizes: Sequence[int]) -> bool:
        """Returns whether it is an overlay of the first of several axes, which have these sizes, alone."""
        return len(sizes) > 1 and self.ranks == sizes[0] != math.prod(sizes)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.trees[0].parents)

    @property
    def shares(self) -> tuple[int, ...]:
        """The share of each tree."""
        return tuple(tree.share for tree in self.trees)

    @property
    def depth(self) -> int:
        """The depth of the deepest tree."""
        return max(tree.depth for tree in self.trees)

    @property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """The parents of the ranks in each tree."""
        return tuple(tree.parents for tree in self.trees)

    def loads(self) -> dict[tuple[int, int], float]:
        """Returns {(lower rank, higher rank): the part of a message that goes over this link in each direction}."""
        found: dict[tuple[int, int], float] = {}
        for tree in self.trees:
            for link in tree.links:
                key = min(link), max(link)
                found[key] = found.get(key, 0) + tree.share / sum(self.shares)
        return found

    def sent(self, up: Sequence[int], down: Sequence[int]) -> list[int]:
        """Returns the bytes that each rank sends, if links of tree i carry up[i] bytes up and down[i] bytes down."""
        found = [0] * self.ranks
        for tree, one, other in zip(self.trees, up, down):
            for child, parent in tree.links:
                found[child] += one
                found[parent] += other
        return found

    def __str__(self) -> str:
        return f"Overlay({len(self.trees)} trees over {self.ranks} ranks, depth {self.depth})"

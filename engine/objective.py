"""What is trained: branches, and the pairs of branches that losses compare. Records; no tensor and
no process here.

    image ──┐
            ├── image_text: InfoNCE ──┐
    text ───┤                         ├── the loss: a weighted sum over the pairs
            ├── audio_text: InfoNCE ──┘
    audio ──┘

A branch may be in several pairs; the gradients of its embeddings add up. Beside the rows of its
samples it may make further ones, such as a row for each region of an image, which pairs of their
own compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.loss_protocols import ContrastiveLoss, MatchingLoss  # imports torch

RESERVED = {"head", "batch_norm", "merged"}  # of clipping, of locking, of a layout's stages


@dataclass(frozen=True)
class Branch:
    """A modality's path through the pipeline.

    Its tensors are those whose names begin with `name` and an underscore (`image_embeds` [B, D],
    `image_position` [B]), and those in `inputs`, which are named otherwise where they enter
    (`pixel_values`).
    """

    name: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two branches whose embeddings an evaluation compares.

    `made`: names of the rows of the first and of the second that are compared, where they are not
    those of the samples, which are called as the branch is. Of such rows a sample has any number,
    and their tensors are named after them (`region_embeds` [n, D], `region_position` [n]).
    """

    first: str
    second: str
    made: tuple[str, str] | None = field(default=None, kw_only=True)

    @property
    def rows(self) -> tuple[str, str]:
        """The names of the rows that are compared."""
        return self.made or self.branches

    @property
    def name(self) -> str:
        return "_".join(self.rows)

    @property
    def branches(self) -> tuple[str, str]:
        return self.first, self.second


@dataclass(frozen=True)
class Pair(Comparison):
    """Two branches and the loss between them.

    `first` owns what the loss learns: the last layer of its tower emits these scalars, each [1], as
    tensors named `prefix` + the loss's own name for it. `weight`: of this loss in the sum over all
    pairs. `matching`: a second loss, of single (first, second) pairs, which the last layer of the
    `second` tower scores; None: there is none.
    """

    loss: ContrastiveLoss = field(compare=False)
    weight: float = 1.0
    matching: MatchingLoss | None = field(default=None, compare=False)
    prefix: str = ""

    @property
    def scalars(self) -> dict[str, str]:
        """The loss's name for each of its learned scalars -> the name of its tensor."""
        return {name: self.prefix + name for name in self.loss.parameters}

    def reported(self, name: str, value: float) -> tuple[str, float]:
        """One of them as metrics show it."""
        shown, number = self.loss.reported(name, value)
        return self.prefix + shown, number


@dataclass(frozen=True)
class Objective:
    """All branches of a run, in the order of their layers and ranks, and all pairs. Checked when
    made.

    Raises ValueError for a pair of unknown branches, a branch without a pair, names that stand
    twice, and a branch that has the name of something else in the configuration.
    """

    branches: tuple[Branch, ...]
    pairs: tuple[Pair, ...]

    def __post_init__(self):
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                f"objective: the branches {', '.join(self.names)} do not have different names"
            )
        if reserved := sorted(RESERVED & set(self.names)):
            raise ValueError(
                f"objective: a branch is called {reserved[0]}, which has a meaning of its own in "
                'the "branches" block; call it otherwise'
            )
        for pair in self.pairs:
            unknown = [name for name in pair.branches if name not in self.names]
            if unknown:
                raise ValueError(
                    f"objective: pair {pair.name} is of branch {unknown[0]}, which is none of "
                    f"{', '.join(self.names)}"
                )
            if pair.first == pair.second:
                raise ValueError(
                    f"objective: pair {pair.name} compares a branch with itself; name two branches"
                )
        sets = [frozenset(pair.rows) for pair in self.pairs]
        if len(set(sets)) < len(sets):
            raise ValueError(
                f"objective: {', '.join(pair.name for pair in self.pairs)} compare two branches "
                "twice; give each pair once"
            )
        homes = {(rows, of) for pair in self.pairs for rows, of in zip(pair.rows, pair.branches)}
        homes |= {(name, name) for name in self.names}
        if len(dict(homes)) < len(homes):
            raise ValueError(
                f"objective: {', '.join(sorted(rows for rows, _ in homes))} are names of rows of "
                "two branches; call them otherwise"
            )
        names = [comparison.name for comparison in self.comparisons]
        if len(set(names)) < len(names):
            raise ValueError(
                f"objective: two pairs have the same name among {', '.join(names)}; call their "
                "branches otherwise"
            )
        alone = [
            name for name in self.names if not any(name in pair.branches for pair in self.pairs)
        ]
        if alone:
            raise ValueError(
                f"objective: branch {alone[0]} is in no pair, so it would not learn; add a pair "
                "with it, or leave it out"
            )
        scalars = [tensor for pair in self.pairs for tensor in pair.scalars.values()]
        if len(set(scalars)) < len(scalars):
            raise ValueError(
                f"objective: the learned scalars {', '.join(scalars)} do not have different names; "
                "give pairs a prefix"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the branches."""
        return tuple(branch.name for branch in self.branches)

    @cached_property
    def _home(self) -> dict[str, str]:
        """Rows, by their name -> the branch that makes them."""
        further = {rows: of for pair in self.pairs for rows, of in zip(pair.rows, pair.branches)}
        return {name: name for name in self.names} | further

    def made_by(self, branches: Iterable[str]) -> tuple[str, ...]:
        """The names of all rows that these branches make."""
        return tuple(rows for name in branches for rows, of in self._home.items() if of == name)

    @property
    def may_lack_rows(self) -> bool:
        """Whether a batch with rows of one branch may have none of another that are compared."""
        return len(self.pairs) > 1

    @property
    def has_further_rows(self) -> bool:
        """Whether there are others than those of samples."""
        return len(self._home) > len(self.names)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """What an evaluation compares: the pairs, then the branches between which there is no
        loss."""
        named = [pair.branches for pair in self.pairs if not pair.made]
        return (*self.pairs, *(Comparison(*two) for two in without_loss(self.names, named)))

    @cached_property
    def _owners(self) -> dict[str, str]:
        """Tensors that are not named after their branch -> the branch."""
        inputs = {tensor: branch.name for branch in self.branches for tensor in branch.inputs}
        return inputs | {
            tensor: pair.first for pair in self.pairs for tensor in pair.scalars.values()
        }

    @cached_property
    def losses(self) -> dict[str, float]:
        """Name -> weight of every loss, in the order of the pairs. A pair's matching loss counts as
        much as its contrastive one, unless `train_batch` is given other weights."""
        kinds = ("contrastive", "matching")
        return {
            self.loss_name(kind, pair): pair.weight
            for pair in self.pairs
            for kind in kinds[: 2 if pair.matching else 1]
        }

    def loss_name(self, kind: str, pair: Pair) -> str:
        """`contrastive` or `matching`; where there are several pairs, with the name of the pair:
        `contrastive/image_text`."""
        return f"{kind}/{pair.name}" if len(self.pairs) > 1 else kind

    def scalars_of(self, branch: str) -> dict[str, float]:
        """Tensor name -> first value of the learned scalars that this branch owns."""
        return scalars_of(self.pairs, branch)

    def branch_of(self, tensor: str) -> str:
        """The branch that a named tensor belongs to. Raises ValueError for a name that is
        nobody's."""
        if tensor in self._owners:
            return self._owners[tensor]
        found = [name for name in self._home if tensor.startswith(f"{name}_")]
        if not found:
            raise ValueError(
                f"tensor {tensor!r} belongs to no branch: a name begins with one of "
                f"{', '.join(f'{name}_' for name in self._home)}, or is one of "
                f"{', '.join(sorted(self._owners)) or 'the inputs of a branch'}; rename it, or add "
                "it to the inputs of its branch"
            )
        return self._home[max(found, key=len)]


def without_loss(
    branches: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Every two of `branches` that are no pair, in their order."""
    compared = {frozenset(pair) for pair in pairs}
    return tuple(two for two in combinations(branches, 2) if frozenset(two) not in compared)


def scalars_of(pairs: Sequence[Pair], branch: str) -> dict[str, float]:
    """Tensor name -> first value of the learned scalars that a branch owns."""
    owned = [pair for pair in pairs if pair.first == branch]
    return {
        tensor: pair.loss.parameters[name]
        for pair in owned
        for name, tensor in pair.scalars.items()
    }


def loss_metric(loss: str) -> str:
    """The name of a loss's value among the metrics: `contrastive/image_text` is reported as
    `contrastive_loss/image_text`, `matching` as `matching_loss`."""
    kind, slash, pair = loss.partition("/")
    return f"{kind}_loss{slash}{pair}"

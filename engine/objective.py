"""What is trained: branches, and the terms of the loss, each over the embeddings of some of them.
Records; no tensor and no process here.

    image ──┐
            ├── image_text: InfoNCE ──┐
    text ───┤                         ├── the loss: a weighted sum over the terms
            ├── audio_text: InfoNCE ──┘
    audio ──┘

Most terms are pairs: a loss between two branches. Others are over one branch, whose samples have
several rows, or over more than two. A branch may be in several terms; the gradients of its
embeddings add up. Beside the rows of its samples it may make further ones, such as a row for each
region of an image, which pairs of their own compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar

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


class Learning:
    """What terms have in common: a loss and what it learns. The first branch of a term owns that: the
    last layer of its tower emits these scalars, each [1], as tensors named `prefix` + the loss's own
    name for it."""

    loss: ContrastiveLoss
    prefix: str

    @property
    def scalars(self) -> dict[str, str]:
        """The loss's name for each of its learned scalars -> the name of its tensor."""
        return {name: self.prefix + name for name in self.loss.parameters}

    def reported(self, name: str, value: float) -> tuple[str, float]:
        """One of them as metrics show it."""
        shown, number = self.loss.reported(name, value)
        return self.prefix + shown, number


@dataclass(frozen=True)
class Pair(Comparison, Learning):
    """Two branches and the loss between them, which an evaluation compares, too.

    `weight`: of this loss in the sum over all terms. `matching`: a second loss, of single
    (first, second) pairs, which the last layer of the `second` tower scores; None: there is none.
    """

    loss: ContrastiveLoss = field(compare=False)
    weight: float = 1.0
    matching: MatchingLoss | None = field(default=None, compare=False)
    prefix: str = ""
    kind: ClassVar[str] = "contrastive"


@dataclass(frozen=True)
class Joint(Learning):
    """A loss over the rows of one branch, or of any number of them at once.

    A sample takes part where all of these branches have its rows. `kind`: what the loss is called,
    as the one between two branches is called contrastive.
    """

    branches: tuple[str, ...]
    loss: ContrastiveLoss = field(compare=False)
    weight: float = 1.0
    prefix: str = ""
    kind: str = "contrastive"
    made: ClassVar[None] = None
    matching: ClassVar[None] = None

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of the rows that are in it."""
        return self.branches

    @property
    def name(self) -> str:
        return "_".join(self.branches if len(self.branches) > 1 else 2 * self.branches)


Term = Pair | Joint


@dataclass(frozen=True)
class Objective:
    """All branches of a run, in the order of their layers and ranks, and all terms of its loss.
    Checked when made.

    Raises ValueError for a term of unknown branches, a branch without a term, names that stand
    twice, and a branch that has the name of something else in the configuration.
    """

    branches: tuple[Branch, ...]
    terms: tuple[Term, ...]

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
        for term in self.terms:
            if not term.branches:
                raise ValueError("objective: a term of no branch; name one or several")
            unknown = [name for name in term.branches if name not in self.names]
            if unknown:
                raise ValueError(
                    f"objective: {_called(term)} is of branch {unknown[0]}, which is none of "
                    f"{', '.join(self.names)}"
                )
            if len(set(term.branches)) < len(term.branches):
                raise ValueError(
                    f"objective: {_called(term)} compares a branch with itself; name each branch once"
                )
        sets = [(term.kind, frozenset(term.rows)) for term in self.terms]
        if len(set(sets)) < len(sets):
            raise ValueError(
                f"objective: {', '.join(term.name for term in self.terms)} compare two branches "
                "twice; give each pair once"
            )
        homes = {(rows, of) for term in self.terms for rows, of in zip(term.rows, term.branches)}
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
            name for name in self.names if not any(name in term.branches for term in self.terms)
        ]
        if alone:
            raise ValueError(
                f"objective: branch {alone[0]} is in no pair, so it would not learn; add a pair "
                "with it, or leave it out"
            )
        scalars = [tensor for term in self.terms for tensor in term.scalars.values()]
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
        further = {rows: of for term in self.terms for rows, of in zip(term.rows, term.branches)}
        return {name: name for name in self.names} | further

    def made_by(self, branches: Iterable[str]) -> tuple[str, ...]:
        """The names of all rows that these branches make."""
        return tuple(rows for name in branches for rows, of in self._home.items() if of == name)

    @property
    def may_lack_rows(self) -> bool:
        """Whether a batch with rows of one branch may have none of another that are compared."""
        return len(self.terms) > 1

    @property
    def has_further_rows(self) -> bool:
        """Whether there are others than those of samples."""
        return len(self._home) > len(self.names)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """What an evaluation compares: the pairs, then the branches between which there is no
        loss."""
        pairs = [term for term in self.terms if isinstance(term, Pair)]
        named = [pair.branches for pair in pairs if not pair.made]
        return (*pairs, *(Comparison(*two) for two in without_loss(self.names, named)))

    @cached_property
    def _owners(self) -> dict[str, str]:
        """Tensors that are not named after their branch -> the branch."""
        inputs = {tensor: branch.name for branch in self.branches for tensor in branch.inputs}
        return inputs | {
            tensor: term.branches[0] for term in self.terms for tensor in term.scalars.values()
        }

    @cached_property
    def losses(self) -> dict[str, float]:
        """Name -> weight of every loss, in the order of the terms. A pair's matching loss counts as
        much as its contrastive one, unless `train_batch` is given other weights."""
        return {
            self.loss_name(kind, term): term.weight
            for term in self.terms
            for kind in ((term.kind, "matching") if term.matching else (term.kind,))
        }

    def loss_name(self, kind: str, term: Term) -> str:
        """`contrastive`, `matching` or another kind; where there are several terms, with the name of
        the term: `contrastive/image_text`."""
        return f"{kind}/{term.name}" if len(self.terms) > 1 else kind

    def scalars_of(self, branch: str) -> dict[str, float]:
        """Tensor name -> first value of the learned scalars that this branch owns."""
        return scalars_of(self.terms, branch)

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


def _called(term: Term) -> str:
    return f"pair {term.name}" if isinstance(term, Pair) else f"the {term.kind} term {term.name}"


def without_loss(
    branches: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Every two of `branches` that are no pair, in their order."""
    compared = {frozenset(pair) for pair in pairs}
    return tuple(two for two in combinations(branches, 2) if frozenset(two) not in compared)


def scalars_of(terms: Sequence[Term], branch: str) -> dict[str, float]:
    """Tensor name -> first value of the learned scalars that a branch owns."""
    owned = [term for term in terms if term.branches[0] == branch]
    return {
        tensor: term.loss.parameters[name]
        for term in owned
        for name, tensor in term.scalars.items()
    }


def loss_metric(loss: str) -> str:
    """The name of a loss's value among the metrics: `contrastive/image_text` is reported as
    `contrastive_loss/image_text`, `matching` as `matching_loss`."""
    kind, slash, pair = loss.partition("/")
    return f"{kind}_loss{slash}{pair}"

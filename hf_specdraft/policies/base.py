"""The contract of a policy: how deep to draft before, while and after drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..draft import Draft, Partial
from .costs import Costs, costs_of, nominal_costs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..drafters.base import Drafter
    from .fixed import FixedLength


@dataclass
class Situation:
    """What a policy may know of the call it serves when it is made.

    batch: the request's rows. columns: the prompt's. inner: the lengths the caller asks for. nodes: of a tree, 0 for
    chains. sampled: whether drafts are drawn: then lengths that depend on measured times would make one seed give
    different texts in different processes. settings that the caller gave stand in `inner`.
    """

    target: PreTrainedModel
    drafter: Drafter
    batch: int
    columns: int
    inner: FixedLength
    nodes: int = 0
    sampled: bool = False

    def costs(self, depth: int | None = None) -> Costs:
        """What this call's rounds cost: measured (by the loop, while a policy's `costs` are not known), or by the
        number of weights where drafts are drawn. depth: of the drafts made while they are measured, by default as the
        caller asks for."""
        depth = max(self.inner.lengths) if depth is None else depth
        if self.sampled:
            return nominal_costs(self.target, self.drafter, depth, self.nodes)
        return costs_of(self.target, self.drafter, self.batch, self.columns, depth, self.nodes)


class Policy:
    """Decides by counts and by what was measured beforehand, never by the clock, so that a seed reproduces an output.

    Rows are numbers of the request's rows, in the order of the pass. What is said here keeps the output's law while no
    decision about a drawn node has looked at its token or at later ones (draft.py, `confidence_kind`); where one has,
    `trees.prune` is told so and makes point rows.
    """

    name: str | None = None  # under which a config's `policy` finds it; its options are __init__'s behind `situation`
    costs: Costs | None = None  # filled in by the loop while they are not known
    free_only = False  # whether a drafter that has a free part should leave its network out of this round

    @staticmethod
    def check(**options) -> None:
        """Raise ValueError for values that no call has a use for, before there is one (`policies.check`). options: all
        of them, defaults included."""

    def before(self, rows: list[int], outlook: Callable[[], Tensor | None] = lambda: None) -> list[int]:
        """How deep each row's draft may go this round; 0 for none.

        outlook: the session's own guess before drafting (`Session.outlook`): [B, G] chances that the first 1, 2, ...
        tokens of a draft are all accepted; None when the drafter has no such part.
        """
        raise NotImplementedError

    def more(self, partial: Partial) -> list[bool]:
        """Which rows of the pass draft on, asked after each token (each block) of a drafter that could.

        The tokens drafted so far stay in the draft whatever is said here, so a decision may look at them. A drafter
        that reads its own states poorly says so by `partial.own`; who goes on all the same pays with acceptance only.
        """
        return partial.follow()

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        """The draft without the nodes that are not worth verifying. going: rows that are not finished."""
        return draft

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        """Hear the offered depth and the committed tokens of each row."""


class AsAsked(Policy):
    """Drafts of the lengths that the caller asks for; what is verified of them is for subclasses to say."""

    def __init__(self, situation: Situation):
        self.inner = situation.inner

    def before(self, rows: list[int], outlook=None) -> list[int]:
        return self.inner.before(rows)

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        self.inner.observe(rows, offered, committed)

"""The contract of a corrector: a block's marginals, one slot after the other, given the tokens drafted so far.

R walkers, each somewhere in one of a block's B rows; S slots, K tokens in a support, H the drafter's width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ..draft import Block
from ..parts import Part, Scored

if TYPE_CHECKING:
    from ..drafters.base import TargetView
    from ..heads import HeadedDrafter
    from ..training.records import Unrolled


@dataclass
class State:
    """Where R walkers stand.

    rows: [R] the block's row each of them walks.
    carry: what the corrector takes from slot to slot: a tensor [R, ...] or a nest of them; None for nothing.
    """

    drafter: HeadedDrafter
    view: TargetView
    block: Block
    rows: Tensor
    carry: Any = None

    def fork(self, index: Tensor) -> State:
        """The walkers `index` [R'] of these, in that order; repeated ones go their own ways."""
        carry = tree_map(lambda x: None if x is None else x[index], self.carry)
        return replace(self, rows=self.rows[index], carry=carry)


@dataclass
class Scores:
    """What R walkers may draft next.

    logits: [R, K] whose softmax is the law; unwarped. ids: [R, K] target ids, None: the drafter's vocabulary in order.
    """

    logits: Tensor
    ids: Tensor | None = None


class Memory:
    """What a corrector keeps of the context during a call; `block.memory` in its steps."""

    def hear(self, tokens: list[list[int]]) -> None:
        """Hear what was committed: per row, the new token ids (`draft.Commit`), the prompt's first of all."""

    def observe(self, context: Tensor, positions: Tensor, counts: list[int]) -> None:
        """Hear new context: [B, C, H] fused features, as the drafter's layers read them, at positions [B, C], of which
        the first counts[b] of row b are real."""
        raise NotImplementedError

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, in this order."""
        raise NotImplementedError


class Corrector(Part):
    """Scores the next token of a block given those before it. Subclasses are found by their `name`.

    Options come behind the drafter's config: `def __init__(self, config, rank=256)`; `drafter.config.corrector` is
    {"name": "markov", "rank": 256}.

    beam: how many paths `walkers.beam` keeps to find a chain; 0 for none, then `walkers.chain` makes it.
    additive: whether the beam adds the scores up as they are. They are logits of a law otherwise.
    """

    beam: int = 0
    additive: bool = False

    def __init__(self, config):
        super().__init__()

    def memory(self, batch: int) -> Memory | None:
        """A call's memory of the context, None when the block is all it reads."""
        return None

    def begin(self, drafter: HeadedDrafter, view: TargetView, block: Block) -> State:
        """One walker at the start of each row of a block, before slot 0."""
        return State(drafter, view, block, torch.arange(len(block.anchor), device=block.hidden.device))

    def step(self, state: State, slot: int, previous: Tensor) -> tuple[Scores, State]:
        """The scores at `slot`, given `previous` [R], the target id of the token before it (the anchor at slot 0), and
        the walkers' new state. Must not change `state`: walkers fork."""
        raise NotImplementedError

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, base: Tensor) -> Scored:
        """Teacher forcing: what all slots say after the text's own tokens (`unrolled.previous` [a, S]).

        base: [a, S, K] the marginals' logits. Equal to the steps' scores along the same tokens.
        """
        raise NotImplementedError


def plus(logits: Tensor, correction: Tensor) -> Tensor:
    """[..., K] logits and what is added to them. One tokenizer's heads are padded to different sizes: rows that only
    the logits have stay as they are, rows that only the correction has are dropped."""
    return logits + F.pad(correction, (0, logits.shape[-1] - correction.shape[-1]))

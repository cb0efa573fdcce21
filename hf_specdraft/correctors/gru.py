"""Domino's head: a GRU over the drafted tokens corrects each slot's logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization

from ..draft import Block
from ..parts import Scored
from .base import Corrector, Scores, State, plus

if TYPE_CHECKING:
    from ..drafters.base import TargetView
    from ..heads import HeadConfig, HeadedDrafter
    from ..training.records import Unrolled


class GruHead(Corrector):
    """logits_k + E([h_k; s_k]), s_k a GRU's state after the embeddings of the anchor and d_1 .. d_{k-1} (Domino
    2605.29707). It starts from zero in every block. E = Linear, SiLU, Linear; ours: its last weights start at zero, so
    that training starts from the plain drafter.

    hidden_size: the GRU's. rank: E's inner width. free_slots: how many first drafts are left uncorrected
    (`pure_draft_prefix_len`).
    """

    name = "gru"

    def __init__(self, config: HeadConfig, hidden_size: int = 1024, rank: int = 256, free_slots: int = 1):
        super().__init__(config)
        for option, value, least in (("hidden_size", hidden_size, 1), ("rank", rank, 1), ("free_slots", free_slots, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{option} of the GRU head must be at least {least}, got {value!r}")
        if config.vocab_size is None:
            raise ValueError("a GRU head has a row for each token: give vocab_size, the target's number of tokens")
        self.free_slots = free_slots
        self.prefix_gru = nn.GRU(config.hidden_size, hidden_size, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + hidden_size, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False),
        )

    def init_weights(self) -> None:
        initialization.zeros_(self.embed_proj[2].weight)

    def begin(self, drafter: HeadedDrafter, view: TargetView, block: Block) -> State:
        state = super().begin(drafter, view, block)
        return replace(state, carry=block.hidden.new_zeros(len(block.hidden), self.prefix_gru.hidden_size))

    def step(self, state: State, slot: int, previous: Tensor) -> tuple[Scores, State]:
        embedded = state.drafter.embed(previous[:, None], state.view)
        read, carry = self.prefix_gru(embedded, state.carry[None].contiguous())
        logits = state.block.logits[state.rows, slot]
        if slot >= self.free_slots:
            logits = plus(logits, self._correction(state.block.hidden[state.rows, slot], read[:, 0]))
        return Scores(logits), replace(state, carry=carry[0])

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, base: Tensor) -> Scored:
        free = min(self.free_slots, base.shape[1])
        read, _ = self.prefix_gru(drafter.embed(unrolled.previous, view))
        later = plus(base[:, free:], self._correction(unrolled.hidden[:, free:], read[:, free:]))
        return Scored(torch.cat((base[:, :free].to(later.dtype), later), dim=1), base)

    def _correction(self, hidden: Tensor, read: Tensor) -> Tensor:
        return self.embed_proj(torch.cat((hidden, read), -1))

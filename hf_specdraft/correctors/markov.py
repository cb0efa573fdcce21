"""DSpark's Markov head: each slot's logits, shifted by what the token before it says."""

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

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(Corrector):
    """logits_k + W2 f(W1[x_{k-1}]) (DSpark 2607.05147), of rank r.

    kind: what f is. "vanilla": the row itself. "gated": the row, times sigmoid(G [h_k; row]). "rnn": a gated state over
    the block's tokens so far, zero before the first.

    `markov_w1` is indexed by target ids, `markov_w2` has a row for each token of the drafter's vocabulary. Ours: W2
    starts at zero, so that training starts from the plain drafter, and W1's rows at about unit length.
    """

    name = "markov"

    def __init__(self, config: HeadConfig, rank: int = 256, kind: str = "vanilla"):
        super().__init__(config)
        if kind not in KINDS:
            raise ValueError(f"kind of the Markov head must be one of {', '.join(KINDS)}, got {kind!r}")
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank of the Markov head must be at least 1, got {rank!r}")
        if config.vocab_size is None:
            raise ValueError("a Markov head has a row for each token: give vocab_size, the target's number of tokens")
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def init_weights(self) -> None:
        initialization.normal_(self.markov_w1.weight, std=self.rank**-0.5)
        initialization.zeros_(self.markov_w2.weight)

    def codes(self, drafter: HeadedDrafter, view: TargetView, tokens: Tensor) -> Tensor:
        """[...] target ids -> [..., r] rows of W1; ids beyond it (padding of the target's vocabulary) get the last."""
        return self.markov_w1(tokens.clamp(max=self.markov_w1.num_embeddings - 1))

    def begin(self, drafter: HeadedDrafter, view: TargetView, block: Block) -> State:
        state = super().begin(drafter, view, block)
        return replace(state, carry=self._nothing(block.hidden[:, 0]))

    def step(self, state: State, slot: int, previous: Tensor) -> tuple[Scores, State]:
        block, codes = state.block, self.codes(state.drafter, state.view, previous)
        code, carry = self._read(block.hidden[state.rows, slot], codes, state.carry)
        logits = plus(block.logits[state.rows, slot], self.markov_w2(code))
        return Scores(logits), replace(state, carry=carry)

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, base: Tensor) -> Scored:
        hidden, codes = unrolled.hidden, self.codes(drafter, view, unrolled.previous)
        if self.kind == "rnn":
            carry, read = self._nothing(hidden[:, 0]), []
            for slot in range(hidden.shape[1]):
                code, carry = self._read(hidden[:, slot], codes[:, slot], carry)
                read.append(code)
            codes = torch.stack(read, 1)
        else:
            codes, _ = self._read(hidden, codes, None)
        return Scored(plus(base, self.markov_w2(codes)), base)

    def _nothing(self, hidden: Tensor) -> Tensor | None:
        """The state before the first slot of [R, H]."""
        return hidden.new_zeros(len(hidden), self.rank) if self.kind == "rnn" else None

    def _read(self, hidden: Tensor, code: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W2 reads [..., r] of a slot's state [..., H] and the row of the token before it, and the new carry."""
        if self.kind == "gated":
            code = self.gate_proj(torch.cat((hidden, code), -1)).sigmoid() * code
        elif self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat((carry, code, hidden), -1)).chunk(3, -1)
            gate = gate.sigmoid()
            carry = gate * carry + (1 - gate) * candidate.tanh()  # not lerp, which takes one dtype, unlike autocast
            code = output.tanh()
        return code, carry

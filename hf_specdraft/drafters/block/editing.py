"""Editors: a block is read again with the drafted tokens in its slots, before the target sees any of them.

DEdit (2609.38510): K passes of the same weights over context that is read once; every pass but the first sees real
tokens in place of masks, and may change all of them. DRLM's cavity energy, as a gate: how well a draft's tokens fit
each other, without the evidence that each gives for itself; of the drafts of a round the one of lowest energy is kept.

What a round drafts is a function of the context alone up to its last pass: every pass reads the best tokens of the one
before it. So the last pass's marginals are a law that nothing drawn has shaped, and tokens drawn from it are told with
it. A gate judges tokens, not marginals: what it keeps is a point draft. Drawing tokens and changing them afterwards
while telling a softmax as their law would be wrong, and no function here can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from ...draft import Block, Context
from ...parts import Part, refuse_unknown
from ...verification import argmax

if TYPE_CHECKING:
    from .configuration_block import BlockConfig
    from .session_block import BlockSession


def log_odds(logits: Tensor, tokens: Tensor) -> Tensor:
    """log P / (1 - P) of `tokens` [...] under the softmax of `logits` [..., V], exact where P rounds to 1."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    others = logits.scatter(-1, tokens[..., None], -math.inf).logsumexp(-1)
    return logits.gather(-1, tokens[..., None])[..., 0] - others


def self_evidence(rate: float, size: int) -> float:
    """By how much a token's log-odds rise because the denoiser saw it, when each token is replaced with probability
    `rate` by one drawn evenly from `size`: log(1 + size (1 - rate) / rate)."""
    return math.log1p(size * (1 - rate) / rate)


def cavity_log_prob(logits: Tensor, tokens: Tensor, shift: Tensor | float) -> Tensor:
    """log p(token | all others) [...] of `tokens` [...] that the network read, from what it then says (`logits`
    [..., V]); shift: what seeing each added to its log-odds (`self_evidence`). Float32, float64 for float64."""
    return F.logsigmoid(log_odds(logits, tokens) - shift)


def calibrated_shift(odds: Tensor, correct: Tensor, mask: Tensor) -> list[float]:
    """Per slot the shift at which as many tokens are expected to be right as are.

    Drafts err by confusion, not evenly, so that `self_evidence` says too much. odds: [n, S] `log_odds` of drafted
    tokens that were read. correct, mask: [n, S] bool, which of them are the text's, and which count.
    """
    low, high = odds.new_full((odds.shape[1],), -100.0), odds.new_full((odds.shape[1],), 100.0)
    for _ in range(40):
        middle = (low + high) / 2
        expected = ((odds - middle).sigmoid() * mask).sum(0)
        raise_it = expected > (correct & mask).sum(0)
        low, high = torch.where(raise_it, middle, low), torch.where(raise_it, high, middle)
    return ((low + high) / 2).tolist()


@dataclass
class CavityGate:
    """DRLM's energy, sum over slots i of -w_i log p(x_i | the other tokens), and what is kept by it.

    rate: share of tokens that were replaced at random in training (`corruption` of the edit unroll).
    slot_gamma: w_i = exp(-i / slot_gamma), early slots decide about later ones; None: 1.
    shift: per slot, in place of the rate's (`calibrated_shift`).
    accept_unscored: whether the last pass's draft, which no pass has read, is kept when the one before it was better
        than all before; a draft is as good as its energy says, but passes are trained to improve.
    """

    rate: float = 0.2
    slot_gamma: float | None = None
    shift: list[float] | None = None
    accept_unscored: bool = True

    @classmethod
    def of(cls, options: str | dict, slots: int) -> CavityGate:
        """The gate that a config names: "cavity", or {"name": "cavity", and its options}. Raises ValueError."""
        options = {"name": options} if isinstance(options, str) else dict(options)
        name = options.pop("name", None)
        if name != "cavity":
            raise ValueError(f"edit_gate must be cavity, or null for none, got {name!r}")
        refuse_unknown("edit_gate cavity", options, cls, 0)
        gate = cls(**options)
        if not 0 < gate.rate <= 1:
            raise ValueError(f"edit_gate.rate is the share of replaced tokens, above 0 and up to 1, got {gate.rate}")
        if gate.slot_gamma is not None and gate.slot_gamma <= 0:
            raise ValueError(f"edit_gate.slot_gamma must be above 0, or null for even weights, got {gate.slot_gamma}")
        if gate.shift is not None and len(gate.shift) != slots:
            raise ValueError(f"edit_gate.shift has {len(gate.shift)} values for a block's {slots} drafts")
        return gate

    def energy(self, logits: Tensor, tokens: Tensor, seen: int) -> Tensor:
        """[R] of drafts `tokens` [R, S] (indices of the last dimension of `logits` [R, S, K]) that gave `logits` when
        read. Only the first `seen` of them stood in the block: the rest gave no evidence for themselves."""
        slots = torch.arange(tokens.shape[1], device=logits.device)
        shift = torch.full(slots.shape, self_evidence(self.rate, logits.shape[-1]), device=logits.device)
        if self.shift is not None:
            shift = torch.tensor(self.shift, device=logits.device)
        weights = torch.ones_like(shift) if self.slot_gamma is None else (-slots / self.slot_gamma).exp()
        return -(weights * cavity_log_prob(logits, tokens, shift.where(slots < seen, 0))).sum(-1)


class EditEmbedding(Part):
    """A vector [H] on top of the embeddings of drafted tokens, which tells them from the text's. Starts at 0."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))

    def init_weights(self) -> None:
        initialization.zeros_(self.weight)

    def forward(self, embeddings: Tensor, drafted: Tensor) -> Tensor:
        """embeddings: [..., H]. drafted: [...] bool."""
        return embeddings + self.weight * drafted[..., None]


def filled(anchors: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Blocks [..., size] of anchors [...] and the drafts `tokens` [..., S] (target ids) in their slots.

    Token j (from 1) stands in slot j, its own place, whichever slot predicts it. Where that is the slot before
    (`anchor_drafts`), each token is still seen by what predicts it, but for the last one, which has no place.
    """
    return torch.cat((anchors[..., None], tokens[..., : size - 1]), dim=-1)


@dataclass
class Version:
    """What one pass makes of R blocks.

    best: [R, S] indices of the drafter's vocabulary; None where nobody asks. state: tensors [R, ...] that say it.
    energy: [R] of the draft that it read, where a gate asks.
    """

    best: Tensor | None
    state: tuple[Tensor, ...]
    energy: Tensor | None = None

    def where(self, rows: Tensor, other: Version) -> Version:
        """This one for `rows` [R] bool, another one for the rest."""
        pick = lambda mine, its: mine.where(rows.view(-1, *[1] * (mine.dim() - 1)), its)  # noqa: E731
        return Version(pick(self.best, other.best), tuple(map(pick, self.state, other.state)))


def refine(config: BlockConfig, read: Callable[[Tensor | None, bool], Version]) -> Version:
    """The version that each block's draft is taken from, after up to 1 + config.edit_passes passes.

    read: a pass over masks (None), or over drafts given as `Version.best`; and whether no pass can follow it. A pass
        that reads what it said itself is a fixed point, and with all blocks there, or stopped by the gate, passes end.
    """
    gate = config.gate
    latest = kept = read(None, config.edit_passes == 0)
    going = lowest = None
    for left in reversed(range(config.edit_passes)):
        new = read(latest.best, left == 0)
        if gate is None:
            kept = new
        else:
            # `new` has read the draft of `latest`, and tells its energy.
            better = new.energy < math.inf if lowest is None else going & (new.energy < lowest)
            lowest = new.energy if lowest is None else torch.where(better, new.energy, lowest)
            kept, going = latest.where(better, kept), better
        if left and (config.edit_early_exit or gate is not None):
            changes = (new.best != latest.best).any(1)
            going = changes if gate is None else going & changes
            if not going.any():
                break
        latest = new
    else:
        if gate is not None and gate.accept_unscored and config.edit_passes:
            kept = latest.where(going, kept)
    return kept


def edited_block(session: BlockSession, context: Context, depth: int) -> Block:
    """The first `depth` drafting slots of the version that a round's passes end with. The whole block is edited."""
    drafter, config = session.drafter, session.drafter.config
    blocks = []

    def read(best: Tensor | None, last: bool) -> Version:
        whole = not last or config.gate is not None
        slots = slice(config.first_slot, config.first_slot + (config.num_drafts if whole else depth))
        ids = None if best is None else filled(blocks[0].anchor, drafter.target_ids(best), config.block_size)
        block = session.block_pass(context, slots, ids)
        blocks.append(block)
        energy = None
        if config.gate is not None and best is not None:
            energy = config.gate.energy(block.logits, best, config.block_size - 1)
        return Version(argmax(block.logits) if whole else None, (block.logits, block.hidden), energy)

    logits, hidden = refine(config, read).state
    return replace(blocks[-1], logits=logits[:, :depth], hidden=hidden[:, :depth])

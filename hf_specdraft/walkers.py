"""From a block and its corrector to a draft: one token after the other, each given those before it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .correctors import Corrector, Scores
from .draft import Block, Context, Draft, Law
from .drafters.base import TargetView
from .heads import HeadedDrafter
from .verification import argmax, sample


def chain(
    drafter: HeadedDrafter, view: TargetView, corrector: Corrector, block: Block, context: Context, lengths: list[int]
) -> Draft:
    """A chain per row, its tokens the best of each step's scores; drawn, with their exact law, when the request samples
    and the drafter's config says `draft_sampling`.

    Confidence is the product of the chosen steps' largest probabilities: each factor is known before its own token is
    drawn, but depends on the tokens before it ("pre").
    """
    drawn = context.do_sample and drafter.config.draft_sampling
    state, previous = corrector.begin(drafter, view, block), block.anchor
    tokens, probs, ids, sure = [], [], [], []
    for slot in range(max(lengths)):
        scores, state = corrector.step(state, slot, previous)
        logits = scores.logits.float()
        sure.append((logits.amax(-1) - logits.logsumexp(-1)).nan_to_num(-math.inf))
        if drawn:
            law = warped(drafter, view, scores, context).softmax(-1)
            index = sample(law, torch.rand(len(law), device=law.device))
            probs.append(law)
        else:
            index = argmax(logits)
        previous = token_ids(drafter, scores, index)
        tokens.append(previous)
        ids.append(scores.ids)
    law = None
    if drawn:
        first = drafter.draft_ids if ids[0] is None else None
        known = torch.stack(ids, 1) if ids[0] is not None else first
        known = known.expand_as(torch.stack(probs, 1)) if first is not None else known
        law = Law(torch.stack(probs, 1), known, torch.ones(len(lengths), dtype=torch.bool))
    confidence = torch.stack(sure, 1).cumsum(1).exp()
    return Draft.chain(
        torch.stack(tokens, 1), lengths, law=law, confidence=confidence, confidence_kind="pre", evidence=block
    )


def token_ids(drafter: HeadedDrafter, scores: Scores, index: Tensor) -> Tensor:
    """[R] indices of a support -> target ids."""
    return drafter.target_ids(index) if scores.ids is None else scores.ids.gather(1, index[:, None])[:, 0]


def warped(drafter: HeadedDrafter, view: TargetView, scores: Scores, context: Context) -> Tensor:
    """[R, K] float32 scores under the request's warpers, which see the target's vocabulary, -inf beyond the support."""
    if scores.ids is None:
        return drafter.warped(view, scores.logits, context)
    whole = scores.logits.new_full((len(scores.logits), view.vocab_size), -math.inf)
    whole = context.warp(whole.scatter(1, scores.ids, scores.logits)).gather(1, scores.ids)
    # Warpers that leave nothing of the support: any law that is told exactly will do.
    return torch.where(whole.amax(-1, keepdim=True) == -math.inf, scores.logits, whole).float()

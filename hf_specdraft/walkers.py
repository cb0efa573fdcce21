"""From a block and its corrector to a draft: one token after the other, each given those before it.

| walker | draft | when the request samples |
| --- | --- | --- |
| `chain` | greedy, or drawn | a point draft, or drawn from a law that is told exactly |
| `beam` | the best path of a search | a point draft: a search result was drawn from no law |
| `tree` | the likeliest prefixes | a point draft, likewise |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .correctors import Corrector, Scores, State
from .draft import Block, Context, Draft, Law
from .drafters.base import TargetView
from .heads import HeadedDrafter
from .trees import padded
from .verification import argmax, sample


def walk(
    drafter: HeadedDrafter, view: TargetView, corrector: Corrector, block: Block, context: Context, lengths: list[int]
) -> Draft:
    """The draft that the request, the drafter's config and the corrector ask for: a tree, a search or a chain."""
    if context.tree and drafter.config.tree_nodes > 0:
        return tree(drafter, view, corrector, block, context, lengths)
    if corrector.beam:
        return beam(drafter, view, corrector, block, context, lengths, corrector.beam)
    return chain(drafter, view, corrector, block, context, lengths)


def chain(
    drafter: HeadedDrafter, view: TargetView, corrector: Corrector, block: Block, context: Context, lengths: list[int]
) -> Draft:
    """A chain per row, its tokens the best of each step's scores; drawn, with their exact law, when the request samples
    and the drafter's config says `draft_sampling`.

    Confidence is the product of what the drafter's confidence head says of each step, or else of the steps' largest
    probabilities: each factor is known before its own token is drawn, but may depend on the tokens before it ("pre").
    """
    drawn, head = context.do_sample and drafter.config.draft_sampling, drafter.confidence
    state, previous = corrector.begin(drafter, view, block), block.anchor
    depth, device = max(lengths), block.hidden.device
    noise = torch.rand(len(lengths), depth, device=device) if drawn else None
    tokens, probs, ids, sure = [], [], [], []
    for slot in range(depth):
        scores, state = corrector.step(state, slot, previous)
        logits = scores.logits.float()
        if head is not None:
            sure.append(head(drafter, view, block.hidden[:, slot], previous))
        else:
            sure.append((logits.amax(-1) - logits.logsumexp(-1)).nan_to_num(-math.inf))
        if drawn:
            law = warped(drafter, view, scores, context).softmax(-1)
            index = sample(law, noise[:, slot])
            probs.append(law)
        else:
            index = argmax(logits)
        previous = token_ids(drafter, scores, index)
        tokens.append(previous)
        ids.append(scores.ids)
    law = None
    if drawn:
        probs = torch.stack(probs, 1)
        if ids[0] is not None:
            known = torch.stack(ids, 1)
        else:
            known = None if drafter.draft_ids is None else drafter.draft_ids.expand_as(probs)
        law = Law(probs, known, torch.ones(len(lengths), dtype=torch.bool))
    sure, kind = torch.stack(sure, 1), "pre"
    if head is not None:
        block, kind = replace(block, confidence=sure), head.kind
    confidence = sure.cumsum(1).exp() if head is None else head.survival(sure)
    return Draft.chain(
        torch.stack(tokens, 1), lengths, law=law, confidence=confidence, confidence_kind=kind, evidence=block
    )


def token_ids(drafter: HeadedDrafter, scores: Scores, index: Tensor) -> Tensor:
    """[R] or [R, k] indices of a support -> target ids."""
    if scores.ids is None:
        return drafter.target_ids(index)
    return scores.ids.gather(1, index.view(len(index), -1)).view(index.shape)


def warped(drafter: HeadedDrafter, view: TargetView, scores: Scores, context: Context) -> Tensor:
    """[R, K] float32 scores under the request's warpers, which see the target's vocabulary, -inf beyond the support."""
    if scores.ids is None:
        return drafter.warped(view, scores.logits, context)
    whole = scores.logits.new_full((len(scores.logits), view.vocab_size), -math.inf)
    whole = context.warp(whole.scatter(1, scores.ids, scores.logits)).gather(1, scores.ids)
    # Warpers that leave nothing of the support: any law that is told exactly will do.
    return torch.where(whole.amax(-1, keepdim=True) == -math.inf, scores.logits, whole).float()


def beam(
    drafter: HeadedDrafter,
    view: TargetView,
    corrector: Corrector,
    block: Block,
    context: Context,
    lengths: list[int],
    width: int,
) -> Draft:
    """The best path per row that a search finds which keeps `width` paths at each slot.

    A path's score is the sum of its tokens' log-probabilities, or of the scores themselves for a corrector whose scores
    are `additive`. A row's path ends where nothing is possible any more (scores of -inf). A point draft: what a search
    found was drawn from no law. Confidence is the path's probability so far. Reads the device once.
    """
    state, previous = corrector.begin(drafter, view, block), block.anchor
    batch, device = len(lengths), previous.device
    total = torch.zeros(batch, 1, device=device)
    tokens, sure = previous.new_zeros(batch, 1, 0), total.new_zeros(batch, 1, 0)  # of each path kept
    best, possible = [], []
    for slot in range(max(lengths)):
        scores, state = corrector.step(state, slot, previous)
        logits = _possible(scores.logits.float())
        known = _possible(logits.log_softmax(-1))
        grown = (total.view(-1, 1) + (logits if corrector.additive else known)).view(batch, -1)
        total, place = grown.topk(min(width, grown.shape[1]))
        paths, index = tokens.shape[1], place % logits.shape[1]
        source = place // logits.shape[1]
        walker = (source + torch.arange(batch, device=device)[:, None] * paths).flatten()
        index = index.flatten()
        previous = drafter.target_ids(index) if scores.ids is None else scores.ids[walker, index]
        state = state.fork(walker)
        tokens, sure = (
            torch.cat([old.take_along_dim(source[..., None], 1), new.view(batch, -1, 1)], 2)
            for old, new in ((tokens, previous), (sure, known[walker, index]))
        )
        best.append((tokens[:, 0], sure[:, 0]))
        possible.append(total[:, 0] > -math.inf)
    reach = torch.stack(possible, 1).long().cumprod(1).sum(1).tolist()
    ends = [min(length, end) for length, end in zip(lengths, reach)]
    chosen, confidence = torch.zeros_like(best[-1][0]), torch.zeros_like(best[-1][1])
    for row, end in enumerate(ends):
        if end:
            chosen[row, :end], confidence[row, :end] = (part[row] for part in best[end - 1])
    return Draft.chain(chosen, ends, confidence=confidence.cumsum(1).exp(), evidence=block)


def _possible(scores: Tensor) -> Tensor:
    """The scores with -inf in the place of NaN."""
    return scores.masked_fill(scores.isnan(), -math.inf)


# Walkers of one row that step at once. A step's time hardly depends on so few, as it goes into reading the corrector's
# weights; more of them would mostly be nodes that do not stay.
_AT_ONCE = 8


@dataclass(eq=False, slots=True)
class _Node:
    """A prefix of one row. score: its log-probability. state, walker: where its parent's step left its walker."""

    row: int
    score: float
    depth: int
    state: State
    walker: int
    token: int = -1
    parent: _Node | None = None
    is_open: bool = True


def tree(
    drafter: HeadedDrafter, view: TargetView, corrector: Corrector, block: Block, context: Context, lengths: list[int]
) -> Draft:
    """The tree of each row's `context.nodes` likeliest prefixes under the corrector's law, where a node's children are
    scored given the path to it (DDTree, arXiv 2604.12989, puts the product of the marginals in its place).

    No child is likelier than its parent, so the tree is found once none of the best nodes is left to expand. They are
    expanded from the deepest down, a few at once: the first steps down to the last slot leave little to do above.

    A point draft, exact for any choice of nodes. Confidence is the path's probability. Each step waits for the device.
    """
    budget = context.nodes
    start = corrector.begin(drafter, view, block)
    best: list[list[_Node]] = [[] for _ in lengths]
    parents = [_Node(row, 0.0, 0, start, row) for row, length in enumerate(lengths) if length > 0 < budget]
    previous = block.anchor[[node.row for node in parents]]
    while parents:
        _expand(drafter, corrector, parents, previous, best, budget)
        parents = _next(best, lengths, max(_AT_ONCE, budget // 4))
        previous = torch.tensor([node.token for node in parents], device=block.anchor.device)
    rows = []
    for nodes in best:
        number = {None: -1} | {node: i for i, node in enumerate(nodes)}
        parents = [number[node.parent] for node in nodes]
        rows.append(([node.token for node in nodes], parents, [node.score for node in nodes]))
    tokens, parents, valid, score = padded(rows, block.anchor.device)
    confidence = score.exp().to(tokens.device, torch.float32)
    return Draft(tokens, parents, valid, confidence=confidence, evidence=block)


def _expand(
    drafter: HeadedDrafter,
    corrector: Corrector,
    parents: list[_Node],
    previous: Tensor,
    best: list[list[_Node]],
    budget: int,
) -> None:
    """Put what is good enough of the children of `parents`, all of one state, among the `best` of each row."""
    index = torch.tensor([node.walker for node in parents], device=previous.device)
    depth = parents[0].depth
    scores, state = corrector.step(parents[0].state.fork(index), depth, previous)
    log_probs, index = scores.logits.log_softmax(-1, dtype=torch.float32).topk(min(budget, scores.logits.shape[-1]))
    ids = token_ids(drafter, scores, index).tolist()
    floors = [nodes[-1].score if len(nodes) == budget else -math.inf for nodes in best]
    for walker, (node, values, tokens) in enumerate(zip(parents, log_probs.tolist(), ids)):
        row, score, floor = node.row, node.score, floors[node.row]
        node.is_open = False
        for value, token in zip(values, tokens):
            # False for NaN, too. A child as good as the last of the best came later, and is not among them.
            if not score + value > floor:
                break
            best[row].append(_Node(row, score + value, depth + 1, state, walker, token, None if depth == 0 else node))
    for row in {node.row for node in parents}:
        # Stable: a parent stays before a child that is as good.
        best[row].sort(key=_falling)
        del best[row][budget:]
        if len(best[row]) == budget:
            best[row][-1].is_open = False  # no child of it is better than the last


def _falling(node: _Node) -> float:
    return -node.score


def _next(best: list[list[_Node]], lengths: list[int], at_once: int) -> list[_Node]:
    """Up to `at_once` of each row's best nodes that can be expanded together: of the deepest state there is."""
    waiting = [[node for node in nodes if node.is_open and node.depth < length] for nodes, length in zip(best, lengths)]
    deepest = max((node for nodes in waiting for node in nodes), key=lambda node: node.depth, default=None)
    return [node for nodes in waiting for node in [node for node in nodes if node.state is deepest.state][:at_once]]

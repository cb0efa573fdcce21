"""Pure functions on the structure of draft trees. Nodes are numbered parents first; -1 is the anchor.

`parents` [B, N] int64 and `valid` [B, N] bool live on the CPU (see draft.py). Padding nodes have parent -1. A chain is
the tree whose parents are -1, 0, 1, ... (`Draft.chain` makes one).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .draft import Draft

# What a round costs, for the cost-aware stop: (time of drafting, time of a target pass over the anchor and n nodes).
Cost = tuple[float, Callable[[int], float]]


def is_chain(parents: Tensor, valid: Tensor) -> bool:
    """Whether every valid node's parent is the node before it."""
    return bool(((parents == torch.arange(-1, parents.shape[1] - 1)) | ~valid).all())


def ancestors(parents: Tensor, valid: Tensor) -> Tensor:
    """[B, N, N] bool: entry (j, i) says that node i is j or an ancestor of j. Padding nodes have only themselves."""
    batch, nodes = parents.shape
    # The anchor gets a column of its own, so that a finished climb has somewhere to stay; it is cut off at the end.
    found = torch.eye(nodes, nodes + 1, dtype=torch.bool).repeat(batch, 1, 1)
    climb = up = torch.where(valid & (parents >= 0), parents, nodes)
    up = torch.nn.functional.pad(up, (0, 1), value=nodes)
    while bool((climb < nodes).any()):
        found.scatter_(2, climb[:, :, None], True)
        climb = up.gather(1, climb)
    return found[:, :, :nodes]


def depths(parents: Tensor, valid: Tensor) -> Tensor:
    """[B, N] int64 depth of each node; children of the anchor, and padding, have depth 1."""
    return ancestors(parents, valid).sum(2)


def visibility(lineage: Tensor) -> Tensor:
    """`ancestors` -> [B, N+1, N+1] bool: which of anchor (index 0) and nodes (index j+1) each of them may attend to.

    A node sees the anchor, its ancestors and itself. All of them see the whole committed context besides.
    """
    mask = torch.nn.functional.pad(lineage, (1, 0, 1, 0))
    mask[:, :, 0] = True
    return mask


def children(parents: Tensor, valid: Tensor) -> Tensor:
    """[B, N+1, K] int64: the children of the anchor (row 0) and of node j (row j+1), in order, then N.

    K is the largest number of siblings, at least 1.
    """
    batch, nodes = parents.shape
    rank = siblings(parents, valid).tril(-1).sum(2)
    width = int(rank.max()) + 1 if rank.numel() else 1
    # Padding is written into a row of its own, which is cut off.
    place = torch.where(valid, parents + 1, nodes + 1) * width + torch.where(valid, rank, 0)
    table = torch.full((batch, (nodes + 2) * width), nodes)
    table.scatter_(1, place, torch.arange(nodes).expand(batch, nodes))
    return table.view(batch, nodes + 2, width)[:, : nodes + 1]


def siblings(parents: Tensor, valid: Tensor) -> Tensor:
    """[B, N, N] bool: both nodes are valid and have the same parent."""
    return (parents[:, :, None] == parents[:, None, :]) & valid[:, :, None] & valid[:, None, :]


def best_first(
    log_probs: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], budget: int, cost: Cost | None = None
) -> tuple[list[int], list[int], list[float]]:
    """The tree of the `budget` likeliest prefixes under independent slots (DDTree, arXiv 2604.12989).

    log_probs, ids: [S, K] host lists; row s has the candidates of slot s in falling order of log-probability.
    cost: (C_d, C_v), times in one unit, C_v(n) convex in n. The tree then stops growing where expected tokens per time,
        (1 + sum of node probabilities) / (C_d + C_v(n)), no longer grows (CaDDTree, arXiv 2606.01813).

    Returns token ids, parents and log-probabilities of the nodes, likeliest first. Among equally likely nodes the
    lexicographically smaller tuple of ranks comes first. Impossible nodes (log-probability -inf) are left out, so there
    may be fewer than `budget`.
    """
    tokens, parents, scores = [], [], []
    # Entries (-score, ranks, parent): a popped node's next sibling and first child never score above it, so nodes leave
    # the heap in falling order and parents before children.
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def push(score: float, ranks: tuple[int, ...], parent: int) -> None:
        if score > -math.inf:
            heapq.heappush(heap, (-score, ranks, parent))

    if log_probs and log_probs[0]:
        push(log_probs[0][0], (0,), -1)
    expected = 1.0
    rate = cost and expected / (cost[0] + cost[1](0))
    while heap and len(tokens) < budget:
        score, ranks, parent = heapq.heappop(heap)
        score, node, slot, rank = -score, len(tokens), len(ranks) - 1, ranks[-1]
        if cost:
            expected += math.exp(score)
            previous, rate = rate, expected / (cost[0] + cost[1](node + 1))
            if rate <= previous:
                break
        tokens.append(ids[slot][rank])
        parents.append(parent)
        scores.append(score)
        if rank + 1 < len(log_probs[slot]):
            push(score - log_probs[slot][rank] + log_probs[slot][rank + 1], (*ranks[:-1], rank + 1), parent)
        if slot + 1 < len(log_probs):
            push(score + log_probs[slot + 1][0], (*ranks, 0), node)
    return tokens, parents, scores


def from_marginals(
    log_probs: Tensor, budget: int, lengths: Sequence[int], cost: Cost | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`best_first` for each row of [B, S, V] log-probabilities, of which the first `lengths[b]` slots count.

    Returns tokens [B, N] on the device of `log_probs`, and on the CPU parents [B, N], valid [B, N] and the nodes'
    log-probabilities [B, N] float64 (-inf for padding). N is the largest row's node count. Reads the device once.
    """
    values, ids = log_probs[:, : max(lengths, default=0)].topk(min(budget, log_probs.shape[-1]))
    rows = [
        best_first(row_values[:length], row_ids[:length], budget, cost)
        for row_values, row_ids, length in zip(values.tolist(), ids.tolist(), lengths)
    ]
    return padded(rows, log_probs.device)


def padded(
    rows: Sequence[tuple[list[int], list[int], list[float]]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, parents, log-probabilities) of each row's nodes -> what `from_marginals` returns."""
    tokens, parents, scores = zip(*rows)
    return (
        _ragged(tokens, 0).to(device),
        _ragged(parents, -1),
        _ragged([[True] * len(row) for row in tokens], False),
        _ragged(scores, -math.inf, torch.float64),
    )


def _ragged(rows: Sequence[list], fill: float, dtype: torch.dtype | None = None) -> Tensor:
    width = max(map(len, rows), default=0)
    dtype = dtype or (torch.bool if fill is False else torch.long)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype).view(len(rows), width)


def merge(*drafts: Draft, agreed: Callable[[float, float], float] = lambda first, later: first) -> Draft:
    """The union of several drafts of the same rows: the same token under the same parent becomes one node.

    Nodes keep their order, those of earlier drafts first. The result is a point draft, whatever the parts were: a node
    is there because any of them proposed it, so it was drawn from nobody's law. A node's confidence is what `agreed`
    makes of those of the drafts that have it, by default the first one's, and is dropped unless all drafts give one.
    Reads the tokens on the host.
    """
    batch, device = drafts[0].shape[0], drafts[0].tokens.device
    nodes: list[dict[tuple[int, int], float]] = [{} for _ in range(batch)]
    rated = all(draft.confidence is not None for draft in drafts)
    for draft in drafts:
        tokens, parents, valid = draft.tokens.tolist(), draft.parents.tolist(), draft.valid.tolist()
        confidence = draft.confidence.tolist() if rated else tokens
        for b, known in enumerate(nodes):
            numbers = {key: number for number, key in enumerate(known)}
            place = {-1: -1}
            for j, real in enumerate(valid[b]):
                if real:
                    key = (place[parents[b][j]], tokens[b][j])
                    place[j] = numbers.setdefault(key, len(numbers))
                    known[key] = agreed(known[key], confidence[b][j]) if key in known else confidence[b][j]
    parents = _ragged([[parent for parent, _ in known] for known in nodes], -1)
    valid = _ragged([[True] * len(known) for known in nodes], False)
    merged = Draft(_ragged([[token for _, token in known] for known in nodes], 0).to(device), parents, valid)
    if rated:
        kinds = {draft.confidence_kind for draft in drafts}
        merged.confidence = _ragged([list(known.values()) for known in nodes], 0.0, torch.float32).to(device)
        merged.confidence_kind = kinds.pop() if len(kinds) == 1 else "own"
    merged.is_chain = is_chain(parents, valid)
    return merged


def prune(draft: Draft, keep: Tensor, looked_at_token: bool) -> Draft:
    """The draft without the nodes that `keep` [B, N] (bool, CPU) denies, and without their descendants.

    looked_at_token: whether `keep` depends on drafted tokens (an "own" confidence). All rows then become point rows,
        also those that lose nothing: that everything was kept says something about the tokens too. Otherwise drawn rows
        stay drawn, except a row drawn without replacement that keeps a node but drops an earlier sibling: the verifier
        could no longer know what the kept one was drawn from.
    """
    kept = draft.valid & (keep[:, None] | ~ancestors(draft.parents, draft.valid)).all(2)
    counts = kept.sum(1)
    width = int(counts.max()) if len(counts) else 0
    order = (~kept).long().argsort(dim=1, stable=True)[:, :width]
    valid = torch.arange(width) < counts[:, None]
    number = torch.nn.functional.pad(kept.cumsum(1) - 1, (1, 0), value=-1)  # index 0: the anchor stays -1
    parents = number.gather(1, draft.parents.gather(1, order) + 1).where(valid, -1)

    def select(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        index = order.to(values.device)
        return values[torch.arange(len(index), device=values.device)[:, None], index]

    law = None if looked_at_token else draft.law
    if law is not None:
        rows = law.rows
        if not law.replacement:
            lost = draft.valid & ~kept
            orphaned = siblings(draft.parents, draft.valid) & kept[:, :, None] & lost[:, None, :]
            rows = rows & ~orphaned.tril(-1).flatten(1).any(1)
        law = replace(law, probs=select(law.probs), ids=select(law.ids), rows=rows)
    return replace(
        draft,
        tokens=select(draft.tokens),
        parents=parents,
        valid=valid,
        law=law,
        confidence=select(draft.confidence),
        is_chain=is_chain(parents, valid),
    )

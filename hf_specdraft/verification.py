"""The rules that turn a draft and the target's laws into committed tokens. Pure: uniforms come in as arguments.

p is the target's law after all logits processors, q the law a node was drawn from. A target pass over the anchor and N
nodes gives N+1 rows: row 0 is the anchor's and scores the roots, row j+1 is node j's and scores its children.

| rule | draft                           | function        | source                                        |
| B, C | any tree, one token per row     | `match`         | greedy, or one draw from the target per row   |
| A, D | drawn chains, drawn siblings    | `walk`          | 2211.17192 (chain), 2305.09781, 2402.14160    |
| B    | any tree, one row at a time     | `walk`          | point rows                                    |
| E    | drawn chains                    | `block`         | Sun et al. 2403.10444                         |
| F    | any tree; changes the law       | `lossy_typical` | Medusa 2401.10774                             |

Nothing here waits for an accelerator: loops are bounded by the CPU structure, and only on the CPU, where looking costs
nothing, do they stop early.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import trees
from .draft import Draft, Law, Verdict

# Entries summed at once by `sample`: about the square root of a large vocabulary.
_CHUNK = 512


def sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw ids [...] from `probs` [..., V] by inverse CDF at `uniform` [...] in [0, 1).

    `probs` need not sum to 1. Never returns an id of probability zero unless the whole row is zero (then 0). Sums are
    float64, by chunk and then within the chunk, so that neither the vocabulary's size nor the order in which a device
    adds makes the CDF inexact or unsorted.
    """
    size = min(_CHUNK, probs.shape[-1])
    chunks = F.pad(probs, (0, -probs.shape[-1] % size)).unflatten(-1, (-1, size))
    mass = chunks.sum(-1, dtype=torch.float64)
    chunk, rest = _invert(mass, uniform.to(mass)[..., None] * mass.sum(-1, keepdim=True))
    inside = chunks.take_along_dim(chunk[..., None], -2).squeeze(-2)
    return (chunk * size + _invert(inside.double(), rest)[0]).squeeze(-1)


def _invert(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of positive mass whose running sum exceeds `target` [..., 1], and how far it reaches in."""
    cdf = mass.cumsum(-1).masked_fill_(mass <= 0, 0)
    top = cdf.amax(-1, keepdim=True)
    inside = torch.minimum(target, torch.nextafter(top, torch.zeros_like(top))).clamp_(min=0)
    index = (cdf > inside).byte().argmax(-1, keepdim=True)
    return index, target - cdf.gather(-1, index) + mass.gather(-1, index)


def argmax(scores: Tensor) -> Tensor:
    """[..., V] -> [...] the first greatest entry. NumPy finds it some twenty times sooner than PyTorch on the CPU."""
    if scores.device.type == "cpu" and scores.is_floating_point() and not scores.requires_grad:
        if scores.dtype in (torch.float32, torch.float64):
            return torch.as_tensor(scores.numpy().argmax(-1))
        # NumPy has no bfloat16; a row at a time, so that not all rows are held in float32.
        best = [int(row.float().numpy().argmax()) for row in scores.reshape(-1, scores.shape[-1])]
        return torch.tensor(best, dtype=torch.long).view(scores.shape[:-1])
    return scores.argmax(-1)


def match(chosen: Tensor, tokens: Tensor, parents: Tensor, valid: Tensor, lineage: Tensor | None = None) -> Verdict:
    """Rules B and C: a node is accepted if its parent is and its token is `chosen` [B, N+1] at its parent's row.

    `chosen` is the argmax of each row (greedy), or a draw from each row with noise that the tree was not built from;
    either is exact for any tree. Of siblings with the same token only the first counts: their rows have draws of their
    own, and to follow the luckier one would bias the law (`trees.merge` makes one node of them). `tokens` [B, N] are on
    the device of `chosen`, `parents` and `valid` [B, N] on the CPU. `lineage` is `trees.ancestors` when known already.
    """
    device = tokens.device
    if trees.is_chain(parents, valid):
        hit = (chosen[:, :-1] == tokens) & valid.to(device)
        accepted = hit.cumprod(1, dtype=torch.long)
        length = accepted.sum(1)
        # A chain's accepted node j is j steps down: where accepted is 1 the path says j, elsewhere -1.
        path = torch.arange(1, tokens.shape[1] + 1, device=device) * accepted - 1
        return Verdict(path, length, chosen.gather(1, length[:, None])[:, 0])
    earlier = trees.siblings(parents, valid).tril(-1).to(device)
    twin = (earlier & (tokens[:, :, None] == tokens[:, None, :])).any(2)
    hit = (chosen.gather(1, (parents + 1).to(device)) == tokens) & ~twin
    path, length, row = _deepest(hit, trees.ancestors(parents, valid) if lineage is None else lineage, valid)
    return Verdict(path, length, chosen.gather(1, row[:, None])[:, 0])


def _deepest(hit: Tensor, lineage: Tensor, valid: Tensor, score: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The path to the deepest node that is hit and whose ancestors are all hit; ties by `score`, then the first.

    Returns path [B, D], length [B] and the index [B] of the last accepted row.
    """
    device = hit.device
    depth = lineage.sum(2).where(valid, 0)
    width = int(depth.max()) if depth.numel() else 0
    lineage, depth = lineage.to(device), depth.to(device)
    # The anchor joins as row 0 with depth 0: the first maximum where no node is accepted.
    reached = F.pad(depth * (hit[:, None, :] | ~lineage).all(2), (1, 0))
    length = reached.amax(1)
    if score is None:
        row = reached.argmax(1)
    else:
        row = F.pad(score, (1, 0)).masked_fill(reached < length[:, None], -torch.inf).argmax(1)
    on_path = F.pad(lineage, (0, 0, 1, 0)).take_along_dim(row[:, None, None], 1)[:, 0]
    # Nodes off the path are written into a column of its own, which is cut off.
    path = torch.full((len(hit), width + 1), -1, device=device)
    nodes = torch.arange(hit.shape[1], device=device).expand_as(hit)
    path.scatter_(1, torch.where(on_path, depth - 1, width), nodes)
    return path[:, :width], length, row


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[B, V]: norm((p - q)+), what is left of p after a draw from q was rejected; p itself where nothing is left.

    Nothing is left when p and q differ by rounding only; a rejection there has probability zero but for rounding.
    """
    gap = (p - q).clamp_(min=0)
    mass = gap.sum(-1, keepdim=True, dtype=torch.float64)
    return torch.where(_vanishes(mass, p), p, gap / mass.to(p.dtype))


def _vanishes(mass: Tensor, p: Tensor) -> Tensor:
    return mass <= 8 * torch.finfo(p.dtype).eps


def _none(mask: Tensor) -> bool:
    """True if no element is set and finding out costs no wait for a device."""
    return mask.device.type == "cpu" and not bool(mask.any())


def walk(
    row_at: Callable[[Tensor, Tensor], Tensor],
    draft: Draft,
    accept_uniforms: Tensor,
    emit_uniforms: Tensor,
    vocab_size: int,
    draw_uniforms: Tensor | None = None,
) -> Verdict:
    """Rules A, B and D: descend from the anchor, one target row per depth, until no child is accepted.

    row_at(index [B], alive [B]) -> p [B, V]: the law at each row's current row index (0 = anchor, j+1 = node j). Called
        once per depth in path order, so processors see exactly the committed prefixes. Rows not `alive` have stopped
        and may get anything.
    accept_uniforms [B, N], emit_uniforms [B]: independent of each other and of the draft.

    Drawn rows (`draft.law.rows`) try the children in draw order, child j with accept_uniforms[:, j]: accepted with
    probability min(1, r(x) / Q(x)), where r starts as p and becomes norm((r - Q)+) at each failure, and Q is the law
    child j was drawn from, without its earlier siblings if so drawn. When all fail, r is emitted, with emit_uniforms. A
    token that Q gives no chance is never accepted: it cannot have been drawn from Q.
    Point rows draw one token from p and go to the first child that carries it, or emit it. Each depth has noise of its
    own: draw_uniforms [B, N+1] at the row's index; without them the accept uniform of the first child, and
    emit_uniforms where there are no children.
    """
    device, (batch, nodes) = draft.tokens.device, draft.shape
    law, drawn, any_point = _law(draft)
    table = trees.children(draft.parents, draft.valid)
    widths = _widths(table, draft)
    table = table.to(device)
    # Index N stands for "no child": a token that is never drawn, and the uniform for emitting.
    tokens = F.pad(draft.tokens, (0, 1), value=-1)
    uniforms = torch.cat([accept_uniforms, emit_uniforms[:, None].to(accept_uniforms)], 1)
    rows = torch.arange(batch, device=device)
    index = torch.zeros(batch, dtype=torch.long, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    path = torch.full((batch, len(widths)), -1, device=device)
    next_token, last = torch.zeros_like(index), None
    for depth, width in enumerate(widths):
        p = row_at(index, alive)
        siblings = table[rows, index, :width]
        picked = torch.full_like(index, nodes)
        if law is not None:
            for k in range(width):
                child = siblings[:, k]
                trying = alive & drawn & (child < nodes) & (picked == nodes)
                if _none(trying):
                    break
                q = law.at(child.clamp(max=nodes - 1), vocab_size).to(p)
                if k and not law.replacement:
                    q = q.scatter(1, tokens.gather(1, siblings[:, :k]).clamp(min=0), 0)
                    q = q / q.sum(1, keepdim=True, dtype=torch.float64).clamp(min=torch.finfo(q.dtype).tiny).to(q)
                accepted = trying & _accepts(uniforms.gather(1, child[:, None]), p, q, tokens.gather(1, child[:, None]))
                picked = torch.where(accepted, child, picked)
                failed = trying & ~accepted
                if not _none(failed):
                    p = torch.where(failed[:, None], residual(p, q), p)
        if any_point:
            if draw_uniforms is None:
                noise = uniforms.gather(1, siblings[:, :1])
            else:
                noise = draw_uniforms.gather(1, index[:, None])
            token = sample(p, noise[:, 0])
            carries = tokens.gather(1, siblings) == token[:, None]
            picked = torch.where(drawn, picked, siblings.where(carries, nodes).amin(1))
            next_token = torch.where(alive & (picked == nodes), token, next_token)
        stops = alive & (picked == nodes)
        if law is not None and not _none(stops):
            last = p if last is None else torch.where(stops[:, None], p, last)
        alive = alive & ~stops
        path[:, depth] = torch.where(alive, picked, -1)
        if _none(alive):
            break
        index = torch.where(alive, picked + 1, index)
    if law is not None:
        next_token = torch.where(drawn, sample(last, emit_uniforms), next_token)
    path = path[:, :-1]
    return Verdict(path, (path >= 0).sum(1), next_token)


def _law(draft: Draft) -> tuple[Law | None, Tensor, bool]:
    """The law if any row was drawn from it, which rows were ([B], on the draft's device), and whether any was not."""
    rows = torch.zeros(draft.shape[0], dtype=torch.bool) if draft.law is None else draft.law.rows
    return draft.law if bool(rows.any()) else None, rows.to(draft.tokens.device), not bool(rows.all())


def _widths(table: Tensor, draft: Draft) -> list[int]:
    """The most children any node at depth 0, 1, ... has, down to the leaves (which count as 1)."""
    counts = (table < draft.shape[1]).sum(2)
    level = F.pad(draft.depth.where(draft.valid, 0), (1, 0))
    return [max(1, int(counts[level == depth].max())) for depth in range(int(level.max()) + 1)]


def _accepts(uniform: Tensor, p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """[B]: whether a token drawn from q survives, with probability min(1, p / q)."""
    token = token.clamp(min=0)
    p, q = p.gather(1, token).double(), q.gather(1, token).double()
    return ((uniform * q < p) & (q > 0))[:, 0]


def block(
    row_at_index: Callable[[Tensor], Tensor],
    draft: Draft,
    accept_uniforms: Tensor,
    emit_uniforms: Tensor,
    vocab_size: int,
) -> Verdict:
    """Rule E, block verification of chains: never accepts less than rule A on average, and has the same output law.

    row_at_index(index [B]) -> p [B, V], called for row 0, 1, ... of every chain, past the first weak token too: the
    longest prefix that passes its test wins. accept_uniforms [B, N] and emit_uniforms [B] as in `walk`. A row's chain
    is as long as it has valid nodes; the law stays exact if each length was chosen before the next token was drawn.
    Point rows count as drawn from the law that has only their token.
    """
    assert trees.is_chain(draft.parents, draft.valid), "block verification needs chains"
    device, (batch, nodes) = draft.tokens.device, draft.shape
    lengths = draft.valid.sum(1).to(device)
    law, drawn, any_point = _law(draft)
    uniforms = F.pad(accept_uniforms.double(), (1, 0))  # the empty prefix always passes
    weight = torch.ones(batch, dtype=torch.float64, device=device)
    accepted = torch.zeros(batch, dtype=torch.long, device=device)
    last = None
    for i in range(nodes + 1):
        index = torch.full((batch,), i, device=device)
        p = row_at_index(index)
        gap = weight[:, None].to(p) * p
        # Past its end a chain proposes nothing, q = 0: then h is the weight and the residual p, as they should be.
        if i < nodes:
            token = draft.tokens[:, i : i + 1]
            q = law.at(index, vocab_size).to(p) if law is not None else torch.zeros_like(p)
            if any_point:
                q = torch.where(drawn[:, None], q, torch.zeros_like(p).scatter_(1, token, 1))
            gap = (gap - q * (i < lengths)[:, None]).clamp_(min=0)
        mass = gap.sum(1, dtype=torch.float64)
        passes = torch.where(weight >= 1, 1.0, mass / (mass + 1 - weight))
        takes = (i <= lengths) & (uniforms[:, i] < passes)
        accepted = torch.where(takes, i, accepted)
        if not _none(takes):
            gap = torch.where(_vanishes(mass, p)[:, None], p, gap)
            last = gap if last is None else torch.where(takes[:, None], gap, last)
        if i < nodes:
            p_token, q_token = p.gather(1, token)[:, 0].double(), q.gather(1, token)[:, 0].double()
            weight = torch.where(q_token > 0, (weight * p_token / q_token).clamp(max=1), 0)
            if _none(weight > 0):
                break
    columns = torch.arange(nodes, device=device)
    return Verdict(torch.where(columns < accepted[:, None], columns, -1), accepted, sample(last, emit_uniforms))


def lossy_typical(
    row_at_index: Callable[[Tensor], Tensor],
    draft: Draft,
    emit_uniforms: Tensor,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
) -> Verdict:
    """Rule F, Medusa's typical acceptance. LOSSY: the output does not have the target's law.

    A node is accepted if its parent is and p(token) > min(posterior_threshold, posterior_alpha * exp(-H(p))), H in
    nats. The longest accepted path wins, the larger sum of log p on a tie. The next token is drawn from p with
    emit_uniforms [B]; Medusa takes the argmax there.

    row_at_index(index [B]) -> p [B, V]; called for every row, then once more for the last accepted one.
    """
    device, (batch, nodes) = draft.tokens.device, draft.shape
    parent_row = (draft.parents + 1).to(device)
    log_p, threshold = torch.zeros(2, batch, nodes, device=device)
    for i in range(nodes + 1):
        p = row_at_index(torch.full((batch,), i, device=device)).float()
        bar = (posterior_alpha * torch.special.entr(p).sum(1, keepdim=True).neg().exp()).clamp(max=posterior_threshold)
        here = parent_row == i
        log_p = torch.where(here, p.gather(1, draft.tokens).log(), log_p)
        threshold = torch.where(here, bar, threshold)
    lineage = draft.lineage
    total = log_p[:, None, :].masked_fill(~lineage.to(device), 0).sum(2)
    path, length, row = _deepest(log_p.exp() > threshold, lineage, draft.valid, total)
    return Verdict(path, length, sample(row_at_index(row), emit_uniforms))

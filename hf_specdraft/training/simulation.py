"""What decoding would gain, from a teacher-forced pass over texts that the target wrote."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from .records import TrainingBatch


def simulate(matches: Tensor, anchors: Tensor, batch: TrainingBatch) -> tuple[int, int]:
    """Tokens committed and target passes made, had the batch's answers been decoded with this drafter.

    Walks every answer as the loop does: the first token is the prefill's and no pass of ours; a pass at an anchor
    commits the drafted tokens up to the first that is not the text's, and one more, and the last of those is the next
    anchor. Exact for drafts chosen by argmax: of greedy answers for greedy decoding, of sampled ones for sampling (the
    target keeps a chosen token exactly if it samples the same). committed / passes is tau; add both up over batches.

    matches: [A, S] bool, as DraftLoss returns them. anchors: [A] flattened columns (Unrolled). Where the walk meets a
    token that is no anchor, because only some were sampled, it goes on at the answer's next one.
    """
    mask = batch.loss_mask
    continues = torch.zeros_like(mask)
    continues[:, 1:] = mask[:, 1:] & mask[:, :-1] & (batch.document_ids[:, 1:] == batch.document_ids[:, :-1])
    ends = torch.ones_like(mask)
    ends[:, :-1] = ~continues[:, 1:]
    firsts = (mask & ~continues).flatten().nonzero().flatten().tolist()
    lasts = (mask & ends).flatten().nonzero().flatten().tolist()

    order = anchors.argsort()
    places, accepted = anchors[order].tolist(), matches[order].long().cumprod(1).sum(1).tolist()
    committed = passes = 0
    for column, last in zip(firsts, lasts):
        index = bisect_left(places, column)
        while index < len(places) and places[index] < last:
            step = min(accepted[index] + 1, last - places[index])
            committed, passes = committed + step, passes + 1
            index = bisect_left(places, places[index] + step)
    return committed, passes


def simulated_tau(matches: Tensor, anchors: Tensor, batch: TrainingBatch) -> float:
    """tau of one batch (`simulate`), 1.0 when nothing was left to draft."""
    committed, passes = simulate(matches, anchors, batch)
    return committed / passes if passes else 1.0

"""One call of a combined drafter: both parts' sessions, and how well the ratings of each came true."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...draft import Commit, Context, Draft
from ...policies import Threshold
from ...trees import merge, prune
from ..base import DrafterConfig, Session, TargetView

if TYPE_CHECKING:
    from .modeling_combined import CombinedDrafter


class Source:
    """A part's session, its drafts rated on a scale that both parts share.

    A rating is the chance that a node and all above it are accepted, so what a part claims of a single step is a node's
    rating over its parent's. Whether a step came true is known where its parent was committed and so was a token after
    it: that does not depend on which nodes were verified, and says the same of drafts that were not. `trust`, tokens
    that came over tokens claimed, corrects every step.
    """

    memory = 0.95  # weight of the past in the counts, per round
    weight = 2.0  # claims (in tokens) that are believed before any came true
    unrated = 0.5  # claim of a step of a drafter that rates nothing: `trust` makes it the share that came true

    def __init__(self, session: Session, config: DrafterConfig):
        self.session, self.config = session, config
        threshold = getattr(config, "confidence_threshold", 0.0)  # the loop knows that of the whole drafter only
        self.threshold = Threshold(threshold) if threshold else None
        self.hits = self.claims = self.offers = self.drafts = 0.0
        # Of the draft that waits for its verdict: parents, tokens and claims of the nodes, by row.
        self.waiting: list[tuple[list[int], list[int], list[float]]] = []
        self.offered: list[float] = []

    @property
    def trust(self) -> float:
        return (self.hits + self.weight) / (self.claims + self.weight)

    @property
    def offer(self) -> float:
        """Accepted tokens to expect of a draft that is not made yet, by the last ones. While there are none it tends to
        one token, so that a part that was poor is tried again."""
        return (self.offers + 1) / (self.drafts + 1)

    def propose(self, context: Context, asked: list[bool]) -> Draft:
        """A point draft for the rows `asked`, `confidence` on the common scale."""
        lengths = [min(n, self.config.num_assistant_tokens) * ask for n, ask in zip(context.lengths, asked)]
        nodes = min(context.nodes, self.config.tree_nodes) if context.tree and self.config.tree_nodes else max(lengths)
        # Not sampling: see CombinedDrafter.
        context = replace(context, lengths=lengths, nodes=nodes, do_sample=False)
        if self.threshold is not None:
            more = context.more
            context.more = lambda partial: [a and b for a, b in zip(more(partial), self.threshold.more(partial))]
        draft = self.session.propose(context)
        given = None if draft.confidence is None else draft.confidence.nan_to_num(0).tolist()
        parents, tokens, valid = draft.parents.tolist(), draft.tokens.tolist(), draft.valid.tolist()
        self.waiting, ratings, trust = [], [], self.trust
        for b, above in enumerate(parents):
            claims, rating = [], []
            for j, parent in enumerate(above):
                claim, known = self.unrated, 1.0 if parent < 0 else rating[parent]
                if given is not None:
                    before = 1.0 if parent < 0 else given[b][parent]
                    claim = min(1.0, given[b][j] / before) if before > 0 else 0.0
                claims.append(claim)
                rating.append(known * min(1.0, trust * claim) * valid[b][j])
            # Padding hangs nowhere.
            self.waiting.append(([p if v else -2 for p, v in zip(above, valid[b])], tokens[b], claims))
            ratings.append(rating)
        self.offered = [sum(row) for row, n in zip(ratings, lengths) if n]
        confidence = torch.tensor(ratings, device=draft.tokens.device).view(draft.shape)
        return replace(draft, law=None, confidence=confidence, confidence_kind="own")

    def observe(self, commit: Commit) -> None:
        if self.waiting:
            self.hits, self.claims = self.memory * self.hits, self.memory * self.claims
        self.offers = self.memory * self.offers + sum(self.offered)
        self.drafts = self.memory * self.drafts + len(self.offered)
        for (parents, tokens, claims), committed in zip(self.waiting, commit.tokens):
            node = -1
            for token in committed:
                steps = [j for j, parent in enumerate(parents) if parent == node]
                self.claims += sum(claims[j] for j in steps)
                node = next((j for j in steps if tokens[j] == token), None)
                if node is None:
                    break
                self.hits += 1
        self.waiting, self.offered = [], []
        self.session.observe(commit)


class CombinedSession(Session):
    """Both parts hear every commit, so either may be left out of any round."""

    def __init__(self, drafter: CombinedDrafter, view: TargetView, batch: int):
        self.drafter = drafter
        self.ngram, self.network = (
            Source(part.start(view, batch), part.config) for part in (drafter.ngram, drafter.network)
        )

    def observe(self, commit: Commit) -> None:
        self.ngram.observe(commit)
        self.network.observe(commit)

    def keep(self, rows: list[int]) -> None:
        self.ngram.session.keep(rows)
        self.network.session.keep(rows)

    def propose(self, context: Context) -> Draft:
        copied = self.ngram.propose(context, [True] * len(context.lengths))
        together = context.tree and self.drafter.config.mode == "tree"
        promised = copied.confidence.sum(1).tolist()
        asked = [n > 0 and (together or sure < self.network.offer) for n, sure in zip(context.lengths, promised)]
        if context.free_only or not any(asked):
            return replace(copied, free=True)
        made = self.network.propose(context, asked)
        if not together:
            copied = replace(copied, valid=copied.valid & ~made.valid.any(1, keepdim=True))
        # A token that both propose is as likely as if each had a chance of its own to be right.
        both = merge(copied, made, agreed=lambda first, later: 1 - (1 - first) * (1 - later))
        rank = both.confidence.cpu().sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
        return prune(both, rank < context.nodes, looked_at_token=True)

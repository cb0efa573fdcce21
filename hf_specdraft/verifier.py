"""Verification of one round: which rule a draft's law asks for, and the target's laws it needs.

| draft                                       | processors read prefixes | rule                                    |
|---------------------------------------------|--------------------------|-----------------------------------------|
| chain, greedy request                       | no                       | C by the fused kernel                   |
| anything without a law                      | no                       | B, C by one choice per row              |
| drawn chains                                | no                       | E; A when config.verification="token",  |
|                                             |                          | by the fused kernel if warped by at     |
|                                             |                          | most a temperature                      |
| drawn trees, mixed rows                     | no                       | A, D                                    |
| anything                                    | yes                      | A, B, C, D along the accepted path      |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import kernels, verification
from .draft import Draft, Verdict
from .drafters.base import DrafterConfig
from .recording import Recorder
from .rows import Rows
from .sampling import Scorer


class Verifier:
    """The verification step of one call."""

    def __init__(self, scorer: Scorer, rows: Rows, recorder: Recorder, config: DrafterConfig):
        self.scorer, self.rows, self.recorder, self.config = scorer, rows, recorder, config
        if config.lossy_typical_acceptance and not scorer.prefix_free:
            raise ValueError(
                "lossy_typical_acceptance looks at all nodes at once and cannot serve processors that read prefixes; "
                "drop those processors or verify losslessly"
            )

    def __call__(self, draft: Draft, logits: Tensor, active: list[int]) -> Verdict:
        """Judge a draft by logits [B, 1+N, V]; `active` are the request's rows in the pass."""
        if draft.law is not None:
            draft.law = draft.law.checked()
        batch, nodes = draft.shape
        vocab = logits.shape[-1]
        draw = self._noise(draft, active).to(logits.device)
        uniforms = torch.rand(batch, nodes + 1, device=logits.device) if self.scorer.do_sample else draw
        accept, emit = uniforms[:, :nodes], uniforms[:, -1]
        if not self.scorer.prefix_free:
            return verification.walk(self._prefixed(draft, logits, active), draft, accept, emit, vocab, draw)
        row_at = partial(self._row_at, logits)
        if self.config.lossy_typical_acceptance and nodes and self.scorer.do_sample:
            return verification.lossy_typical(row_at, draft, emit)
        drawn = draft.law is not None and bool(draft.law.rows.any())
        temperature = self.scorer.temperature
        by_token = self.config.verification == "token"
        if draft.is_chain and temperature is not None and (drawn and by_token or not self.scorer.do_sample):
            accepted, token = kernels.verify_chain(
                logits,
                draft.tokens,
                draft.valid.sum(1),
                greedy=not self.scorer.do_sample,
                temperature=temperature,
                law=draft.law,
                accept_uniforms=accept,
                emit_uniforms=emit,
            )
            step = torch.arange(nodes, device=accepted.device)
            return Verdict(torch.where(step < accepted[:, None], step, -1), accepted, token)
        if not drawn:
            chosen = self.scorer.choose(logits, draw)
            return verification.match(chosen, draft.tokens.to(chosen.device), draft.parents, draft.valid, draft.lineage)
        if draft.is_chain and not by_token and bool(draft.law.rows.all()):
            return verification.block(row_at, draft, accept, emit, vocab)
        return verification.walk(row_at, draft, accept, emit, vocab, draw)

    def _noise(self, draft: Draft, active: list[int]) -> Tensor:
        """[B, 1+N] uniforms by row of the logits, each of the position that the row decides; zeros if greedy."""
        if self.scorer.noise is None:
            return torch.zeros(draft.shape[0], draft.shape[1] + 1)
        committed = torch.tensor([len(self.rows.new[row]) for row in active])
        depth = torch.nn.functional.pad(draft.depth, (1, 0))
        return self.scorer.noise.at(active, committed[:, None] + depth)

    def _row_at(self, logits: Tensor, index: Tensor, alive: Tensor | None = None) -> Tensor:
        """[B, V] law at row `index` [B] of each batch row, after processors that read no prefix."""
        at = torch.arange(len(index), device=logits.device)
        return self.scorer.distribution(self.scorer.warp(logits[at, index.to(at.device)]))

    def _prefixed(self, draft: Draft, logits: Tensor, active: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
        """Probabilities of each row's current node after processors that read its prefix: called along the accepted
        path only, in order, and never below a stop."""
        parents, tokens = draft.parents.tolist(), draft.tokens.tolist()
        stopped: set[int] = set()
        self.recorder.processed = {}

        def row_at(index: Tensor, alive: Tensor) -> Tensor:
            where, going = index.tolist(), alive.tolist()
            out = self.scorer.distribution(logits[torch.arange(len(where)), where].float())
            rows, prefixes, at = [], [], []
            for b, row in enumerate(active):
                if not going[b] or b in stopped or self.rows.done[row]:
                    continue
                nodes, node = [], where[b] - 1
                while node >= 0:
                    nodes.insert(0, node)
                    node = parents[b][node]
                path = [tokens[b][node] for node in nodes]
                columns = [0, *(node + 1 for node in nodes)]
                scores = partial(self._scores_along, b, row, columns[:-1], logits)
                if path and self.rows.ends(row, path, scores):
                    stopped.add(b)
                    continue
                rows.append(row)
                at.append(b)
                prefixes.append(self.rows.prefix(row, path))
            if at:
                raw = logits[torch.tensor(at), [where[b] for b in at]].float()
                scores = self.scorer.process(raw, rows, prefixes)
                out[at] = self.scorer.distribution(scores)
                for i, b in enumerate(at):
                    self.recorder.processed[b, where[b]] = scores[i]
            return out

        return row_at

    def _scores_along(self, b: int, row: int, columns: list[int], logits: Tensor) -> tuple | None:
        """The scores plain generate would hold at this point, for a stopping criterion that reads them."""
        if not self.recorder.scores:
            return None
        ahead = [self.recorder.score_of(b, column, logits) for column in columns]
        return self.rows.scores(row, len(self.rows.new[row]), ahead)

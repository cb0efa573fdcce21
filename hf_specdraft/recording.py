"""Scores, logits, hidden states and attentions of the committed tokens, in the shapes plain generate returns.

Entry t of each tuple belongs to the t-th new token. Where rows of a batch end at different lengths, a row's entries
after its own end are zero; plain generate fills them by running the model on padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .rows import Rows
from .sampling import Scorer
from .target import TargetPass


class Recorder:
    """Collects what the caller asked for; costs nothing when nothing was asked.

    processed: scores that were already computed for (row of the pass, row of the logits), by processors that may only
        be called once per prefix.
    """

    def __init__(self, config: GenerationConfig, rows: Rows, target: TargetPass, scorer: Scorer):
        on = bool(config.return_dict_in_generate)
        self.scores = on and bool(config.output_scores)
        self.logits = on and bool(config.output_logits)
        self.hidden = on and bool(config.output_hidden_states)
        self.attentions = on and bool(config.output_attentions)
        self.rows, self.target, self.scorer = rows, target, scorer
        self.processed: dict[tuple[int, int], Tensor] = {}
        self._first: dict[str, Any] = {}

    def prefill(self, outputs: Any) -> None:
        """The first step's hidden states and attentions are those of the whole prompt."""
        if self.hidden:
            self._first["hidden_states"] = self._picked(outputs.hidden_states)
        if self.attentions:
            self._first["attentions"] = outputs.attentions
        self.start, self.columns = list(self.target.rows.start), self.target.rows.columns

    def row(self, b: int, row: int, where: list[int], logits: Tensor, outputs: Any) -> None:
        """Row `b` of the pass is the request's `row`; its next tokens come from the pass's columns `where`."""
        for i, column in enumerate(where):
            record = {}
            if self.scores:
                record["scores"] = self.score_of(b, column, logits)
            if self.logits:
                record["logits"] = logits[b, column].float().clone()
            if outputs is not None and self.hidden:
                record["hidden_states"] = [
                    None if h is None else h[b, column].clone() for h in self._picked(outputs.hidden_states)
                ]
            if outputs is not None and self.attentions:
                record["attentions"] = [
                    self._attention(layer, a, b, row, where[: i + 1]) for layer, a in enumerate(outputs.attentions)
                ]
            self.rows.records[row].append(record)

    def score_of(self, b: int, column: int, logits: Tensor) -> Tensor:
        """[V] processed scores of one row of the pass."""
        known = self.processed.get((b, column))
        return self.scorer.warp(logits[b, column]) if known is None else known

    def cut(self, row: int, length: int) -> None:
        """Forget what lies behind a stop."""
        del self.rows.records[row][length:]

    def outputs(self) -> dict[str, tuple | None]:
        """The fields of transformers' output class."""
        steps = max(map(len, self.rows.records), default=0)
        result: dict[str, tuple | None] = dict.fromkeys(("scores", "logits", "hidden_states", "attentions"))
        for name in ("scores", "logits"):
            if getattr(self, name):
                result[name] = tuple(_stacked([r[name] for r in self._at(t)]) for t in range(steps))
        for name, wanted in (("hidden_states", self.hidden), ("attentions", self.attentions)):
            if wanted:
                later = tuple(self._layers(name, t) for t in range(1, steps))
                result[name] = (self._first[name], *later)
        return result

    def _at(self, step: int) -> list[dict | None]:
        return [_Missing if step >= len(records) else records[step] for records in self.rows.records]

    def _layers(self, name: str, step: int) -> tuple:
        rows = [record[name] for record in self._at(step)]
        count = max(len(layers) for layers in rows if layers is not None)
        stacked = (_stacked([None if row is None else row[i] for row in rows]) for i in range(count))
        at = 1 if name == "hidden_states" else 2
        return tuple(None if s is None else s.unsqueeze(at) for s in stacked)

    def _picked(self, hidden_states: tuple) -> tuple:
        """As transformers returns them: None for layers that the caller's list leaves out."""
        wanted = self.target.user_hidden
        if isinstance(wanted, bool):
            return hidden_states
        count = len(hidden_states)
        kept = {i % count for i in ([wanted] if isinstance(wanted, int) else wanted)}
        return tuple(h if i in kept else None for i, h in enumerate(hidden_states))

    def _attention(self, layer: int, weights: Tensor | None, b: int, row: int, path: list[int]) -> Tensor | None:
        """[heads, K] one token's attention, moved from the pass's columns to those plain generate would have."""
        if weights is None:
            return None
        held = self.target.rows
        start, columns = held.start[b], held.columns
        live = torch.tensor([*range(start, columns), *(columns + c for c in path)])
        total = self.start[row] + len(live)
        stored = weights.shape[-1]
        offset, length = (0, stored) if held.is_static else (columns + weights.shape[-2] - stored, None)
        if length is None:
            window = getattr(held.cache.layers[layer], "sliding_window", None)
            length = total if window is None else min(total, window)
        out = weights.new_zeros(weights.shape[1], length)
        shown = live[-min(len(live), length) :]
        first = self.start[row] + len(live) - len(shown)
        at = first if held.is_static else first - (total - length)
        out[:, at : at + len(shown)] = weights[b, :, path[-1], (shown - offset).to(weights.device)]
        return out


class _NoRecord(dict):
    def __missing__(self, key: str) -> None:
        return None


_Missing = _NoRecord()


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    shape = next((part for part in parts if part is not None), None)
    if shape is None:
        return None
    return torch.stack([torch.zeros_like(shape) if part is None else part for part in parts])

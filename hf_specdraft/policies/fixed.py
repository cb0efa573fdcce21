"""Always drafting."""

from __future__ import annotations

from .base import Policy


class FixedLength(Policy):
    """Always drafts: the same length, or transformers' heuristic (+2 after full acceptance, -1 otherwise) per row."""

    def __init__(self, length: int, heuristic: bool = False, batch: int = 1):
        self.heuristic = heuristic
        self.lengths = [length] * batch

    def before(self, rows: list[int], outlook=None) -> list[int]:
        return [self.lengths[row] for row in rows]

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        if not self.heuristic:
            return
        for row, depth, tokens in zip(rows, offered, committed):
            if depth:
                self.lengths[row] = self.lengths[row] + 2 if len(tokens) > depth else max(1, self.lengths[row] - 1)

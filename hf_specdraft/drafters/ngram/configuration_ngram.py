"""Settings of the drafter without weights."""

from __future__ import annotations

from ..base import DrafterConfig


class NgramConfig(DrafterConfig):
    """Retrieval by longest-suffix matching.

    scoring: "blend" lets all occurrences of the last token vote, long matches more (`matcher.blend`); "suffix" is
        SuffixDecoding (2411.04975) as published (`matcher.suffix`).
    max_depth: the longest match looked for; under "suffix" the depth of its trees (match and draft together; published
        with 64).
    max_occurrences: occurrences that are looked at closely; the longest matching and the most recent come first.
    min_prob: nodes whose estimated probability of acceptance is lower are not drafted ("suffix" publishes 0.1). 0
        always drafts as much as is asked for: whether it pays is the policy's business.
    escape: "blend" only. A match of M tokens goes on as before with probability M / (M + escape). Measured
        on SmolLM2's answers it lies between 1 (longest accepted chains) and 2 (best estimates).
    recent: "blend" only. The most frequent of so many last tokens are guessed where no match is likely; 0: never. In
        trees of 10 nodes it is worth 0.14 tokens a round on ordinary answers.
    max_spec_factor, max_spec_offset: "suffix" only. A match of M tokens drafts up to factor * M + offset.
    corpus_size: length of the `corpus` buffer, see `NgramDrafter.set_corpus`, which sets it.
    """

    model_type = "specdraft_ngram"

    # As many as transformers' prompt lookup is usually given, in chains as in trees.
    num_assistant_tokens: int = 10
    tree_nodes: int = 10
    scoring: str = "blend"
    max_depth: int = 32
    max_occurrences: int = 64
    min_prob: float = 0.0
    escape: float = 1.5
    recent: int = 256
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    corpus_size: int = 0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.scoring not in ("blend", "suffix"):
            raise ValueError(f"scoring must be 'blend' or 'suffix', got {self.scoring!r}")
        for name, least in (("max_depth", 2), ("max_occurrences", 1), ("recent", 0), ("corpus_size", 0), ("escape", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.min_prob <= 1:
            raise ValueError(f"min_prob is a probability, got {self.min_prob}")
        if self.max_spec_factor < 0:
            raise ValueError(f"max_spec_factor must not be negative, got {self.max_spec_factor}")

    @classmethod
    def tiny(cls, **overrides) -> NgramConfig:
        return cls(**{"num_assistant_tokens": 4, "tree_nodes": 6, "max_depth": 8, **overrides})

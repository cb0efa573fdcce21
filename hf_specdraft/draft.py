"""The records that pass between the steps of one round.

Shape legend of the whole package: B batch rows, N draft nodes, K candidates per slot or siblings per node, S slots of
a block, L context length, D depth, V target vocabulary, H hidden size. p is always the target's law, q the drafter's.

A draft is a tree of tokens under the anchor (the last committed token, not yet through the target). A chain is the
tree whose parents are -1, 0, 1, ... Structure (`parents`, `valid`) lives on the CPU, where the loop reads it without
waiting for a device; tokens and laws live where the drafter made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass
class Law:
    """The exact law each node was drawn from (Leviathan et al. 2211.17192: q).

    Only for tokens that were really drawn from these probabilities and kept whatever came out. A row whose tokens were
    chosen (argmax, top-k, retrieval) or filtered after the draw has no law: leave `rows` False for it, and the verifier
    uses the point-mass rule, which is exact for any choice.

    probs: [B, N, K] float32, row j is the law node j was drawn from; sums to 1 (before removing earlier siblings).
    ids: [B, N, K] int64 token ids of `probs`, or None when K is the vocabulary (may be narrower than the target's V).
    rows: [B] bool on the CPU, which rows were drawn. The others are point rows.
    replacement: whether siblings were drawn with replacement. Without it, the k-th sibling's law is `probs` with the
        earlier siblings removed and renormalised; `probs` holds the unreduced law either way.
    """

    probs: Tensor
    ids: Tensor | None
    rows: Tensor
    replacement: bool = True

    def checked(self) -> Law:
        """This law, with zeros for nodes whose probabilities are not finite or do not sum to about 1.

        Under every rule a node of no law is rejected whatever its token is, and the target's own law decides: exact
        without knowing how the token came about, and without waiting for a device.
        """
        broken = ~((self.probs.sum(-1) - 1).abs() < 0.01)  # true for NaN, too
        if broken.device.type == "cpu" and not broken.any():
            return self
        return replace(self, probs=self.probs.masked_fill(broken[..., None], 0))

    def at(self, index: Tensor, vocab_size: int) -> Tensor:
        """Dense law [B, V] of node `index` [B] of each row."""
        batch = torch.arange(len(index), device=self.probs.device)
        index = index.to(self.probs.device)
        probs = self.probs[batch, index]
        if self.ids is None:
            return torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[-1]))
        return probs.new_zeros(len(index), vocab_size).scatter_add_(1, self.ids[batch, index], probs)


@dataclass
class Draft:
    """What a session proposes.

    tokens: [B, N] int64, target token ids. Siblings stand in draw order.
    parents: [B, N] int64 on the CPU, index of the parent node, -1 for the anchor. Parents come before their children.
    valid: [B, N] bool on the CPU. Nodes that are not valid are padding and never verified; a valid node's parent is
        valid.
    law: the drawn rows' law, or None when every row is a point draft.
    confidence: [B, N] float, the drafter's own estimate that the node is accepted, optional.
    confidence_kind: what a node's confidence had seen. "prior": no token of this draft. "pre": the tokens before its
        own; a cut may stop at a node that is low, but not look past it at later ones. "own": its own token too. Any
        other use of it in a cut makes drawn rows point rows (`trees.prune`; Leviathan's law asks for non-anticipation).
    evidence: the Block the draft was made from, for correctors and editors.
    free: made without the network, by a drafter that has one: its cost says nothing about others.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    law: Law | None = None
    confidence: Tensor | None = None
    confidence_kind: str = "own"
    evidence: Any = None
    free: bool = False
    # Set by `chain`, so that the loop need not compare parents to know.
    is_chain: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    @cached_property
    def lineage(self) -> Tensor:
        """[B, N, N] bool on the CPU: entry (j, i) says that node i is j or an ancestor of j."""
        from .trees import ancestors

        return ancestors(self.parents, self.valid)

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] int64 on the CPU: 1 for children of the anchor; padding of a tree has 1 too."""
        if self.is_chain:
            return torch.arange(1, self.shape[1] + 1).expand(self.shape)
        return self.lineage.sum(2)

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Draft:
        """A draft of no nodes: the round is one plain decoding step."""
        return cls.chain(torch.zeros(batch, 0, dtype=torch.long, device=device), [0] * batch)

    @classmethod
    def chain(cls, tokens: Tensor, lengths: list[int], **fields) -> Draft:
        """A chain per row: `tokens` [B, N], the first `lengths[b]` of row b are real."""
        batch, nodes = tokens.shape
        parents = torch.arange(-1, nodes - 1).expand(batch, nodes)
        valid = torch.arange(nodes) < torch.tensor(lengths, dtype=torch.long)[:, None]
        return cls(tokens, parents, valid, is_chain=True, **fields)


@dataclass
class Block:
    """A parallel drafter's raw output for the slots that draft, for correctors and editors.

    logits: [B, S, K] unwarped.
    ids: [K] target ids of the last dimension, None when they are the target's own.
    hidden: [B, S, H] the states the logits were made from.
    anchor: [B] the token the block continues.
    memory: what the corrector has kept of the context (`correctors.Memory`), None when it keeps nothing.
    confidence: [B, S'] logits of the confidence head along the chain drafted from it, before calibration; None without.
    share: [B] how much of the block its length head finds worth verifying, None without one.
    """

    logits: Tensor
    ids: Tensor | None
    hidden: Tensor
    anchor: Tensor
    memory: Any = None
    confidence: Tensor | None = None
    share: Tensor | None = None


@dataclass
class Verdict:
    """What the target decided about a draft.

    path: [B, D] int64, node indices of the accepted path from the anchor down, -1 where the path has ended.
    length: [B] int64, accepted nodes per row.
    next_token: [B] int64, the token emitted after the path (a correction, or the bonus token).
    """

    path: Tensor
    length: Tensor
    next_token: Tensor


@dataclass
class Features:
    """Hidden states of the target at committed positions, rows left-justified.

    hidden: [B, C, n*H] the layers the drafter's config names, concatenated in its order; zeros beyond `counts`.
    counts: positions per row (host integers).
    start: [B] host integers, the row's position (0 = its first unpadded token) of `hidden[:, 0]`.
    """

    hidden: Tensor
    counts: list[int]
    start: list[int]


@dataclass
class Commit:
    """What became certain since the session last heard: after prefill, the prompt and the first token; after a round,
    the accepted path and the next token. Features cover the tokens before those, so that afterwards every committed
    position but the last (the anchor) is known.

    tokens: per row, the new committed token ids (host lists, without padding; empty for a finished row).
    features: the target's hidden states, or None when the drafter asked for none.
    rejected: those of the chain's nodes that were verified and not kept, for a drafter that `wants_rejected`; None
        after prefill, and after rounds without a draft.
    """

    tokens: list[list[int]]
    features: Features | None = None
    rejected: Features | None = None


@dataclass
class Partial:
    """A draft that could go on, at the latest of its tokens: what `Policy.more` decides by.

    step: tokens drafted so far in each row that goes on. tokens: [B] the latest. logits: [B, K] it was taken from,
    warped where it was drawn. hidden: [B, H] what those logits were made from, None where the drafter does not tell.
    fed: [B, H] the network's state after the token before the latest one, which tells how good that one was
        (SpecDec++); None likewise.
    chances: [B, n] of a drafter that drafts by the block: the probabilities it gave to the tokens drafted since it was
        asked last, each given those before.
    own: what the drafter's own rule says of each row, None where it has none. A policy without a rule follows it.
    """

    step: int
    tokens: Tensor
    logits: Tensor
    hidden: Tensor | None = None
    fed: Tensor | None = None
    chances: Tensor | None = None
    own: list[bool] | None = None
    # [K] ascending target ids of the logits, None when they are the target's own.
    ids: Tensor | None = None

    def follow(self) -> list[bool]:
        """The rows that the drafter itself would go on with: all where it has no rule."""
        return [True] * len(self.tokens) if self.own is None else self.own


@dataclass
class Context:
    """What a session may see when it proposes.

    anchor: [B] int64 on the target's device, the last committed token of each row.
    position: per row, the anchor's position in its row (0 = the first unpadded token), host integers.
    lengths: per row, how deep a draft may go; 0 asks for none.
    nodes: how many nodes a row's tree may have. Equal to the greatest length when only a chain is possible.
    tree: whether the target accepts trees.
    do_sample: whether the request samples.
    warp: the request's prefix-free logits warpers, [..., V] scores -> scores. Drawing drafts from warped scores is what
        keeps acceptance high under top-k and top-p.
    """

    anchor: Tensor
    position: list[int]
    lengths: list[int]
    nodes: int
    tree: bool = False
    do_sample: bool = False
    warp: Any = field(default=lambda scores: scores)
    # `Policy.more`: asked after each token of a draft that could go on; which rows draft on.
    more: Callable[[Partial], list[bool]] = Partial.follow
    # The network does not pay at present: only what is drafted without it is wanted.
    free_only: bool = False

"""The exact law of a round's first two tokens under a policy, by enumeration of all drafts: what would show bias.

p1 [V], p2 [V, V] are the target's laws of the first token and of the second given the first; q1, q2 the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_specdraft.draft import Block, Draft, Law, Partial
from hf_specdraft.trees import prune


def tables(seed: int, vocab: int = 3) -> tuple[Tensor, ...]:
    """p1, p2, q1, q2, float64: the drafter's some way off the target's."""
    generator = torch.Generator().manual_seed(seed)
    p1, p2, n1, n2 = (
        torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1)
        for shape in ((vocab,), (vocab, vocab), (vocab,), (vocab, vocab))
    )
    return p1, p2, (p1 + n1) / 2, (p2 + n2) / 2


def drafts(q1: Tensor, q2: Tensor, **fields) -> tuple[Draft, Tensor]:
    """Every chain of two tokens as a row of one drawn draft, and the probability [V * V] of each."""
    vocab = len(q1)
    first, second = (part.flatten() for part in torch.meshgrid(*[torch.arange(vocab)] * 2, indexing="ij"))
    rows = len(first)
    laws = torch.stack((q1.expand(rows, vocab), q2[first]), 1)
    law = Law(laws, None, torch.ones(rows, dtype=torch.bool))
    block = Block(laws.log(), None, torch.zeros(rows, 2, 1), torch.zeros(rows, dtype=torch.long))
    chain = Draft.chain(torch.stack((first, second), 1), [2] * rows, law=law, evidence=block, **fields)
    return chain, q1[first] * q2[first, second]


def output(p1: Tensor, p2: Tensor, whole: Draft, chances: Tensor, cut: Draft) -> Tensor:
    """[V, V] law of the first two tokens when each row of `whole`, which comes with `chances`, is verified as `cut`
    says: token by token against its law (rule A), a row without law as a point draft (rule B)."""
    law = torch.zeros_like(p2)
    drawn = torch.zeros(len(chances), dtype=torch.bool) if cut.law is None else cut.law.rows
    for row, (tokens, chance, kept) in enumerate(zip(whole.tokens.tolist(), chances, cut.valid.sum(1).tolist())):
        first, second = tokens
        laws = whole.law.probs[row] if drawn[row] else torch.eye(len(p1), dtype=p1.dtype)[tokens]
        accept, other = verified(p1, laws[0], first) if kept > 0 else (0.0, p1)
        law += chance * (1 - accept) * other[:, None] * p2
        then, rest = verified(p2[first], laws[1], second) if kept > 1 else (0.0, p2[first])
        law[first] += chance * accept * (1 - then) * rest
        law[first, second] += chance * accept * then
    return law


def verified(p: Tensor, q: Tensor, token: int) -> tuple[float, Tensor]:
    """The probability that a token drawn from q is accepted, and the law of what comes where it is not."""
    rest = (p - q).clamp(min=0)
    return float((p[token] / q[token]).clamp(max=1)), rest / rest.sum() if float(rest.sum()) else p


def distance(seed: int, decide: Callable[[Draft], Draft], **fields) -> float:
    """Total variation between a policy's output and the target's law; 0 but for rounding when there is no bias."""
    p1, p2, q1, q2 = tables(seed)
    whole, chances = drafts(q1, q2, **fields)
    return float((output(p1, p2, whole, chances, decide(whole)) - p1[:, None] * p2).abs().sum() / 2)


def token_by_token(rule) -> Callable[[Draft], Draft]:
    """What a sequential drafter does with a rule: it asks behind the first token, which stays."""

    def decide(draft: Draft) -> Draft:
        going = torch.tensor(rule.more(Partial(1, draft.tokens[:, 0], draft.evidence.logits[:, 0])))
        return prune(draft, torch.stack((torch.ones_like(going), going), 1), looked_at_token=False)

    return decide

"""Rules that end a draft behind an unsure token.

| name | a row's draft ends behind the token at which | source |
| --- | --- | --- |
| hf_threshold | its own probability is below a threshold, re-fitted as outcomes come in | transformers |
| svip | sqrt(0.15 entropy) of its law is above a threshold | SVIP 2411.18462 |
| kangaroo | its law's largest probability, or the product of those so far, is below a threshold | Kangaroo 2404.18911 |
| cost_aware | one more token would lower the expected tokens per second | ours |

All of them look at the laws of the draft's tokens up to the latest, `hf_threshold` at the tokens, too; the latest
stays in the draft and is verified. So whether a token is drafted depends on those before it alone, which keeps the
law of the output (Leviathan et al. 2211.17192), where dropping the unsure token would not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..draft import Block, Draft, Partial
from ..trees import prune
from .base import AsAsked, Situation


class StopRule(AsAsked):
    """Drafts of the lengths the caller asks for, stopped where `unsure` says so.

    A drafter that asks after each token is stopped there. A chain that came at once, or block by block, is cut behind
    its first unsure slot, by the blocks' own laws. Of trees nothing is cut.
    """

    def __init__(self, situation: Situation):
        super().__init__(situation)
        self._asked = False

    def unsure(self, partial: Partial) -> Tensor:
        """[B] bool on the device of the logits: rows whose draft should end behind its latest token. Asked for steps 1,
        2, ... of every draft in turn; step 1 begins a new one."""
        raise NotImplementedError

    def more(self, partial: Partial) -> list[bool]:
        if partial.chances is not None:
            return partial.follow()  # by the block: its slots are cut when it is there
        self._asked = True
        return (~self.unsure(partial)).tolist()

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        asked, self._asked = self._asked, False
        block = draft.evidence
        if asked or not draft.is_chain or not isinstance(block, Block):
            return draft
        if not 2 <= draft.shape[1] <= block.logits.shape[1]:
            return draft
        stops = [self.unsure(_at_slot(draft, block, slot)) for slot in range(draft.shape[1] - 1)]
        keep = F.pad(~torch.stack(stops, 1).cpu(), (1, 0), value=True).cumprod(1).bool()
        # Whether there are nodes behind a node may depend on its own token from here on, so that no later cut may
        # look past a node, as it might at confidences that had seen no token.
        kind = "pre" if draft.confidence_kind == "prior" else draft.confidence_kind
        draft = replace(draft, confidence_kind=kind)
        return prune(draft, keep, looked_at_token=False) if (draft.valid & ~keep).any() else draft


def _at_slot(draft: Draft, block: Block, slot: int) -> Partial:
    return Partial(slot + 1, draft.tokens[:, slot], block.logits[:, slot], block.hidden[:, slot], ids=block.ids)


def chance(partial: Partial) -> Tensor:
    """[B] float32 probability of the latest token under the law it was taken from."""
    index = partial.tokens.to(partial.logits.device)
    if partial.ids is not None:
        index = torch.searchsorted(partial.ids, index.contiguous()).clamp(max=len(partial.ids) - 1)
    taken = partial.logits.gather(1, index[:, None])[:, 0]
    return (taken - partial.logits.logsumexp(-1)).float().exp()


def top(partial: Partial) -> Tensor:
    """[B] float32 largest probability of the law that the latest token was taken from."""
    return (partial.logits.amax(-1) - partial.logits.logsumexp(-1)).float().exp()


class Threshold(StopRule):
    """The caller's own `assistant_confidence_threshold`, beside whatever policy there is: it has no lengths to say.

    Where nothing asks token by token, drafts that nobody drew are cut by their nodes' own ratings: paths that are less
    likely than the threshold go.
    """

    def __init__(self, threshold: float):
        self.threshold, self._asked = threshold, False

    def unsure(self, partial: Partial) -> Tensor:
        return ~(chance(partial) >= self.threshold)  # NaN is unsure, too

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        rated = draft.confidence is not None and draft.confidence_kind == "own" and draft.law is None
        if not self._asked and rated and draft.shape[1]:
            keep = (draft.confidence >= self.threshold).cpu()
            return prune(draft, keep, looked_at_token=True) if (draft.valid & ~keep).any() else draft
        return super().cut(draft, going)


class HFThreshold(StopRule):
    """transformers' confidence stop. online: re-fit the threshold after each round, as transformers does where
    scikit-learn is installed: the one with the least (false positive rate + 3 x false negative rate) of telling the
    tokens that were accepted by their probability, once there are more than 5 and of both kinds.

    Counted are the tokens that a rule is asked about (not a draft's last one) and that are verified: rows that others
    drafted, as beside an n-gram drafter, tell nothing. Rows of a batch share the threshold.
    """

    name = "hf_threshold"
    remembered = 2000  # tokens; transformers keeps all of a call

    def __init__(self, situation: Situation, threshold: float = 0.4, online: bool = True):
        super().__init__(situation)
        self.threshold, self.online = threshold, online
        self._asked_about: list[tuple[Tensor, Tensor]] = []  # per step, [B] tokens and their chances
        self._verified: list[list[tuple[int, float]]] = []  # the same by row, of tokens that are in the draft
        self._known: deque[tuple[float, bool]] = deque(maxlen=self.remembered)

    @classmethod
    def check(cls, threshold: float, **others) -> None:
        _refuse_no_share(cls, threshold)

    def unsure(self, partial: Partial) -> Tensor:
        sure = chance(partial)
        if self.online:
            self._asked_about.append((partial.tokens, sure))
        return ~(sure >= self.threshold)

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        draft = super().cut(draft, going)
        if self._asked_about:
            tokens, sure = (torch.stack(part, 1) for part in zip(*self._asked_about))
            paths = [list(zip(*row)) for row in zip(tokens.tolist(), sure.nan_to_num(0).tolist())]
            nodes = zip(draft.parents.tolist(), draft.tokens.tolist(), draft.valid.tolist())
            self._verified = [_within(path, *row) for path, row in zip(paths, nodes)]
            self._asked_about = []
        return draft

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        super().observe(rows, offered, committed)
        if not self._verified:
            return
        verified, self._verified = self._verified, []
        for path, tokens in zip(verified, committed):
            for (token, sure), came in zip(path, tokens):
                self._known.append((sure, token == came))
                if token != came:
                    break
        sure, right = (torch.tensor(part) for part in zip(*self._known)) if self._known else ([], [])
        if len(sure) > 5 and right.any() and not right.all():
            self.threshold = best_threshold(sure, right)


def _within(
    path: list[tuple[int, float]], parents: list[int], tokens: list[int], valid: list[bool]
) -> list[tuple[int, float]]:
    """The part of a path of (token, chance) that a row's nodes hold, from the anchor down."""
    node = -1
    for depth, (token, _) in enumerate(path):
        children = (j for j, real in enumerate(valid) if real and parents[j] == node and tokens[j] == token)
        node = next(children, None)
        if node is None:
            return path[:depth]
    return path


def best_threshold(chances: Tensor, right: Tensor) -> float:
    """The threshold on `chances` [n] that tells which tokens were `right` [n] (bool, both kinds) at the least
    FPR + 3 FNR; the greatest of equally good ones."""
    chances, order = chances.sort(descending=True)
    hits, misses = (kind[order].cumsum(0) for kind in (right, ~right))
    cost = misses / misses[-1] + 3 * (1 - hits / hits[-1])
    within = F.pad(chances[1:] == chances[:-1], (0, 1))  # equal chances pass together
    return float(chances[cost.masked_fill(within, torch.inf).argmin()])


def _refuse_no_share(rule: type[StopRule], threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold of policy {rule.name} must be in [0, 1], got {threshold}")


class SVIP(StopRule):
    """Stops where a lower bound of the acceptance, 1 - sqrt(c entropy), is low: needs no training, one pass's law
    tells. Entropy in nats; c = 0.15, as published. threshold: infinity never stops, 0 always."""

    name = "svip"
    factor = 0.15

    def __init__(self, situation: Situation, threshold: float = 0.3):
        super().__init__(situation)
        self.threshold = threshold

    @classmethod
    def check(cls, threshold: float) -> None:
        if not threshold >= 0:
            raise ValueError(f"threshold of policy {cls.name} must not be negative, got {threshold}")

    def unsure(self, partial: Partial) -> Tensor:
        entropy = torch.special.entr(partial.logits.float().softmax(-1)).sum(-1)
        return ~((self.factor * entropy).sqrt() <= self.threshold)


class Kangaroo(StopRule):
    """Stops where the drafter's largest probability is below the threshold; cumulative: the product of those so far,
    the estimate that the whole chain is accepted."""

    name = "kangaroo"

    def __init__(self, situation: Situation, threshold: float = 0.6, cumulative: bool = False):
        super().__init__(situation)
        self.threshold, self.cumulative = threshold, cumulative
        self._product: Tensor | None = None

    @classmethod
    def check(cls, threshold: float, **others) -> None:
        _refuse_no_share(cls, threshold)

    def unsure(self, partial: Partial) -> Tensor:
        sure = top(partial)
        if self.cumulative:
            sure = self._product = sure if partial.step == 1 else sure * self._product
        return ~(sure >= self.threshold)


class CostAware(StopRule):
    """Stops where a token more would lower the expected tokens per second of the round.

    After n tokens of largest probabilities a_1, ..., a_n a round is expected to give 1 + a_1 + a_1 a_2 + ... tokens,
    and takes the target's pass over n nodes and its share of the draft; the next token is taken to be as likely as the
    latest. Until the costs are known, drafts have the length the caller asks for.
    """

    name = "cost_aware"

    def __init__(self, situation: Situation):
        super().__init__(situation)
        self.costs = situation.costs()
        self.depth, self.sequential = max(situation.inner.lengths), situation.drafter.is_sequential
        self._product: Tensor | None = None

    def seconds(self, nodes: int) -> float:
        """Of a round with a chain of `nodes` nodes."""
        share = nodes / self.depth if self.sequential else 1.0
        return self.costs.seconds(nodes) + share * self.costs.draft

    def unsure(self, partial: Partial) -> Tensor:
        sure = top(partial).nan_to_num(0)
        if partial.step == 1:
            self._product, self._tokens = torch.ones_like(sure), torch.ones_like(sure)
        self._product = self._product * sure
        self._tokens = self._tokens + self._product
        if not self.costs.known:
            return torch.zeros_like(sure, dtype=torch.bool)
        longer = (self._tokens + self._product * sure) / self.seconds(partial.step + 1)
        return longer <= self._tokens / self.seconds(partial.step)

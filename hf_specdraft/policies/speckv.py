"""SpecKV's gamma controller (2605.02888): how deep to draft next, by how sure the last drafts were.

Not the published form, which measured its features over the very round whose length it chose, and sought tokens per
round, which the greatest length always wins. Here a round's length is chosen before it, from the rounds before (so
nothing drawn decides about itself), for the most tokens per SECOND, with the chances that the first 1, 2, ... tokens
are accepted learnt one by one: a mean acceptance rate at one length does not tell that at another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..draft import Block, Draft, Partial
from .base import Policy, Situation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..drafters.base import Drafter

FEATURES = (
    "mean_draft_entropy",
    "mean_draft_confidence",
    "max_draft_entropy",
    "min_draft_confidence",
    "compression",
    "level",
)
# The published codes: 16-bit, 8-bit and 4-bit weights of the target.
COMPRESSION = {"none": 0, "8-bit": 1, "4-bit": 2}


@dataclass
class Record:
    """A row's round. features: the first five of FEATURES, known before it. drafted, accepted: its tokens."""

    features: list[float]
    drafted: int
    accepted: int


class Controller(nn.Module):
    """FEATURES -> the chance that at least `level` drafted tokens are accepted: 6 -> 16 -> 1, standardised inside."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.inner, self.outer = nn.Linear(len(FEATURES), width), nn.Linear(width, 1)
        self.register_buffer("mean", torch.zeros(len(FEATURES)))
        self.register_buffer("std", torch.ones(len(FEATURES)))

    def logits(self, features: Tensor) -> Tensor:
        """[..., 6] -> [...]"""
        return self.outer(F.relu(self.inner((features - self.mean) / self.std)))[..., 0]

    @torch.no_grad()
    def expected(self, features: Tensor, deepest: int) -> Tensor:
        """[B, 5] features -> [B, deepest + 1] tokens to expect of a round that drafts 0, 1, ..., deepest."""
        levels = torch.arange(1, deepest + 1, dtype=torch.float32).expand(len(features), -1)
        known = features[:, None].expand(-1, deepest, -1)
        chances = self.logits(torch.cat((known, levels[..., None]), -1)).sigmoid()
        # More cannot be accepted more often than fewer.
        return F.pad(chances.cummin(1).values.cumsum(1) + 1, (1, 0), value=1.0)

    def to_dict(self) -> dict[str, list]:
        """Its weights as numbers, for a config's `policy`."""
        return {name: tensor.tolist() for name, tensor in self.state_dict().items()}

    @classmethod
    def of(cls, weights: dict[str, list]) -> Controller:
        """Of `to_dict`. Raises ValueError for weights of another form."""
        try:
            state = {name: torch.tensor(values, dtype=torch.float32) for name, values in weights.items()}
            made = cls(len(state["inner.bias"]))
            made.load_state_dict(state)
        except (KeyError, TypeError, RuntimeError, AttributeError) as error:
            raise ValueError(
                f"the controller's weights are not those of policies.speckv.fit(...).to_dict(): {error}"
            ) from None
        return made


def fit(records: Iterable[Record], steps: int = 400, width: int = 16, seed: int = 0) -> Controller:
    """A controller of records, which should come from every length in turn (`collect`). Each gives one sample a level
    that its draft reached; weights start from `seed`. Raises ValueError when there are none."""
    samples = [(r.features + [float(level)], r.accepted >= level) for r in records for level in range(1, r.drafted + 1)]
    if not samples:
        raise ValueError("there are no records of drafted rounds to fit a controller to; collect some first")
    inputs, goals = (torch.tensor(part, dtype=torch.float32) for part in zip(*samples))
    with torch.random.fork_rng([]), torch.enable_grad():
        torch.manual_seed(seed)
        made = Controller(width)
        made.mean, made.std = inputs.mean(0), inputs.std(0, correction=0).clamp(min=1e-3)
        optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
        for _ in range(steps):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(made.logits(inputs), goals).backward()
            optimizer.step()
    return made.requires_grad_(False)


def best_length(tokens: Tensor, seconds: Sequence[float], options: Sequence[int]) -> list[int]:
    """Of each row the length in `options` with the most tokens per second; of equals the shorter.

    tokens: [B, G + 1] to expect of rounds that draft 0, 1, ..., G. seconds: [G + 1] that they take.
    """
    options = sorted(options)
    rates = tokens[:, options] / torch.tensor([seconds[n] for n in options], dtype=tokens.dtype)
    return [options[i] for i in rates.argmax(1).tolist()]


def compression_of(target: PreTrainedModel) -> int:
    """The target's code in COMPRESSION."""
    if getattr(target, "is_loaded_in_4bit", False):
        return COMPRESSION["4-bit"]
    return COMPRESSION["8-bit" if getattr(target, "is_loaded_in_8bit", False) else "none"]


class SpecKV(Policy):
    """Drafts each row as many of `lengths` tokens as give the most tokens per second, by a fitted controller.

    It looks at a row's former rounds alone: entropy (nats) and largest probability of the drafter's laws, a running
    mean with weight 0.5 for the latest. A drafter that goes token by token tells of all its tokens but the last. A
    row's first round, and all while the costs are not known, have the length nearest to 4.

    controller: `fit(...).to_dict()`; may be left out for one length. log: a list that takes a Record of each row's
    round, for `collect`. Raises ValueError without a controller, or for lengths below 1.
    """

    name = "speckv"
    first = 4

    def __init__(
        self,
        situation: Situation,
        controller: dict | None = None,
        lengths: Sequence[int] = (2, 4, 6, 8),
        log: list[Record] | None = None,
    ):
        self.lengths = sorted(set(lengths))
        if controller is None and len(self.lengths) > 1:
            raise ValueError(
                f"policy {self.name} needs a controller: policies.speckv.fit(policies.speckv.collect(target, drafter, "
                "inputs)).to_dict(), or one length"
            )
        self.controller = None if controller is None else Controller.of(controller)
        self.depth = min(self.lengths, key=lambda n: abs(n - self.first))  # of drafts while nothing is known
        self.costs, self.log = situation.costs(self.depth), log
        self.sequential = situation.drafter.is_sequential
        self.compression = float(compression_of(situation.target))
        self._features: dict[int, Tensor] = {}
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._used: list[list[float] | None] = []

    @classmethod
    def check(cls, controller: dict | None, lengths: Sequence[int], log: list[Record] | None) -> None:
        """A missing controller is told when a call needs it: a config may get it later."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths of policy {cls.name} must be numbers from 1, got {lengths!r}")
        if controller is not None:
            Controller.of(controller)

    def seconds(self, nodes: int) -> float:
        """Of a round with a chain of `nodes` nodes."""
        share = nodes / self.depth if self.sequential else 1.0
        return self.costs.seconds(nodes) + share * self.costs.draft

    def before(self, rows: list[int], outlook=None) -> list[int]:
        self._seen, known = [], [row for row in rows if row in self._features]
        self._used = [self._features[row].tolist() if row in self._features else None for row in rows]
        chosen = dict.fromkeys(rows, self.depth)
        if known and self.controller is not None and self.costs.known:
            expected = self.controller.expected(torch.stack([self._features[row] for row in known]), self.lengths[-1])
            seconds = [self.seconds(n) for n in range(self.lengths[-1] + 1)]
            chosen.update(zip(known, best_length(expected, seconds, self.lengths)))
        return [chosen[row] for row in rows]

    def more(self, partial: Partial) -> list[bool]:
        if partial.chances is None:
            self._seen.append(_sureness(partial.logits))
        return partial.follow()

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        block = draft.evidence
        if not self._seen and isinstance(block, Block) and draft.is_chain:
            self._seen = [
                _sureness(block.logits[:, slot]) for slot in range(min(draft.shape[1], block.logits.shape[1]))
            ]
        return draft

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        if self.log is not None:
            for used, depth, tokens in zip(self._used, offered, committed):
                if used is not None and depth and tokens:
                    self.log.append(Record(used, depth, len(tokens) - 1))
        if not self._seen:
            return
        entropy, sure = (torch.stack(part, 1).float().cpu() for part in zip(*self._seen))
        for b, row in enumerate(rows):
            of_row = slice(0, max(1, offered[b]))
            h, s = entropy[b, of_row], sure[b, of_row]
            new = torch.tensor([h.mean(), s.mean(), h.max(), s.min(), self.compression])
            self._features[row] = new if row not in self._features else (self._features[row] + new) / 2


def _sureness(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[B, K] logits -> [B] entropy in nats and [B] largest probability."""
    probs = logits.float().softmax(-1)
    return torch.special.entr(probs).sum(-1), probs.amax(-1)


def collect(
    target: PreTrainedModel,
    drafter: Drafter,
    inputs: Sequence[dict[str, Any]],
    lengths: Sequence[int] = (2, 4, 6, 8),
    **generate: Any,
) -> list[Record]:
    """Records of generating from each of `inputs` (generate's own) with each length in turn; 200 rounds a length and
    kind of target do. generate: further arguments, such as max_new_tokens. The drafter's config stays as it is.
    """
    config, records = drafter.config, []
    before = config.policy, config.num_assistant_tokens
    try:
        for length in lengths:
            config.policy, config.num_assistant_tokens = {"name": "speckv", "lengths": [length], "log": records}, length
            for given in inputs:
                target.generate(**given, assistant_model=drafter, **generate)
    finally:
        config.policy, config.num_assistant_tokens = before
    return records

"""How sure a draft is of itself: a head that estimates each slot's chance of being accepted, and its calibration."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .draft import Commit, Context, Draft
from .parts import Part, Scored
from .training.objectives import acceptance, confidence_bce

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .correctors import Corrector
    from .drafters.base import Drafter, TargetView
    from .heads import HeadConfig, HeadedDrafter
    from .training.records import Unrolled

# What calibration tries, the mildest first, so that nothing is changed for nothing.
TEMPERATURES = sorted((2.0 ** (step / 8) for step in range(-24, 25)), key=lambda t: abs(math.log(t)))


class ConfidenceHead(Part):
    """A linear estimate of the chance that a slot's draft is accepted, given that those before it were (DSpark
    2607.05147).

    with_markov: it also reads the corrector's `codes` of the token before the slot (a Markov head's row); without it,
        no drafted token.
    temperatures: one a slot, by which the logits are divided (`calibrate`); the last holds for all further slots.

    Its training term "confidence" is the cross entropy with the exact acceptance of rejection sampling, 1 - TV of the
    target's law and the (corrected) draft's. With a reduced draft vocabulary that is the acceptance within it.
    """

    terms = {"confidence": True}

    def __init__(
        self,
        config: HeadConfig,
        corrector: Corrector | None,
        with_markov: bool = False,
        temperatures: Sequence[float] | None = None,
    ):
        super().__init__()
        if with_markov and not hasattr(corrector, "codes"):
            raise ValueError(
                "confidence.with_markov reads a Markov head or prefix attention; give the drafter one as its corrector "
                "({'name': 'markov'}), or leave with_markov out"
            )
        if temperatures is not None and not (len(temperatures) and all(t > 0 for t in temperatures)):
            raise ValueError(f"confidence.temperatures must be numbers above 0, one a slot, got {temperatures!r}")
        self.with_markov, self.temperatures = with_markov, temperatures
        self.proj = nn.Linear(config.hidden_size + (corrector.rank if with_markov else 0), 1)

    @property
    def kind(self) -> str:
        """`Draft.confidence_kind` of its estimates along a chain."""
        return "pre" if self.with_markov else "prior"

    def forward(self, drafter: HeadedDrafter, view: TargetView, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """[...] logits, before calibration, of slots' states [..., H] and the target ids [...] before them (read by
        with_markov alone)."""
        if self.with_markov:
            hidden = torch.cat((hidden, drafter.corrector.codes(drafter, view, previous)), -1)
        return self.proj(hidden)[..., 0]

    def survival(self, logits: Tensor) -> Tensor:
        """[B, S] logits from the first slot on -> chances that all slots up to each one are accepted."""
        logits = logits.float()
        if self.temperatures is not None:
            slots = [min(slot, len(self.temperatures) - 1) for slot in range(logits.shape[1])]
            logits = logits / logits.new_tensor([self.temperatures[slot] for slot in slots])
        return F.logsigmoid(logits).cumsum(1).exp().nan_to_num(0)

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, scored: Scored) -> None:
        """Add the term to what the slots say."""
        logits = self(drafter, view, unrolled.hidden, unrolled.previous)

        def term(teacher: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            with torch.no_grad():
                known = scored.logits[..., : teacher.shape[-1]].to(teacher.dtype)
                chance = acceptance(known, teacher)
            return confidence_bce(logits.to(chance.dtype), chance).where(labels >= 0, 0)

        scored.terms["confidence"] = term


def factors(draft: Draft) -> Tensor:
    """[B, N] of a chain: each node's own chance, given that those before it are accepted. What a node's factor had seen
    is what its confidence had (`confidence_kind`)."""
    before = F.pad(draft.confidence[:, :-1], (1, 0), value=1.0)
    return (draft.confidence / before.clamp(min=torch.finfo(before.dtype).tiny)).clamp(max=1.0)


def expected_calibration_error(chance: Tensor, accepted: Tensor, bins: int = 15) -> float:
    """Mean over N estimates of the distance between chance [N] and rate of `accepted` [N] within each of equal bins."""
    place = (chance * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, chance.double() - accepted.double())
    return float(gap.abs().sum() / max(1, len(chance)))


def sequential_temperatures(logits: Tensor, drafted: Tensor, accepted: Tensor) -> list[float]:
    """DSpark's sequential temperature scaling: slot by slot, the temperature with which the survival up to the slot has
    the least calibration error, those before it kept.

    logits: [N, S] of N rounds. drafted, accepted: [N] tokens of each. Slots that no round drafted get the last one's.
    """
    survival, chosen = torch.ones(len(logits), dtype=torch.float64), []
    for slot in range(int(drafted.max())):
        some, held = drafted > slot, accepted > slot
        tried = [survival * (logits[:, slot].double() / t).sigmoid() for t in TEMPERATURES]
        errors = [expected_calibration_error(chance[some], held[some]) for chance in tried]
        best = errors.index(min(errors))
        survival = tried[best]
        chosen.append(TEMPERATURES[best])
    return chosen


@torch.no_grad()
def rounds(
    target: PreTrainedModel, drafter: Drafter, prompts: Iterable[Tensor], **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft along prompts [P], one after the other: the head's logits [N, S] of N rounds, and the tokens drafted [N]
    and accepted [N] in each. `settings` go to generate. A row's last round is left out: its end may have cut it."""
    heard: list[tuple[Tensor, int, int]] = []
    for prompt in prompts:
        ids = prompt[None].to(target.device)
        listener = _Listener(drafter)
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=listener.drafter, **settings)
        heard += listener.rounds
    if not heard:
        raise ValueError("no round was drafted: give prompts whose answers are longer than a draft")
    width = max(len(logits) for logits, _, _ in heard)
    logits = torch.stack([F.pad(logits, (0, width - len(logits))) for logits, _, _ in heard])
    return logits, *(torch.tensor(counts) for counts in list(zip(*heard))[1:])


def calibrate(
    target: PreTrainedModel, drafter: Drafter, prompts: Iterable[Tensor], max_new_tokens: int = 256, **settings: Any
) -> list[float]:
    """Set the temperatures of a drafter's confidence head by rounds that are drafted along held-out prompts [P], under
    the settings of generate (do_sample, temperature) that it shall serve. They are saved with the drafter's config.

    Raises ValueError for a drafter without a confidence head, or whose drafts do not ask it, or prompts that bring no
    round.
    """
    if getattr(drafter, "confidence", None) is None:
        raise ValueError("the drafter has no confidence head to calibrate; give its config a confidence field")
    if drafter.corrector is not None and drafter.corrector.beam:
        raise ValueError(
            f"the confidence head is not used with corrector {drafter.corrector.name}: a search rates its drafts by "
            "their own probability, so there is nothing to calibrate; take a drafter without this corrector, or with "
            "one that drafts token by token, such as markov"
        )
    seen = rounds(target, drafter, prompts, max_new_tokens=max_new_tokens, **settings)
    temperatures = sequential_temperatures(*seen)
    drafter.confidence.temperatures = temperatures
    drafter.config.confidence = {**drafter.config.confidence, "temperatures": temperatures}
    return temperatures


class _Listener:
    """A drafter of one row that always drafts, whole, and the rounds it went through."""

    def __init__(self, drafter: Drafter):
        self.rounds: list[tuple[Tensor, int, int]] = []
        self._draft, self._round = None, None
        self.drafter = copy.copy(drafter)
        self.drafter.config = copy.copy(drafter.config)
        self.drafter.config.policy, self.drafter.config.tree_nodes = "fixed", 0
        self.drafter.start = self._start
        self._drafter = drafter

    def _start(self, view, batch: int):
        session = self._drafter.start(view, batch)
        propose, observe = session.propose, session.observe

        def tell_propose(context: Context) -> Draft:
            if self._round is not None:  # the row went on after it
                self.rounds.append(self._round)
            self._draft, self._round = propose(context), None
            return self._draft

        def tell_observe(commit: Commit) -> None:
            drafted = 0 if self._draft is None else int(self._draft.valid[0].sum())
            if drafted:
                logits = self._draft.evidence.confidence[0].float().cpu()
                self._round = logits, drafted, len(commit.tokens[0]) - 1
            self._draft = None
            observe(commit)

        session.propose, session.observe = tell_propose, tell_observe
        return session

"""A drafter's training loss, its vocabulary side computed a few anchors at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .. import correctors
from ..drafters.base import Drafter, TargetView
from ..parts import PART_TERMS, Scored
from . import objectives
from .objectives import OBJECTIVES, WEIGHTINGS
from .records import TrainingBatch

NORMALISATIONS = ("weights", "count", "anchors")


class DraftLoss:
    """Weighted sum of objectives over the slots that a drafter unrolls.

    terms: as in a recipe: an objective's name ("ce"), or by name its weight, or a dict of its weight and its options:
        {"ce": 0.1, "tv": 1.8} or {"forward_kl": {"weight": 1.0, "temperature": 2.0}}. See objectives.py. The option
        `mean_clip` of those with a clip is AdaFlash's published one: of the slot's value divided by the sum of the
        batch's weights (by its number of slots, where weights depend on what the drafter says).
        "base_" before a name: of the marginals, before a corrector. Or a term of the drafter's parts (`PART_TERMS`). A
        weight may move: [first, last, share] goes in a straight line over that share of the training (`progress`).
    weighting: how slots weigh: a name, or {name: options}: "uniform", {"decay": {"gamma": 4}}, "geometric", "dpace".
    normalise: what the sum is divided by: "weights" of the slots, "count" of the slots, or "anchors".
    chunk_size: anchors whose logits exist at a time; None for as many as `chunk_bytes` of float32 logits allow, of
        which training holds about six copies.
    teacher_metrics: compute the target's law for the metrics even where no term asks for it.
    Raises ValueError for unknown names and options.
    """

    def __init__(
        self,
        terms: str | dict[str, float | dict[str, Any]],
        weighting: str | dict[str, dict[str, Any]] = "uniform",
        normalise: str = "weights",
        chunk_size: int | None = None,
        chunk_bytes: int = 256 * 2**20,
        teacher_metrics: bool = False,
    ):
        terms, weighting = ({given: {}} if isinstance(given, str) else given for given in (terms, weighting))
        if not isinstance(terms, dict) or not terms:
            raise ValueError(f"a loss is objectives by weight, not {terms!r}; known are {', '.join(OBJECTIVES)}")
        if not isinstance(weighting, dict) or len(weighting) != 1:
            raise ValueError(f"a weighting is one name, or one {{name: options}}, not {weighting!r}")
        if normalise not in NORMALISATIONS:
            raise ValueError(f"normalise must be one of {', '.join(NORMALISATIONS)}, got {normalise!r}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1 anchor, got {chunk_size}")
        self.terms = {name: _Term(name, options) for name, options in terms.items()}
        ((name, options),) = weighting.items()
        self.weighting = objectives.resolve("weighting", WEIGHTINGS, name, options or {})
        self.reads_label_probs = name not in objectives.WITHOUT_LABEL_PROBS
        self.normalise = normalise
        self.progress = 0.0  # share of the training that is done, for weights that move
        self.chunk_size, self.chunk_bytes = chunk_size, chunk_bytes
        self.teacher_metrics = teacher_metrics

    @property
    def needs_law(self) -> bool:
        """Whether `batch.last_hidden` and `law` must be given."""
        return self.teacher_metrics or any(term.reads_teacher for term in self.terms.values())

    def __call__(
        self,
        drafter: Drafter,
        view: TargetView,
        batch: TrainingBatch,
        law: Callable[[Tensor, Tensor | None], Tensor] | None = None,
        *,
        denominator: Tensor | float | None = None,
        **unroll_options,
    ) -> dict[str, Any]:
        """Unroll the drafter along a batch and compare it with the text and the target's law.

        law: (last hidden states [..., Ht], draft token ids [K] or None) -> the target's logits [..., V or K].
        denominator: divide by this instead of this batch's own denominator.
        unroll_options: go to `drafter.unroll`.

        A mean of means is not the mean when micro-batches or ranks hold different numbers of slots. Exact is: sum the
        denominators of everything that makes one optimiser step and give the sum to each part (with DDP, which
        averages, times 1 / ranks). Where it is not known beforehand (sampled anchors, D-PACE), give 1, and divide the
        accumulated gradients by the sum before the step: they are linear in it.

        Returns tensors, and waits for no device:
            loss: scalar, numerator / denominator. numerator, denominator: scalars without gradient, to add up.
            terms: by name, the part of the loss before its weight.
            slot_correct, slot_count: [S] slots whose best token is the teacher's best (the text's where no law is
                computed), and slots that count. A token outside the drafter's vocabulary is never drafted correctly.
            matches: [A, S] bool, slots that count and whose best token is the text's, for `simulation.simulate`.
            anchors: [A] where they stand (Unrolled).
            accepted: mean over anchors of the length of the matching prefix.
            slot_acceptance: [S], only with teacher_metrics: sum of min(p, q) over the slots that count.
        """
        if self.needs_law and (law is None or batch.last_hidden is None):
            raise ValueError(
                f"the loss compares with the target's law ({', '.join(self.terms)}), but the batch has no last_hidden "
                "or no law was given; build the features with law=True, or train on ce alone"
            )
        unrolled = drafter.unroll(view, batch, **unroll_options)
        hidden, mask, ids = unrolled.hidden, unrolled.mask, drafter.draft_token_ids
        width = view.vocab_size if ids is None else len(ids)
        labels = _places(unrolled.labels, ids).where(mask, -1)
        rows = unrolled.rows.where(mask, 0)
        states = batch.last_hidden.flatten(0, 1).to(hidden.device) if self.needs_law else None
        count = mask.sum()
        drafts = mask.new_ones(len(mask)) if unrolled.drafts is None else unrolled.drafts
        weight = torch.ones_like(drafts, dtype=torch.float32) if unrolled.weight is None else unrolled.weight
        mass = count if self.reads_label_probs else (self.weighting(mask, None) * weight[:, None]).sum()

        def score(hidden: Tensor, part: slice) -> tuple:
            scored = drafter.score(view, replace(unrolled.at(part), hidden=hidden))
            teacher = None
            if states is not None:
                with torch.no_grad():
                    teacher = law(states[rows[part]], ids)
            return self._score(scored, teacher, labels[part], mask[part], mass, drafts[part], weight[part])

        size = self.chunk_size or max(1, self.chunk_bytes // (4 * width * mask.shape[1]))
        parts = [slice(i, i + size) for i in range(0, len(hidden), size)]
        numerator, scores = _walk(score, hidden, parts)
        terms, weights, correct, matches, accepts = ([s[i] for s in scores] for i in range(5))

        own = {"weights": sum(weights, torch.zeros((), device=hidden.device)), "count": count}
        own = own.get(self.normalise, mask[:, 0].sum()).float().clamp(min=torch.finfo(torch.float32).tiny)
        matches = (torch.cat(matches) if matches else mask)[drafts]
        mask = mask[drafts]
        metrics = {
            "loss": numerator / (own if denominator is None else denominator),
            "numerator": numerator.detach(),
            "denominator": own,
            "terms": {name: sum(t[i] for t in terms) / own for i, name in enumerate(self.terms)},
            "slot_correct": sum(correct, torch.zeros(mask.shape[1], device=hidden.device)),
            "slot_count": mask.sum(0),
            "matches": matches,
            "anchors": unrolled.anchors[drafts],
            "accepted": matches.long().cumprod(1).sum() / mask[:, 0].sum().clamp(min=1),
        }
        if self.teacher_metrics:
            metrics["slot_acceptance"] = sum(accepts, torch.zeros(mask.shape[1], device=hidden.device))
        return metrics

    def _score(
        self,
        scored: Scored,
        teacher: Tensor | None,
        labels: Tensor,
        mask: Tensor,
        mass: Tensor,
        drafts: Tensor,
        weight: Tensor,
    ) -> tuple:
        """Of one chunk [a, S]: its part of the numerator, and without gradient that of each term, the weights' sum, the
        correct slots [S], the slots matching the text [a, S] and the acceptance [S] (None without teacher_metrics).
        Correct slots and acceptance are of the anchors that `drafts` [a] says."""
        common = scored.logits.shape[-1]
        if teacher is not None and teacher.shape[-1] != common:
            # Heads of one tokenizer are padded to different sizes; no token stands for the rows beyond.
            common = min(teacher.shape[-1], common)
            teacher = teacher[..., :common]
            scored = replace(scored, base=None if scored.base is None else scored.base[..., :common])
        draft = scored.logits[..., :common]
        draft = draft.to(torch.promote_types(draft.dtype, torch.float32))
        teacher = None if teacher is None else teacher.to(draft)
        scored = replace(scored, logits=draft)
        labels = labels.where(labels < common, -1)
        values = {name: term(scored, teacher, labels, mask, mass) for name, term in self.terms.items()}
        label_probs = None
        if self.reads_label_probs:
            surprise = values["ce"] if "ce" in values else objectives.ce(draft.detach(), None, labels)
            label_probs = (-surprise.detach()).exp().where(labels >= 0, 0)
        weights = self.weighting(mask, label_probs) * weight[:, None]
        numerator = sum((weights * value).sum() * self.terms[name].at(self.progress) for name, value in values.items())
        with torch.no_grad():
            best = draft.argmax(-1) if scored.chosen is None else scored.chosen
            matches = best == labels  # masked slots have no label
            goals = labels if teacher is None else teacher.argmax(-1).where(labels >= 0, -1)
            terms = [(weights * value).sum() for value in values.values()]
            seen = mask & drafts[:, None]
            accepts = (objectives.acceptance(draft, teacher) * seen).sum(0) if self.teacher_metrics else None
            return numerator, terms, weights.sum(), ((best == goals) & seen).sum(0), matches, accepts


class _Term:
    """An objective, or a term of the drafter's parts, its options set, and its weight."""

    def __init__(self, name: str, options: float | dict[str, Any]):
        options = dict(options) if isinstance(options, dict) else {"weight": options}
        self.name, self.of_base = name, name.startswith("base_")
        name = name.removeprefix("base_")
        weight = options.pop("weight", 1.0)
        path = weight if isinstance(weight, list) and len(weight) == 3 else [weight, weight, 1.0]
        if any(not isinstance(x, (int, float)) or isinstance(x, bool) for x in path) or not 0 < path[2] <= 1:
            raise ValueError(
                f"the weight of objective {name} must be a number, or [first, last, share of the training], got "
                f"{weight!r}"
            )
        self.path = path
        correctors.known()  # those not used yet have not told their terms
        self.is_part = self.name in PART_TERMS
        if self.is_part:
            if options:
                raise ValueError(f"term {name} has no options; those of a part stand in the drafter's config")
            self.reads_teacher = PART_TERMS[name]
            return
        if name in PART_TERMS:
            raise ValueError(f"base_ stands before objectives, and {name} is a term of a part; write {name}")
        self.mean_clip = options.pop("mean_clip", None)
        if self.mean_clip is not None:
            if "clip" in options:
                raise ValueError(f"objective {name} takes clip or mean_clip, not both")
            objectives.resolve("objective", OBJECTIVES, name, {"clip": self.mean_clip})
        self.objective = objectives.resolve("objective", {**OBJECTIVES, **PART_TERMS}, name, options)
        self.reads_teacher = name not in objectives.WITHOUT_TEACHER

    def at(self, progress: float) -> float:
        """The weight at a share of the training."""
        first, last, share = self.path
        return first + (last - first) * min(1.0, progress / share)

    def __call__(self, scored: Scored, teacher: Tensor | None, labels: Tensor, mask: Tensor, mass: Tensor) -> Tensor:
        if self.is_part:
            if self.name not in scored.terms:
                given = ", ".join(scored.terms) or "none"
                raise ValueError(f"the drafter has no part that gives the term {self.name}; its parts give {given}")
            return scored.terms[self.name](teacher, labels, mask)
        draft = scored.logits
        if self.of_base and scored.base is not None:
            draft = scored.base.to(draft.dtype)
        clip = {} if self.mean_clip is None else {"clip": self.mean_clip * mass}
        return self.objective(draft, teacher, labels, **clip)


def _places(labels: Tensor, ids: Tensor | None) -> Tensor:
    """Target ids as indices into the ascending `ids` [K], -1 for those not among them."""
    if ids is None:
        return labels
    places = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    return places.where(ids[places] == labels, -1)


class _Attach(torch.autograd.Function):
    """A value whose gradient in `hidden` is known already."""

    @staticmethod
    def forward(ctx, value: Tensor, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple:
        (gradient,) = ctx.saved_tensors
        return None, gradient * upstream.to(gradient.dtype), None


def _walk(score: Callable, hidden: Tensor, parts: list[slice]) -> tuple[Tensor, list]:
    """Sum of the first result of `score(hidden[part], part)` over the parts, and the other results of each.

    The logits of more than one part never exist at once, in backward neither. Where no weight of the head learns
    (the score of one anchor's detached states has no gradient) each part's gradient in `hidden` is taken at once, so
    that the head runs once; else the parts are computed again in backward, which FSDP and DeepSpeed can follow.
    """
    if not parts:
        return hidden.sum() * 0.0, []
    if not (torch.is_grad_enabled() and len(parts) > 1):
        scores = [score(hidden[part], part) for part in parts]
        return sum(s[0] for s in scores), [s[1:] for s in scores]
    if score(hidden[:1].detach(), slice(0, 1))[0].requires_grad:
        scores = [checkpoint(score, hidden[part], part, use_reentrant=False) for part in parts]
        return sum(s[0] for s in scores), [s[1:] for s in scores]
    total, rest, gradient = 0.0, [], torch.empty_like(hidden)
    for part in parts:
        leaf = hidden[part].detach().requires_grad_()
        value, *others = score(leaf, part)
        (gradient[part],) = torch.autograd.grad(value, leaf)
        total = total + value.detach()
        rest.append(others)
    return _Attach.apply(total, hidden, gradient), rest

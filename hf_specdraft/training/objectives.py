"""What a drafter is trained on: objectives, one number per slot, and weightings of the slots, as pure functions.

An objective is `f(draft_logits [..., K], teacher_logits [..., K] or None, labels [...]) -> [...]`, computed in its
inputs' dtype. q is the drafter's law, p the teacher's (the target's, restricted to the K tokens the drafter knows and
renormalised). A label indexes K, -1 stands for a token that the drafter cannot draft: such a slot contributes 0.
A weighting is `f(mask [A, S], label_probs [A, S]) -> [A, S]`, without gradient and 0 where the mask is False.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

# Stands for log 0 in the teacher's law, where a target forbids tokens: 0 * log 0 must be 0.
_LOG_ZERO = -1e4


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def _teacher_log_probs(logits: Tensor, temperature: float) -> Tensor:
    return _log_probs(logits, temperature).clamp(min=_LOG_ZERO)


def _known(values: Tensor, labels: Tensor, clip: float | Tensor | None = None) -> Tensor:
    """`values`, at most `clip`, and 0 where the label is no token of the drafter's."""
    return (values if clip is None else values.clamp(max=clip)).where(labels >= 0, 0)


def ce(draft_logits: Tensor, teacher_logits: Tensor | None, labels: Tensor) -> Tensor:
    """Cross entropy of the text's token. Needs no teacher."""
    flat = F.cross_entropy(draft_logits.flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="none")
    return flat.view(labels.shape)


def argmax_ce(draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the teacher's most probable token (AdaFlash 2607.19223: 0.8 of it + 0.2 of `reverse_kl`)."""
    return ce(draft_logits, None, teacher_logits.argmax(-1).where(labels >= 0, -1))


def soft_ce(draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """-sum p log q (EAGLE-3 2503.01840).

    Ours are the temperature, the paper having none, and which slots count: those whose text token can be drafted, where
    EAGLE-3 asks it of the teacher's best token. `DraftLoss` divides by the slots that count, EAGLE-3 by all positions.
    """
    log_q = _log_probs(draft_logits, temperature)
    return _known(-(_log_probs(teacher_logits, temperature).exp() * log_q).sum(-1), labels) * temperature**2


def forward_kl(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    clip: float | Tensor | None = None,
) -> Tensor:
    """KL(p || q) of both laws at a temperature, times its square, so that gradients keep their scale (1503.02531).

    clip: the most one slot may count, in nats before that scaling; a slot above it has no gradient.
    """
    log_p, log_q = _teacher_log_probs(teacher_logits, temperature), _log_probs(draft_logits, temperature)
    return _known((log_p.exp() * (log_p - log_q)).sum(-1), labels, clip) * temperature**2


def reverse_kl(
    draft_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    clip: float | Tensor | None = None,
) -> Tensor:
    """KL(q || p), options as for `forward_kl`. Without a clip, slots where q has mass on tokens that the teacher finds
    impossible outweigh all others; 10 nats is a good one."""
    log_p, log_q = _teacher_log_probs(teacher_logits, temperature), _log_probs(draft_logits, temperature)
    return _known((log_q.exp() * (log_q - log_p)).sum(-1), labels, clip) * temperature**2


def jsd(draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q
    (GKD 2306.13649), 0 < beta < 1. What OSD 2310.07177 calls jsd is the sum {forward_kl: 0.9, reverse_kl: 0.1}."""
    log_p, log_q = _teacher_log_probs(teacher_logits, 1.0), _log_probs(draft_logits, 1.0)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.lerp(q, p, beta).clamp(min=torch.finfo(q.dtype).tiny).log()
    return _known((beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1), labels)


def acceptance(draft_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """sum min(p, q): the probability that rejection sampling accepts a token drawn from q."""
    return torch.minimum(draft_logits.softmax(-1), teacher_logits.softmax(-1)).sum(-1)


def tv(draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    """Total variation distance, half the L1 distance of p and q: 1 - acceptance. DSpark (2607.05147) weighs the whole
    L1 distance with 0.9: {ce: 0.1, tv: 1.8}."""
    return _known((draft_logits.softmax(-1) - teacher_logits.softmax(-1)).abs().sum(-1) / 2, labels)


def lk(draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    """-log acceptance (LK losses, "alpha"). Unlike `tv` it has a gradient where p and q hardly overlap."""
    log_p, log_q = _teacher_log_probs(teacher_logits, 1.0), _log_probs(draft_logits, 1.0)
    return _known(-torch.minimum(log_p, log_q).logsumexp(-1), labels)


def lk_mix(draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, eta: float = 3.0) -> Tensor:
    """LK losses, "lambda": l KL(p || q) + (1 - l) TV(p, q) with l = exp(-eta acceptance) held fixed: the divergence
    while little is accepted, then acceptance itself. That l, and its eta, are our reading of their "adaptive mix"."""
    distance = tv(draft_logits, teacher_logits, labels)
    share = (-eta * (1 - distance.detach())).exp()
    return share * forward_kl(draft_logits, teacher_logits, labels) + (1 - share) * distance


def confidence_bce(logit: Tensor, acceptance: Tensor) -> Tensor:
    """Cross entropy of a confidence head's logit [...] with the exact `acceptance` [...] of its slot (DSpark)."""
    return F.binary_cross_entropy_with_logits(logit, acceptance.detach().to(logit.dtype), reduction="none")


def uniform(mask: Tensor, label_probs: Tensor | None) -> Tensor:
    """1 for every slot that counts."""
    return mask.float()


def decay(mask: Tensor, label_probs: Tensor | None, *, gamma: float = 7.0) -> Tensor:
    """exp(-k / gamma), k = 0, 1, ... along the draft (DFlash 2602.06036: 7 for blocks of 16, 4 for blocks of 8)."""
    return mask * (-torch.arange(mask.shape[-1], device=mask.device) / gamma).exp()


def geometric(mask: Tensor, label_probs: Tensor | None, *, ratio: float = 0.8) -> Tensor:
    """ratio^k, k = 0, 1, ... along the draft (EAGLE-3: 0.8)."""
    return mask * ratio ** torch.arange(mask.shape[-1], device=mask.device)


def dpace(mask: Tensor, label_probs: Tensor, *, alpha: float = 0.5) -> Tensor:
    """D-PACE (2605.18810): each slot's share in the gradient of the expected accepted length.

    With s_k = (1 - alpha) label_probs_k + alpha and P_k = s_1 ... s_k, the weight of slot j is the sum of P_k over
    k >= j. alpha 0 collapses in training, 0.3 to 0.7 is good.
    """
    survival = torch.where(mask, (1 - alpha) * label_probs + alpha, 1).cumprod(-1) * mask
    return survival.flip(-1).cumsum(-1).flip(-1) * mask


OBJECTIVES: dict[str, Callable] = {
    f.__name__: f for f in (ce, argmax_ce, soft_ce, forward_kl, reverse_kl, jsd, tv, lk, lk_mix)
}
WEIGHTINGS: dict[str, Callable] = {f.__name__: f for f in (uniform, decay, geometric, dpace)}
# Names that can do without what others read.
WITHOUT_TEACHER = {"ce"}
WITHOUT_LABEL_PROBS = {"uniform", "decay", "geometric"}
# What the options may be; those not named here are above 0.
_RANGES: dict[str, tuple[str, Callable]] = {
    "alpha": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "beta": ("between 0 and 1", lambda value: 0 < value < 1),
}


def resolve(kind: str, known: dict[str, Callable], name: str, options: dict) -> Callable:
    """`known[name]` with its options set. Raises ValueError for an unknown name or option, or an impossible value."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(known)}")
    if not isinstance(options, dict):
        raise ValueError(f"the options of {kind} {name} must be names and values, got {options!r}")
    parameters = inspect.signature(known[name]).parameters.values()
    accepted = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option, value in options.items():
        if option not in accepted:
            raise ValueError(f"{kind} {name} has no option {option!r}; it has {', '.join(accepted) or 'none'}")
        if value is None and option == "clip":
            continue
        needed, is_fit = _RANGES.get(option, ("above 0", lambda value: 0 < value < float("inf")))
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_fit(value):
            raise ValueError(f"{option} of {kind} {name} must be a number {needed}, got {value!r}")
    return partial(known[name], **options)

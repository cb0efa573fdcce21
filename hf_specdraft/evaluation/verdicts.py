"""Is the output the target's? Differences of greedy text, distances of sampled ones, and the report of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..drafters import Drafter
from . import runs
from .runs import ratio

# Is a difference rounding, or a fault? --------------------------------------------------------------------------------

TIE, FAULT = "rounding tie", "REAL FAULT"


@dataclass
class Difference:
    """The first place where two greedy continuations of one prompt part.

    position: index among the new tokens. plain_token, other_token: the two tokens, None where a text has ended.
    top_tokens, gap: the target's two best tokens there and the distance of their logits.
    shortfall: how far the other text's token lies below the best one.
    tolerance: the shortfall that rounding can explain.
    verdict: "rounding tie" or "REAL FAULT".
    """

    position: int
    plain_token: int | None
    other_token: int | None
    top_tokens: tuple[int, int]
    gap: float
    shortfall: float
    tolerance: float
    verdict: str


@torch.inference_mode()
def classify_difference(
    target: Any,
    prompt_ids: Sequence[int] | Tensor,
    plain_ids: Sequence[int] | Tensor,
    other_ids: Sequence[int] | Tensor,
    steps: float = 2.0,
    logits_processor: LogitsProcessorList | None = None,
) -> Difference | None:
    """Say whether two greedy texts differ by rounding or because one of them is wrong. None when they are equal.

    prompt_ids [L], plain_ids, other_ids: one row without padding; the latter two are new tokens only, as in
    `sequences[0, L:]`, plain_ids those of plain greedy generate. `logits_processor`: what the two calls applied.

    A pass over several tokens and several passes over one round differently, so in 16 bit two nearly equal logits may
    change order. A tie is granted when the other token's logit lies within `steps` steps of the target's dtype (at the
    size of the best logit) of the best one, or within twice what these two logits change when the target itself reads
    the same prefix in one pass instead of prefill and step. Everything else, and a text that ends where
    the other goes on, is a fault.
    """
    prompt, plain, other = (torch.as_tensor(x).flatten().tolist() for x in (prompt_ids, plain_ids, other_ids))
    if plain == other:
        return None
    pairs = zip(plain, other)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    plain_token, other_token = (x[position] if position < len(x) else None for x in (plain, other))

    prefix = torch.tensor([prompt + plain[:position]], device=target.device)
    whole = step = target(prefix).logits[0, -1].float()
    if prefix.shape[1] > 1:
        cache = target(prefix[:, :-1], use_cache=True).cache
        step = target(prefix[:, -1:], cache=cache, use_cache=True).logits[0, -1].float()
    if logits_processor is not None:
        whole, step = (logits_processor(prefix, x[None].clone())[0] for x in (whole, step))

    best, top = step.topk(2)
    tokens = [t for t in (int(top[0]), other_token) if t is not None]
    noise = (whole - step)[tokens].abs().max().item()
    size = max(abs(best[0].item()), torch.finfo(target.dtype).tiny)
    tolerance = max(steps * torch.finfo(target.dtype).eps * 2 ** math.floor(math.log2(size)), 2 * noise)
    shortfall = math.inf if other_token is None else (best[0] - step[other_token]).item()
    ended = plain_token is None or other_token is None
    return Difference(
        position=position,
        plain_token=plain_token,
        other_token=other_token,
        top_tokens=(int(top[0]), int(top[1])),
        gap=(best[0] - best[1]).item(),
        shortfall=shortfall,
        tolerance=tolerance,
        verdict=TIE if shortfall <= tolerance and not ended else FAULT,
    )


# Is the law the same when sampling? -----------------------------------------------------------------------------------


@dataclass
class Distance:
    """Total variation between assisted and plain sampling of a prompt's first tokens.

    tv: between `draws` assisted and `draws` plain draws. noise: between these plain draws and as many with other seeds.
    p_value: share of random re-labellings of the assisted and plain draws that lie at least as far apart as tv.
    """

    tv: float
    noise: float
    p_value: float
    draws: int
    tokens: int

    @property
    def within_noise(self) -> bool:
        """Whether chance explains the distance: false once in a thousand checks of a right sampler."""
        return self.p_value >= 0.001


def sampling_distance(
    target: Any, inputs: dict[str, Tensor], drafter: Drafter, draws: int = 256, tokens: int = 2, **arguments: Any
) -> Distance:
    """Compare the joint law of the first `tokens` new tokens, assisted against plain, over `draws` draws of each.

    `inputs` hold one row. `arguments` go to all calls (temperature, top_k, ...). Each call goes on for two
    tokens more than it compares, so that the compared ones can be drafted.
    """
    sample = _sampler(target, inputs, draws, tokens, arguments)
    plain, again, assisted = sample(0), sample(1), sample(2, assistant_model=drafter)
    law = np.random.default_rng(0)
    pooled, tv = plain + assisted, _total_variation(plain, assisted)
    shuffled = 1999
    # A hair below tv, so that sums added up in another order still count as equal.
    reached = sum(
        _total_variation(order[:draws], order[draws:]) >= tv - 1e-9
        for order in ([pooled[i] for i in law.permutation(2 * draws)] for _ in range(shuffled))
    )
    return Distance(tv, _total_variation(plain, again), (reached + 1) / (shuffled + 1), draws, tokens)


def _sampler(target: Any, inputs: dict[str, Tensor], draws: int, tokens: int, arguments: dict) -> Callable:
    prompt_length = inputs["input_ids"].shape[1]

    def sample(group: int, **extra: Any) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        while len(seen) < draws:
            # Far apart, so that no two calls of any group share a seed.
            torch.manual_seed(group * 1_000_003 + len(seen))
            rows = min(32, draws - len(seen))
            out = target.generate(
                **inputs, do_sample=True, max_new_tokens=tokens + 2, num_return_sequences=rows, **arguments, **extra
            )
            seen += map(tuple, out[:, prompt_length : prompt_length + tokens].tolist())
        return seen

    return sample


def _total_variation(first: list, second: list) -> float:
    counts: dict[Any, float] = {}
    for x in first:
        counts[x] = counts.get(x, 0.0) + 1 / len(first)
    for x in second:
        counts[x] = counts.get(x, 0.0) - 1 / len(second)
    return sum(map(abs, counts.values())) / 2


# The losslessness report ----------------------------------------------------------------------------------------------


@dataclass
class CheckReport:
    """Plain against assisted over some prompts.

    differences: by prompt id, the prompts whose greedy texts differ.
    tokens: new tokens of all prompts. passes, committed: as in Run, summed over the assisted calls.
    accepted_by_depth, offered_by_depth: nodes of depth 1, 2, ... accepted and offered.
    plain_seconds, assisted_seconds: wall time. target_seconds, draft_seconds: the assisted calls' forwards.
    token_seconds: plain's cost of a token after prefill. round_seconds: the cost of an assisted round.
    distances: by prompt id, when sampling was checked.
    """

    prompts: int = 0
    differences: dict[str, Difference] = field(default_factory=dict)
    tokens: int = 0
    passes: int = 0
    committed: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)
    plain_seconds: float = 0.0
    assisted_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    token_seconds: float = math.nan
    round_seconds: float = math.nan
    distances: dict[str, Distance] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Tokens committed per target pass, prefill excluded."""
        return ratio(self.committed, self.passes)

    @property
    def break_even(self) -> float:
        """The tau at which the measured costs of a round would make assisted as fast as plain."""
        return ratio(self.round_seconds, self.token_seconds)

    @property
    def lossless(self) -> bool:
        """No difference that rounding does not explain, no distance that chance does not explain."""
        faults = [d for d in self.differences.values() if d.verdict == FAULT]
        return not faults and all(d.within_noise for d in self.distances.values())


def check(
    target: Any,
    drafter: Drafter,
    prompts: dict[str, dict[str, Tensor]],
    max_new_tokens: int = 64,
    draws: int = 0,
    sampling: dict[str, Any] | None = None,
    progress: Callable[[], Any] = lambda: None,
) -> CheckReport:
    """Run each prompt plain and assisted, greedily, and compare; with `draws`, compare sampled laws too.

    prompts: id -> model inputs of one row. sampling: generate's arguments for the sampled calls.
    progress: called after each prompt.
    """
    report = CheckReport(prompts=len(prompts))
    plain_steps = plain_after_prefill = assisted_after_prefill = 0.0
    warm = next(iter(prompts.values()))
    for arguments in ({}, {"assistant_model": drafter}):
        runs.run(target, warm, 8, **arguments)
    for name, inputs in prompts.items():
        plain = runs.run(target, inputs, max_new_tokens)
        assisted = runs.run(target, inputs, max_new_tokens, assistant_model=drafter)
        difference = classify_difference(target, inputs["input_ids"], plain.ids, assisted.ids)
        if difference is not None:
            report.differences[name] = difference
        if draws:
            report.distances[name] = sampling_distance(target, inputs, drafter, draws, **(sampling or {}))
        report.tokens += len(assisted.ids)
        report.passes += assisted.passes
        report.committed += assisted.committed
        report.accepted_by_depth = _add(report.accepted_by_depth, assisted.speculation.accepted_by_depth)
        report.offered_by_depth = _add(report.offered_by_depth, assisted.speculation.offered_by_depth)
        report.plain_seconds += plain.seconds
        report.assisted_seconds += assisted.seconds
        report.target_seconds += assisted.target_seconds
        report.draft_seconds += assisted.draft_seconds
        plain_steps += plain.passes
        plain_after_prefill += plain.seconds - plain.prefill_seconds
        # The same prefill cost is taken off both, so that it cancels.
        assisted_after_prefill += assisted.seconds - plain.prefill_seconds
        progress()
    report.token_seconds = ratio(plain_after_prefill, plain_steps)
    report.round_seconds = ratio(assisted_after_prefill, report.passes)
    return report


def _add(first: list[int], second: list[int]) -> list[int]:
    length = max(len(first), len(second))
    first, second = ([*x, *[0] * (length - len(x))] for x in (first, second))
    return [a + b for a, b in zip(first, second)]

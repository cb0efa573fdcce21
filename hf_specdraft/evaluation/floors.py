"""Information floors (2608.27339): how much of a block drafter's rejection no proposal that sees so little could avoid.

Under speculative acceptance a token is rejected with probability TV(p, q). At slot k (0-based) the target's law p
depends on the context X and all tokens Z_<k drafted so far, a proposal of order m only on X and the last m of them, W:

    T_k^(m) = E_W[ min_q E[ TV(p(. | X, Z_<k), q) | W ] ]

No drafter appears in it; a drafter's model gap is its own rejection minus the floor of its order. M members of a cell:
laws of one slot at one W, [M, V], each summing to 1, with weights [M] that need not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """[..., V] laws p and q -> [...] TV. q may leave out tokens that p does not have."""
    return (p - q).clamp(min=0).sum(-1)


def barycentre(probs: Tensor, weights: Tensor) -> Tensor:
    """[V] law of the least weighted mean TV to the members.

    q(v) is a weighted quantile of the members' p_i(v), of one level for all tokens: the one where q sums to 1. That sum
    jumps with the level, so q lies between the quantiles on both sides of the jump, on a straight line. (The mean of
    the members is the barycentre of the log loss, and too far away.)
    """
    values, order = probs.sort(dim=0)
    reached = weights[order].cumsum(0)
    reached = reached / reached[-1]

    def quantile(level: float) -> Tensor:
        rank = (reached < level).sum(0, keepdim=True).clamp(max=len(probs) - 1)
        return values.gather(0, rank)[0]

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if quantile(middle).sum() < 1 else (low, middle)
    below, above = quantile(low), quantile(high)
    jump = above.sum() - below.sum()
    q = torch.lerp(below, above, (1 - below.sum()) / jump) if jump > 0 else above
    return q / q.sum()  # of rounding


def floor(probs: Tensor, weights: Tensor) -> float:
    """A cell's floor: the members' weighted mean TV to their barycentre; NaN for fewer than two members of weight."""
    everyone = weights > 0
    if everyone.sum() < 2:
        return math.nan
    return _mean(total_variation(probs[everyone], barycentre(probs[everyone], weights[everyone])), weights[everyone])


def split_floor(probs: Tensor, weights: Tensor, order: Tensor) -> float:
    """The floor fitted on one half and scored on the other, which errs upwards where `floor` errs downwards.

    order: [M] a permutation; its even places fit, its odd ones score.
    """
    fit, score = order[::2], order[1::2]
    if not (weights[fit].sum() > 0 and weights[score].sum() > 0):
        return math.nan
    return _mean(total_variation(probs[score], barycentre(probs[fit], weights[fit])), weights[score])


def effective_size(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2: how many members of equal weight would tell as much."""
    return float(weights.sum() ** 2 / weights.square().sum())


def importance(log_probs: Tensor) -> Tensor:
    """[M] log p(z | X, prefix) of a predecessor that was forced after sampled prefixes -> weights, 1 the largest."""
    return (log_probs - log_probs.max()).exp()


def serving_risk(distances: Tensor, factors: Tensor) -> Tensor:
    """[S] rejection at each slot among drafts that get there: E[W_k-1 TV_k] / E[W_k-1].

    distances: [N, S] TV along N rollouts of the target. factors: [N, S] the chance that the rollout's token is drafted
    and kept, relative to the target's own, min(1, q / p); W_k-1 is their product before slot k. NaN at a slot counts
    for nothing.
    """
    reach = torch.nn.functional.pad(factors[:, :-1].cumprod(1), (1, 0), value=1)
    reach = reach.where(~distances.isnan(), 0)
    return (reach * distances.nan_to_num()).sum(0) / reach.sum(0)


def _mean(values: Tensor, weights: Tensor) -> float:
    return float((values * weights).sum() / weights.sum())

"""The fallback that runs everywhere: PyTorch's own operators. See `hf_specdraft.kernels` for the contracts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..draft import Law
from ..verification import argmax, residual, sample


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    # Heads are repeated here because with a mask `enable_gqa` leads to SDPA's slowest path on CUDA.
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def verify_chain(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    greedy: bool,
    temperature: float,
    law: Law | None,
    accept_uniforms: Tensor | None,
    emit_uniforms: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if greedy:
        choice = argmax(logits)  # [B, N+1]
        accepted = leading(choice[:, :-1] == tokens, lengths)
        return accepted, choice.gather(1, accepted[:, None]).squeeze(1)

    p_of_token = torch.zeros_like(accept_uniforms)
    for i in range(tokens.shape[1]):  # one [B, V] in float32 at a time
        scores = logits[:, i].float() / temperature
        p_of_token[:, i] = (scores.gather(1, tokens[:, i : i + 1]).squeeze(1) - scores.logsumexp(-1)).exp()
    accepted = leading(accepts(law, tokens, accept_uniforms, p_of_token), lengths)

    token, q = rejection(law, tokens, lengths, accepted, logits.shape[-1])
    row = logits[torch.arange(len(logits), device=logits.device), accepted]  # [B, V]
    p = (row.float() / temperature).softmax(-1)
    q = torch.zeros_like(p) if q is None else q
    q.scatter_add_(1, token.clamp(min=0)[:, None], (token >= 0).to(q)[:, None])
    return accepted, sample(residual(p, q), emit_uniforms)


def leading(accept: Tensor, lengths: Tensor) -> Tensor:
    """[B, N] bool -> [B], how many of the first `lengths` entries are True before the first False."""
    real = torch.arange(accept.shape[1], device=accept.device) < lengths[:, None]
    return (accept & real).long().cumprod(-1).sum(-1)


def accepts(law: Law | None, tokens: Tensor, uniforms: Tensor, p: Tensor) -> Tensor:
    """[B, N] bool: whether each token survives on its own, with probability min(1, p / q); q is 1 in point rows."""
    if law is None:
        return uniforms < p
    if law.ids is None:
        inside = tokens < law.probs.shape[-1]
        q = law.probs.gather(-1, (tokens * inside)[..., None]).squeeze(-1) * inside
    else:
        q = (law.probs * (law.ids == tokens[..., None])).sum(-1)
    q = torch.where(law.rows[:, None], q, 1.0)
    return (uniforms.double() * q.double() < p.double()) & (q > 0)


def rejection(
    law: Law | None, tokens: Tensor, lengths: Tensor, accepted: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """What a rejection takes out of p: the token [B] of point rows (-1 in others), and the law [B, V] of drawn rows.

    The law is zero in other rows, and None without drawn rows.
    """
    rejected = accepted < lengths
    if tokens.shape[1] == 0:
        return torch.full_like(accepted, -1), None
    index = accepted.clamp(max=tokens.shape[1] - 1)
    token = tokens.gather(1, index[:, None]).squeeze(1)
    if law is None:
        return token.masked_fill(~rejected, -1), None
    q = law.at(index, vocab_size).float().masked_fill(~(rejected & law.rows)[:, None], 0)
    return token.masked_fill(~rejected | law.rows, -1), q

"""Chain verification as two Triton kernels: one pass over every scored row, then the emitting row once more.

Nothing of the size of rows x vocabulary is written. See `hf_specdraft.kernels.verify_chain` for the contract.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..draft import Law
from .reference import VANISHED
from .sdpa import accepts, leading, rejection

_BLOCK = 4096  # vocabulary entries per step


@triton.jit
def _read_rows(
    logits,
    tokens,
    lengths,
    choice,
    p_of_token,
    log_total,
    logits_b,
    logits_n,
    logits_v,
    vocab_size,
    nodes,
    temperature,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row (b, i): its argmax when GREEDY, else its log-sum-exp and the probability of token i."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    length = tl.load(lengths + b)
    if i <= length:
        row = logits + b * logits_b + i * logits_n
        top = tl.full((), float("-inf"), tl.float32)
        best = tl.zeros((), tl.int32)
        total = tl.zeros((), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row + ids * logits_v, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            if GREEDY:
                block_top = tl.max(x, 0)
                block_best = tl.min(tl.where(x == block_top, ids, vocab_size), 0)
                best = tl.where(block_top > top, block_best, best)
                top = tl.maximum(top, block_top)
            else:
                x = x / temperature
                new_top = tl.maximum(top, tl.max(x, 0))
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # top-k and top-p leave blocks without a token
                total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
                top = new_top
        if GREEDY:
            tl.store(choice + b * (nodes + 1) + i, best.to(tl.int64))
        else:
            log_sum = top + tl.log(total)
            tl.store(log_total + b * (nodes + 1) + i, log_sum)
            if i < length:
                token = tl.load(tokens + b * nodes + i)
                x = tl.load(row + token * logits_v).to(tl.float32) / temperature
                tl.store(p_of_token + b * nodes + i, tl.exp(x - log_sum))


@triton.jit
def _weights(row, ids, logits_v, vocab_size, temperature, log_sum, q, rejected, HAS_LAW: tl.constexpr):
    """p and the residual of the ids; `rejected` is -1 where no single token is taken out."""
    inside = ids < vocab_size
    x = tl.load(row + ids * logits_v, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(x / temperature - log_sum)
    residual = p
    if HAS_LAW:
        residual = tl.maximum(p - tl.load(q + ids, mask=inside, other=0.0), 0.0)
    return p, tl.where(ids == rejected, 0.0, residual)


@triton.jit
def _emit(
    logits,
    accepted,
    log_total,
    rejected_token,
    q,
    uniforms,
    next_token,
    logits_b,
    logits_n,
    logits_v,
    vocab_size,
    nodes,
    temperature,
    vanished,
    HAS_LAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row b: inverse CDF of the residual by token id, summed in float64 like the other implementations."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.load(accepted + b)
    log_sum = tl.load(log_total + b * (nodes + 1) + i)
    rejected = tl.load(rejected_token + b)
    row = logits + b * logits_b + i * logits_n
    q_row = q + b * vocab_size
    total = tl.zeros((), tl.float64)
    p_total = tl.zeros((), tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        p, residual = _weights(row, ids, logits_v, vocab_size, temperature, log_sum, q_row, rejected, HAS_LAW)
        total += tl.sum(residual.to(tl.float64), 0)
        p_total += tl.sum(p.to(tl.float64), 0)
    empty = total <= vanished
    target = tl.load(uniforms + b).to(tl.float64) * tl.where(empty, p_total, total)
    below = tl.zeros((), tl.float64)
    found = tl.full((), 0, tl.int32) + vocab_size
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        p, residual = _weights(row, ids, logits_v, vocab_size, temperature, log_sum, q_row, rejected, HAS_LAW)
        weights = tl.where(empty, p, residual).to(tl.float64)
        cumulated = below + tl.cumsum(weights, 0)
        # A scan rounds differently at each place: an id without weight may seem to pass the target.
        found = tl.minimum(found, tl.min(tl.where((cumulated > target) & (weights > 0), ids, vocab_size), 0))
        below += tl.sum(weights, 0)
    tl.store(next_token + b, found.to(tl.int64))


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
    """See `hf_specdraft.kernels.verify_chain`."""
    (batch, nodes), vocab_size = tokens.shape, logits.shape[-1]
    tokens, lengths = tokens.contiguous(), lengths.contiguous()
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    # Entries of rows beyond a chain's length are never written; `leading` drops what was computed from them.
    choice = tokens.new_empty(batch, nodes + 1)
    p_of_token = logits.new_empty(batch, nodes, dtype=torch.float32)
    log_total = logits.new_empty(batch, nodes + 1, dtype=torch.float32)
    shape = (*logits.stride(), vocab_size, nodes, float(temperature))
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _read_rows[(batch, nodes + 1)](
            logits, tokens, lengths, choice, p_of_token, log_total, *shape, GREEDY=greedy, BLOCK=block
        )
    if greedy:
        accepted = leading(choice[:, :-1] == tokens, lengths)
        return accepted, choice.gather(1, accepted[:, None]).squeeze(1)

    accepted = leading(accepts(law, tokens, accept_uniforms, p_of_token), lengths)
    rejected_token, q = rejection(law, tokens, lengths, accepted, vocab_size)
    next_token = torch.empty_like(accepted)
    with torch.cuda.device_of(logits):
        _emit[(batch,)](
            logits,
            accepted,
            log_total,
            rejected_token,
            log_total if q is None else q,  # a pointer is needed either way
            emit_uniforms.contiguous(),
            next_token,
            *shape,
            VANISHED,
            HAS_LAW=q is not None,
            BLOCK=block,
        )
    return accepted, next_token

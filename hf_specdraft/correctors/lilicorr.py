"""LiLiCorr: a small attention network over all candidates of all slots gives each an in- and an out-vector; the cosine
of one's out-vector with the next one's in-vector says how well they fit (2608.20530; NVIDIA Model-Optimizer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ..draft import Block
from ..parts import Term
from .base import Memory
from .lattice import Candidates, LatticeCorrector

if TYPE_CHECKING:
    from ..drafters.base import TargetView
    from ..heads import HeadedDrafter
    from ..training.records import Unrolled

FEATURES = 5


class LastRow(Memory):
    """The last fused row of the context of each batch row: that of the position before the anchor.

    rows: [B, H], None before any context came. known: [B] bool, which rows have one.
    """

    def __init__(self, rows: Tensor | None, known: Tensor):
        self.rows, self.known = rows, known

    def observe(self, context: Tensor, positions: Tensor, counts: list[int]) -> None:
        counts = torch.tensor(counts, device=context.device)
        last = context.take_along_dim((counts - 1).clamp(min=0)[:, None, None], 1)[:, 0]
        old = torch.zeros_like(last) if self.rows is None else self.rows
        self.rows = torch.where(counts[:, None] > 0, last, old)
        self.known = self.known.to(context.device) | (counts > 0)

    def keep(self, rows: list[int]) -> None:
        self.known = self.known[rows]
        self.rows = None if self.rows is None else self.rows[rows]


class NodeAttention(nn.Module):
    """Attention of all nodes to all nodes, under the parameter names of torch's MultiheadAttention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x: [B, N, width]; bias: [heads, N, N] -> [B, N, width]."""
        parts = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias[None].to(x.dtype))
        return self.out_proj(out.transpose(1, 2).flatten(2))


class NodeLayer(nn.Module):
    """Pre-norm attention and MLP over nodes: x [B, N, width], bias [heads, N, N] -> [B, N, width]."""

    def __init__(self, width: int, heads: int, mlp_width: int, eps: float):
        super().__init__()
        self.attn_norm = Qwen3RMSNorm(width, eps=eps)
        self.attn = NodeAttention(width, heads)
        self.mlp_norm = Qwen3RMSNorm(width, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_width), nn.SiLU(), nn.Linear(mlp_width, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorr(LatticeCorrector):
    """Published names and shapes. Trained with the drafter, or alone on a frozen one.

    top_k: candidates of a slot; fewer than trained work. hidden_size: of the nodes, None for the drafter's own.
    factor_dim: of the in- and out-vectors, None for hidden_size. logit_scale: times the cosines gives log-potentials.
    vector_eps: least length a vector is divided by. margin: of "lilicorr_margin".

    Terms, all of the forced slots: those whose own candidates and those of all slots before hold the text's token, of
    anchors whose slots all count. 0 elsewhere; the paper divides by the forced slots, the loss here by all its slots.
    "lilicorr_ce": of the text's token among the candidates (published weights 0.25, or 0.125 with margin).
    "lilicorr_margin": how much its score lacks to lead by `margin` (0, or 0.125).
    "lilicorr_penalty": the law's mean of what the target's logit of a candidate lacks to the text's token's (0.25).
    "lilicorr_calibration": KL of the target's law among the candidates from the lattice's (0).
    """

    name = "lilicorr"
    terms = {
        "lilicorr_ce": False,
        "lilicorr_margin": False,
        "lilicorr_penalty": True,
        "lilicorr_calibration": True,
    }

    def __init__(
        self,
        config,
        top_k: int = 8,
        hidden_size: int | None = None,
        factor_dim: int | None = None,
        num_layers: int = 2,
        num_heads: int = 8,
        mlp_ratio: float = 2.0,
        logit_scale: float = 8.0,
        vector_eps: float = 1e-4,
        margin: float = 2.0,
        sweeps: int = 0,
    ):
        super().__init__(config, top_k, sweeps)
        width, drafter_width, eps = hidden_size or config.hidden_size, config.hidden_size, config.rms_norm_eps
        vectors = factor_dim or width
        if width % num_heads:
            raise ValueError(f"lilicorr num_heads {num_heads} must divide its hidden_size {width}")
        self.block_size, self.logit_scale, self.vector_eps, self.margin = (
            config.block_size,
            logit_scale,
            vector_eps,
            margin,
        )
        self.token_proj = nn.Identity() if width == drafter_width else nn.Linear(drafter_width, width)
        self.pass_hidden_proj = nn.Linear(drafter_width, width)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, config.num_drafts, 1, width))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, top_k, width))
        self.relative_slot_bias = nn.Parameter(torch.empty(num_heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(num_heads))
        self.context_proj = nn.Linear(drafter_width, width)
        self.layers = nn.ModuleList(NodeLayer(width, num_heads, int(width * mlp_ratio), eps) for _ in range(num_layers))
        self.output_norm = Qwen3RMSNorm(width, eps=eps)
        self.anchor_norm = Qwen3RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, vectors)
        self.in_head = nn.Linear(width, vectors)
        self.anchor_out_head = nn.Linear(width, vectors)

    def init_weights(self) -> None:
        """Matrices N(0, 0.02), everything else 0 (norms 1); the heads last, for both of a product at 0 never move."""
        for table in (self.slot_embedding, self.rank_embedding, self.relative_slot_bias, self.same_slot_bias):
            initialization.zeros_(table)
        heads = (self.out_head, self.in_head, self.anchor_out_head)
        linear = [m for m in self.modules() if isinstance(m, nn.Linear) and m not in heads]
        for module in (*linear, *heads):
            initialization.normal_(module.weight, std=0.02)
            initialization.zeros_(module.bias)
        for layer in self.layers:
            initialization.normal_(layer.attn.in_proj_weight, std=0.02)
            initialization.zeros_(layer.attn.in_proj_bias)

    def memory(self, batch: int) -> LastRow:
        return LastRow(None, torch.zeros(batch, dtype=torch.bool))

    def recall(self, unrolled: Unrolled) -> LastRow:
        context, anchors = unrolled.context, unrolled.anchors
        known = context.position_ids.flatten()[anchors] > 0
        return LastRow(context.rows.flatten(0, 1)[(anchors - 1).clamp(min=0)], known)

    def tables(
        self, drafter: HeadedDrafter, view: TargetView, block: Block, candidates: Candidates
    ) -> tuple[Tensor, Tensor]:
        log_probs = candidates.logits - block.logits.float().logsumexp(-1, keepdim=True)
        embeddings = drafter.embed(candidates.ids, view).detach()
        start, pair = self.cosines(log_probs, embeddings, block.hidden, block.memory.rows, block.memory.known)
        return self.logit_scale * start, self.logit_scale * pair

    def cosines(
        self, log_probs: Tensor, embeddings: Tensor, hidden: Tensor, last: Tensor | None, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """start [B, k] and pair [B, S - 1, k, k], float32 within [-1, 1].

        log_probs: [B, S, k] of the candidates, among all tokens. embeddings: [B, S, k, H] theirs. hidden: [B, S, H] the
        slots' states. last, known: the context's last rows, as `LastRow` has them.
        """
        slots, k = log_probs.shape[1:]
        nodes = (
            self.token_proj(embeddings)
            + self.pass_hidden_proj(hidden)[:, :, None]
            + self.feature_mlp(_features(log_probs).to(hidden.dtype))
            + self.slot_embedding[0, :, :slots]
            + self.rank_embedding[0, :, :, :k]
        ).flatten(1, 2)
        slot = torch.arange(slots, device=hidden.device).repeat_interleave(k)
        apart = slot[:, None] - slot
        bias = self.relative_slot_bias[:, apart + self.block_size - 1] + self.same_slot_bias[:, None, None] * (
            apart == 0
        )
        for layer in self.layers:
            nodes = layer(nodes, bias)
        nodes = self.output_norm(nodes).unflatten(1, (slots, k))
        last = hidden.new_zeros(len(hidden), hidden.shape[-1]) if last is None else last
        # Without a row before it, the anchor says nothing: not even the projection's bias.
        anchor = self.anchor_norm(self.context_proj(last) * known.to(hidden)[:, None])
        beside = anchor[:, None, None].expand_as(nodes)
        factors = F.silu(self.factor_input_proj(torch.cat((nodes, beside, nodes * beside), dim=-1)))
        outward, inward, first = (
            F.normalize(vectors.float(), dim=-1, eps=self.vector_eps)
            for vectors in (self.out_head(factors), self.in_head(factors), self.anchor_out_head(anchor))
        )
        start = (inward[:, 0] @ first[..., None])[..., 0]
        return start, outward[:, :-1] @ inward[:, 1:].mT

    def lessons(
        self,
        drafter: HeadedDrafter,
        view: TargetView,
        block: Block,
        candidates: Candidates,
        scores: Tensor,
        previous: Tensor,
    ) -> dict[str, Term]:
        def forced(labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            """[a, S] slots that count here, and [a, S, 1] the rank of the text's token in them."""
            gold = (candidates.index == labels[..., None]) & (labels >= 0)[..., None]
            held = gold.any(-1).long().cumprod(1).bool() & mask.all(1, keepdim=True)
            return held, gold.long().argmax(-1, keepdim=True)

        def at(logits: Tensor) -> Tensor:
            """The target's [a, S, K] logits of the candidates."""
            return logits.float().gather(-1, candidates.index.clamp(max=logits.shape[-1] - 1))

        def ce(teacher, labels, mask):
            held, rank = forced(labels, mask)
            return -scores.log_softmax(-1).gather(-1, rank)[..., 0] * held

        def margin(teacher, labels, mask):
            held, rank = forced(labels, mask)
            rest = scores.scatter(-1, rank, -torch.inf).amax(-1)
            return F.relu(self.margin - (scores.gather(-1, rank)[..., 0] - rest)) * held

        def penalty(teacher, labels, mask):
            held, rank = forced(labels, mask)
            logits = at(teacher)
            lacking = F.relu(logits.gather(-1, rank) - logits)
            return (scores.softmax(-1) * lacking).sum(-1) * held

        def calibration(teacher, labels, mask):
            held, _ = forced(labels, mask)
            log_law = at(teacher).log_softmax(-1)
            return F.kl_div(scores.log_softmax(-1), log_law, log_target=True, reduction="none").sum(-1) * held

        return {
            "lilicorr_ce": ce,
            "lilicorr_margin": margin,
            "lilicorr_penalty": penalty,
            "lilicorr_calibration": calibration,
        }


def _features(log_probs: Tensor) -> Tensor:
    """[B, S, k] -> [B, S, k, FEATURES]: log-probability, probability, distance to the best, rank, being the best."""
    rank = torch.arange(log_probs.shape[-1], device=log_probs.device).expand_as(log_probs)
    return torch.stack(
        (
            log_probs,
            log_probs.exp(),
            log_probs - log_probs.amax(-1, keepdim=True),
            rank / max(1, log_probs.shape[-1] - 1),
            (rank == 0).to(log_probs),
        ),
        dim=-1,
    )

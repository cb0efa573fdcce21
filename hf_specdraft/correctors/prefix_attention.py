"""The prefix-attention head of "information floors": each token given the one before it, read in the light of the whole
context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from ..draft import Block
from ..parts import Scored, Term
from ..verification import argmax
from .base import Memory, plus
from .lattice import Candidates, LatticeCorrector

if TYPE_CHECKING:
    from ..drafters.base import TargetView
    from ..heads import HeadConfig, HeadedDrafter
    from ..training.records import FusedContext, Unrolled


class PrefixAttention(LatticeCorrector):
    """logits_k + W2 x(x_{k-1}, h_k, X) (2608.27339), of rank r.

    x is a layer's output for each pair of a slot's state and the token before it: it attends to the context X behind
    the anchor (fused rows, as the drafter's layers read them), without positions, and never to other pairs.

    top_k: candidates of a slot, the best of the marginals. In training the whole vocabulary is scored, after the text's
        tokens.
    out_scale, seed_std: of the start, x's size and W2's. With seed_std 0, training starts from the plain drafter; the
    paper's is random, a projection of the target's head in the place of our noise.
    nominate: the term "nomination" is the cross entropy of the marginals with the target's law over its best
        `nominate` tokens, for it is the marginals that give the candidates.
    """

    name = "prefix_attention"
    terms = {"nomination": True}

    def __init__(
        self,
        config: HeadConfig,
        rank: int = 512,
        heads: int = 4,
        head_dim: int = 128,
        mlp_hidden: int = 2048,
        top_k: int = 16,
        nominate: int = 16,
        out_scale: float = 0.35,
        seed_std: float = 0.0664,
        sweeps: int = 0,
    ):
        super().__init__(config, top_k, sweeps)
        sizes = dict(rank=rank, heads=heads, head_dim=head_dim, mlp_hidden=mlp_hidden)
        for name, size in {**sizes, "nominate": nominate}.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} of prefix attention must be at least 1, got {size!r}")
        if config.vocab_size is None:
            raise ValueError(
                "prefix attention has a row for each token: give vocab_size, the target's number of tokens"
            )
        self.rank, self.head_dim, self.nominate = rank, head_dim, nominate
        self.out_scale, self.seed_std = out_scale, seed_std
        hidden, width = config.hidden_size, heads * head_dim

        def norm(size: int) -> nn.Module:
            return nn.RMSNorm(size, eps=config.rms_norm_eps)

        def linear(inputs: int, outputs: int) -> nn.Module:
            return nn.Linear(inputs, outputs, bias=False)

        # Apart, because in one norm the state's large channels would drown the embedding.
        self.embed_norm, self.state_norm = norm(hidden), norm(hidden)
        self.in_proj = linear(2 * hidden, rank)
        self.attn_norm, self.ctx_norm = norm(rank), norm(hidden)
        self.q_proj, self.k_proj, self.v_proj = linear(rank, width), linear(hidden, width), linear(hidden, width)
        self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)
        self.o_proj = linear(width, rank)
        self.mlp_norm = norm(rank)
        self.gate_p, self.up, self.down = linear(rank, mlp_hidden), linear(rank, mlp_hidden), linear(mlp_hidden, rank)
        self.out_norm = norm(rank)
        self.markov_w2 = linear(rank, config.draft_vocab_size or config.vocab_size)

    def init_weights(self) -> None:
        initialization.constant_(self.out_norm.weight, self.out_scale)
        initialization.normal_(self.markov_w2.weight, std=self.seed_std)

    def memory(self, batch: int) -> PrefixMemory:
        return PrefixMemory(self, batch)

    def keys_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C, H] fused rows -> keys and values [B, heads, C, head_dim]."""
        x = self.ctx_norm(context)
        keys, values = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.k_proj, self.v_proj))
        return self.k_norm(keys).transpose(1, 2), values.transpose(1, 2)

    def codes(self, drafter: HeadedDrafter, view: TargetView, tokens: Tensor) -> Tensor:
        """[...] target ids -> [..., r] what `in_proj` makes of their embeddings."""
        embedded = drafter.embed(tokens, view)
        return F.linear(self.embed_norm(embedded), self.in_proj.weight[:, : embedded.shape[-1]])

    def latent(self, codes: Tensor, hidden: Tensor, past: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """x of N pairs [B, N, r]: of the tokens' `codes` [B, N, r] and the slots' states `hidden` [B, N, H].

        past: keys, values [B, heads, C, head_dim] of the context and which of them each pair sees, [B, 1, N or 1, C]
        bool; None for no context.
        """
        x = codes + F.linear(self.state_norm(hidden), self.in_proj.weight[:, hidden.shape[-1] :])
        if past is not None:
            x = x + self._attend(self.attn_norm(x), *past)
        y = self.mlp_norm(x)
        return self.out_norm(x + self.down(F.silu(self.gate_p(y)) * self.up(y)))

    def _attend(self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        some = seen.any(-1, keepdim=True)  # [B, 1, N or 1, 1]; a softmax over nothing would be NaN
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=(seen | ~some).expand(-1, -1, x.shape[1], -1)
        )
        return self.o_proj((out * some).transpose(1, 2).flatten(2))

    def tables(
        self, drafter: HeadedDrafter, view: TargetView, block: Block, candidates: Candidates
    ) -> tuple[Tensor, Tensor]:
        slots, width = candidates.ids.shape[1:]
        # [B, P] all predecessors, slot by slot: the anchor, then the candidates of each slot but the last.
        previous = torch.cat((block.anchor[:, None], candidates.ids[:, :-1].flatten(1)), dim=1)
        slot = torch.arange(1, slots, device=previous.device).repeat_interleave(width)
        hidden = block.hidden[:, F.pad(slot, (1, 0))]
        past = None if block.memory is None else block.memory.read()
        latents = self.latent(self.codes(drafter, view, previous), hidden, past)
        rows = F.embedding(candidates.index.clamp(max=self.markov_w2.out_features - 1), self.markov_w2.weight)
        start = candidates.logits[:, 0] + (rows[:, 0] @ latents[:, 0, :, None])[..., 0]
        pairs = latents[:, 1:].unflatten(1, (slots - 1, width)) @ rows[:, 1:].mT
        return start, candidates.logits[:, 1:, None] + pairs

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, base: Tensor) -> Scored:
        codes = self.codes(drafter, view, unrolled.previous)
        latents = self._taught(codes, unrolled.hidden, unrolled.anchors, unrolled.context)
        logits = plus(base, self.markov_w2(latents))
        with torch.no_grad():
            best = Candidates.of(drafter, base, self.top_k).index
            chosen = best.gather(-1, argmax(logits.gather(-1, best))[..., None])[..., 0]
        return Scored(logits, base, chosen, {"nomination": self._nomination(base)})

    def _taught(self, codes: Tensor, hidden: Tensor, anchors: Tensor, context: FusedContext) -> Tensor:
        """x [a, S, r] at `anchors` [a]: the pairs of one row of the batch at a time, over its context."""
        columns, slots = context.rows.shape[1], hidden.shape[1]
        keys, values = self.keys_values(context.rows)
        row, documents, positions = anchors // columns, context.document_ids.flatten(), context.position_ids.flatten()
        parts, places = [], []
        for b in row.unique().tolist():
            place = (row == b).nonzero()[:, 0]
            anchor = anchors[place, None]
            seen = (context.document_ids[b] == documents[anchor]) & (context.position_ids[b] < positions[anchor])
            past = keys[b, None], values[b, None], seen.repeat_interleave(slots, dim=0)[None, None]
            parts.append(self.latent(codes[place].flatten(0, 1)[None], hidden[place].flatten(0, 1)[None], past)[0])
            places.append(place)
        order = torch.cat(places).argsort()
        return torch.cat(parts).unflatten(0, (-1, slots))[order]

    def _nomination(self, base: Tensor) -> Term:
        def term(teacher: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            best = teacher.topk(min(self.nominate, teacher.shape[-1]), dim=-1)
            known = base[..., : teacher.shape[-1]].to(teacher.dtype).log_softmax(-1).gather(-1, best.indices)
            # Where fewer tokens are possible at all, 0 * log 0 must be 0.
            return -(best.values.softmax(-1) * known.clamp(min=-1e4)).sum(-1).where(labels >= 0, 0)

        return term


class PrefixMemory(Memory):
    """The head's keys and values of the context."""

    def __init__(self, head: PrefixAttention, batch: int):
        from ..drafters.block.context_cache import ContextCache

        self.head, self.cache = head, ContextCache(batch)

    def observe(self, context: Tensor, positions: Tensor, counts: list[int]) -> None:
        self.cache.extend(positions, counts)
        self.cache.write(0, *self.head.keys_values(context))

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)

    def read(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keys, values [B, heads, C, head_dim] and which are real, [B, 1, 1, C]; None before any context."""
        if not self.cache.length:
            return None
        return *self.cache.read(0), self.cache.positions[:, None, None, : self.cache.length] >= 0

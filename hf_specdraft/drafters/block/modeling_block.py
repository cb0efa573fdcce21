"""The network of the block family. Weights only: context keys and values live in a session's ContextCache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half
from transformers.utils import ModelOutput

from ... import correctors
from ...confidence import ConfidenceHead
from ...heads import HeadConfig, HeadedDrafter
from ...length_head import LengthHead
from ...parts import Scored, build
from ...training.records import TrainingBatch, Unrolled
from .. import register
from ..base import TargetView
from . import dialects, exports
from .configuration_block import BlockConfig
from .context_cache import ContextCache
from .convolutions import BlockConvolution
from .editing import EditEmbedding
from .predraft import PreDraft
from .session_block import BlockSession
from .slots import SlotEmbedding
from .stages import OwnStates
from .unroll_block import resolve_mode, unroll_block
from .visibility import visible

# [B, 1, S, C + S] bool, None where every slot sees every key, or what attends in the place of torch's attention:
# (queries [B, heads, S, head_dim], keys, values [B, kv heads, C + S, head_dim]) -> [B, heads, S, head_dim].
Mask = Tensor | None | Callable[[Tensor, Tensor, Tensor], Tensor]


class BlockRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, with angles for a part of the head too."""

    @staticmethod
    def compute_default_rope_parameters(config: BlockConfig, **kwargs) -> tuple[Tensor, float]:
        """Qwen3's frequencies over the first `partial_rotary_factor` of the head."""
        width = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        return config.rope_parameters["rope_theta"] ** -exponents, 1.0


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, heads, T, head_dim] turned by (cos, sin) [B, T, R]; dimensions beyond R stay."""
    cos, sin = (part.unsqueeze(1) for part in rope)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = turned * cos + rotate_half(turned) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class BlockAttention(nn.Module):
    """Qwen3's attention of the slots over the context and themselves; the mask alone says what is causal."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> keys and values [B, kv heads, T, head_dim]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        return rotate(keys, rope), self.v_proj(x).view(heads).transpose(1, 2)

    def forward(self, x: Tensor, rope, past: tuple[Tensor, Tensor] | None, mask: Mask) -> Tensor:
        queries = self.q_norm(self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim)).transpose(1, 2)
        keys, values = self.keys_values(x, rope)
        if past is not None:
            keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        attend = mask if callable(mask) else partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        out = attend(rotate(queries, rope), keys, values)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, S, H]


class BlockLayer(nn.Module):
    """Qwen3's layer, its sublayers inside short convolutions where the config has them."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = build("convolution", BlockConvolution, config.convolution, config)
        self.mlp_conv = build("convolution", BlockConvolution, config.convolution, config)

    def forward(self, x: Tensor, rope, mask: Mask, known: Callable, context: Tensor | None, context_rope) -> Tensor:
        """known: new context's keys and values, or None -> those of all context. The new ones are made in here, because
        FSDP has a layer's weights whole, and its gradients complete, only around its forward and its tensor inputs."""
        new = None if context is None else self.self_attn.keys_values(context, context_rope)
        attend = partial(self.self_attn, rope=rope, past=known(new), mask=mask)
        y = self.input_layernorm(x)
        x = x + (attend(y) if self.attention_conv is None else self.attention_conv(y, attend))
        y = self.post_attention_layernorm(x)
        return x + (self.mlp(y) if self.mlp_conv is None else self.mlp_conv(y, self.mlp))


@dataclass
class BlockOutput(ModelOutput):
    """last_hidden_state: [B, S, H] after the final norm. logits: [B, S, K] of an own head, else None.
    context: [B, C, H] the new context as the layers read it, None when there was none."""

    last_hidden_state: Tensor | None = None
    logits: Tensor | None = None
    context: Tensor | None = None


def refuse_unlike_target(config: HeadConfig, view: TargetView, if_wider: str, instead: str = "") -> None:
    """Raise ValueError when a target is not of the shape that a drafter with features of named layers was made for.

    if_wider: what helps a drafter that borrows an embedding of another width. instead: what else than reading earlier
        layers, for one that reads the last.
    """
    remedy = f"load the target named in drafter.config.target_name ({config.target_name})"
    if config.target_hidden_size != view.hidden_size:
        raise ValueError(
            f"drafter was built for hidden_size {config.target_hidden_size} but the target has {view.hidden_size}; "
            f"{remedy}"
        )
    if not config.own_embeddings and config.hidden_size != view.hidden_size:
        raise ValueError(
            f"drafter of hidden_size {config.hidden_size} borrows the embedding of a target of hidden_size "
            f"{view.hidden_size}; {if_wider}"
        )
    if config.num_target_layers not in (None, view.num_layers):
        raise ValueError(
            f"drafter was built for a target of {config.num_target_layers} layers but the target has "
            f"{view.num_layers}; {remedy}"
        )
    if view.num_layers - 1 in config.target_layer_ids:
        raise ValueError(
            f"drafter reads layer {view.num_layers - 1}, the target's last, whose output transformers only gives "
            f"after the final norm, not as it leaves the layer; use a drafter that reads earlier layers{instead}"
        )


@register
class BlockDrafter(HeadedDrafter):
    """DFlash and its dialects (`dialects.py`) in one internal form."""

    config_class = BlockConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules = ["BlockLayer"]
    export_dialects = exports.DIALECTS

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.feature_layers = config.feature_layers
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(self.feature_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.wants_rejected = config.carryover
        if config.carryover:
            # Starts as nothing: rejected rows look like others.
            self.carry_embedding = nn.Parameter(torch.zeros(self.fc.in_features))
        self.own_states = OwnStates(config) if config.max_stages > 1 else None
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = BlockRotaryEmbedding(config)
        self.edit_embedding = EditEmbedding(config) if config.edit_type_embedding else None
        self.slot_embedding = SlotEmbedding(config) if config.slot_embed else None
        self.add_head()
        if config.corrector is not None:
            self.corrector = correctors.build(config, config.corrector)
        self.length_head = build("length_head", LengthHead, config.length_head, config)
        self.confidence = build("confidence", ConfidenceHead, config.confidence, config, self.corrector)
        self.predraft = build("predraft", PreDraft, config.predraft, config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "embed_tokens", None)

    def check(self, view: TargetView) -> None:
        config = self.config
        super().check(view)
        refuse_unlike_target(
            config,
            view,
            "only a drafter with embedding and head of its own may differ in width",
            ", or train one with reads_final",
        )
        if not config.own_embeddings and not 0 <= config.mask_token_id < view.vocab_size:
            raise ValueError(
                f"mask_token_id {config.mask_token_id} has no row in the target's embedding of {view.vocab_size}; "
                f"load the target named in drafter.config.target_name ({config.target_name})"
            )

    def start(self, view: TargetView, batch: int) -> BlockSession:
        return BlockSession(self, view, batch)

    def embed(self, ids: Tensor, view: TargetView | None = None) -> Tensor:
        """[B, S] block ids -> [B, S, H], by the own embedding or the target's."""
        if not self.config.own_embeddings:
            return view.embed(ids, skip_norm=self.config.skip_embed_norm).to(self.device, self.dtype)
        # The target's vocabulary may be padded further: an id without a row is as good as unknown.
        return self.embed_tokens(ids.where(ids < self.config.vocab_size, self.config.mask_token_id))

    def fused(self, features: Tensor, carried: Tensor | None = None) -> Tensor:
        """[..., C, n*H] states of the target -> [..., C, H] context rows as the layers read them.

        carried: [..., C] bool, those of rejected tokens, which bear Carryover's mark.
        """
        if carried is not None:
            features = torch.where(carried[..., None], features + self.carry_embedding, features)
        return self.hidden_norm(self.fc(features))

    def reread(self, hidden: Tensor, stages: Tensor) -> Tensor:
        """[..., C, H] own states, made at `stages` [C] -> context rows; as they are where no stages were trained."""
        if self.own_states is None:
            return self.hidden_norm(hidden)
        return self.own_states(hidden, stages, self.hidden_norm)

    def embed_blocks(self, ids: Tensor, view: TargetView | None = None) -> Tensor:
        """[..., block_size] ids of whole blocks -> [..., block_size, H]."""
        embeddings = self.embed(ids.flatten(0, -2), view).unflatten(0, ids.shape[:-1])
        if self.slot_embedding is not None:
            embeddings = self.slot_embedding(embeddings)
        if self.edit_embedding is None:
            return embeddings
        drafted = (ids != self.config.mask_token_id) & (torch.arange(ids.shape[-1], device=ids.device) > 0)
        return self.edit_embedding(embeddings, drafted)

    def grown(self, **fields) -> BlockDrafter:
        """As Drafter.grown. A drafter that drafted as deep as its stages gave does so with more of them."""
        config = self.config
        if "max_stages" in fields and config.num_assistant_tokens == config.max_stages * config.num_drafts:
            fields = {"num_assistant_tokens": None, **fields}
        return super().grown(**fields)

    @torch.no_grad()
    def start_from(self, view: TargetView, batches: Iterable[TrainingBatch]) -> None:
        """Give the final norm the size that the head is used to, channel by channel: from noise of another size, the
        first hundreds of steps only undo a cross entropy of tens of nats.

        batches: with last_hidden. Raises ValueError for another width than the target's, and for texts without
        supervised tokens.
        """
        if self.config.hidden_size != view.hidden_size:
            raise ValueError("only a drafter as wide as its target can start from the target's states")
        states = [batch.last_hidden[batch.loss_mask].float() for batch in batches]
        energy, count = sum(x.square().sum(0) for x in states), sum(map(len, states))
        if not count:
            raise ValueError("the texts to start from hold no supervised tokens")
        self.norm.weight.copy_((energy / count).sqrt().clamp(min=1e-6))

    def score(self, view: TargetView, unrolled: Unrolled) -> Scored:
        base = self.logits(view, unrolled.hidden)
        scored = Scored(base) if self.corrector is None else self.corrector.teach(self, view, unrolled, base)
        if self.confidence is not None:
            self.confidence.teach(self, view, unrolled, scored)
        if self.length_head is not None:
            self.length_head.teach(self, view, unrolled, scored)
        if self.predraft is not None:
            self.predraft.teach(unrolled, scored)
        return scored

    # Itself, not a wrapper: a training config's options are checked against its signature.
    unroll = unroll_block

    @classmethod
    def check_unroll(cls, options: dict) -> None:
        if options.get("mode") is not None:
            resolve_mode(options["mode"])

    @classmethod
    def dialect_of(cls, config: dict) -> str | None:
        return dialects.dialect_of(config)

    def to_dialect(self, dialect: str, target=None) -> tuple[BlockDrafter, dict, dict[str, Tensor]]:
        return exports.write(self, dialect, target)

    @classmethod
    def from_dialect(cls, name_or_path, config: dict, **kwargs) -> BlockDrafter:
        """`kwargs` as for from_pretrained; those that are BlockConfig fields (say sliding_rule) overrule the reader."""
        fields = {
            key: kwargs.pop(key) for key in list(kwargs) if key in BlockConfig.__dataclass_fields__ and key != "dtype"
        }
        values, state = dialects.read(name_or_path, config, fields, kwargs)
        return cls.from_pretrained(None, config=BlockConfig(**values), state_dict=state, **kwargs)

    def draft_pass(
        self,
        input_ids: Tensor | None = None,
        features: Tensor | None = None,
        feature_positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: ContextCache | None = None,
        attention_mask: dict[str, Mask] | None = None,
        inputs_embeds: Tensor | None = None,
        counts: list[int] | None = None,
        carried: Tensor | None = None,
        own_states: Tensor | None = None,
        stages: Tensor | None = None,
        slots: slice = slice(None),
        head: bool = True,
    ) -> BlockOutput:
        """One drafting pass.

        input_ids: [B, S] anchor and masks, for a drafter with own embeddings; inputs_embeds: [B, S, H] instead.
        features: [B, C, n*H] the target's hidden states of new context, or None; feature_positions: [B, C] their
            positions, -1 for padding; counts: how many are real per row (host integers), None when all are.
        carried: [B, C] bool, which of `features` are of rejected tokens (Carryover).
        own_states, stages: in the place of `features`, the drafter's own states [B, C, H] of drafted tokens, and the
            stages [C] of drafting, from 0, that made them (DLoop).
        position_ids: [B, S] positions of the block.
        cache: earlier context. It is extended by `features`; without it the pass sees `features` alone.
        slots: the slots to return, all by default.
        head: whether to make the logits of an own head.
        attention_mask: layer type -> Mask, for packed training; by default from the positions.
        """
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions, is_ragged = x.new_zeros(x.shape[0], 0, dtype=torch.long), False
        context = context_rope = None
        if feature_positions is not None:
            context = self.fused(features, carried) if own_states is None else self.reread(own_states, stages)
            context_rope = self.rotary_emb(context, feature_positions.clamp(min=0))
            positions, is_ragged = feature_positions, counts is not None and min(counts) < context.shape[1]
            if cache is not None:
                cache.extend(positions, [context.shape[1]] * len(x) if counts is None else counts)
        if cache is not None and cache.positions is not None:
            positions, is_ragged = cache.positions[:, : cache.length], min(cache.counts) < cache.length
        if attention_mask is None:
            attention_mask = {
                layer_type: visible(self.config, layer_type, position_ids, positions)
                if is_ragged or (layer_type == "sliding_attention" and self.config.window_acts)
                else None
                for layer_type in set(self.config.layer_types)
            }
        rope = self.rotary_emb(x, position_ids)

        def known(index: int, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
            if cache is None:
                return new
            if new is not None:
                cache.write(index, *new)
            return cache.read(index) if cache.keys else None

        for index, layer in enumerate(self.layers):
            mask = attention_mask[self.config.layer_types[index]]
            x = layer(x, rope, mask, partial(known, index), context, context_rope)
        hidden = self.norm(x[:, slots])
        return BlockOutput(hidden, self.lm_head(hidden) if head and self.config.own_head else None, context)

"""The network of the EAGLE-3 family. Weights only: keys and values live in a session's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.utils import ModelOutput

from ...acceptance import AcceptanceHead
from ...heads import HeadedDrafter
from ...parts import build
from .. import register
from ..base import TargetView
from ..block.modeling_block import BlockRotaryEmbedding, refuse_unlike_target, rotate
from . import dialects, exports
from .configuration_eagle3 import Eagle3Config, tapped_layers
from .session_eagle3 import Eagle3Session
from .start_eagle3 import start_eagle3
from .unroll_eagle3 import unroll_eagle3

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...training.records import TrainingBatch, Unrolled

# (cos, sin), each [B, T, R].
Rope = tuple[Tensor, Tensor]


class Eagle3Attention(nn.Module):
    def __init__(self, config: Eagle3Config, width: int):
        super().__init__()
        self.head_dim = config.head_dim
        q_width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, q_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.attention_bias)
        norm = nn.RMSNorm if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = (norm(config.head_dim, eps=config.rms_norm_eps) for _ in range(2))

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """[B, T, W] -> [B, heads, T, head_dim]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2), rope)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[B, T, W] -> keys and values [B, kv heads, T, head_dim]."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotate(keys, rope), self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Eagle3Layer(nn.Module):
    """Attention comes between `read` and `write`, because decoding and training attend to different things."""

    def __init__(self, config: Eagle3Config, first: bool):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = Eagle3Attention(config, (1 + first * config.token_window) * config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if first else None
        self.norm_before_residual = config.norm_before_residual

    def read(self, x: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, what attention projects). The first layer's projections read the embeddings and the state."""
        if self.hidden_norm is None:
            return x, self.input_layernorm(x)
        normed = self.hidden_norm(x)
        embeds = self.input_layernorm(embeds.unflatten(-1, (-1, self.hidden_size))).flatten(-2)
        return normed if self.norm_before_residual else x, torch.cat((embeds, normed), dim=-1)

    def write(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual [B, T, H], attended [B, T, heads * head_dim] -> the layer's output [B, T, H]."""
        x = residual + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class Eagle3Output(ModelOutput):
    """last_hidden_state: [B, T, H] after the final norm, what the head reads. state: [B, T, H], what stands in for the
    target's features in the next step."""

    last_hidden_state: Tensor | None = None
    state: Tensor | None = None


@register
class Eagle3Drafter(HeadedDrafter):
    """EAGLE-3 and its dialects in one internal form."""

    config_class = Eagle3Config
    main_input_name = "inputs_embeds"
    is_sequential = True
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    # Training calls parts of a layer, and FSDP has what it shards whole only inside forward: it shards all as one.
    _no_split_modules = []
    _keep_in_fp32_modules_strict = ["acceptance_head"]
    export_dialects = exports.DIALECTS

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.feature_layers = config.feature_layers
        read, width = config.num_features, config.target_hidden_size
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=config.rms_norm_eps) for _ in range(read))
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(read * width, eps=config.rms_norm_eps)
        token = config.hidden_size if config.token_residual else 0
        self.fc = nn.Linear(read * width + token, config.hidden_size, bias=False)
        if config.token_residual:
            self.fc_next = nn.Linear(config.hidden_size + token, config.hidden_size, bias=False)
            self.token_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Eagle3Layer(config, index == 0) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = BlockRotaryEmbedding(config)
        self.add_head()
        self.acceptance_head = build("acceptance_head", AcceptanceHead, config.acceptance_head, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return getattr(self, "embed_tokens", None)

    def check(self, view: TargetView) -> None:
        """As every drafter's. A drafter that reads the paper's layers learns here which those are."""
        config = self.config
        if config.target_layer_ids is None:
            config.target_layer_ids, config.num_target_layers = tapped_layers(view.num_layers), view.num_layers
            self.feature_layers = config.feature_layers
        super().check(view)
        own = "or give the drafter its own (own_embeddings=True)"
        refuse_unlike_target(
            config,
            view,
            f"load the target named in drafter.config.target_name ({config.target_name}), {own}",
            ", or train one with reads_final",
        )

    def start(self, view: TargetView, batch: int) -> Eagle3Session:
        return Eagle3Session(self, view, batch)

    @torch.no_grad()
    def initialise_from(self, target: PreTrainedModel, draft_ids: Tensor | None = None) -> Eagle3Drafter:
        """Start from what the target knows: its embedding and head where the drafter has its own, hidden states of the
        size that head is used to, and, with reads_final, its final state passed on as it is. Returns the drafter.

        draft_ids: [K] target ids of a reduced head, by default those it has. Raises ValueError for a target that
        `check` or `initialize_head` refuses.
        """
        from ...training.vocabulary import initialize_head

        view, config = TargetView(target), self.config
        self.check(view)
        if config.own_embeddings and config.hidden_size == view.hidden_size:
            ids = torch.arange(min(config.vocab_size, view.vocab_size), device=view.device)
            self.embed_tokens.weight[: len(ids)] = view.embed(ids).to(self.embed_tokens.weight)
        if config.own_head:
            initialize_head(self, view, self.draft_ids if draft_ids is None else draft_ids)
        # The final norm's weights are not public, but the size of what leaves it is; tokens from everywhere will do.
        ids = torch.linspace(0, view.vocab_size - 1, 64, device=view.device).long()[None]
        states = target(input_ids=ids, output_hidden_states=[view.num_layers]).hidden_states[-1]
        size = float(states.float().square().mean(-1).sqrt().median())
        self.norm.weight.fill_(size)
        if config.reads_final and config.hidden_size == view.hidden_size:
            self.fc.weight.zero_()
            passed = self.fc.weight[:, -view.hidden_size :]
            passed.fill_diagonal_(size if config.fc_norm else 1.0)
        return self

    def to_dialect(
        self, dialect: str, target: PreTrainedModel | None = None
    ) -> tuple[Eagle3Drafter, dict, dict[str, Tensor]]:
        return exports.write(self, dialect, target)

    def start_from(self, view: TargetView, batches: Iterable[TrainingBatch]) -> None:
        """See `start_eagle3`."""
        start_eagle3(self, view, batches)

    @classmethod
    def dialect_of(cls, config: dict) -> str | None:
        return dialects.dialect_of(config)

    @classmethod
    def from_dialect(cls, name_or_path, config: dict, **kwargs) -> Eagle3Drafter:
        """`kwargs` as for from_pretrained; those that are Eagle3Config fields overrule the reader."""
        known = Eagle3Config.__dataclass_fields__
        fields = {key: kwargs.pop(key) for key in list(kwargs) if key in known and key != "dtype"}
        values, state = dialects.read(name_or_path, config, fields, kwargs)
        return cls.from_pretrained(None, config=Eagle3Config(**values), state_dict=state, **kwargs)

    def embed(self, ids: Tensor, view: TargetView) -> Tensor:
        """[..., w] target token ids, a row's own first -> [..., w * H], by the own embedding or the target's."""
        if not self.config.own_embeddings:
            return view.embed(ids).detach().to(self.fc.weight).flatten(-2)
        # The target's vocabulary may be padded further: an id without a row is as good as unknown.
        return self.embed_tokens(ids.where(ids < self.config.vocab_size, 0)).flatten(-2)

    def fuse(self, features: Tensor, embeds: Tensor) -> Tensor:
        """[..., n * Ht] of the target's states and [..., w * H] of `embed` -> [..., H], a row's residual."""
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(self._with_token(features, embeds))

    def resume(self, state: Tensor, embeds: Tensor) -> Tensor:
        """As `fuse`, of an earlier pass's state [..., H] in place of the target's."""
        return self.fc_next(self._with_token(state, embeds)) if self.config.token_residual else state

    def _with_token(self, states: Tensor, embeds: Tensor) -> Tensor:
        if not self.config.token_residual:
            return states
        return torch.cat((states, self.token_norm(embeds[..., : self.config.hidden_size])), dim=-1)

    def finish(self, x: Tensor) -> Eagle3Output:
        """The last layer's output -> what the head reads, and what the next step does."""
        hidden = self.norm(x)
        return Eagle3Output(hidden, hidden if self.config.norm_output else x)

    def draft_pass(
        self,
        inputs_embeds: Tensor,
        rope: Rope,
        features: Tensor | None = None,
        state: Tensor | None = None,
        past: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        attention_mask: list[Tensor | None] | None = None,
        rows: Tensor | None = None,
    ) -> Eagle3Output:
        """One drafting pass over T rows.

        inputs_embeds: [B, T, w * H] embeddings of each row's tokens, its own first. rope: `rotary_emb` of the rows'
            positions.
        features: [B, T, n * Ht] the target's states at the token before each row's; or state: [B, T, H], an earlier
            pass's, in their place.
        past: (layer, keys, values) of these rows -> all keys and values [B, kv heads, L, head_dim] to attend to; by
            default the rows' own.
        attention_mask: per layer [B, 1, T, L] bool, None where every row sees every key; by default for all layers.
        rows: [B] the one row of each batch row whose output is wanted (its last layer's mask is [B, 1, 1, L]).
        """
        x = self.fuse(features, inputs_embeds) if state is None else self.resume(state, inputs_embeds)
        for index, layer in enumerate(self.layers):
            residual, normed = layer.read(x, inputs_embeds)
            keys, values = layer.self_attn.keys_values(normed, rope)
            if past is not None:
                keys, values = past(index, keys, values)
            if rows is not None and index == len(self.layers) - 1:
                residual, normed, *rope = (
                    part[torch.arange(len(x), device=x.device), rows][:, None] for part in (residual, normed, *rope)
                )
            mask = None if attention_mask is None else attention_mask[index]
            queries = layer.self_attn.queries(normed, rope)
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
            x = layer.write(residual, attended.transpose(1, 2).flatten(2))
        return self.finish(x)

    def unroll(
        self,
        view: TargetView,
        batch: TrainingBatch,
        steps: int | None = None,
        anchors: int | None = 512,
        generator: torch.Generator | None = None,
    ) -> Unrolled:
        """Training-time test, see `unroll_eagle3`."""
        return unroll_eagle3(self, view, batch, steps, anchors, generator)

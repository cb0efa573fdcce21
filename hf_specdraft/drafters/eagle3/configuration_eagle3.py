"""The one internal form of every EAGLE-3 dialect."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...heads import HeadConfig
from ..block.of_target import ROPE_TYPES, network_like


class Eagle3Config(HeadConfig):
    """EAGLE-3 (2503.01840): one transformer layer, autoregressive over (target's state at t, embedding of token t + 1).

    Row t predicts token t + 2. Beyond the target's states, a row's own output stands in for the state of the next. Only
    differences of positions act (the angles are rotary), so whether rows count from 0 or 1 is no setting.

    num_hidden_layers: layers; those after the first are plain ones.
    target_layer_ids: zero-based target layers whose OUTPUT is read, in order; -1 is the embedding output. None: the
        paper's three (`tapped_layers`) of a target whose depth is told by num_target_layers, or else by the first
        target the drafter is checked against.
    reads_final: read the state that the target's head reads (after the final norm) as well, behind the others. Needs
        num_target_layers.
    target_hidden_size: the target's hidden size, None when it equals `hidden_size`.
    num_target_layers: depth of the target the drafter was made for, None when the checkpoint does not say.
    own_embeddings: whether the checkpoint holds them; otherwise the target's are used.
    qk_norm: norms of each head's queries and keys, as Qwen3 has them.
    fc_norm: one norm for each state read. norm_before_fc: instead, one norm over all of them together.
    norm_before_residual: whether the residual starts from the normed state.
    norm_output: whether the state fed to the next step is the normed one (EAGLE-3.1), what the head reads.
    token_window: tokens whose embeddings a row's attention reads: the row's own and those before it. The paper's rows
        read one; with two or more, attention can find where the last tokens stood before, and copy what came next.
    token_residual: whether the residual starts from a map of the states AND the row's token (as EAGLE-1's did), with a
        map of its own (`fc_next`) where the state is the drafter's. A linear drafter in itself: see `start_eagle3`.
    tree_width: nodes expanded a level, and children each of them gets, when trees are drafted (EAGLE-2, 2406.16858).
    draft_sampling: when the request samples, draw chains from the drafter's warped law (and verify by it) instead of
        taking the argmax. Trees hold the likeliest tokens either way.
    acceptance_head: options of a head that rates tokens once they were read (`acceptance.AcceptanceHead`, for the
        policy "specdecpp"), {} for none of them; None for no head. `train` makes assistants' alone.
    """

    model_type = "specdraft_eagle3"
    ignore_keys_at_rope_validation = {"partial_rotary_factor"}

    # Llama-3.1-8B's published drafter.
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 1
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    initializer_range: float = 0.02

    target_layer_ids: list[int] | tuple[int, ...] | None = (1, 15, 28)
    reads_final: bool = False
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    own_embeddings: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    token_window: int = 1
    token_residual: bool = False

    num_assistant_tokens: int = 5
    tree_width: int = 8
    draft_sampling: bool = True
    acceptance_head: dict | None = None

    def __post_init__(self, **kwargs):
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = tapped_layers(self.num_target_layers)
        if self.target_layer_ids is not None:
            self.target_layer_ids = list(self.target_layer_ids)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)
        if self.reads_final and self.num_target_layers is None:
            raise ValueError("reads_final needs num_target_layers, to know which state is the target's last")
        if not self.num_features:
            raise ValueError("target_layer_ids is empty and reads_final off: the drafter would read nothing")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are two norms for the same place; set one of them")
        if self.own_embeddings and self.vocab_size is None:
            raise ValueError("own embeddings need vocab_size")
        if self.token_window < 1:
            raise ValueError(f"token_window must be at least 1, got {self.token_window}")
        if self.tree_width < 1:
            raise ValueError(f"tree_width must be at least 1, got {self.tree_width}")
        if self.rope_parameters["rope_type"] not in ROPE_TYPES:
            raise ValueError(
                f"rope_type {self.rope_parameters['rope_type']!r} is not supported ({', '.join(ROPE_TYPES)} are): its "
                "angles depend on the length, and the context's keys are cached"
            )

    @property
    def num_features(self) -> int:
        """How many of the target's states are read."""
        return (3 if self.target_layer_ids is None else len(self.target_layer_ids)) + self.reads_final

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers read, in the order of `fc`'s columns; none while the target's depth is not known."""
        return (*(self.target_layer_ids or ()), *([self.num_target_layers - 1] if self.reads_final else []))

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, tokenizer: Any = None, **overrides) -> Eagle3Config:
        """A drafter as wide as the target, reading a low, a middle and a high layer and the final state.

        tokenizer: not needed here. overrides: fields of the config. Raises ValueError for what the config refuses.
        """
        text = target_config.get_text_config()
        layers = text.num_hidden_layers
        values = dict(
            **network_like(text, cls),
            target_layer_ids=sorted({min(1, layers - 2), layers // 2 - 1, max(layers - 4, -1)}),
            reads_final=True,
            num_target_layers=layers,
            fc_norm=True,
            norm_output=True,
            target_name=target_config.name_or_path or None,
        )
        return cls(**{**values, **overrides})

    @classmethod
    def tiny(cls, **overrides) -> Eagle3Config:
        """Own embeddings, a reduced head, two layers and most norms, for a target of two layers or more, hidden size 32
        and 64 tokens."""
        vocab_size = overrides.get("vocab_size", 64)
        values = dict(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            target_layer_ids=[-1, 0],
            own_embeddings=True,
            own_head=True,
            draft_vocab_size=vocab_size - vocab_size // 4,
            qk_norm=True,
            fc_norm=True,
            norm_output=True,
            num_assistant_tokens=3,
            tree_width=3,
        )
        return cls(**{**values, **overrides})


def tapped_layers(depth: int) -> list[int]:
    """The three layers of a target that EAGLE-3 reads: a low, a middle and a high one, zero-based outputs.

    Raises ValueError for a target too shallow to have three of them.
    """
    layers = [1, depth // 2 - 1, depth - 4]
    if sorted(set(layers)) != layers:
        raise ValueError(
            f"a target of {depth} layers is too shallow for the three states EAGLE-3 reads (it takes 7); name the "
            "layers to read in target_layer_ids"
        )
    return layers

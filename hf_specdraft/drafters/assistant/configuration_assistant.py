from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from ..base import DrafterConfig


class AssistantConfig(DrafterConfig):
    """assistant_config: the causal LM's own config (a PreTrainedConfig, or a dict with its `model_type`).

    draft_sampling: whether sampling requests draw drafts from the assistant's law (more is accepted: the sum of
        min(p, q) per token) or take its argmax.
    confidence_threshold: stop a draft after a token drawn with less probability than this; 0 never stops. The token
        itself is still verified, which is what keeps the output's law exact (verification.md, non-anticipation).
    acceptance_head: options of a head that rates tokens once they were read (`acceptance.AcceptanceHead`, for the
        policy "specdecpp"), {} for none of them; None for no head.
    """

    model_type = "specdraft_assistant"

    assistant_config: dict | PreTrainedConfig | None = None
    num_assistant_tokens: int = 5
    draft_sampling: bool = True
    confidence_threshold: float = 0.0
    acceptance_head: dict | None = None

    def __post_init__(self, **kwargs):
        if isinstance(self.assistant_config, dict):
            self.assistant_config = AutoConfig.for_model(**self.assistant_config)
        if self.assistant_config is not None and self.vocab_size is None:
            self.vocab_size = self.assistant_config.get_text_config().vocab_size
        super().__post_init__(**kwargs)
        if not 0 <= self.confidence_threshold < 1:
            raise ValueError(f"confidence_threshold must be in [0, 1), got {self.confidence_threshold}")

    def to_dict(self) -> dict:
        out = super().to_dict()
        if isinstance(self.assistant_config, PreTrainedConfig):
            out["assistant_config"] = self.assistant_config.to_dict()
        return out

    @classmethod
    def tiny(cls, vocab_size: int = 64, **overrides) -> AssistantConfig:
        llama = AutoConfig.for_model(
            "llama",
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.5,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        return cls(assistant_config=llama, **overrides)

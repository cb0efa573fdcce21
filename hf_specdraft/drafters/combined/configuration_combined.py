"""Settings of two drafters as one."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from ..base import DrafterConfig
from ..eagle3 import Eagle3Config
from ..ngram import NgramConfig

_PARTS = ("ngram_config", "network_config")
# What a combined drafter says of its target is what its network says.
_OF_THE_TARGET = (
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "target_name",
    "target_revision",
    "chat_template_sha256",
    "chat_template_kwargs",
)


class CombinedConfig(DrafterConfig):
    """ngram_config, network_config: the configs of the two parts (or dicts, the network's with its `model_type`). How
        deep each drafts, and whether it drafts trees, stands there.
    mode: "first": row by row the n-gram's draft where it promises more accepted tokens than the network's, which is not
        run while no row needs it; "tree": both in one tree, the likeliest `tree_nodes` nodes of it, where the target
        accepts trees ("first" where it does not).
    num_assistant_tokens, tree_nodes: of the two together.
    """

    model_type = "specdraft_combined"

    ngram_config: dict | PreTrainedConfig | None = None
    network_config: dict | PreTrainedConfig | None = None
    mode: str = "first"
    num_assistant_tokens: int = 10
    tree_nodes: int = 10

    def __post_init__(self, **kwargs):
        for name in _PARTS:
            if isinstance(getattr(self, name), dict):
                setattr(self, name, AutoConfig.for_model(**getattr(self, name)))
        if self.ngram_config is None:
            self.ngram_config = NgramConfig()
        for name in _OF_THE_TARGET:
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.network_config, name, None))
        super().__post_init__(**kwargs)
        if self.mode not in ("first", "tree"):
            raise ValueError(f"mode must be 'first' or 'tree', got {self.mode!r}")
        if not isinstance(self.ngram_config, NgramConfig):
            raise ValueError(f"ngram_config must be an NgramConfig, got a {type(self.ngram_config).__name__}")
        if isinstance(self.network_config, NgramConfig | CombinedConfig):
            raise ValueError(
                f"network_config is a {type(self.network_config).__name__}, but the second part must be a drafter with "
                "a network: a block drafter, an assistant, ..."
            )

    def to_dict(self) -> dict:
        out = super().to_dict()
        for name in _PARTS:
            if isinstance(getattr(self, name), PreTrainedConfig):
                out[name] = getattr(self, name).to_dict()
        return out

    @classmethod
    def tiny(cls, vocab_size: int = 64, **overrides) -> CombinedConfig:
        forms = {"tree_nodes": overrides.get("tree_nodes", 6)}
        network = Eagle3Config.tiny(vocab_size=vocab_size, **forms)
        values = dict(ngram_config=NgramConfig.tiny(**forms), network_config=network, mode="tree", **forms)
        return cls(**{**values, "num_assistant_tokens": 4, **overrides})
